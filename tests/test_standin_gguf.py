"""The exported file, run by llama.cpp's server, says what the torch reference of the checkpoint says."""

import json
import re
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xllamacpp")

from standin_checkpoints import (  # noqa: E402
    TOKENIZER,
    all_logits,
    margin,
    peaked_parameters,
    random_parameters,
    simulate,
)

from kit.errors import KitError  # noqa: E402
from kit.standin import modeling as M  # noqa: E402
from kit.standin.cache import standin_gguf, standin_hf  # noqa: E402
from kit.standin.checkpoint import open_checkpoint  # noqa: E402
from kit.standin.gguf_export import tiled_heads, write_gguf  # noqa: E402
from kit.standin.grow import GrowSpec, grow  # noqa: E402

TINY = Path(__file__).parent.parent / "data" / "tiny-mtp"
SHAPE = M.Shape(num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=6, num_attention_heads=4)
OUTPUT = 64
ENDS = [0, 2]
"""<|endoftext|> and <|im_end|>."""
TOLERANCE = 0.1
"""Logits closer than this may swap between bfloat16 products in llama.cpp and float32 in torch."""

SERVER = """
import sys, time, xllamacpp as x
path, width = sys.argv[1], int(sys.argv[2])
p = x.CommonParams()
p.model.path, p.n_ctx, p.n_parallel = path, 2048, 1
p.hostnames, p.port, p.warmup, p.verbosity = ["127.0.0.1"], 0, False, 0
for c in (p.cpuparams, p.cpuparams_batch, p.speculative.draft.cpuparams):
    c.n_threads = 1
if width:
    p.load_mtp = True
    p.speculative.types = [x.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
    p.speculative.draft.n_max, p.speculative.draft.p_min = width, 0.0
server = x.Server(p)
print("ADDRESS", server.listening_address, flush=True)
sys.stdin.read()
"""


