"""Where a server's GPU time goes, from its own timers: decoding a token, drafting it, reading prompts.

SGLang counts the seconds of GPU time of its forward passes by kind (``forward_execution_seconds_total``). Between the
first and the last sample of a cell's window they are set against the tokens that arrived in that time. What decoding a
token costs does not depend on how much prompt a window happened to hold, so it can be compared between arms where
throughput, in a window of seconds, cannot. It does depend on how many requests run, which stands beside it.

The timers are of GPU work alone: what the host adds to a step, or leaves idle between steps, is in the idle share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from kit.figures.figure import NotRecorded, listed, percent
from kit.figures.waterfall import Ladder, ladder_of, steps_of
from kit.load.window import chunk_tokens
from kit.records.metrics import ratio
from kit.records.schema import CellRecord
from kit.records.stats import estimate
from kit.records.store import Run
from kit.report.notebook import Evidence
from kit.report.samples import samples_of

_TIMER = re.compile(r'^sglang:forward_execution_seconds_total\{category="(\w+)"\}$')

PROMPT = "extend"
"""The kind of pass that reads prompts."""
DRAFTING = {"eagle_draft": "draft", "eagle_draft_extend": "draft-extend"}


@dataclass(frozen=True)
class GpuTime:
    """GPU seconds by kind of pass over ``seconds``, in which ``tokens`` output tokens arrived."""

    seconds: float
    tokens: float
    kinds: dict[str, float]

    @property
    def decoding(self) -> float:
        """GPU seconds of everything but reading prompts."""
        return sum(value for kind, value in self.kinds.items() if kind != PROMPT)

    @property
    def per_token(self) -> float | None:
        """GPU seconds of decoding per output token: decoding or verifying, drafting, draft-extend."""
        return ratio(self.decoding, self.tokens)

    @property
    def tokens_per_gpu_s(self) -> float | None:
        """The inverse: output tokens per second of GPU time spent decoding."""
        return ratio(self.tokens, self.decoding)

    @property
    def prompt_share(self) -> float | None:
        """Part of the GPU's working time spent reading prompts."""
        return ratio(self.kinds.get(PROMPT, 0.0), sum(self.kinds.values()))

    @property
    def busy(self) -> float | None:
        """Part of the time in which a pass ran."""
        return ratio(sum(self.kinds.values()), self.seconds)


def gpu_time(run: Run, cell: CellRecord) -> GpuTime | None:
    """Of one cell; None where its server has no such timers or was sampled less than twice in the window."""
    if cell.window_ns is None:
        return None
    start, end = cell.window_ns
    inside = [s for s in samples_of(run, cell) if start <= s.t_ns <= end]
    if len(inside) < 2:
        return None
    first, last = inside[0], inside[-1]
    kinds = {}
    for name, value in last.values.items():
        # A series that the first sample lacks began at 0: a server lists it once it has counted something.
        if (match := _TIMER.match(name)) and value is not None:
            kinds[match[1]] = value - (first.values.get(name) or 0.0)
    if not kinds or min(kinds.values()) < 0:
        return None
    arrived = (
        tokens for request in run.requests(cell) for t_ns, tokens, _ in chunk_tokens(request)
        if first.t_ns < t_ns <= last.t_ns
    )  # fmt: skip
    return GpuTime((last.t_ns - first.t_ns) / 1e9, sum(arrived), kinds)


@dataclass(frozen=True)
class GpuTimes:
    """Of an experiment's good cells, by arm and load, then by repeat."""

    evidence: Evidence
    found: dict[tuple[str, float], dict[int, GpuTime]]

    def mean(self, what: str, arm: str, load: float) -> float | None:
        """Mean over the repeats of a property of :class:`GpuTime`."""
        made = estimate([getattr(t, what) for t in self.found.get((arm, load), {}).values()])
        return made.mean if made else None


def gpu_times(evidence: Evidence) -> GpuTimes:
    """Read from samples and raw requests. Raises NotRecorded if no cell has timers."""
    found: dict[tuple[str, float], dict[int, GpuTime]] = {}
    for run in evidence.runs:
        for cell in run.cells():
            if cell.cell.experiment == evidence.experiment and cell.status == "ok" and (made := gpu_time(run, cell)):
                found.setdefault((cell.cell.arm, cell.cell.load.value), {})[cell.cell.repeat] = made
    if not found:
        raise NotRecorded("the server's timers of its forward passes were not recorded")
    return GpuTimes(evidence, found)


