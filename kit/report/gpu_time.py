"""Where a server's GPU time goes, from its own timers: decoding a token, drafting it, reading prompts.

SGLang counts the seconds of GPU time of its forward passes by kind (``forward_execution_seconds_total``). Two readings:

* Over a window, from its first to its last sample: how much of the work was reading prompts, and how busy the GPU was.
* Over *stretches* of it: between two neighbouring samples at both of which nearly all of the load's clients have a
  request decoding (:data:`ALL_RUNNING`). There the timers, but for reading prompts, are set against the tokens that
  arrived. What decoding a token costs depends on how many requests share a step, so only stretches with the same number
  of them compare arms; over whole windows each arm has another mixture, and repeats that meet the same phase give a
  tight interval round it.

The timers are of GPU work alone: what the host adds to a step, or leaves idle between steps, is in the idle share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd

from kit.figures.figure import NotRecorded, listed, percent, percent_within
from kit.figures.waterfall import Ladder, ladder_of, steps_of
from kit.load.window import chunk_tokens
from kit.records.metrics import ratio
from kit.records.schema import CellRecord, ServerSample
from kit.records.stats import aa_spread, estimate, within_noise
from kit.records.store import Run
from kit.report.notebook import Evidence

_TIMER = re.compile(r'^sglang:forward_execution_seconds_total\{category="(\w+)"\}$')

PROMPT = "extend"
"""The kind of pass that reads prompts."""
DRAFTING = {"eagle_draft": "draft", "eagle_draft_extend": "draft-extend"}


ALL_RUNNING = 0.875
"""Part of a closed load's clients whose requests must be running for a stretch to count."""
RUNNING = "sglang:num_running_reqs"


@dataclass(frozen=True)
class GpuTime:
    """GPU seconds by kind of pass over ``seconds``; of the stretches ``tokens`` and seconds by kind in them."""

    seconds: float
    kinds: dict[str, float]
    tokens: float
    decoding: dict[str, float]

    @property
    def per_token(self) -> float | None:
        """GPU seconds per output token in the stretches: decoding or verifying, drafting, draft-extend."""
        return ratio(sum(self.decoding.values()), self.tokens)

    @property
    def tokens_per_gpu_s(self) -> float | None:
        """The inverse: output tokens per second of GPU time."""
        return ratio(self.tokens, sum(self.decoding.values()))

    @property
    def prompt_share(self) -> float | None:
        """Part of the GPU's working time in the window that was spent reading prompts."""
        return ratio(self.kinds.get(PROMPT, 0.0), sum(self.kinds.values()))

    @property
    def busy(self) -> float | None:
        """Part of the window in which a pass ran."""
        return ratio(sum(self.kinds.values()), self.seconds)


def gpu_time(run: Run, cell: CellRecord) -> GpuTime | None:
    """Of one cell; None where its server has no such timers or was sampled less than twice in the window."""
    if cell.window_ns is None:
        return None
    start, end = cell.window_ns
    inside = [s for s in run.samples(cell.cell) if start <= s.t_ns <= end]
    if len(inside) < 2:
        return None
    kinds = _gained(inside[0], inside[-1])
    if not kinds or min(kinds.values()) < 0:
        return None
    arrivals = [(t_ns, tokens) for request in run.requests(cell) for t_ns, tokens, _ in chunk_tokens(request)]
    enough = ALL_RUNNING * cell.cell.load.value
    total, spent = 0.0, dict.fromkeys((kind for kind in kinds if kind != PROMPT), 0.0)
    for before, after in pairwise(inside):
        gained = _gained(before, after)
        if min(s.values.get(RUNNING) or 0.0 for s in (before, after)) < enough:
            continue
        total += sum(tokens for t_ns, tokens in arrivals if before.t_ns < t_ns <= after.t_ns)
        for kind in spent:
            spent[kind] += gained.get(kind, 0.0)
    return GpuTime((inside[-1].t_ns - inside[0].t_ns) / 1e9, kinds, total, spent)


