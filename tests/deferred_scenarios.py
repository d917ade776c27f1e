"""Scenarios that put the deferred queue to the test, whatever plays them: a fake model on a CPU, a real one on a GPU.

A scenario makes an engine, drives its generator into a corner and returns it. `watched` notes the draft cache at every
moment somebody looks at it.
"""

import contextlib
from collections.abc import Iterator

import pytest

from kit import deferred

torch = pytest.importorskip("torch", reason="the scheduler tests need torch")

PAGE = 256
TOKENS = 512
"""Prompts use the first so many token ids: below 2048, they are exact in the fake model's fp16 cache."""


def prompt(length: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TOKENS, (1, length), generator=generator)


def extended(ids, keep, length, seed):
    """The first ``keep`` tokens of ``ids``, then others."""
    return torch.cat((ids[:, :keep], prompt(length - keep, seed)), dim=-1)


# ------------------------------------------------------------------------------------------------------------ scenarios


def several_jobs_share_prefixes(make):
    e = make()
    base = prompt(1500)
    e.enqueue(base, "first", new_tokens=30)
    e.iterate(2)
    e.enqueue(extended(base, 1200, 2000, 1), "shares four pages")
    e.enqueue(base, "the same prompt")
    e.iterate(3)
    e.enqueue(extended(base, 1024, 2600, 2), "shares the start")
    e.run()
    return e


def a_prompt_arrives_while_another_job_generates(make):
    e = make()
    e.enqueue(prompt(300), "generates", new_tokens=80)
    e.iterate(3)
    e.enqueue(prompt(3000, 1), "arrives")
    e.run()
    return e


def cancelled_mid_prefill_then_repeated(make):
    e = make()
    ids = prompt(3000)
    job = e.enqueue(ids, "cancelled")
    e.iterate(3)
    e.generator.cancel(job)
    e.enqueue(ids, "again")
    e.run()
    return e


def queue_cleared_mid_prefill(make):
    e = make()
    ids = prompt(2000)
    e.enqueue(ids, "cleared")
    e.enqueue(prompt(1800, 1), "cleared too")
    e.iterate(3)
    e.generator.clear_queue()
    e.enqueue(ids, "again")
    e.run()
    return e


def requeued_while_another_prompt_waits(make):
    e = make()
    e.enqueue(prompt(700), "long answer", new_tokens=330, max_rq_tokens=PAGE)
    e.iterate(6)
    e.enqueue(prompt(2500, 1), "prompt")
    e.run()
    return e


def evicted_to_the_cpu_tier_and_back(make):
    e = make(pages=16, options={"cpu_cache_size": 2**21})
    first = prompt(2500)
    e.enqueue(first, "first")
    e.run()
    e.enqueue(prompt(1500, 1), "half way")
    e.iterate(2)
    e.enqueue(prompt(1700, 2), "evicts the first")
    e.run()
    e.enqueue(first, "restored")
    e.run()
    assert e.generator.cpu_page_cache.metrics["pushes"] > 0
    assert e.generator.cpu_page_cache.metrics["restores"] > 0
    return e


def page_copied_from_a_prompt_being_read(make):
    e = make()
    base = prompt(2000)
    e.enqueue(base, "being read")
    e.iterate(1)
    e.enqueue(extended(base, PAGE + 100, 1100, 1), "matches a page in part")
    e.run()
    assert any(what == "copy page" for what, _ in e.trace)
    return e


def page_exchanged_for_its_twin(make):
    e = make()
    ids = prompt(1025)
    e.enqueue(ids, "first", new_tokens=60)
    e.iterate(4)
    e.enqueue(prompt(2000, 3), "another prompt")
    e.enqueue(ids, "twin")
    e.run()
    assert any(what == "exchange page" for what, _ in e.trace)
    return e


def defragmented_when_the_last_job_is_cancelled(make):
    e = make(pages=12)
    for seed in range(14):
        e.enqueue(prompt(700 + 300 * (seed % 4), seed), seed, new_tokens=4)
        e.iterate(3)
        e.enqueue(prompt(600, seed + 50), seed + 50, new_tokens=4)
        e.run()
    job = e.enqueue(prompt(2300, 99), "last")
    e.iterate(2)
    e.generator.cancel(job)
    for seed in (12, 13):
        e.enqueue(prompt(700 + 300 * (seed % 4), seed), f"again {seed}", new_tokens=4)
        e.run()
    assert e.generator.pagetable.last_defrag_serial > 12
    return e


def recurrent_states_replay_shared_pages(make):
    e = make(recurrent=True, options={"recurrent_checkpoint_interval": 512, "recurrent_checkpoint_interval_pp": 1024})
    base = prompt(2100)
    e.enqueue(base, "first", new_tokens=60)
    e.iterate(6)
    e.enqueue(extended(base, 1700, 2400, 1), "shares", new_tokens=20)
    e.run()
    e.enqueue(base, "again")
    e.run()
    return e


def a_pass_from_elsewhere(make):
    """A draft pass outside prompt prefill, as after acceptance, over rows whose pass may be pending."""
    e = make()
    job = e.enqueue(prompt(3000), "prompt")
    e.iterate(3)
    with torch.inference_mode():
        e.generator.draft_model.prefill(
            prompt(2, 7),
            {
                "attn_mode": "flash_attn",
                "block_table": job.sequences[0].block_index_tensor,
                "cache": e.draft_cache,
                "cache_seqlens": torch.tensor([2900], dtype=torch.int32),
                "target_hidden": e.two_rows(),
            },
        )
    e.run()
    return e


def taken_out_mid_prefill(make):
    e = make()
    e.enqueue(prompt(3000), "prompt")
    e.iterate(3)
    deferred.uninstall()
    e.run()
    return e


SCENARIOS = [
    several_jobs_share_prefixes,
    a_prompt_arrives_while_another_job_generates,
    cancelled_mid_prefill_then_repeated,
    queue_cleared_mid_prefill,
    requeued_while_another_prompt_waits,
    evicted_to_the_cpu_tier_and_back,
    page_copied_from_a_prompt_being_read,
    page_exchanged_for_its_twin,
    defragmented_when_the_last_job_is_cancelled,
    recurrent_states_replay_shared_pages,
    a_pass_from_elsewhere,
    taken_out_mid_prefill,
]


# ------------------------------------------------------------------------------------------------------------ looking


@contextlib.contextmanager
def watched(engine_list) -> Iterator[None]:
    """Note the draft cache at every look that does not go through the MTP head."""
    from exllamav3 import Cache, Job
    from exllamav3.generator import generator as generator_module
    from exllamav3.generator.cpu_cache import CPUPageCache

    patch = pytest.MonkeyPatch()

    def current():
        return engine_list[-1] if engine_list else None

    def watch(owner, name, what, only_draft_cache=False):
        original = getattr(owner, name, None)
        if original is None:  # an older release
            return

        def watched(self, *args, **kwargs):
            engine = current()
            if engine is not None and not (only_draft_cache and self is not engine.draft_cache):
                engine.look(what)
            return original(self, *args, **kwargs)

        patch.setattr(owner, name, watched)

    watch(Cache, "copy_page", "copy page", only_draft_cache=True)
    watch(CPUPageCache, "store", "store")
    watch(Job, "deallocate_pages", "deallocate")
    watch(Job, "hash_completed_page", "exchange page")
    patch.setattr(generator_module, "cuda_sync_active", lambda: current() and current().look_at_clock(), raising=False)
    try:
        yield
    finally:
        patch.undo()
