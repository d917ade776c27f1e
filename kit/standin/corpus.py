"""Agent sessions written from Python source, the tokenizer, and the trace that the load driver replays.

A session is what a coding agent's context looks like: an instruction, a tool call that reads a part of a file, the
file's text, an edit that copies it with one change, the tool's answer, a summary that cites names; then the next
instruction on the same text. The assistant's words are therefore mostly copied from context, as coding agents' are,
which is what makes speculation work on them. Nothing is sampled from a model: the sessions are written by rule from
real source files.

Every choice comes from `random.Random` seeded by (seed, file, index), so the same sources and seed give the same bytes.
A file is held out by the hash of its name (`is_held_out`): no text of a held-out file is trained on, nor used to train
the tokenizer. The trace in `data/traces/` comes from held-out files alone.

Text form, which is also the chat template: `<|im_start|>ROLE\\n…<|im_end|>\\n`, sessions separated by `<|endoftext|>`.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib.util
import json
import keyword
import lzma
import random
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kit.errors import KitError

VOCAB_SIZE = 4096
SPECIAL_TOKENS = (  # ids 0 … 11, in this order; the vision tokens are there for the multimodal checkpoint form
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|reserved_0|>",
    "<|reserved_1|>",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The pre-tokenizer of the Qwen2 family; llama.cpp knows it as `qwen2`.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SOURCES = ("stdlib", "networkx", "numpy", "pandas", "matplotlib", "sympy", "torch", "tornado", "jinja2", "IPython")
"""Where source text is taken from: the standard library (PSF licence) and installed packages (BSD, PSF-style)."""

Role = Literal["system", "user", "assistant", "tool"]

ADJECTIVES = (
    "new old first last next prev current inner outer local total raw clean final base main extra left right upper "
    "lower known cached active pending visible shared partial full sorted parsed selected default safe strict fast temp"
).split()
NOUNS = (
    "value item node entry key name path index count size text line token field record row column result state buffer "
    "chunk block group label option param target source handler parser reader writer context config data info mask "
    "limit offset width height weight score level depth step start end flag kind mode tag part"
).split()
EXCEPTIONS = ("ValueError", "TypeError", "KeyError", "OSError", "RuntimeError", "AttributeError")
SYSTEMS = (
    "You are a coding agent. Tools: read, edit, write.",
    "You are a careful coding agent working in a Python repository. Use the tools read, edit and write.",
    "You help with Python code. Read before you edit. Tools: read, edit, write.",
)


@dataclass(frozen=True)
class Message:
    """One message of a session. `role` is `system`, `user`, `assistant` or `tool`."""

    role: Role
    content: str


@dataclass(frozen=True)
class Session:
    """A whole session: `source` names the file it was written from (package/path, no machine path)."""

    source: str
    messages: tuple[Message, ...]

    def text(self) -> str:
        """The session as the model sees it, ended by `<|endoftext|>`."""
        return "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in self.messages) + "<|endoftext|>"

    def turns(self) -> Iterator[tuple[tuple[Message, ...], str]]:
        """Each request of the session: (messages before it, the recorded assistant text)."""
        for i, m in enumerate(self.messages):
            if m.role == "assistant":
                yield self.messages[:i], m.content


@dataclass(frozen=True)
class Function:
    """A function or method of a source file. `first` and `last` are 0-based line numbers, last exclusive."""

    name: str
    first: int
    last: int
    args: tuple[str, ...]
    body: int  # line of the first statement
    docstring: bool


@dataclass(frozen=True)
class SourceFile:
    """One parsed source file: `name` is package/path."""

    name: str
    lines: tuple[str, ...]
    functions: tuple[Function, ...]


def is_held_out(name: str) -> bool:
    """Whether a file is kept away from training: one in forty, by the hash of its name."""
    return zlib.crc32(name.encode()) % 40 == 0


def parse(name: str, text: str) -> SourceFile | None:
    """Parse one file; None where it is of no use (not Python 3, not ASCII, no function of a usable size)."""
    if not text.isascii() or "\t" in text or "\x0c" in text or "<|" in text:
        return None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    lines = tuple(text.split("\n"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and 3 <= node.end_lineno - node.lineno + 1 <= 26:
            span = lines[node.lineno - 1 : node.end_lineno]
            if max(map(len, span)) > 110 or sum(map(len, span)) > 1000:
                continue
            args = tuple(a.arg for a in node.args.args if a.arg not in ("self", "cls"))
            doc = ast.get_docstring(node, clean=False) is not None
            found.append(Function(node.name, node.lineno - 1, node.end_lineno, args, node.body[0].lineno - 1, doc))
    found.sort(key=lambda f: f.first)
    return SourceFile(name, lines, tuple(found)) if found else None


def source_files(sources: Sequence[str] = SOURCES) -> Iterator[tuple[str, str]]:
    """(name, text) of every source file, in a fixed order.

    Raises KitError if a package is not installed.
    """
    for package in sources:
        if package == "stdlib":
            root = Path(sysconfig.get_path("stdlib"))
        else:
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:
                raise KitError(f"source package {package!r} is not installed; install it or leave it out of --sources")
            root = Path(spec.origin).parent
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if relative.parts[0] in ("site-packages", "dist-packages", "lib2to3") or path.stat().st_size > 400_000:
                continue
            try:
                yield f"{package}/{relative.as_posix()}", path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def _dedent(lines: Sequence[str]) -> list[str]:
    """The lines with their common indentation removed (blank lines are ignored, and emptied)."""
    margin = min((len(s) - len(s.lstrip()) for s in lines if s.strip()), default=0)
    return [s[margin:].rstrip() for s in lines]


def _identifiers(text: str) -> list[str]:
    """Names used at least twice, long enough to be worth renaming, in order of first use."""
    names = re.findall(r"(?<![\w.'\"])[A-Za-z_]\w{2,}(?!\w)", text)
    seen: dict[str, int] = {}
    for n in names:
        seen[n] = seen.get(n, 0) + 1
    return [n for n, k in seen.items() if k >= 2 and not keyword.iskeyword(n) and n not in ("self", "cls")]


@dataclass
class _Draft:
    """A session being written: the snippet's present lines and the messages so far."""

    rng: random.Random
    path: str
    name: str  # the function worked on
    snippet: list[str]  # what the agent has been shown
    start: int  # first line number of the snippet, 1-based
    messages: list[Message] = field(default_factory=list)
    log: list[str] = field(default_factory=list)  # what was done, for a last summary

    def say(self, role: Role, text: str) -> None:
        self.messages.append(Message(role, text))

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)

    def new_name(self) -> str:
        return f"{self.rng.choice(ADJECTIVES)}_{self.rng.choice(NOUNS)}"

    def function(self) -> tuple[int, int] | None:
        """Lines [first, last) of the function in the snippet as it now is."""
        pattern = re.compile(rf"(\s*)(async )?def {re.escape(self.name)}\(")
        for i, s in enumerate(self.snippet):
            m = pattern.match(s)
            if m:
                indent, j = len(m[1]), i + 1
                depth = s.count("(") - s.count(")")
                while j < len(self.snippet):
                    t = self.snippet[j]
                    if depth <= 0 and t.strip() and len(t) - len(t.lstrip()) <= indent:
                        break
                    depth += t.count("(") - t.count(")")
                    j += 1
                while j > i + 1 and not self.snippet[j - 1].strip():
                    j -= 1
                return i, j
        return None

    def edit(self, first: int, last: int, new: list[str], lead: str) -> None:
        """The assistant replaces lines [first, last) of the snippet by `new`; the tool confirms."""
        old = self.snippet[first:last]
        body = "\n".join(["old:", *old, "new:", *new])
        self.say("assistant", f"{lead}\n<tool_call>\nedit {self.path}\n{body}\n</tool_call>")
        self.snippet[first:last] = new
        self.say("tool", f"ok: {self.path} changed, {len(old)} lines replaced by {len(new)}")

    def write(self, path: str, new: list[str], lead: str) -> None:
        body = "\n".join(new)
        self.say("assistant", f"{lead}\n<tool_call>\nwrite {path}\n{body}\n</tool_call>")
        self.say("tool", f"ok: {path} written, {len(new)} lines")


