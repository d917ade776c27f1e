"""What to send: workloads read from the formats people already have, as sessions of turns.

A *session* is a conversation with its recorded history. Each assistant message of it is one *turn*: one request
whose prompt is the history before that message and whose output length is the recorded one. Since the history is
the recorded one and not what the server answers, every arm does the same work, and later turns share their
prefix with earlier ones as they do in use.

Formats:

``messages``
    JSON lines (plain or ``.gz``), a session a line: ``{"messages": [{"role": …, "content": …}, …]}``. Output
    lengths come from ``output_tokens``: either on each assistant message, or as a list beside ``messages`` with
    one number per assistant message. ``id`` is optional.
``sharegpt``
    A JSON list of ``{"conversations": [{"from": "human" | "gpt" | "system", "value": …}, …]}``.
``mooncake``
    JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids`` (one per
    block of 512 tokens). The text of a block is made from its hash id alone, so requests share exactly the
    prefixes that the trace says they share. A word is about a token; what the server counts is what is recorded.
``synthetic``
    Sessions of random words, ``input_tokens`` more a turn and ``output_tokens`` each.

Lengths that are not recorded are *asked for* by the server's tokenizer count of the recorded answer, or where it
has no tokenizer endpoint as one token per four characters. That is a request length only: what is measured
always comes from the server.

Prompts are unique per cell: a short preamble at the very start of the first message (:func:`preamble`) holds a
digest of (seed, load, repeat, session number), never of the arm. So the arms of a repeat get the same prompts, no
prefix-cache hit crosses cells, and the turns of one session still share theirs.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from kit.errors import KitError
from kit.records.schema import Strict

PREAMBLE_VERSION = 1
"""Part of the workload hash; raise when the preamble or the synthetic text changes.

1: first version.
"""

START_VERSION = 1
"""Part of the workload hash; raise when it changes where a closed loop's clients begin.

0 (not in the hash): each at the first turn of a session, with the whole of its answer. 1: each in the middle, at a
random turn and with a random part of its answer.
"""

BLOCK_TOKENS = 512
"""Tokens per hash id in Mooncake traces."""

CHARS_PER_TOKEN = 4
"""Used to ask for a length where neither a recorded one nor a tokenizer endpoint is there."""

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
                  "assistant": "assistant", "bing": "assistant", "bard": "assistant", "system": "system",
                  "tool": "tool"}  # fmt: skip

KINDS_BY_NAME = ("messages", "sharegpt", "mooncake")
"""Formats of trace files."""

# Short common words: about one token each in the usual vocabularies.
WORDS = (
    "the of and to in is that it for was on are as with his they at be this from have or by one had not but what "
    "all were when we there can an your which their said if do will each about how up out them then she many some "
    "so these would other into has more her two like him see time could no make than first been its who now people "
    "my made over did down only way find use may water long little very after words called just where most know"
).split()


class WorkloadSpec(Strict):
    """Which workload, and how much of it."""

    kind: Literal["messages", "sharegpt", "mooncake", "synthetic"]
    path: Path | None = None
    """The trace file (all kinds but synthetic)."""
    input_tokens: int | None = Field(default=None, gt=0)
    """synthetic: tokens a turn adds to the prompt."""
    output_tokens: int | None = Field(default=None, gt=0)
    """Output length of every turn; without it the recorded ones (synthetic needs it)."""
    turns: int = Field(default=1, gt=0)
    """synthetic: turns a session."""
    max_output_tokens: int | None = Field(default=None, gt=0)
    """Cap on recorded output lengths."""
    max_sessions: int | None = Field(default=None, gt=0)
    """Use the first this many sessions of the file only."""
    max_turns: int | None = Field(default=None, gt=0)
    """End a session after this many turns."""
    max_prompt_chars: int | None = Field(default=None, gt=0)
    """End a session before the turn whose prompt would be longer: for servers with a short context."""

    @model_validator(mode="after")
    def _complete(self) -> WorkloadSpec:
        if self.kind == "synthetic":
            if self.input_tokens is None or self.output_tokens is None:
                raise ValueError("a synthetic workload needs input_tokens and output_tokens")
            if self.path is not None:
                raise ValueError("a synthetic workload has no path")
        elif self.path is None:
            raise ValueError(f"a {self.kind} workload needs the path of its file")
        elif self.input_tokens is not None or self.turns != 1:
            raise ValueError("input_tokens and turns go with a synthetic workload")
        return self


@dataclass(frozen=True)
class Turn:
    """One request of a session: the history up to ``upto`` messages, then an answer of a recorded length."""

    upto: int
    output_tokens: int | None
    answer: str = ""
    """The recorded answer, to take a length from where none is recorded."""


@dataclass(frozen=True)
class Session:
    """A conversation. ``messages`` holds what is sent; ``blocks`` (Mooncake) makes the text instead."""

    id: str
    messages: Sequence[Mapping[str, Any]]
    turns: tuple[Turn, ...]
    at_s: float | None = None
    shares_prefix: bool = False
    """Prefixes are shared between sessions of the trace, so the preamble must be the cell's, not its own."""
    blocks: tuple[tuple[int, int], ...] = ()
    """(hash id, words) in order."""

    def history(self, turn: Turn) -> list[dict[str, Any]]:
        """The messages of a turn's prompt."""
        if self.blocks:
            return [{"role": "user", "content": "".join(block_text(hash_id, n) for hash_id, n in self.blocks)}]
        return [dict(message) for message in self.messages[: turn.upto]]