def _gained(before: ServerSample, after: ServerSample) -> dict[str, float]:
    """What the timers gained from one sample to another, by kind of pass.

    A series that the first sample lacks began at 0: a server lists it once it has counted something.
    """
    return {
        match[1]: value - (before.values.get(name) or 0.0)
        for name, value in after.values.items()
        if value is not None and (match := _TIMER.match(name))
    }


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
    """Means over the repeats: GPU ms per output token while all clients' requests decode; the windows' shares."""
    sweep = times.evidence.sweep()
    rows = []
    for load in sweep.loads:
        for arm in sweep.arms:
            mine = times.found.get((arm, load))
            if not mine:
                continue
            known = [t for t in mine.values() if t.tokens]
            per_kind = {
                kind: sum(t.decoding.get(kind, 0.0) / t.tokens for t in known) / len(known) * 1000
                for kind in {kind for t in known for kind in t.decoding}
            }
            per_token = times.mean("per_token", arm, load)
            share, busy = times.mean("prompt_share", arm, load), times.mean("busy", arm, load)
            rows.append(
                {
                    "arm": sweep.label(arm),
                    sweep.load_letter: f"{load:g}",
                    "decode or verify (ms)": sum(v for kind, v in per_kind.items() if kind not in DRAFTING)
                    if per_kind
                    else None,
                    **{f"{word} (ms)": per_kind.get(kind) for kind, word in DRAFTING.items()},
                    "all (ms per token)": None if per_token is None else per_token * 1000,
                    "n": str(len(known)),
                    "window: prompts": None if share is None else f"{share * 100:.0f} %",
                    "window: GPU busy": None if busy is None else f"{busy * 100:.0f} %",
                }
            )
    return pd.DataFrame(rows)


def ladder(times: GpuTimes, rungs: Sequence[tuple[str, str | None]]) -> list[Ladder]:
    """The rungs (arm, what separates it from the one before) in output tokens per GPU second, by load: in stretches in
    which all clients' requests decode together.

    Of an arm that was not measured the step is joined to the next.
    """
    sweep = times.evidence.sweep()

    def values(arm: str, load: float) -> dict[int, float | None]:
        return {repeat: t.tokens_per_gpu_s for repeat, t in times.found.get((arm, load), {}).items()}

    def noise(load: float) -> float | None:
        """Of the arm measured twice; None without one."""
        first, again = (values(arm, load) for arm in sweep.twin or ("", ""))
        return aa_spread(first, again)

    return [
        ladder_of(load, [(sweep.label(arm), values(arm, load), step) for arm, step in rungs], noise(load))
        for load in sweep.loads
    ]


def steps(times: GpuTimes, rungs: Sequence[tuple[str, str | None]]) -> str | None:
    """The ablation's steps in GPU time by load, in words; None where no two rungs have timers."""
    told = []
    for made in ladder(times, rungs):
        said = []
        for name, change in steps_of(made):
            if change is not None:
                spread = f" ({percent_within(change) or f'n = {change.n}'})"
                quiet = ", noise" if within_noise(change, made.noise) else ""
                said.append(f"{name} {percent(change.mean)}{spread}{quiet}")
        if said:
            told.append(f"at {times.evidence.sweep().at(made.load)} {listed(said)}")
    if not told:
        return None
    return f"In output tokens per GPU second, all clients' requests decoding together: {'; '.join(told)}."


def shrinking(
    times: GpuTimes,
    plain: str,
    drafting: str,
    *,
    tokens_per_step: Mapping[float, float | None],
    steady: Sequence[float],
) -> str | None:
    """Why a drafting arm's gain shrinks with the load, in words: a dearer step, and prompts beside it.

    Args:
        tokens_per_step: Of the drafting arm, by load; a plain step gives one token a request.
        steady: Loads whose windows were steady, where the share of prompts is the load's own.

    Returns:
        None unless both arms have timers at two loads.
    """
    sweep = times.evidence.sweep()
    cost, before, after, where = [], [], [], []
    for load in sweep.loads:
        share = ratio(times.mean("per_token", drafting, load), times.mean("per_token", plain, load))
        tokens = tokens_per_step.get(load)
        if share is not None and tokens is not None:
            cost.append(f"{share * tokens:.2f}× at {sweep.at(load)} (for {tokens:.1f} tokens)")
        shares = [times.mean("prompt_share", arm, load) for arm in (plain, drafting)]
        if load in steady and None not in shares:
            where.append(sweep.at(load))
            before.append(f"{(shares[0] or 0.0) * 100:.0f}\u00a0%")
            after.append(f"{(shares[1] or 0.0) * 100:.0f}\u00a0%")
    if len(cost) < 2:
        return None
    ours, theirs = sweep.label(drafting), sweep.label(plain)
    text = (
        f"Why the gain shrinks, by the server's timers: a step of {ours} takes {listed(cost)} the GPU time of a step "
        f"of {theirs}. To verify several positions of every request costs little while few requests share a step, and "
        "more the more do."
    )
    if where:
        text += (
            f" Beside it stands reading prompts, which no draft makes faster: {listed(before)} of the GPU's work for "
            f"{theirs} and {listed(after)} for {ours} at {listed(where)}."
        )
    return text