def _task_rename(d: _Draft) -> bool:
    span = d.function()
    if span is None:
        return False
    text = "\n".join(d.snippet[span[0] : span[1]])
    names = [n for n in _identifiers(text) if n != d.name]
    if not names:
        return False
    old, new = d.rng.choice(names), d.new_name()
    if re.search(rf"\b{new}\b", text):
        return False
    d.say(
        "user",
        d.pick(
            f"In `{d.name}`, rename `{old}` to `{new}`.",
            f"Please rename `{old}` to `{new}` inside `{d.name}` in {d.path}.",
            f"`{old}` is a poor name. Call it `{new}` in `{d.name}`.",
        ),
    )
    renamed = re.sub(rf"\b{re.escape(old)}\b", new, text).split("\n")
    lead = d.pick(f"I will rename `{old}` to `{new}` in `{d.name}`.", f"Renaming `{old}` to `{new}`.")
    if d.rng.random() < 0.6:
        d.write(d.path, renamed, lead)
        d.snippet[span[0] : span[1]] = renamed
    else:
        changed = [i for i in range(*span) if d.snippet[i] != renamed[i - span[0]]]
        d.edit(changed[0], changed[-1] + 1, renamed[changed[0] - span[0] : changed[-1] + 1 - span[0]], lead)
    count = len(re.findall(rf"\b{re.escape(old)}\b", text))
    d.say("assistant", f"Done: `{old}` is now `{new}` in `{d.name}` ({count} places in {d.path}).")
    d.log.append(f"renamed `{old}` to `{new}` in `{d.name}`")
    return True


