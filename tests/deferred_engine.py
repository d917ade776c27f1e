"""The real ExLlamaV3 scheduler on a CPU, with a model small enough to check by eye.

`Generator`, `Job`, the page table, the CPU and disk tiers and the cache classes are ExLlamaV3's own. Replaced are the
compiled extension (the few functions the scheduler calls are given in torch) and the two models:

* the *target* keeps a chain: h[t] = step(h[t-1], token[t]). Its cache rows hold (h, token), its hidden state is h, and
  the next token is a function of h;
* the *MTP head* writes (h[t-1], token[t]) rows and a sum over all rows before it, so a pass that ran too late, too
  early, twice, with another chunking or over somebody else's page leaves different bytes. It drafts the right token
  only while its rows form an unbroken chain, so a stale draft cache costs acceptance and nothing else, as in reality.

`Engine.trace` is the digest of the draft cache at every moment somebody looks at it: drafting, a pass after acceptance,
a page copy, a store to the CPU tier, a page released or exchanged, and the clock of the first token. A deferred run
must leave the trace of a stock run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import os
import sys
import types
from dataclasses import dataclass, field

import pytest
from deferred_scenarios import PAGE, TOKENS, watched

torch = pytest.importorskip("torch", reason="the scheduler tests need torch")
pytest.importorskip("triton", reason="importing exllamav3 needs triton")

VOCAB = TOKENS
MODULUS = 2039  # integers below 2048 are exact in fp16
WIDTH = 8


# ----------------------------------------------------------------------------------------------- the compiled extension


def count_match_tensor(a, b, max_a):
    n = min(int(max_a), a.shape[-1], b.shape[-1])
    same = (a[0, :n] == b[0, :n]).long()
    return int(same.cumprod(0).sum())


def generator_stage_decode(arena, width, tables, positions, ropes, batch_ids, ids, pages, offsets):
    rows = len(tables)
    table = arena[: rows * width].view(rows, width)
    table.zero_()
    lengths = arena[rows * width : rows * width + rows]
    for row, (block_table, position) in enumerate(zip(tables, positions, strict=True)):
        n = min(width, block_table.shape[-1])
        table[row, :n] = block_table[0, :n]
        lengths[row] = position
        if batch_ids is not None:
            batch_ids[row, 0] = ids[row][0, position]
            pages[row][0, offsets[row]] = ids[row][0, position]


def cache_rotate(cache, moves, buffer):
    for to, source in moves.view(-1, 2).tolist():
        value = buffer if source < 0 else cache[source]
        (buffer if to < 0 else cache[to]).copy_(value.clone())


def partial_strings_match(*_):
    return -1


class Automaton:
    """The suffix automaton of hybrid drafting, as the plain search it abbreviates."""

    def __init__(self):
        self.ids = []


def _stub_extension():
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    module = types.ModuleType("exllamav3_ext")

    class Loader:
        def create_module(self, spec):
            return None

        def exec_module(self, module):
            pass

    module.__spec__ = importlib.machinery.ModuleSpec("exllamav3_ext", Loader(), origin=f"exllamav3_ext{suffix}")
    for function in (count_match_tensor, generator_stage_decode, cache_rotate, partial_strings_match):
        setattr(module, function.__name__, function)

    def missing(name):
        if name.startswith("__"):
            raise AttributeError(name)

        class Missing:
            def __call__(self, *args, **kwargs):
                raise NotImplementedError(f"the stub extension has no {name}")

        return Missing()

    module.__getattr__ = missing
    return module


if torch.cuda.is_available():
    pytest.skip("these tests stub the compiled extension; on a GPU test_deferred_gpu runs", allow_module_level=True)
os.environ["EXL3_FUSED_SAMPLER"] = "0"  # the fused sampler is a kernel; the steps it fuses are torch
sys.modules.setdefault("exllamav3_ext", _stub_extension())
pytest.importorskip("exllamav3", reason="exllamav3 is not installed (its wheel, without dependencies, is enough)")

from exllamav3 import AsyncGenerator, AsyncJob, Cache, Generator, Job  # noqa: E402
from exllamav3.generator.cpu_cache import CPUPageCache  # noqa: E402
from exllamav3.generator.sampler import GreedySampler  # noqa: E402

__all__ = ["AsyncGenerator", "AsyncJob", "Engine", "Generator", "Job", "engine", "real_engine"]


class LooksLikeCuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU: the CPU tier refuses others."""

    @property
    def device(self):
        return torch.device("cuda", 0)


