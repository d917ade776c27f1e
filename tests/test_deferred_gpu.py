"""The same scenarios on a real model: draft caches bit-identical to stock's, on the GPU's own kernels.

Needs a GPU, exllamav3 with its compiled extension, and a checkpoint with an MTP head in ``KIT_EXL3_MODEL``. With
``KIT_EXL3_SPLIT`` (layers per GPU, like 12,12) the layers are split over that many GPUs.
"""

import contextlib
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if not os.environ.get("KIT_EXL3_MODEL"):
    pytest.skip("KIT_EXL3_MODEL names no checkpoint with an MTP head", allow_module_level=True)

import deferred_scenarios as scenarios  # noqa: E402
from deferred_scenarios import PAGE, watched  # noqa: E402

from kit import deferred  # noqa: E402
from kit.deferred import request, runner  # noqa: E402
from kit.engines.exllamav3 import ArmSettings, Layout, PrefillPlan  # noqa: E402

CHECKPOINT = Path(os.environ["KIT_EXL3_MODEL"])
SPLIT = tuple(int(n) for n in os.environ.get("KIT_EXL3_SPLIT", "").split(",") if n)
PAGES = 64


@pytest.fixture(scope="module")
def loaded():
    layout = Layout(checkpoint=CHECKPOINT, split=SPLIT, chunk=2 * PAGE, cache_tokens=PAGES * PAGE, draft_tokens=3)
    trace = Path(__file__).parents[1] / "data" / "traces" / "agent-sessions.jsonl.gz"
    plan = PrefillPlan(
        folder=Path(),
        layout=layout,
        arms=[],
        lengths=[PAGE],
        output_tokens=1,
        warm_up_tokens=PAGE,
        trace=trace,
    )
    return request.load(plan, jobs=4)  # the scenarios run several at once