def _task_rename_function(d: _Draft) -> bool:
    span, old = d.function(), d.name
    if span is None or old.startswith("__"):
        return False
    new = f"{d.pick('get', 'make', 'find', 'load', 'build', 'check', 'run', 'read')}_{d.new_name()}"
    d.say("user", d.pick(f"Rename the function `{old}` to `{new}`.", f"`{old}` should be called `{new}`."))
    renamed = [re.sub(rf"\b{re.escape(old)}\b", new, s) for s in d.snippet[span[0] : span[1]]]
    d.write(d.path, renamed, f"I will write `{new}` in place of `{old}`.")
    d.snippet[span[0] : span[1]] = renamed
    d.name = new
    d.say("assistant", f"The function `{old}` is now `{new}` in {d.path}. Nothing else in it was changed.")
    d.log.append(f"renamed the function `{old}` to `{new}`")
    return True


def _task_parameter(d: _Draft) -> bool:
    span = d.function()
    if span is None:
        return False
    line = d.snippet[span[0]]
    m = re.match(r"(.*\))(\s*(?:->.*)?:)$", line)
    if not m or "*" in line:
        return False
    new = f"{d.new_name()}={d.pick('None', 'False', 'True', '0', '1')}"
    head = m[1][:-1] + ("" if m[1].endswith("()") else ", ") + new + ")"
    d.say(
        "user",
        d.pick(f"Give `{d.name}` a parameter `{new}`.", f"Add the keyword parameter `{new}` to `{d.name}`."),
    )
    d.edit(span[0], span[0] + 1, [head + m[2]], f"I will add `{new}` to the signature of `{d.name}`.")
    d.say("assistant", f"`{d.name}` now takes `{new}`:\n\n{head.strip()}{m[2]}")
    d.log.append(f"added the parameter `{new}` to `{d.name}`")
    return True


def _task_log(d: _Draft) -> bool:
    span = d.function()
    if span is None or not re.search(r":\s*$", d.snippet[span[0]]):
        return False
    first = span[0] + 1
    if first >= span[1] or not d.snippet[first].strip() or d.snippet[first].lstrip().startswith(('"', "'", 'r"')):
        return False
    indent = " " * (len(d.snippet[first]) - len(d.snippet[first].lstrip()))
    level = d.pick("debug", "info", "warning")
    new = f'{indent}logger.{level}("{d.pick("enter", "start", "call")} {d.name}")'
    d.say("user", d.pick(f"Log a {level} line when `{d.name}` is called.", f"Add `logger.{level}` to `{d.name}`."))
    shown = min(span[1], span[0] + d.rng.randint(2, 5))
    d.edit(
        span[0],
        shown,
        [d.snippet[span[0]], new, *d.snippet[first:shown]],
        f"I will add a `logger.{level}` line at the top of `{d.name}`.",
    )
    d.say("assistant", f"`{d.name}` now logs when it is called:\n\n{new.strip()}")
    d.log.append(f"added a `logger.{level}` line to `{d.name}`")
    return True