@contextmanager
def serving(path: Path, width: int):
    """llama.cpp's server on loopback in a child process, one compute thread; gives a function that completes ids."""
    command = [sys.executable, "-c", SERVER, str(path), str(width)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        address = next((line.split()[1] for line in child.stdout if line.startswith("ADDRESS")), None)
        assert address, "the server did not start"

        def complete(ids: list[int], n: int = OUTPUT) -> dict:
            body = dict(prompt=ids, n_predict=n, temperature=0, ignore_eos=True, return_tokens=True, cache_prompt=False)
            request = urllib.request.Request(
                address + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as r:
                return json.load(r)

        complete.get = lambda route: json.load(urllib.request.urlopen(address + route, timeout=30))
        yield complete
    finally:
        child.stdin.close()
        child.terminate()
        child.wait(20)


def make(folder: Path, p: M.Params, s: M.Shape = SHAPE) -> Path:
    """A checkpoint folder with the stand-in's tokenizer."""
    M.save(p, s, folder)
    for file in TOKENIZER.iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def peaked(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("peaked") / "ck", peaked_parameters(SHAPE, reject=0.3))


def prompts(s: M.Shape, count: int, length: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(3)
    return torch.randint(16, s.vocab_size, (count, length), generator=g).tolist()


def check(folder: Path, path: Path, prompt: list[int], width: int, complete) -> None:
    """One request: every token is the reference's best, or as good; drafts and acceptance are the simulation's."""
    answer = complete(prompt)
    tokens, timings = answer["tokens"], answer["timings"]
    assert len(tokens) == OUTPUT
    p, s = M.load(folder)
    ids = [*prompt, *tokens]
    trunk, *drafts = all_logits(p, s, torch.tensor(ids), drafts=max(width, 1))
    trunk[:, ENDS] = -torch.inf  # ignore_eos forbids them; the draft head may still name one, which is then rejected
    at = torch.arange(len(prompt) - 1, len(ids) - 1)
    best, said = trunk[at].max(-1).values, trunk[at, torch.tensor(tokens)]
    assert (best - said).max() < TOLERANCE, f"token {int((best - said).argmax())} of the output differs"
    if width:
        want = simulate(drafts, ids, len(prompt), width, TOLERANCE)
        close = want.close + int((margin(trunk[at]) < TOLERANCE).sum())
        assert abs(timings["draft_n_accepted"] - want.accepted) <= close, (timings, want)
        assert abs(timings["draft_n"] - want.drafted) <= width * close, (timings, want)


@pytest.mark.parametrize("width", [0, 1, 2])
def test_peaked_output_and_acceptance_equal_the_reference(peaked, tmp_path, width):
    path = write_gguf(open_checkpoint(peaked), tmp_path / "m.gguf", "bf16")
    p, s = M.load(peaked)
    with serving(path, width) as complete:
        for prompt in prompts(s, 3, 20):
            answer = complete(prompt)
            ids = [*prompt, *answer["tokens"]]
            trunk, *drafts = all_logits(p, s, torch.tensor(ids), drafts=2)
            assert trunk[len(prompt) - 1 : -1].argmax(-1).tolist() == answer["tokens"]
            assert margin(trunk[len(prompt) - 1 :]).min() > TOLERANCE, "the test's checkpoint is not peaked"
            if width:
                want = simulate(drafts, ids, len(prompt), width, TOLERANCE)
                assert 0 < want.accepted < want.drafted and want.close == 0
                assert (answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"]) == (
                    want.drafted,
                    want.accepted,
                )
            else:
                assert not answer["timings"].get("draft_n")


@pytest.mark.parametrize("quant", ["bf16", "q8_0"])
def test_random_weights_agree(tmp_path, quant):
    """No structure to hide behind: every weight matters for the logits of a random checkpoint."""
    folder = make(tmp_path / "ck", random_parameters(SHAPE))
    path = write_gguf(open_checkpoint(folder), tmp_path / "m.gguf", quant)
    p, s = M.load(folder)
    with serving(path, 0) as complete:
        for prompt in prompts(s, 2, 30):
            tokens = complete(prompt)["tokens"]
            logits = all_logits(p, s, torch.tensor([*prompt, *tokens]), drafts=0)[0][len(prompt) - 1 : -1]
            behind = logits.max(-1).values - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
            # the best of 4,096 logits of size 1 lies near 3.5; a wrong export picks at random
            assert behind.median() == 0 and behind.max() < 0.5, behind


def test_grown_file_says_the_same(peaked, tmp_path):
    spec = GrowSpec(hidden=3, heads=2, linear_key_heads=2, intermediate=3, layers=2)
    grown = standin_gguf(peaked, spec, "q8_0", cache=tmp_path, progress=False)
    small = standin_gguf(peaked, quant="q8_0", cache=tmp_path, progress=False)
    assert grown != small and grown.stat().st_size > 4 * small.stat().st_size
    said = []
    for path in (small, grown):
        with serving(path, 2) as complete:
            answers = [complete(prompt) for prompt in prompts(SHAPE, 2, 20)]
            said.append([(a["tokens"], a["timings"]["draft_n"], a["timings"]["draft_n_accepted"]) for a in answers])
    assert said[0] == said[1]


def test_cache_makes_a_file_once_and_knows_a_changed_checkpoint(peaked, tmp_path):
    first = standin_gguf(peaked, quant="bf16", cache=tmp_path / "c", progress=False)
    stamp = first.stat().st_mtime_ns
    assert standin_gguf(peaked, quant="bf16", cache=tmp_path / "c", progress=False) == first
    assert first.stat().st_mtime_ns == stamp
    assert [p.name for p in (tmp_path / "c").iterdir()] == [first.name]
    other = make(tmp_path / "ck", peaked_parameters(SHAPE, reject=0.3, seed=9))
    assert standin_gguf(other, quant="bf16", cache=tmp_path / "c", progress=False) != first
    folder = standin_hf(peaked, GrowSpec(hidden=2), cache=tmp_path / "c", progress=False)
    made = (folder / "config.json").stat().st_mtime_ns
    assert standin_hf(peaked, GrowSpec(hidden=2), cache=tmp_path / "c", progress=False) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    assert open_checkpoint(folder).config["architectures"] == ["Qwen3_5ForConditionalGeneration"]


def test_tokenizer_special_tokens_and_chat_template(peaked, tmp_path):
    from tokenizers import Tokenizer

    text = "def f(x):\n    return x['é'] + 12345  # it's\n\n<|im_end|>\n"
    want = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).encode(text).ids
    with serving(write_gguf(open_checkpoint(peaked), tmp_path / "m.gguf", "q8_0"), 0) as complete:
        body = json.dumps({"content": text, "parse_special": True}).encode()
        base = complete.get("/props")
        assert "im_start" in base["chat_template"]
        assert base["default_generation_settings"]["n_ctx"] == 2048
        answer = complete(text, 1)
        assert answer["tokens_evaluated"] == len(want), body
    from gguf import GGUFReader

    fields = GGUFReader(tmp_path / "m.gguf").fields
    added = json.loads((TOKENIZER / "tokenizer.json").read_text())["added_tokens"]
    types = fields["tokenizer.ggml.token_type"]
    assert all(types.parts[types.data[t["id"]]][0] == (3 if t["special"] else 4) for t in added)
    assert fields["tokenizer.ggml.eos_token_id"].contents() == next(
        t["id"] for t in added if t["content"] == "<|im_end|>"
    )


def test_value_heads_are_tiled():
    assert tiled_heads(2, 6).tolist() == [0, 3, 1, 4, 2, 5]
    assert tiled_heads(1, 3, 2).tolist() == list(range(6))


def test_what_cannot_be_exported_is_said(peaked, tmp_path):
    ck = open_checkpoint(peaked)
    with pytest.raises(KitError, match="unknown quant 'q4'"):
        write_gguf(ck, tmp_path / "m.gguf", "q4")
    without = type(ck)(ck.config, {k: v for k, v in ck.tensors.items() if not k.startswith("mtp.")}, ck.files)
    with pytest.raises(KitError, match="no MTP head"):
        write_gguf(without, tmp_path / "m.gguf")
    bare = type(ck)(ck.config, ck.tensors, {})
    with pytest.raises(KitError, match=re.escape("no tokenizer.json")):
        write_gguf(bare, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not (TINY / "config.json").is_file(), reason="data/tiny-mtp has no weights here")
@pytest.mark.parametrize("width", [1, 2])
def test_trained_model_equals_its_reference(tmp_path, width):
    path = write_gguf(open_checkpoint(TINY), tmp_path / "m.gguf", "bf16")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    code = Path(np.__file__).with_name("version.py").read_text()[:600]
    prompt = (
        f"<|im_start|>user\nShow me the file.<|im_end|>\n<|im_start|>tool\n{code}<|im_end|>\n<|im_start|>assistant\n"
    )
    with serving(path, width) as complete:
        check(TINY, path, tokenizer.encode(prompt).ids, width, complete)


def test_grown_tensors_are_views_of_the_small_ones(peaked):
    """What makes the default cheap to make: nothing is computed before it is read."""
    grown = grow(open_checkpoint(peaked), GrowSpec(hidden=20, intermediate=34, layers=16))
    assert grown.parameters > 1e9
