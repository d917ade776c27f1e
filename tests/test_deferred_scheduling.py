"""Deferring on the real ExLlamaV3 scheduler: nobody who looks at the draft cache can tell it from stock.

Each scenario is played on a stock engine and on a deferred one; what both leave behind must be equal: the output, the
acceptance, the draft cache, and its digest at every look (see `deferred_engine`). The last test takes each flush out in
turn and shows that a scenario notices.
"""

import asyncio
from types import SimpleNamespace

import deferred_engine
import pytest
import torch
from deferred_engine import AsyncGenerator, AsyncJob, engine, real_engine  # noqa: F401
from deferred_scenarios import (
    PAGE,
    SCENARIOS,
    a_pass_from_elsewhere,
    a_prompt_arrives_while_another_job_generates,
    cancelled_mid_prefill_then_repeated,
    evicted_to_the_cpu_tier_and_back,
    extended,
    page_copied_from_a_prompt_being_read,
    page_exchanged_for_its_twin,
    prompt,
    several_jobs_share_prefixes,
    taken_out_mid_prefill,
)

from kit import deferred
from kit.deferred.install import Interposition
from kit.deferred.queue import DeferredQueue, DropReason, FlushReason

CHUNK = 2 * PAGE


def defer(depth=8, **options):
    deferred.install(depth, skip_single_device=False, **options)


_stock: dict = {}


def stock_evidence(scenario, make):
    """What a stock run leaves; played once."""
    if scenario not in _stock:
        _stock[scenario] = scenario(make).evidence()
    return _stock[scenario]


def play(scenario, make, **options):
    """The evidence of a stock run, and a deferred run."""
    stock = stock_evidence(scenario, make)
    defer(**options)
    try:
        return stock, scenario(make)
    finally:
        deferred.uninstall()


# ---------------------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 2},
        {"depth": None},
        {"depth": 2, "where": "pinned", "rolling": True},
        {"depth": 8, "where": "pinned"},
    ],
    ids=["2", "whole", "pinned-rolling", "pinned"],
)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_nobody_can_tell(engine, scenario, options):  # noqa: F811
    stock, run = play(scenario, engine, **options)
    assert run.evidence() == stock
    assert stock["outputs"]


def _lengths(chunk):
    return [1, 2, 100, chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1, 5 * chunk + 123]


def _prompts_of_every_length(chunk):
    def scenario(make):
        e = make(chunk=chunk, pages=64)
        for length in _lengths(chunk):
            e.enqueue(prompt(length, length), length, new_tokens=6)
            e.run()
        return e

    return scenario


BY_CHUNK = {chunk: _prompts_of_every_length(chunk) for chunk in (PAGE, 2 * PAGE, 3 * PAGE)}


@pytest.mark.parametrize("chunk", BY_CHUNK)
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 16, None])
def test_every_depth_chunk_and_prompt_length(engine, depth, chunk):  # noqa: F811
    stock, run = play(BY_CHUNK[chunk], engine, depth=depth)
    assert run.evidence() == stock
    assert all(stock["outputs"][n]["accepted_draft_tokens"] > 0 for n in _lengths(chunk) if n > 1)


@pytest.mark.parametrize("depth", [1, 8])
@pytest.mark.parametrize("scenario", SCENARIOS[:3] + SCENARIOS[6:8], ids=lambda s: s.__name__)
def test_inputs_may_travel_unblocked(engine, scenario, depth):  # noqa: F811
    stock = stock_evidence(scenario, engine)
    defer(depth=depth)
    deferred.unblock()
    assert scenario(engine).evidence() == stock


def test_unblocked_inputs_are_the_prompts_only(engine):  # noqa: F811
    deferred.unblock()
    e = engine()
    e.enqueue(prompt(1500), "prompt")
    e.run()
    # Three chunks, each with a pass of the target and one of the MTP head; generation is left alone.
    assert deferred.counters(e.generator)["unblocked_uploads"] == 6


@pytest.mark.usefixtures("real_engine")
def test_pinned_buffers_are_few_and_carry_any_shape():
    from kit.deferred.uploads import PinnedRing

    ring, kept = PinnedRing(2), []
    for length in (7, 512, 3, 512, 100, 511):
        for dtype in (torch.half, torch.float):
            rows = torch.arange(length * 8, dtype=dtype).reshape(1, length, 8)
            kept.append((rows, ring.upload(rows, torch.device("cpu"))))
    assert all(torch.equal(rows, copy) and rows.dtype == copy.dtype for rows, copy in kept)
    assert ring.nbytes <= 2 * 512 * 8 * 4