def _task_quote(d: _Draft) -> bool:
    span = d.function()
    if span is None:
        return False
    lines = [i for i in range(span[0], span[1]) if len(d.snippet[i].strip()) > 12]
    names = [n for n in _identifiers("\n".join(d.snippet[i] for i in lines)) if n != d.name]
    if not names:
        return False
    name = d.rng.choice(names)
    hits = [i for i in lines if re.search(rf"\b{re.escape(name)}\b", d.snippet[i])][:8]
    d.say("user", d.pick(f"Where is `{name}` used in `{d.name}`?", f"Show me the lines of `{d.name}` with `{name}`."))
    quoted = "\n".join(f"{d.start + i}: {d.snippet[i].strip()}" for i in hits)
    d.say("assistant", f"In `{d.name}`, `{name}` is used in these lines:\n\n{quoted}")
    return True


def _task_move(d: _Draft) -> bool:
    span = d.function()
    if span is None:
        return False
    path = f"{d.path.rsplit('/', 1)[0]}/{d.new_name()}.py"
    d.say("user", d.pick(f"Copy `{d.name}` to {path}.", f"Put `{d.name}` into a new file {path}, unchanged."))
    d.write(path, _dedent(d.snippet[span[0] : span[1]]), f"I will write `{d.name}` to {path}.")
    d.say("assistant", f"`{d.name}` is now in {path} too, unchanged.")
    d.log.append(f"copied `{d.name}` to {path}")
    return True


def _task_wrap(d: _Draft) -> bool:
    span = d.function()
    if span is None:
        return False
    kinds = ("return ", "raise ", "yield ")
    hits = [
        i
        for i in range(span[0] + 1, span[1])
        if re.match(r"\s+[\w.\[\]]+ = .*[\w)\]]$", d.snippet[i]) and not d.snippet[i].lstrip().startswith(kinds)
    ]
    hits = [i for i in hits if all(d.snippet[i].count(a) == d.snippet[i].count(b) for a, b in ("()", "[]", "{}"))]
    hits = [
        i
        for i in hits
        if i + 1 >= span[1]
        or not d.snippet[i + 1].startswith(d.snippet[i][: len(d.snippet[i]) - len(d.snippet[i].lstrip())] + " ")
    ]
    if not hits:
        return False
    i = d.rng.choice(hits)
    s, error = d.snippet[i], d.rng.choice(EXCEPTIONS)
    indent = s[: len(s) - len(s.lstrip())]
    target = s.split(" = ")[0].strip()
    d.say("user", f"In `{d.name}`, set `{target}` to None if computing it raises {error}.")
    new = [f"{indent}try:", f"{indent}    {s.strip()}", f"{indent}except {error}:", f"{indent}    {target} = None"]
    d.edit(i, i + 1, new, f"I will catch {error} where `{target}` is set.")
    d.say("assistant", f"`{target}` is now None in `{d.name}` if {s.strip()!r} raises {error}.")
    d.log.append(f"caught {error} in `{d.name}`")
    return True


def _task_show(d: _Draft) -> bool:
    span = d.function()
    if span is None:
        return False
    d.say("user", d.pick(f"Show me `{d.name}` as it is now.", f"What does `{d.name}` look like now?"))
    d.say("assistant", f"This is `{d.name}` in {d.path}:\n\n" + "\n".join(d.snippet[span[0] : span[1]]))
    return True


def _task_summary(d: _Draft) -> bool:
    if len(d.log) < 2:
        return False
    d.say("user", d.pick("Summarise what you changed.", "What have you changed so far?"))
    d.say("assistant", f"In {d.path} I have:\n\n" + "\n".join(f"- {x}" for x in d.log))
    return True


TASKS: tuple[tuple[Callable[[_Draft], bool], int], ...] = (
    (_task_rename, 6),
    (_task_rename_function, 3),
    (_task_parameter, 2),
    (_task_log, 2),
    (_task_quote, 2),
    (_task_move, 3),
    (_task_wrap, 2),
    (_task_show, 3),
    (_task_summary, 1),
)