@dataclass(frozen=True)
class Workload:
    """A read workload: its sessions in file order, and what identifies it."""

    spec: WorkloadSpec
    sessions: tuple[Session, ...]
    digest: str
    """SHA-256 of the trace's bytes ("synthetic" where there is no file)."""
    lengths: Literal["recorded", "fixed", "tokenizer", "characters", "mixed"] = field(default="recorded")
    """Where the asked-for output lengths come from."""

    @property
    def timestamps(self) -> list[float]:
        """Arrival times in seconds, where the trace has them."""
        return [s.at_s for s in self.sessions if s.at_s is not None]

    def workload_hash(self, sampling: Mapping[str, Any]) -> str:
        """Hash of the definition: trace content, limits, lengths, sampling.

        The path is left out (the same trace may lie elsewhere), and so are seed, load and repeat, which
        choose prompts from the workload but do not define it.
        """
        definition = {
            "trace": self.digest,
            "limits": self.spec.model_dump(mode="json", exclude={"path"}),
            "preamble": PREAMBLE_VERSION,
            "start": START_VERSION,
            "sampling": dict(sampling),
        }
        return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()[:16]


def preamble(*parts: object) -> str:
    """A short unique first line from what identifies a cell and session; equal parts give equal text."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).hexdigest()[:12]
    return f"# session {digest}\n"


def with_preamble(messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with ``text`` at the very start of the first one."""
    first = dict(messages[0])
    content = first.get("content")
    if isinstance(content, list):
        first["content"] = [{"type": "text", "text": text}, *content]
    else:
        first["content"] = text + (content or "")
    return [first, *(dict(message) for message in messages[1:])]


def as_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """A plain rendering for ``/v1/completions``, which applies no chat template."""
    parts = [f"{m['role']}: {message_text(m)}\n\n" for m in messages]
    # The preamble must come first of all, before any role name, to keep cells apart from the first token on.
    if parts and messages and message_text(messages[0]).startswith("# session "):
        line, _, rest = message_text(messages[0]).partition("\n")
        parts[0] = f"{line}\n{messages[0]['role']}: {rest}\n\n"
    return "".join(parts) + "assistant:"


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message: its content, the text parts of it, or its tool calls as JSON."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""


def block_text(hash_id: int, words: int) -> str:
    """Text made from a hash id alone: ``words`` words, a prefix of the block's full text."""
    rng = np.random.default_rng(np.random.SeedSequence([hash_id & 0xFFFFFFFFFFFFFFFF, PREAMBLE_VERSION]))
    chosen = rng.integers(0, len(WORDS), size=max(words, BLOCK_TOKENS))[:words]
    return "".join(WORDS[i] + " " for i in chosen)


