"""Prompt throughput of ExLlamaV3: what is measured, and the process that measures it.

ExLlamaV3 is a library, not a server, so its cells are measured in a process of their own (`kit.deferred.runner`), which
loads the checkpoint once and then runs every arm on it. This module is the other side: the plan that goes in (on
stdin, as JSON), the process, its deadline and its end. It imports no engine.

One cell is one arm, one prompt length, one repeat: a single greedy request. All arms of a length and repeat read the
same prompt, so outputs and draft caches can be compared; each cell has a generator of its own, so nothing is cached.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kit.engines.process import EngineError, ServerProcess, inherited_environment
from kit.errors import KitError
from kit.records.schema import Arm, CellKey, Load
from kit.records.store import Run

RUNNER = "kit.deferred.runner"
EXPERIMENT = "prefill"
PAGE = 256
"""ExLlamaV3's cache page, in tokens."""


class Strict(BaseModel):
    """Base: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ArmSettings(Strict):
    """What one arm does differently.

    Attributes:
        drafting: The MTP head, n-gram lookup, or none.
        mtp_gpu: The GPU that holds the MTP head.
        depth: Chunks whose MTP passes are deferred; 1 is stock.
        where: Where queued rows wait.
        rolling: A full queue replays its oldest pass only.
        coalesce: Queued chunks run as fewer, longer passes (then the draft cache is not bit-identical).
        unblock: Prefill inputs are uploaded without blocking.
        queue_mib: Most MiB queued; None for no limit, so that ``depth`` alone decides.
        draft_bits: Bits per element of the draft cache; 16 is fp16.
        forced_sync: Every target pass and MTP pass is synchronised and timed. The number it gives is not a throughput.
    """

    drafting: Literal["mtp", "ngram", "none"] = "mtp"
    mtp_gpu: Literal["first", "last"] = "first"
    depth: int | Literal["whole"] = 1
    where: Literal["device", "pinned"] = "device"
    rolling: bool = False
    coalesce: bool = False
    unblock: bool = False
    queue_mib: int | None = Field(default=None, ge=1)
    draft_bits: Literal[4, 8, 16] = 4
    forced_sync: bool = False

    @field_validator("depth")
    @classmethod
    def _positive(cls, depth: int | str) -> int | str:
        if isinstance(depth, int) and depth < 1:
            raise ValueError("a depth is 1 (stock) or more, or 'whole'")
        return depth

    @property
    def stock(self) -> bool:
        """Whether this is ExLlamaV3 as it comes, whatever the draft cache's bits: what the others are compared with."""
        return self.model_copy(update={"draft_bits": 4}) == ArmSettings()

    @classmethod
    def of(cls, arm: Arm) -> ArmSettings:
        """The settings of an arm. Raises KitError naming what is wrong and what would be valid."""
        known = {key: value for key, value in arm.settings.items() if key in cls.model_fields}
        unknown = sorted(set(arm.settings) - set(known))
        if unknown:
            raise KitError(f"arm {arm.name}: unknown setting {unknown[0]!r}; valid: {', '.join(cls.model_fields)}")
        try:
            return cls(**known)
        except ValidationError as error:
            first = error.errors()[0]
            raise KitError(f"arm {arm.name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _arm(name: str, label: str, **settings: str | int | bool) -> Arm:
    return Arm(name=name, label=label, settings=settings)


_DEPTHS = [_arm(f"depth-{n}", f"depth {n}", depth=n) for n in (2, 4, 6, 8, 16)]
_ALL = [
    _arm("no-mtp", "no MTP", drafting="none"),
    _arm("no-mtp-unblocked", "no MTP, unblocked inputs", drafting="none", unblock=True),
    _arm("stock", "stock MTP"),
    _arm("stock-last", "stock MTP, head on the last GPU", mtp_gpu="last"),
    *_DEPTHS,
    _arm("whole", "whole prompt deferred", depth="whole"),
    _arm("depth-8-last", "depth 8, head on the last GPU", depth=8, mtp_gpu="last"),
    _arm("pinned", "whole prompt, rows in pinned memory", depth="whole", where="pinned"),
    _arm("pinned-8", "depth 8, rows in pinned memory", depth=8, where="pinned"),
    _arm("rolling", "rolling depth 2, pinned", depth=2, where="pinned", rolling=True),
    _arm("rolling-unblocked", "rolling depth 2, pinned, unblocked inputs", depth=2, where="pinned", rolling=True,
         unblock=True),
    _arm("coalesced", "depth 8, coalesced passes", depth=8, coalesce=True),
    _arm("unblock", "unblocked inputs, head on the last GPU", unblock=True, mtp_gpu="last"),
    _arm("unblock-8", "unblocked inputs and depth 8, head on the last GPU", unblock=True, depth=8, mtp_gpu="last"),
    _arm("ngram", "n-gram lookup", drafting="ngram"),
    _arm("stock-q8", "stock MTP, Q8 draft cache", draft_bits=8),
    _arm("depth-8-q8", "depth 8, Q8 draft cache", depth=8, draft_bits=8),
    _arm("no-mtp-sync", "no MTP, forced synchronisation", drafting="none", forced_sync=True),
    _arm("stock-sync", "stock MTP, forced synchronisation", forced_sync=True),
]  # fmt: skip
ARMS: dict[str, Arm] = {arm.name: arm for arm in _ALL}
"""Every arm by name."""

ONE_GPU = ("no-mtp", "stock", "depth-2", "depth-4", "depth-6", "depth-8", "depth-16", "whole", "pinned", "rolling",
           "coalesced", "unblock", "unblock-8", "ngram", "stock-q8", "depth-8-q8")  # fmt: skip
TWO_GPUS = ("no-mtp", "no-mtp-unblocked", "stock", "stock-last", "depth-2", "depth-4", "depth-8", "depth-16", "whole",
            "depth-8-last", "pinned", "rolling", "rolling-unblocked", "unblock", "unblock-8")  # fmt: skip


def arms_named(names: Sequence[str]) -> list[Arm]:
    """Arms by name; ``one-gpu`` and ``two-gpus`` stand for their sets. Raises KitError listing the known."""
    sets = {"one-gpu": ONE_GPU, "two-gpus": TWO_GPUS}
    wanted = [name for given in names for name in sets.get(given, (given,))]
    for name in wanted:
        if name not in ARMS:
            raise KitError(f"unknown arm {name!r}; the arms are: {', '.join([*sets, *ARMS])}")
    return [ARMS[name] for name in dict.fromkeys(wanted)]


class Layout(Strict):
    """How the checkpoint is loaded.

    Attributes:
        checkpoint: Folder of the checkpoint (Hugging Face or EXL3 form).
        split: Layers on each GPU, first to last; empty puts all on one GPU. The embedding stays on the CPU, the output
            head goes with the last layers.
        chunk: Tokens per prompt chunk.
        cache_tokens: Size of the caches; 0 takes what the longest prompt needs.
        cache_bits: Bits per element of the target's cache; 16 is fp16.
        draft_tokens: Tokens drafted per step.
        ngram_min: Shortest match for n-gram lookup.
        scan_tokens: Tokens per pass of the linear-attention scan (the engine's ``EXL3_GDN_SUB_CHUNK``); 0 leaves its
            default, 2048 in 1.6.5, which cuts a chunk of 3072 into two passes and so launches almost twice the kernels.
            The result does not depend on it.
    """

    checkpoint: Path
    split: tuple[int, ...] = ()
    chunk: int = Field(default=3072, ge=PAGE)
    cache_tokens: int = Field(default=0, ge=0)
    cache_bits: Literal[4, 8, 16] = 4
    draft_tokens: int = Field(default=4, ge=1)
    ngram_min: int = Field(default=2, ge=1)
    scan_tokens: int = Field(default=0, ge=0)

    @field_validator("chunk", "cache_tokens")
    @classmethod
    def _whole_pages(cls, tokens: int) -> int:
        if tokens % PAGE:
            raise ValueError(f"a multiple of the cache page ({PAGE} tokens)")
        return tokens


class PrefillPlan(Strict):
    """Everything the measuring process needs to know.

    Attributes:
        folder: The run's folder (made by the caller with its ``run.json``).
        lengths: Prompt lengths in tokens.
        warm_up_tokens: Length of the unrecorded prompts that compile kernels first.
        budget_s: Stop beginning cells when this many seconds since the start of the process are over.
        trace: Sessions whose text the prompts are made of.
        only: By prompt length, the arms measured at it; a length that is not in it has all.
        timeline: Arms whose timeline of three chunks is recorded.
        timeline_from: The token from which on those chunks lie (an early one if the prompt is to be short).
    """

    folder: Path
    layout: Layout
    arms: list[Arm]
    lengths: list[int]
    output_tokens: int = Field(default=1024, ge=1)
    repeats: int = Field(default=3, ge=1)
    warm_up_tokens: int = Field(default=9216, ge=2)
    seed: int = 0
    budget_s: float | None = None
    trace: Path
    only: dict[int, list[str]] = {}
    timeline: list[str] = []
    timeline_from: int = Field(default=0, ge=0)
    experiment: str = EXPERIMENT

    def cells(self, done: set[str] | None = None) -> Iterator[tuple[CellKey, Arm]]:
        """Cells in the order they are measured, without those in ``done``.

        All arms of a repeat come before the next repeat; their order is shuffled anew for each repeat and length, so
        that a drift of the machine falls on no arm.
        """
        for repeat in range(self.repeats):
            for length in self.lengths:
                arms = [a for a in self.arms if length not in self.only or a.name in self.only[length]]
                random.Random(f"{self.seed}/{repeat}/{length}").shuffle(arms)
                for arm in arms:
                    key = CellKey(
                        experiment=self.experiment,
                        arm=arm.name,
                        load=Load(kind="prefill", value=length),
                        repeat=repeat,
                    )
                    if key.id not in (done or set()):
                        yield key, arm

    def workload(self) -> dict[str, object]:
        """The definition of what is sent, for its hash."""
        return {
            "trace": self.trace.name,
            "lengths": self.lengths,
            "output_tokens": self.output_tokens,
            "sampling": "greedy",
            "seed": self.seed,
        }


def chunks(length: int, chunk: int) -> int:
    """Chunks of a prompt: its last token is the first input of generation and is not prefilled."""
    return -(-(length - 1) // chunk)


def predicted_queue_bytes(settings: ArmSettings, length: int, chunk: int, hidden_size: int) -> int:
    """Bytes of hidden states that an arm's queue holds at its fullest: chunks × tokens × hidden size × 2 (fp16)."""
    if settings.drafting != "mtp" or settings.depth == 1:
        return 0
    waiting = chunks(length, chunk)
    if settings.depth != "whole":
        waiting = min(waiting, settings.depth)
    size = min(waiting * chunk, length - 1) * hidden_size * 2
    return size if settings.queue_mib is None else min(size, settings.queue_mib * 2**20)


def measure(plan: PrefillPlan, deadline_s: float, poll_s: float = 0.5) -> Run:
    """Run a plan in a process of its own and return the run with what was measured.

    Cells that were finished are kept whatever happens. The plan's own ``budget_s`` ends a run in order; ``deadline_s``
    is the end of patience, after which the process and all its children are ended.

    Raises:
        EngineError: If the process fails or the deadline passes; the message quotes its log.
    """
    run = Run.open(plan.folder)
    process = ServerProcess(
        [sys.executable, "-m", RUNNER, "--plan", "-"],
        name="ExLlamaV3",
        log_path=plan.folder / "exllamav3.log",
        env=inherited_environment({"PYTHONUNBUFFERED": "1"}),
        stdin=plan.model_dump_json(),
        cwd=Path(os.getcwd()),
    )
    with process:
        began = time.monotonic()
        while (status := process.poll()) is None:
            if time.monotonic() - began > deadline_s:
                raise EngineError(f"ExLlamaV3 was not done after {deadline_s:g} s{process.log_quote()}")
            time.sleep(poll_s)
        if status:
            raise EngineError(f"ExLlamaV3's process ended with status {status}{process.log_quote()}")
    return run