def write_session(file: SourceFile, index: int, seed: int = 0) -> Session | None:
    """The `index`-th session of a file (it works on one function); None if nothing could be asked about it."""
    rng = random.Random(f"{seed}/{file.name}/{index}")
    f = file.functions[index % len(file.functions)]
    before, after = rng.randint(0, 8), rng.randint(0, 10)
    first, last = max(0, f.first - before), min(len(file.lines), f.last + after)
    snippet = _dedent([s[:120] for s in file.lines[first:last]])
    d = _Draft(rng, file.name, f.name, snippet, first + 1)
    if d.function() is None:
        return None
    if rng.random() < 0.6:
        d.say("system", rng.choice(SYSTEMS))
    functions, weights = zip(*TASKS, strict=True)
    read = f"<tool_call>\nread {d.path} {first + 1} {last}\n</tool_call>"
    shown = "\n".join(snippet)
    done = 0
    wanted = rng.randint(2, 4)
    for _ in range(4 * wanted):
        task = rng.choices(functions, weights)[0]
        if not done:  # the first request also reads the file
            mark = len(d.messages)
            if not task(d):
                continue
            lead = d.pick(f"I will read {d.path} first.", f"Let me look at `{f.name}`.", "First I read the file.")
            d.messages[mark + 1 : mark + 1] = [Message("assistant", f"{lead}\n{read}"), Message("tool", shown)]
            done = 1
        else:
            done += task(d)
        if done >= wanted or sum(len(m.content) for m in d.messages) > 5200:
            break
    return Session(file.name, tuple(d.messages)) if done >= 2 else None


def sessions(files: Iterable[SourceFile], per_function: int, seed: int = 0) -> Iterator[Session]:
    """All sessions of some files: `per_function` for each function, in file order."""
    for file in files:
        for index in range(per_function * len(file.functions)):
            session = write_session(file, index, seed)
            if session is not None:
                yield session


USUAL_CHARS = (3200, 1 << 20)
"""Characters in all of a session for evaluation and for GPU load: about 850 tokens and more."""

SHORT_CHARS = (900, 1700)
"""The same for a load that a CPU can serve: about 250 to 480 tokens."""


def held_out_sessions(
    count: int, sources: Sequence[str] = SOURCES, seed: int = 1, chars: tuple[int, int] = USUAL_CHARS
) -> list[Session]:
    """`count` sessions of held-out files, spread over the sources: a load workload and the evaluation set.

    Only sessions of three requests or more, with `chars` characters in all (smallest, largest).
    """
    files = [p for n, t in source_files(sources) if is_held_out(n) and (p := parse(n, t)) is not None]
    rng = random.Random(seed)
    out: list[Session] = []
    while len(out) < count:
        file = rng.choice(files)
        session = write_session(file, rng.randrange(len(file.functions)), seed)
        if session is None or not chars[0] <= sum(len(m.content) for m in session.messages) <= chars[1]:
            continue
        if len(list(session.turns())) >= 3:
            out.append(session)
    return out


def train_tokenizer(texts: Iterable[str]):  # noqa: ANN201 - tokenizers is imported only here
    """A byte-level BPE of `VOCAB_SIZE` entries with the Qwen2 pre-tokenizer, trained on `texts`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer, folder: Path) -> None:  # noqa: ANN001
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 32768,
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def write_trace(path: Path, chosen: Sequence[Session], tokenizer) -> None:  # noqa: ANN001
    """Write sessions as gzipped JSON lines: {"id", "source", "messages": [{"role", "content"}, …], "output_tokens"}.

    `output_tokens` holds one number per assistant message: what a server generates for it, its end marker included.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as f:
        for i, s in enumerate(chosen):
            row = {
                "id": f"agent-{i:04d}",
                "source": s.source,
                "messages": [{"role": m.role, "content": m.content} for m in s.messages],
                "output_tokens": [len(tokenizer.encode(said + "<|im_end|>").ids) for _, said in s.turns()],
            }
            f.write((json.dumps(row) + "\n").encode())


def pack(ids: Iterable[Sequence[int]], path: Path) -> int:
    """Write token ids as an xz-compressed stream of little-endian uint16. Returns the number of tokens."""
    import numpy as np

    total = 0
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 5, "dict_size": 1 << 23}]
    with lzma.open(path, "wb", format=lzma.FORMAT_XZ, filters=filters) as f:
        for row in ids:
            f.write(np.asarray(row, dtype="<u2").tobytes())
            total += len(row)
    return total