def _embedding(dtype=torch.half, **options):
    """ExLlamaV3's own embedding module over a small table on the CPU."""
    from exllamav3.modules.embedding import Embedding

    module = Embedding(None, "embed", 50, 8, **options)
    weight = torch.randn(50, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    module.device = torch.device("cpu")
    module.embedding = torch.nn.Embedding(50, 8, _weight=weight, _freeze=True)
    return module


@pytest.mark.usefixtures("real_engine")
@pytest.mark.parametrize(
    ("stored", "asked", "gathered"),
    [
        (torch.half, None, True),
        (torch.half, torch.half, True),
        (torch.bfloat16, None, True),
        (torch.bfloat16, torch.half, True),  # rounds, everywhere alike
        (torch.float, torch.half, False),  # rounds: left to the engine
    ],
)
def test_rows_gathered_in_the_tables_type_are_the_modules_own_bits(monkeypatch, stored, asked, gathered):
    from kit.deferred import uploads

    module, ids = _embedding(stored), torch.randint(0, 50, (1, 300))
    own = module.forward(ids, {}, out_dtype=asked)
    calls = []
    original = uploads.PinnedRing.gather
    monkeypatch.setattr(uploads.PinnedRing, "gather", lambda *a: calls.append(1) or original(*a))
    unblocker = uploads.Unblocker(torch.device("cpu"), torch.device("cpu"))
    params = {}
    with unblocker.target_pass(params):
        sent = [unblocker.embed(module.forward, ids, params, out_dtype=asked) for _ in range(uploads.RING + 2)]
    assert all(torch.equal(rows, own) and rows.dtype == own.dtype and rows.shape == own.shape for rows in sent)
    assert bool(calls) is gathered and params["input_ids"] is ids
    assert unblocker.uploads == len(sent)


@pytest.mark.usefixtures("real_engine")
@pytest.mark.parametrize("case", ["scaled", "normalised", "rows given", "images"])
def test_what_is_more_than_gathering_is_left_to_the_engine(case):
    from kit.deferred.uploads import Unblocker, plain_table

    module = _embedding(multiplier=2.0 if case == "scaled" else 1.0, normalize=case == "normalised")
    ids = torch.tensor([[1, 2, 3]])
    params = {
        "rows given": {"draft_embedding": torch.ones(1, 3, 8)},
        "images": {"indexed_embeddings": [SimpleNamespace(first_index=90, mm_length=3)]},
    }.get(case, {})
    assert plain_table(module, ids, params, None) is None
    own = module.forward(ids, dict(params))
    unblocker = Unblocker(torch.device("cpu"), None)
    with unblocker.target_pass(params):
        assert torch.equal(unblocker.embed(module.forward, ids, params), own)


def test_coalescing_changes_the_passes_and_not_the_output(engine):  # noqa: F811
    stock = several_jobs_share_prefixes(engine)
    defer(depth=8, coalesce=True)
    run = several_jobs_share_prefixes(engine)
    prompt_tokens = [sum(n for _, n in e.passes if n > 8) for e in (stock, run)]
    assert prompt_tokens[0] == prompt_tokens[1]
    assert max(n for _, n in run.passes) > CHUNK
    assert len(run.passes) < len(stock.passes)
    assert run.outputs == stock.outputs


def test_a_coalesced_pass_is_bounded(engine, monkeypatch):  # noqa: F811
    import sys

    monkeypatch.setattr(sys.modules["kit.deferred.install"], "COALESCED_TOKENS", 1100)
    defer(depth=None, coalesce=True)
    e = engine()
    e.enqueue(prompt(3000), "prompt")
    e.run()
    assert [n for _, n in e.passes if n > 8] == [1024, 1024, 951]


# --------------------------------------------------------------------------------------------------------------- bounds


def test_memory_is_bounded_in_chunks_and_in_bytes(engine):  # noqa: F811
    row = deferred_engine.WIDTH * 2
    for depth, max_bytes, items in ((3, None, 3), (None, 2 * CHUNK * row, 2), (None, CHUNK * row, 1), (None, 10, 1)):
        defer(depth=depth, max_bytes=max_bytes)
        e = engine()
        e.enqueue(prompt(4500), "prompt")
        e.run()
        counters = deferred.counters(e.generator)
        assert counters["peak_items"] == items, (depth, max_bytes)
        assert counters["queued"] == counters["replayed"] == 9
        assert counters["peak_bytes"] <= max(max_bytes or 3 * CHUNK * row, CHUNK * row)


def test_the_report_counts_what_happened(engine):  # noqa: F811
    defer(depth=4)
    e = engine()
    e.enqueue(prompt(4500), "prompt")
    e.run()
    counters = deferred.counters(e.generator)
    assert counters["flushes"] == {"depth": 2, "prefill_end": 1}
    assert counters["bypass"] is None
    assert counters["flush_seconds"] > 0


# ------------------------------------------------------------------------------------------------------------- failures


def test_out_of_memory_in_a_flush_costs_that_job_only(engine):  # noqa: F811
    """The replay fails once; letting the failed job's pages go repeats it, so the prefix stays good."""
    stock = engine()
    stock.enqueue(prompt(400, 1), "other")
    stock.run()
    stock.enqueue(prompt(2400), "again")
    stock.run()

    defer(depth=3)
    e = engine()
    e.enqueue(prompt(400, 1), "other", new_tokens=12)
    e.run()
    e.enqueue(prompt(2400), "fails")
    e.iterate(2)
    e.head.fail_next = 1
    e.iterate(2)
    [(name, error)] = e.errors
    assert name == "fails"
    assert isinstance(error, torch.OutOfMemoryError)
    assert deferred.counters(e.generator)["drops"] == {}
    e.enqueue(prompt(2400), "again")
    e.run()
    assert e.outputs["again"]["tokens"] == stock.outputs["again"]["tokens"]
    assert e.outputs["again"]["accepted_draft_tokens"] == stock.outputs["again"]["accepted_draft_tokens"]
    assert e.outputs["again"]["cached_pages"] == 4


def test_a_second_failure_keeps_the_first_error_and_clears_the_pages(engine):  # noqa: F811
    stock = engine()
    stock.enqueue(prompt(2400), "again")
    stock.run()

    defer(depth=3)
    e = engine()
    e.enqueue(prompt(2400), "fails")
    e.iterate(2)
    e.head.fail_next = 2
    e.iterate(1)
    [(_, error)] = e.errors
    assert isinstance(error, torch.OutOfMemoryError)
    counters = deferred.counters(e.generator)
    assert (counters["drops"], counters["dropped"]) == ({"flush_failed": 1}, 3)
    assert all(page.ref_count == 0 for page in e.generator.pagetable.all_pages)
    e.enqueue(prompt(2400), "again")
    e.run()
    assert e.outputs["again"] == stock.outputs["again"]
    e.generator.pagetable.validate_pagetable([])


def test_pages_never_written_are_not_cleared_under_another_job(engine):  # noqa: F811
    """The second job shares pages of the failed one, still referenced when the queue is dropped."""
    defer(depth=8)
    e = engine()
    base = prompt(2400)
    e.enqueue(base, "fails")
    e.iterate(2)
    e.enqueue(extended(base, 512, 2400, 1), "shares")
    e.iterate(1)
    job = next(j for j in e.generator.active_jobs if j.identifier == "fails")
    e.head.fail_next = 1
    e.generator.cancel(job)
    assert deferred.counters(e.generator)["dropped"] > 0
    e.run()
    assert len(e.outputs["shares"]["tokens"]) == 12
    e.enqueue(base, "again")
    e.run()
    assert e.outputs["again"]["cached_pages"] == 0
    e.generator.pagetable.validate_pagetable([])


def test_an_exception_out_of_iterate_leaves_nothing_queued(engine):  # noqa: F811
    defer(depth=8)
    e = engine(options={"prefill_cooldown": 0})
    e.enqueue(prompt(300), "generates", new_tokens=80)
    e.iterate(2)
    e.enqueue(prompt(3000, 1), "prompt")
    e.head.fail_next = 1
    with pytest.raises(torch.OutOfMemoryError):
        e.iterate(3)
    counters = deferred.counters(e.generator)
    assert counters["drops"] == {"iterate_failed": 1}
    assert counters["queued"] == counters["replayed"] + counters["dropped"]


def test_a_superseded_generator_never_writes(engine):  # noqa: F811
    defer(depth=8)
    e = engine()
    old = e.generator
    job = e.enqueue(prompt(3000), "old")
    e.iterate(3)
    e.generator = e.new_generator()
    before, passes = e.digest(), len(e.passes)
    with pytest.raises(RuntimeError, match="no longer owns"):
        old.iterate()
    old.cancel(job)
    assert (e.digest(), len(e.passes)) == (before, passes)
    assert deferred.counters(old)["drops"] == {"superseded": 1}
    e.enqueue(prompt(3000), "new")
    e.run()
    assert e.outputs["new"]["accepted_draft_tokens"] > 0
    assert deferred.counters(e.generator)["queued"] == 6


@pytest.mark.parametrize("how", ["owner", "draft cache unloaded", "cache unloaded"])
def test_a_cache_that_is_gone_is_not_written(engine, how):  # noqa: F811
    defer(depth=8)
    e = engine()
    job = e.enqueue(prompt(3000), "prompt")
    e.iterate(3)
    if how == "owner":
        e.cache.owner_serial += 1
    else:
        (e.cache if how == "cache unloaded" else e.draft_cache).initialized = False
    before = e.digest()
    e.generator.cancel(job)
    assert e.digest() == before
    assert deferred.counters(e.generator)["dropped"] == 3


def test_closing_with_work_queued_writes_nothing_and_frees_it(engine):  # noqa: F811
    defer(depth=8)
    e = engine()
    e.enqueue(prompt(3000), "prompt")
    e.iterate(3)
    before = e.digest()
    e.generator.close()
    assert e.digest() == before
    assert deferred.counters(e.generator)["drops"] == {"closed": 1}


# ----------------------------------------------------------------------------------------------------------------- disk


def killed_while_reading(make, folder):
    """Pages of a prompt being read go to disk; the process ends; another one resumes from them."""
    options = {"cpu_cache_size": 2**22, "disk_cache_dir": str(folder), "disk_cache_write_interval": 1e-9}
    first = make(options=options)
    first.enqueue(prompt(3000), "killed")
    first.iterate(5)
    first.generator.disk_page_cache.flush()
    first.generator.disk_page_cache.abort()
    second = make(options=options)
    second.enqueue(prompt(3000), "resumed")
    second.run()
    return second


def test_disk_never_keeps_a_page_whose_draft_half_is_pending(engine, tmp_path):  # noqa: F811
    stock = killed_while_reading(engine, tmp_path / "stock")
    defer(depth=8)
    run = killed_while_reading(engine, tmp_path / "deferred")
    assert stock.outputs["resumed"]["cached_pages"] > 0
    assert run.outputs == stock.outputs


def test_closing_persists_what_was_pending(engine, tmp_path):  # noqa: F811
    def scenario(folder):
        options = {"cpu_cache_size": 2**22, "disk_cache_dir": str(folder), "disk_cache_write_interval": 0}
        first = engine(options=options)
        first.enqueue(prompt(3000), "closed")
        first.iterate(4)
        first.generator.close()
        second = engine(options=options)
        second.enqueue(prompt(3000), "resumed")
        second.run()
        return second.outputs

    stock = scenario(tmp_path / "stock")
    defer(depth=8)
    assert scenario(tmp_path / "deferred") == stock
    assert stock["resumed"]["cached_pages"] > 0


# ---------------------------------------------------------------------------------------------------------------- async


async def _asynchronous(e):
    wrapper = AsyncGenerator(**e.arguments())
    e.generator = wrapper.generator

    async def consume(ids, name, stop_after=None):
        job = AsyncJob(wrapper, ids, max_new_tokens=12, sampler=deferred_engine.GreedySampler(), identifier=name)
        seen = 0
        async for result in job:
            e.collect([result])
            seen += 1
            if seen == stop_after:
                await job.cancel()

    base = prompt(2000)
    tasks = [
        consume(base, "first"),
        consume(extended(base, 900, 1900, 1), "second"),
        consume(prompt(2500, 2), "cancelled", stop_after=3),
    ]
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    await consume(prompt(2500, 2), "again")
    return wrapper


def test_the_async_generator(engine):  # noqa: F811
    async def scenario():
        e = engine()
        wrapper = await _asynchronous(e)
        await wrapper.close()
        return e

    stock = asyncio.run(scenario()).evidence()
    defer(depth=8)
    run = asyncio.run(scenario())
    assert run.evidence() == stock
    assert set(stock["outputs"]) >= {"first", "second", "again"}


def test_a_dead_async_generator_holds_no_rows(engine):  # noqa: F811
    async def scenario():
        e = engine(options={"prefill_cooldown": 0})
        wrapper = AsyncGenerator(**e.arguments())

        async def consume(ids, new_tokens):
            async for _ in AsyncJob(wrapper, ids, max_new_tokens=new_tokens, sampler=deferred_engine.GreedySampler()):
                if new_tokens == 80 and len(wrapper.jobs) == 1:
                    others.append(asyncio.ensure_future(consume(prompt(3000, 1), 4)))
                    e.head.fail_next = 10**6

        others = []
        with pytest.raises(torch.OutOfMemoryError):
            await asyncio.wait_for(consume(prompt(300), 80), 60)
        for other in others:
            with pytest.raises(torch.OutOfMemoryError):
                await other
        return deferred.counters(wrapper)

    defer(depth=8)
    counters = asyncio.run(scenario())
    assert counters["queued"] == counters["replayed"] + counters["dropped"] > 0


# ------------------------------------------------------------------------------------------------------------- mutation


def _outlives_its_bounds(make):
    e = make()
    e.enqueue(prompt(4500), "prompt")
    e.run()
    return e


NOTICED_BY = {
    FlushReason.DRAFT_FORWARD: a_prompt_arrives_while_another_job_generates,
    FlushReason.DRAFT_PREFILL: a_pass_from_elsewhere,
    FlushReason.PREFILL_END: cancelled_mid_prefill_then_repeated,
    FlushReason.COPY_PAGE: page_copied_from_a_prompt_being_read,
    FlushReason.STORE: evicted_to_the_cpu_tier_and_back,
    FlushReason.HASH_SWAP: page_exchanged_for_its_twin,
    FlushReason.DEALLOCATE: cancelled_mid_prefill_then_repeated,
    FlushReason.UNINSTALL: taken_out_mid_prefill,
}


def take_out(monkeypatch, reason):
    replay = DeferredQueue._replay_while
    monkeypatch.setattr(
        DeferredQueue, "_replay_while", lambda self, why, more: None if why is reason else replay(self, why, more)
    )


def test_every_flush_is_named():
    assert set(NOTICED_BY) | {FlushReason.DEPTH, FlushReason.BYTES} == set(FlushReason)


@pytest.mark.parametrize("reason", NOTICED_BY, ids=str)
def test_taking_a_flush_out_is_noticed(engine, monkeypatch, reason):  # noqa: F811
    scenario = NOTICED_BY[reason]
    stock = stock_evidence(scenario, engine)
    take_out(monkeypatch, reason)
    defer(depth=8)
    assert scenario(engine).evidence() != stock


def test_pages_let_go_without_their_passes_cost_acceptance_later(engine, monkeypatch):  # noqa: F811
    """Why it matters: nothing fails and the output is right, but drafting is worse for whoever reuses the pages."""
    stock = cancelled_mid_prefill_then_repeated(engine).outputs["again"]
    monkeypatch.setattr(Interposition, "settle", lambda self: self.queue.drop(DropReason.FLUSH_FAILED))
    defer(depth=8)
    run = cancelled_mid_prefill_then_repeated(engine).outputs["again"]
    assert run["tokens"] == stock["tokens"]
    assert run["accepted_draft_tokens"] < stock["accepted_draft_tokens"]


def test_a_store_without_a_flush_reaches_the_disk(engine, monkeypatch, tmp_path):  # noqa: F811
    stock = killed_while_reading(engine, tmp_path / "stock").outputs["resumed"]
    take_out(monkeypatch, FlushReason.STORE)
    defer(depth=8)
    run = killed_while_reading(engine, tmp_path / "deferred").outputs["resumed"]
    assert run["tokens"] == stock["tokens"]
    assert run["accepted_draft_tokens"] < stock["accepted_draft_tokens"]


@pytest.mark.parametrize("reason", [FlushReason.DEPTH, FlushReason.BYTES], ids=str)
def test_taking_a_bound_out_is_noticed(engine, monkeypatch, reason):  # noqa: F811
    take_out(monkeypatch, reason)
    defer(depth=3 if reason is FlushReason.DEPTH else None, max_bytes=3 * CHUNK * deferred_engine.WIDTH * 2)
    if reason is FlushReason.DEPTH:
        take_out(monkeypatch, FlushReason.BYTES)
    e = _outlives_its_bounds(engine)
    assert deferred.counters(e.generator)["peak_items"] > 3