def read(spec: WorkloadSpec) -> Workload:
    """Read a workload. Raises KitError with file, line and cause if it is missing or malformed."""
    if spec.kind == "synthetic":
        return Workload(spec, tuple(_synthetic(spec)), "synthetic", "fixed")
    path = spec.path
    if path is None or not path.is_file():
        raise KitError(f"workload {path} is not a file")
    data = path.read_bytes()
    reader = {"messages": _messages, "sharegpt": _sharegpt, "mooncake": _mooncake}[spec.kind]
    sessions = []
    for session in reader(_text(data, path), path):
        turns = _limit(session, spec)
        if turns:
            sessions.append(
                Session(session.id, session.messages, turns, session.at_s, session.shares_prefix, session.blocks)
            )
        if spec.max_sessions is not None and len(sessions) == spec.max_sessions:
            break
    if not sessions:
        raise KitError(
            f"{path} holds no session with an answer to replay"
            + (f" within max_prompt_chars={spec.max_prompt_chars}" if spec.max_prompt_chars else "")
        )
    recorded = all(turn.output_tokens is not None for session in sessions for turn in session.turns)
    lengths = "fixed" if spec.output_tokens else "recorded" if recorded else "characters"
    # The content and not the compressed bytes, which depend on the packer.
    return Workload(spec, tuple(sessions), hashlib.sha256(_text(data, path).encode()).hexdigest(), lengths)


def _limit(session: Session, spec: WorkloadSpec) -> tuple[Turn, ...]:
    """A session's turns within the limits, with the spec's output length where it sets one."""
    turns = list(session.turns[: spec.max_turns])
    if spec.max_prompt_chars is not None:
        kept = []
        for turn in turns:
            if sum(len(message_text(m)) for m in session.history(turn)) > spec.max_prompt_chars:
                break
            kept.append(turn)
        turns = kept
    return tuple(Turn(t.upto, spec.output_tokens or t.output_tokens, t.answer) for t in turns)


def capped(output_tokens: int, spec: WorkloadSpec) -> int:
    """An output length within the spec's cap."""
    return min(output_tokens, spec.max_output_tokens or output_tokens)


def kind_of(path: Path) -> str:
    """A trace file's format, by its content. Raises KitError if it is none of the known ones."""
    if not path.is_file():
        raise KitError(f"trace {path} is not a file")
    text = _text(path.read_bytes(), path).lstrip()
    if text.startswith("["):
        return "sharegpt"
    try:
        first = json.loads(text.split("\n", 1)[0])
    except ValueError:
        first = None
    if isinstance(first, dict) and "messages" in first:
        return "messages"
    if isinstance(first, dict) and "hash_ids" in first:
        return "mooncake"
    raise KitError(
        f"{path}: the format is not clear from the first line; expected messages JSONL, ShareGPT JSON or Mooncake JSONL"
    )


def _text(data: bytes, path: Path) -> str:
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return data.decode()
    except (OSError, EOFError, zlib.error) as error:
        raise KitError(f"{path} is not a whole gzip file: {error}") from error
    except UnicodeDecodeError as error:
        raise KitError(f"{path} is not UTF-8 text: {error}") from error