def write_held_out(out: Path, trace: Path, tokenizer, sources: Sequence[str]) -> dict:  # noqa: ANN001
    """Write the replay trace and, from other sessions, the evaluation requests. Returns their statistics."""
    import numpy as np

    chosen = held_out_sessions(400, sources)
    write_trace(trace, chosen[:200], tokenizer)
    rows = []
    for s in chosen[200:]:
        for history, said in s.turns():
            prompt = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in history)
            prompt += "<|im_start|>assistant\n"
            rows.append({"prompt": tokenizer.encode(prompt).ids, "output": tokenizer.encode(said + "<|im_end|>\n").ids})
    with gzip.open(out / "heldout.jsonl.gz", "wt") as f:
        for row in rows:
            f.write(json.dumps(row) + "\n")
    stats: dict = {"held_out_requests": len(rows)}
    for key in ("prompt", "output"):
        quantiles = np.quantile([len(r[key]) for r in rows], [0, 0.1, 0.5, 0.9, 1])
        stats[f"{key}_tokens_quantiles"] = quantiles.tolist()
    return stats


def build(out: Path, trace: Path, tokenizer_dir: Path, sources: Sequence[str], max_tokens: int, seed: int) -> dict:
    """Write the training stream, the evaluation sessions, the tokenizer and the trace.

    The stream is a shuffle of sessions (three for each function) and plain source files (one token in eight or so: they
    keep the model writing Python where there is nothing to copy).
    """
    rng = random.Random(seed)
    files: list[SourceFile] = []
    for name, text in source_files(sources):
        if not is_held_out(name) and (parsed := parse(name, text)) is not None:
            files.append(parsed)
    rng.shuffle(files)
    print(f"{len(files)} training files, {sum(len(f.functions) for f in files)} functions", flush=True)
    tokenizer = train_tokenizer(s.text() for f in files[:1500] for s in sessions([f], 1, seed))
    save_tokenizer(tokenizer, tokenizer_dir)
    jobs = [(i, j) for i, f in enumerate(files) for j in range(3 * len(f.functions))]
    rng.shuffle(jobs)
    out.mkdir(parents=True, exist_ok=True)

    def documents() -> Iterator[str]:
        for n, (i, j) in enumerate(jobs):
            session = write_session(files[i], j, seed)
            if session is not None:
                yield session.text()
            if n % 16 == 0:
                f = files[rng.randrange(len(files))]
                at = rng.randrange(max(1, len(f.lines) - 200))
                yield "\n".join(f.lines[at : at + 200])[:8000] + "<|endoftext|>"

    def batches() -> Iterator[list[int]]:
        total, batch, shown = 0, [], 0
        for text in documents():
            batch.append(text)
            if len(batch) == 512:
                for e in tokenizer.encode_batch_fast(batch):
                    total += len(e.ids)
                    yield e.ids
                batch = []
                if total - shown >= 10_000_000:
                    shown = total
                    print(f"{total / 1e6:.0f} M tokens", flush=True)
                if total >= max_tokens:
                    return

    train_tokens = pack(batches(), out / "train.u16.xz")
    stats = write_held_out(out, trace, tokenizer, sources) | {
        "train_tokens": train_tokens,
        "training_files": len(files),
        "seed": seed,
        "sources": list(sources),
    }
    (out / "corpus.json").write_text(json.dumps(stats, indent=1) + "\n")
    return stats


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: write corpus, tokenizer and trace; print their statistics."""
    p = argparse.ArgumentParser(description="Write the training corpus, the tokenizer and the replay trace.")
    p.add_argument("--out", type=Path, required=True, help="folder for train.u16.xz, heldout.jsonl.gz, corpus.json")
    p.add_argument("--trace", type=Path, required=True, help="the replay trace to write (.jsonl.gz)")
    p.add_argument("--tokenizer", type=Path, required=True, help="folder for the tokenizer files")
    p.add_argument("--sources", nargs="+", default=list(SOURCES))
    p.add_argument("--max-tokens", type=int, default=100_000_000)
    p.add_argument("--held-out-only", action="store_true", help="keep stream and tokenizer; write trace and requests")
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args(argv)
    if a.held_out_only:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(a.tokenizer / "tokenizer.json"))
        stats = json.loads((a.out / "corpus.json").read_text())
        stats |= write_held_out(a.out, a.trace, tokenizer, a.sources)
        (a.out / "corpus.json").write_text(json.dumps(stats, indent=1) + "\n")
        print(json.dumps(stats, indent=1))
        return
    print(json.dumps(build(a.out, a.trace, a.tokenizer, a.sources, a.max_tokens, a.seed), indent=1))


if __name__ == "__main__":
    main()