def table(times: GpuTimes) -> pd.DataFrame:
    """Mean over the repeats: GPU ms per output token by kind, the share of prompts, and how busy the GPU was."""
    sweep = times.evidence.sweep()
    rows = []
    for load in sweep.loads:
        for arm in sweep.arms:
            mine = times.found.get((arm, load))
            if not mine:
                continue
            kinds = {kind for t in mine.values() for kind in t.kinds}
            per_kind = {
                kind: sum(t.kinds.get(kind, 0.0) / t.tokens for t in mine.values() if t.tokens) / len(mine) * 1000
                for kind in kinds
            }
            main = sum(v for kind, v in per_kind.items() if kind != PROMPT and kind not in DRAFTING)
            running = estimate(
                [
                    c.server.get("sglang:num_running_reqs")
                    for c in times.evidence.cells
                    if c.status == "ok" and (c.cell.arm, c.cell.load.value) == (arm, load)
                ]
            )
            share, busy = times.mean("prompt_share", arm, load), times.mean("busy", arm, load)
            rows.append(
                {
                    "arm": sweep.label(arm),
                    sweep.load_letter: f"{load:g}",
                    "running": round(running.mean, 1) if running else None,
                    "decode or verify (ms)": main,
                    **{f"{word} (ms)": per_kind.get(kind) for kind, word in DRAFTING.items()},
                    "all decoding (ms per token)": (times.mean("per_token", arm, load) or 0.0) * 1000,
                    "prompts": None if share is None else f"{share * 100:.0f} %",
                    "GPU busy": None if busy is None else f"{busy * 100:.0f} %",
                }
            )
    return pd.DataFrame(rows)


def ladder(times: GpuTimes, rungs: Sequence[tuple[str, str | None]]) -> list[Ladder]:
    """The rungs (arm, what separates it from the one before) in output tokens per GPU second of decoding, by load.

    Of an arm that was not measured the step is joined to the next.
    """
    sweep = times.evidence.sweep()

    def values(arm: str, load: float) -> dict[int, float | None]:
        return {repeat: t.tokens_per_gpu_s for repeat, t in times.found.get((arm, load), {}).items()}

    def noise(load: float) -> float | None:
        """Of an arm measured twice: the largest |ln| of the two, over the repeats."""
        first, again = (values(arm, load) for arm in sweep.twin or ("", ""))
        pairs = [(first[r], again[r]) for r in first.keys() & again.keys()]
        return max((abs(math.log(b / a)) for a, b in pairs if a and b), default=None)

    return [
        ladder_of(load, [(sweep.label(arm), values(arm, load), step) for arm, step in rungs], noise(load))
        for load in sweep.loads
    ]


def steps(times: GpuTimes, rungs: Sequence[tuple[str, str | None]]) -> str | None:
    """The ablation's steps in GPU time at the largest load, in words; None where no two rungs have timers there."""
    made = [ladder_there for ladder_there in ladder(times, rungs) if len(ladder_there.rungs) > 1]
    if not made:
        return None
    last = max(made, key=lambda one: one.load)
    told = []
    for name, change in steps_of(last):
        if change is not None:
            low, high = change.low, change.high
            spread = "" if low is None or high is None else f" ({percent(low)} to {percent(high)})"
            told.append(f"{name} {percent(change.mean)}{spread}")
    return (
        f"In output tokens per GPU second of decoding, at {times.evidence.sweep().at(last.load)}: {listed(told)}. How "
        "much prompt a window happened to hold is not in this; how many requests run together is."
    )


def shrinking(times: GpuTimes, plain: str, drafting: str) -> str | None:
    """Why a drafting arm's gain shrinks with the load, in words: dearer verification, and prompts beside it.

    None unless both arms have timers at two loads.
    """
    sweep = times.evidence.sweep()
    loads = [load for load in sweep.loads if (plain, load) in times.found and (drafting, load) in times.found]
    if len(loads) < 2:
        return None
    cost, before, after = [], [], []
    for load in loads:
        share = ratio(times.mean("per_token", drafting, load), times.mean("per_token", plain, load))
        cost.append(f"{share or 0.0:.2f}× at {sweep.at(load)}")
        before.append(f"{(times.mean('prompt_share', plain, load) or 0.0) * 100:.0f} %")
        after.append(f"{(times.mean('prompt_share', drafting, load) or 0.0) * 100:.0f} %")
    ours, theirs = sweep.label(drafting), sweep.label(plain)
    return (
        f"Why the gain shrinks, by the server's timers: decoding a token takes {ours} {listed(cost)} the GPU time that "
        f"{theirs} takes. Beside that stands reading prompts, which no draft makes faster: at the same loads "
        f"{listed(before)} of the GPU's work for {theirs} and {listed(after)} for {ours}. The more requests share a "
        "step, the less of the time is decoding's, and the less drafting can save of it."
    )