class FakeEvent:
    """A CUDA event on a machine where everything has already happened."""

    def record(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


@pytest.fixture
def real_engine(monkeypatch):
    """What the scheduler takes for granted on a GPU host, given on a CPU."""
    for name in ("empty", "zeros", "empty_like"):
        monkeypatch.setattr(torch, name, _without_pinning(getattr(torch, name)))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    tier_init = CPUPageCache.__init__

    def init(self, caches, max_size):
        layers = [layer for cache in caches for layer in cache.layers.values()]
        for layer in layers:
            tensors = [torch.Tensor._make_subclass(LooksLikeCuda, t) for t in type(layer).get_tensors(layer)]
            layer.get_tensors = lambda tensors=tensors: tensors
        try:
            tier_init(self, caches, max_size)
        finally:
            for layer in layers:
                del layer.get_tensors

    monkeypatch.setattr(CPUPageCache, "__init__", init)
    from kit import deferred

    yield
    deferred.uninstall()


def _without_pinning(function):
    def unpinned(*args, pin_memory=False, **kwargs):
        return function(*args, **kwargs)

    return unpinned


# ----------------------------------------------------------------------------------------------------------- the models


def step(h: int, token: int) -> int:
    return (h * 31 + token * 17 + 7) % MODULUS


def next_token(h: int) -> int:
    return (h * 7 + 3) % VOCAB


@dataclass
class Attention:
    key: str
    layer_idx: int = 0
    num_kv_heads: int = 1
    head_dim: int = 4
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    cache_layers: list = field(default_factory=list)
    recurrent_layers: list = field(default_factory=list)


class Embedding:
    device = torch.device("cpu")

    def forward(self, ids, params, out_dtype=None):
        return ids.to(out_dtype or torch.float)


class Head:
    device = torch.device("cpu")

    def forward(self, x, params):
        return x

    def prepare_for_device(self, x, params):
        return x


class Config:
    vocab_size = VOCAB
    directory = "fake"
    infer_params = types.SimpleNamespace()
    config_dict = {"model": "chain"}


class State:
    """A recurrent state: where it stands, and the chain there."""

    checkpoint_size = 64
    last_history = 0

    def __init__(self, cache, slot, position, clear, stashed=None):
        self.cache, self.slot, self.position = cache, slot, position

    def stash(self):
        return {"position": self.position, "checkpoint_size": self.checkpoint_size, "h": torch.zeros(4)}

    def rewind(self, n):
        self.position -= n

    def rollback_capacity(self):
        return 8

    def free(self):
        self.cache.release_state(self)

    def reset(self):
        self.position = 0


class Model:
    recurrent_state_cls = State
    loaded_tp = False
    output_device = torch.device("cpu")

    def __init__(self, key, **caps):
        self.caps = caps
        self.config = Config()
        self.cache_weakrefs = {}
        self.draft_verifier_params = {}
        self.attention = Attention(key)
        self.modules = [Embedding(), Head()]
        self.logit_layer_idx = 1

    def get_cache_layers(self):
        return [self.attention]

    def get_recurrent_layers(self):
        return []

    def get_layer_instances(self, idx):
        return ((idx, 0),)

    def prefetch_tokens(self, ids):
        pass

    def rows(self, cache):
        return cache.layers[(0, 0)]


def _where(params, row, positions):
    table = params["block_table"][row].long()
    return table[positions // PAGE], positions % PAGE


class Target(Model):
    """The chain."""

    def forward(self, input_ids, params):
        layer = self.rows(params["cache"])
        tokens = self.modules[0].forward(input_ids, params).long()
        rows, length = tokens.shape
        hidden = torch.zeros((rows, length, WIDTH), dtype=torch.half)
        for row in range(rows):
            start = int(params["cache_seqlens"][row])
            h = 0
            if start:
                page, offset = _where(params, row, torch.tensor([start - 1]))
                h = int(layer.k[page, offset, 0, 0])
            chain = []
            for token in tokens[row].tolist():
                h = step(h, token)
                chain.append(h)
            positions = torch.arange(start, start + length)
            page, offset = _where(params, row, positions)
            hidden[row, :, 0] = torch.tensor(chain, dtype=torch.half)
            layer.k[page, offset, 0, 0] = hidden[row, :, 0]
            layer.k[page, offset, 0, 1] = tokens[row].half()
        params.setdefault("export_states", []).append(hidden)
        for state in params.get("recurrent_states") or ():
            state.position += length
            state.last_history = length - 1 if params.get("recurrent_history") else 0
        last = params.get("last_tokens_only") or length
        logits = torch.zeros((rows, last, VOCAB), dtype=torch.float)
        answers = torch.tensor([[next_token(int(h)) for h in row] for row in hidden[:, -last:, 0].tolist()])
        return logits.scatter_(2, answers.unsqueeze(2), 1.0)

    prefill = forward


class MTPHead(Model):
    """Writes and reads the draft cache; `engine` notes what it saw."""

    engine = None
    fail_next = 0

    def __init__(self, key="mtp"):
        super().__init__(key, mtp_draft=True, attach_target=True)

    def attach_to(self, target):
        self.target = target

    def prefill(self, input_ids, params):
        assert torch.is_inference_mode_enabled()
        if "indexed_embeddings" not in params:
            self.engine.look("pass after acceptance")
        if self.fail_next:
            self.fail_next -= 1
            raise torch.OutOfMemoryError("the fake GPU is full")
        tokens = self.target.modules[0].forward(input_ids, params, out_dtype=torch.half).long()
        self.engine.passes.append((int(params["cache_seqlens"][0]), tokens.shape[-1]))
        for row in range(tokens.shape[0]):
            self.write(row, tokens[row], params["target_hidden"][row, :, 0], params)

    def write(self, row, tokens, hidden, params):
        layer = self.rows(params["cache"])
        start, length = int(params["cache_seqlens"][row]), tokens.shape[-1]
        before = 0
        if start:
            page, offset = _where(params, row, torch.arange(start))
            before = int(layer.k[page, offset, 0, :2].double().sum()) % MODULUS
        page, offset = _where(params, row, torch.arange(start, start + length))
        layer.k[page, offset, 0, 0] = hidden.half()
        layer.k[page, offset, 0, 1] = tokens.half()
        layer.v[page, offset, 0, 0] = before
        layer.v[page, offset, 0, 1] = start % MODULUS
        layer.v[page, offset, 0, 2] = length % MODULUS

    def forward(self, input_ids, params):
        self.engine.look("draft")
        rows = input_ids.shape[0]
        state = torch.zeros((rows, 1, WIDTH), dtype=torch.half)
        layer = self.rows(params["cache"])
        for row in range(rows):
            hidden = params["target_hidden"][row, :, 0]
            self.write(row, input_ids[row], hidden, params)
            page, offset = _where(params, row, torch.arange(int(params["cache_seqlens"][row]) + 1))
            chain = layer.k[page, offset, 0, :2].long()
            follows = torch.full((len(page),), False)
            follows[1:] = (chain[:-1, 0] * 31 + chain[:-1, 1] * 17 + 7) % MODULUS == chain[1:, 0]
            # A job that resumes from cached pages starts with a carry of zeros (ExLlamaV3's own choice): its first row
            # does not continue the chain, nor does the next row continue that one.
            here = torch.arange(len(page)) % MODULUS
            resumed = (layer.v[page, offset, 0, 1].long() == here) & (layer.v[page, offset, 0, 2] > 0)
            resumed &= chain[:, 0] == 0
            follows |= resumed
            follows[1:] |= resumed[:-1]
            intact = bool(follows.all())
            state[row, 0, 0] = step(int(hidden[0]), int(input_ids[row, 0]))
            state[row, 0, 1] = float(intact)
        return state

    def sample_from_state(self, state, params):
        ids = []
        for h, intact in state[:, 0, :2].long().tolist():
            right = bool(intact) and h % 5 != 0  # an imperfect head: some drafts are rejected
            ids.append([next_token(h) if right else (next_token(h) + 1) % VOCAB])
        return torch.tensor(ids)


class Tokenizer:
    actual_vocab_size = VOCAB

    def get_id_to_piece_list(self, special):
        return [chr(0x4E00 + i) for i in range(VOCAB)]

    def decode(self, ids, decode_special_tokens=False):
        return ["".join(chr(0x4E00 + i) for i in ids.flatten().tolist())]


# ----------------------------------------------------------------------------------------------------------- the engine


@dataclass
class Engine:
    """Models, caches and a generator, with everything a run leaves behind."""

    pages: int = 32
    chunk: int = 2 * PAGE
    recurrent: bool = False
    draft: bool = True
    options: dict = field(default_factory=dict)
    trace: list = field(default_factory=list)
    passes: list = field(default_factory=list)
    outputs: dict = field(default_factory=dict)
    errors: list = field(default_factory=list)

    def __post_init__(self):
        self.target = Target("layer", **({"recurrent_states": True} if self.recurrent else {}))
        self.head = MTPHead() if self.draft else None
        self.cache = self._cache(self.target)
        self.draft_cache = self._cache(self.head) if self.draft else None
        if self.draft:
            self.head.engine = self
        self.generator = self.new_generator()

    def _cache(self, model):
        cache = Cache(model, self.pages * PAGE, max_history=8)
        for layer in cache.layers.values():
            layer.alloc(torch.device("cpu"))
        cache.initialized = True
        return cache

    def arguments(self, **options):
        drafting = {"draft_model": self.head, "draft_cache": self.draft_cache, "num_draft_tokens": 3}
        return {
            "model": self.target,
            "cache": self.cache,
            "tokenizer": Tokenizer(),
            "max_chunk_size": self.chunk,
            "max_batch_size": 4,
            **(drafting if self.draft else {}),
            **self.options,
            **options,
        }

    def new_generator(self, **options):
        return Generator(**self.arguments(**options))

    # -- looking

    def digest(self):
        layer = self.head.rows(self.draft_cache)
        return hashlib.sha256(layer.k.numpy().tobytes() + layer.v.numpy().tobytes()).hexdigest()[:16]

    def look(self, what):
        if self.draft:
            self.trace.append((what, self.digest()))

    def look_at_clock(self):
        """The clock of a first token starts: the passes of jobs that finished their prompt are over."""
        if not self.draft:
            return
        layer, rows = self.head.rows(self.draft_cache), []
        for job in self.generator.active_jobs:
            if job.is_prefill_done():
                pages = [page.page_index for page in job.sequences[0].allocated_pages]
                rows.append(layer.v[pages].reshape(-1, 4)[: job.sequences[0].kv_position].numpy().tobytes())
        self.trace.append(("first token's clock", hashlib.sha256(b"".join(rows)).hexdigest()[:16]))

    def two_rows(self):
        """A hidden state for two tokens."""
        return torch.zeros((1, 2, WIDTH), dtype=torch.half)

    # -- running

    def job(self, ids, new_tokens=12, **options):
        return Job(ids, max_new_tokens=new_tokens, sampler=GreedySampler(), seed=1, **options)

    def enqueue(self, ids, name=None, new_tokens=12, **options):
        job = self.job(ids, new_tokens, identifier=name, **options)
        self.generator.enqueue(job)
        return job

    def iterate(self, rounds=1):
        for _ in range(rounds):
            self.collect(self.generator.iterate())

    def run(self, limit=400):
        while self.generator.num_remaining_jobs():
            self.iterate()
            limit -= 1
            assert limit, "the generator does not finish"

    def collect(self, results):
        for result in results:
            name = result.get("identifier")
            if result["stage"] == "error":
                self.errors.append((result["job"].identifier, result["error"]))
            if result.get("stage") == "streaming":
                output = self.outputs.setdefault(name, {"tokens": []})
                output["tokens"] += result["token_ids"].flatten().tolist() if "token_ids" in result else []
                if result["eos"]:
                    keys = ("new_tokens", "prompt_tokens", "cached_pages", "cached_tokens")
                    output |= {k: result[k] for k in keys}
                    output |= {k: result.get(k) for k in ("accepted_draft_tokens", "rejected_draft_tokens")}

    def evidence(self):
        """Everything a deferred run must leave as a stock run leaves it."""
        return {
            "trace": self.trace,
            "outputs": self.outputs,
            "errors": [(n, type(e)) for n, e in self.errors],
            "cache": self.digest() if self.draft else None,
        }


@pytest.fixture
def engine(real_engine):
    """Makes engines whose looks are noted; wraps lie innermost, below whatever the kit interposes."""
    made: list[Engine] = []
    with watched(made):

        def make(**options):
            # Known before construction ends, so that looks during it are not lost.
            instance = Engine.__new__(Engine)
            made.append(instance)
            instance.__init__(**options)
            return instance

        yield make
    for instance in made:
        with contextlib.suppress(Exception):
            instance.generator.close()