def _json_lines(text: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise KitError(f"{where}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise KitError(f"{where}: expected a JSON object, found {_kind(value)}")
        yield where, value


def _messages(text: str, path: Path) -> Iterator[Session]:
    for number, (where, value) in enumerate(_json_lines(text, path)):
        messages = value.get("messages")
        if not isinstance(messages, list) or not messages:
            raise KitError(f'{where}: needs "messages", a list of {{"role": …, "content": …}}')
        beside = value.get("output_tokens")
        answers = [i for i, m in enumerate(messages) if isinstance(m, dict) and m.get("role") == "assistant"]
        if beside is not None and (not isinstance(beside, list) or len(beside) != len(answers)):
            raise KitError(
                f"{where}: output_tokens must be a list with one number per assistant message ({len(answers)})"
            )
        turns, sent = [], []
        for index, message in enumerate(messages):
            _check_message(message, f"{where}: messages[{index}]")
            if message["role"] == "assistant" and index > 0:
                length = message.get("output_tokens")
                if length is None and beside is not None:
                    length = beside[answers.index(index)]
                turns.append(
                    Turn(index, _count(length, f"{where}: messages[{index}] output_tokens"), message_text(message))
                )
            sent.append({k: v for k, v in message.items() if k != "output_tokens"})
        yield Session(str(value.get("id", number)), sent, tuple(turns))


def _sharegpt(text: str, path: Path) -> Iterator[Session]:
    try:
        items = json.loads(text)
    except ValueError as error:
        raise KitError(f"{path}: not JSON: {error}") from error
    if not isinstance(items, list):
        raise KitError(f"{path}: expected a JSON list of conversations, found {_kind(items)}")
    for number, item in enumerate(items):
        where = f"{path}: item {number}"
        talk = item.get("conversations") if isinstance(item, dict) else None
        if not isinstance(talk, list):
            raise KitError(f'{where}: needs "conversations", a list of {{"from": …, "value": …}}')
        messages, turns = [], []
        for index, said in enumerate(talk):
            role = SHAREGPT_ROLES.get(said.get("from")) if isinstance(said, dict) else None
            if role is None or not isinstance(said.get("value"), str):
                raise KitError(
                    f'{where}: conversations[{index}] needs "value" and "from", one of '
                    + ", ".join(sorted(SHAREGPT_ROLES))
                )
            if role == "assistant" and index > 0:
                turns.append(Turn(index, None, said["value"]))
            messages.append({"role": role, "content": said["value"]})
        yield Session(str(item.get("id", number)), messages, tuple(turns))


def _mooncake(text: str, path: Path) -> Iterator[Session]:
    for number, (where, value) in enumerate(_json_lines(text, path)):
        missing = [k for k in ("timestamp", "input_length", "output_length", "hash_ids") if k not in value]
        if missing:
            raise KitError(f"{where}: a Mooncake line needs {', '.join(missing)}")
        length = _count(value["input_length"], f"{where}: input_length")
        output = _count(value["output_length"], f"{where}: output_length")
        ids = value["hash_ids"]
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise KitError(f"{where}: hash_ids must be a list of whole numbers")
        if not isinstance(value["timestamp"], int | float):
            raise KitError(f"{where}: timestamp must be a number of milliseconds")
        needed = -(-(length or 0) // BLOCK_TOKENS)
        if len(ids) != needed:
            raise KitError(
                f"{where}: input_length {length} needs {needed} hash_ids of {BLOCK_TOKENS} tokens, found {len(ids)}"
            )
        blocks = tuple((hash_id, min(BLOCK_TOKENS, (length or 0) - i * BLOCK_TOKENS)) for i, hash_id in enumerate(ids))
        yield Session(str(number), (), (Turn(0, output),), value["timestamp"] / 1000, shares_prefix=True, blocks=blocks)


def _synthetic(spec: WorkloadSpec) -> Iterator[Session]:
    words, output = spec.input_tokens or 0, spec.output_tokens or 0
    for number in range(spec.max_sessions or 256):
        messages: list[dict[str, Any]] = []
        turns = []
        for turn in range(min(spec.turns, spec.max_turns or spec.turns)):
            seed = np.random.SeedSequence([number, turn, PREAMBLE_VERSION])
            draw = np.random.default_rng(seed).integers(0, len(WORDS), size=words + output)
            text = [WORDS[i] for i in draw]
            messages.append({"role": "user", "content": " ".join(text[:words])})
            turns.append(Turn(len(messages), output))
            messages.append({"role": "assistant", "content": " ".join(text[words:])})
        yield Session(str(number), messages, tuple(turns))


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        raise KitError(f"{where}: expected an object with role and content, found {_kind(message)}")
    if message.get("role") not in ROLES:
        raise KitError(f"{where}: role must be one of {', '.join(ROLES)}, not {message.get('role')!r}")
    content = message.get("content")
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not (isinstance(content, str) or parts or (content is None and message.get("tool_calls"))):
        raise KitError(f"{where}: content must be text or a list of parts, not {_kind(content)}")


def _count(value: object, where: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise KitError(f"{where} must be a whole number above 0, not {value!r}")
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false", type(None): "null"}
    return names.get(type(value), "a number")