class RealEngine:
    """What the scenarios drive, on the loaded checkpoint."""

    def __init__(self, loaded, pages=None, chunk=2 * PAGE, recurrent=None, options=None, where="first", bits=4):
        self.loaded = loaded
        self.chunk = chunk
        self.options = options or {}
        self.cache = loaded.cache
        self.head, self.draft_cache = loaded.draft(where, bits)
        with torch.inference_mode():  # the caches were made in it
            for cache in (self.cache, self.draft_cache):
                for tensor in cache.get_all_tensors():
                    tensor.zero_()
        self.trace, self.outputs, self.errors = [], {}, []
        self.generator = self.new_generator()

    def new_generator(self):
        from exllamav3 import Generator

        return Generator(
            model=self.loaded.target,
            cache=self.cache,
            tokenizer=self.loaded.tokenizer,
            draft_model=self.head,
            draft_cache=self.draft_cache,
            num_draft_tokens=3,
            max_batch_size=4,
            max_chunk_size=self.chunk,
            **self.options,
        )

    def digest(self):
        pages = torch.arange(self.draft_cache.max_num_tokens // PAGE)[None]
        return request.cache_digest(self.draft_cache, pages, self.draft_cache.max_num_tokens)

    def look(self, what):
        self.trace.append((what, self.digest()))

    def look_at_clock(self):
        pass

    def two_rows(self):
        return torch.zeros((1, 2, self.loaded.hidden_size), dtype=torch.half, device=self.head.modules[0].device)

    def enqueue(self, ids, name=None, new_tokens=12, **options):
        from exllamav3 import Job
        from exllamav3.generator.sampler import GreedySampler

        job = Job(ids, max_new_tokens=new_tokens, sampler=GreedySampler(), identifier=name, **options)
        self.generator.enqueue(job)
        return job

    def iterate(self, rounds=1):
        for _ in range(rounds):
            for result in self.generator.iterate():
                if result["stage"] == "error":
                    raise result["error"]
                if result["stage"] == "streaming":
                    name = result.get("identifier")
                    output = self.outputs.setdefault(name, {"tokens": []})
                    output["tokens"] += result["token_ids"].flatten().tolist() if "token_ids" in result else []
                    if result["eos"]:
                        keys = ("accepted_draft_tokens", "rejected_draft_tokens", "cached_pages", "cached_tokens")
                        output |= {key: result[key] for key in keys}

    def run(self, limit=3000):
        while self.generator.num_remaining_jobs():
            self.iterate()
            limit -= 1
            assert limit, "the generator does not finish"

    def evidence(self):
        return {"trace": self.trace, "outputs": self.outputs, "cache": self.digest()}


@pytest.fixture
def make(loaded):
    made = []
    with watched(made):

        def engine(**options):
            instance = RealEngine.__new__(RealEngine)
            instance.trace = []
            made.clear()
            instance.__init__(loaded, **options)
            made.append(instance)
            return instance

        yield engine
    deferred.uninstall()
    for instance in made:
        with contextlib.suppress(Exception):
            instance.generator.close()


# A page copy needs a model without recurrent layers; a fixed recurrent interval and small caches are the fake model's.
SCENARIOS = [
    scenarios.several_jobs_share_prefixes,
    scenarios.a_prompt_arrives_while_another_job_generates,
    scenarios.cancelled_mid_prefill_then_repeated,
    scenarios.queue_cleared_mid_prefill,
    scenarios.requeued_while_another_prompt_waits,
    scenarios.taken_out_mid_prefill,
    scenarios.a_pass_from_elsewhere,
]
_stock: dict = {}


def stock(scenario, make):
    if scenario not in _stock:
        first, second = scenario(make).evidence(), scenario(make).evidence()
        if first != second:
            pytest.skip("stock itself does not repeat bit by bit here, so there is nothing to compare with")
        _stock[scenario] = first
    return _stock[scenario]


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 2},
        {"depth": 8},
        {"depth": None, "max_bytes": None},
        {"depth": 8, "where": "pinned"},
        {"depth": 2, "where": "pinned", "rolling": True},
        {"depth": 1, "unblock": True},
        {"depth": 8, "unblock": True},
    ],
    ids=["2", "8", "whole", "pinned", "rolling", "unblock", "unblock-8"],
)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_nobody_can_tell(make, scenario, options):
    expected = stock(scenario, make)
    options = dict(options)
    unblocked = options.pop("unblock", False)
    deferred.install(**options, skip_single_device=False)
    if unblocked:
        deferred.unblock()
    assert scenario(make).evidence() == expected


@pytest.mark.parametrize("settings", [{"mtp_gpu": "last"}, {"draft_bits": 8}, {"draft_bits": 16}], ids=str)
def test_other_heads_and_caches(make, settings):
    where = {"where": settings.get("mtp_gpu", "first"), "bits": settings.get("draft_bits", 4)}

    def scenario(make):
        return scenarios.several_jobs_share_prefixes(lambda **options: make(**options, **where))

    expected = scenario(make).evidence()
    deferred.install(8, skip_single_device=False)
    assert scenario(make).evidence() == expected


@pytest.mark.parametrize("length", [100, 512, 513, 2048, 2049, 5000])
def test_every_prompt_length(loaded, length):
    layout = Layout(checkpoint=CHECKPOINT, split=SPLIT, chunk=2 * PAGE, draft_tokens=3)
    texts = runner.session_texts(Path(__file__).parents[1] / "data" / "traces" / "agent-sessions.jsonl.gz")
    ids = runner.make_prompt(runner.encoder(CHECKPOINT), texts, length, "gpu")
    settings = [
        {},
        {"depth": 4},
        {"depth": "whole"},
        {"depth": 2, "where": "pinned", "rolling": True},
        {"unblock": True},
    ]
    outcomes = [request.run_request(loaded, ArmSettings(**s), layout, ids, 16) for s in settings]
    assert len({o.draft_sha256 for o in outcomes}) == 1
    assert len({tuple(o.token_ids) for o in outcomes}) == 1
