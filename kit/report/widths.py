"""What the draft-width notebook shows beyond a sweep: the isolation pair, the ladder of the ablation, the policy.

Arms are known by name (``kit.draftwidth.experiment`` explains the ladder): ``b<k>`` or ``width-<k>`` is one MTP
deployment at width k; ``a``, ``a-capped`` and ``b0s`` are deployments of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from kit.errors import KitError
from kit.figures.figure import NotRecorded, listed, percent, times_within
from kit.figures.sweep import Effect, Sweep
from kit.figures.timeline_policy import Timeline
from kit.figures.waterfall import Ladder, ladders
from kit.load.window import UNSTEADY_FLAG, chunk_tokens
from kit.records.schema import CellRecord, ServerSample
from kit.records.stats import MIN_REPEATS_FOR_INTERVAL, estimate
from kit.records.store import Run
from kit.report import gpu_time
from kit.report.notebook import Evidence

_WIDTH = re.compile(r"^(?:b|w|width-)(\d+)$")

_RUNNING = re.compile(r"(num_running_reqs|requests_processing|num_requests_running)$")
_WIDTH_SAMPLE = re.compile(r"(speculative_num_steps|spec_num_steps)$")


def width_of(arm: str) -> int | None:
    """The draft width an arm's name tells; None for an arm that is no width of the one deployment."""
    found = _WIDTH.match(arm)
    return int(found[1]) if found else None


def isolation(evidence: Evidence) -> Sweep:
    """The arms of one deployment that differ in the draft width alone, against width 0 where it was measured.

    Cells whose window was not steady are left out. Where the requests carry no counts of drafts, acceptance and tokens
    per step are the server's own (:func:`counted`). An experiment whose arms have other names is taken whole, with the
    card's baseline.
    """
    evidence = counted(steady(evidence))
    present = list(dict.fromkeys(c.cell.arm for c in evidence.cells if c.status == "ok"))
    widths = sorted((arm for arm in present if width_of(arm) is not None), key=lambda arm: width_of(arm) or 0)
    sweep = evidence.sweep() if len(widths) < 2 else evidence.sweep(arms=widths, baseline=widths[0])
    if any("drive.acceptance" in c.server for c in evidence.cells):
        sweep = replace(sweep, notes=[*sweep.notes, COUNTED])
    return sweep


def steady(evidence: Evidence) -> Evidence:
    """The cells without those whose window was not steady: their throughput depends on the phase they met.

    Where most cells of a load are such, all of it goes: the others met whole waves by chance. Where none would be left,
    all stay, and the figures carry the flag.
    """
    rough = unsteady_loads(evidence)
    cells = [c for c in evidence.cells if UNSTEADY_FLAG not in c.flags and c.cell.load.value not in rough]
    return evidence.with_cells(cells) if any(c.status == "ok" for c in cells) else evidence


def unsteady_loads(evidence: Evidence) -> list[float]:
    """Loads at which more than half of the good cells had an unsteady window."""
    flags: dict[float, list[bool]] = {}
    for cell in evidence.cells:
        if cell.status == "ok":
            flags.setdefault(cell.cell.load.value, []).append(UNSTEADY_FLAG in cell.flags)
    return sorted(load for load, found in flags.items() if sum(found) > len(found) / 2)


def left_out(evidence: Evidence) -> list[str]:
    """Which cells are left out of throughput, in words."""
    sweep, rough = evidence.sweep(), unsteady_loads(evidence)
    good = [c for c in evidence.cells if c.status == "ok"]
    said = []
    for load in sorted({c.cell.load.value for c in good if UNSTEADY_FLAG in c.flags}):
        here = [c for c in good if c.cell.load.value == load]
        flagged = [c for c in here if UNSTEADY_FLAG in c.flags]
        arms = {label: sum(c.arm.label == label for c in flagged) for label in (c.arm.label for c in flagged)}
        which = "all cells" if load in rough else listed([f"{n} of {label}" for label, n in arms.items()])
        said.append(
            f"{sweep.at(load)}: left out of every throughput here are {which}. The windows of {len(flagged)} of "
            f"{len(here)} were not steady: requests begun and ended in one differ by more than a quarter, so an arm "
            "read more or fewer prompts than its tokens stand for, and which depends on its speed."
        )
    return said


COUNTED = "Acceptance and tokens per step are the server's own, over all of a cell's traffic."


def counted(evidence: Evidence) -> Evidence:
    """The same cells, with acceptance and tokens per step from the server's counters where the requests told none.

    The counters (``drive.…``) span all of a cell's traffic, burn-in and warm-up included.
    """
    cells = []
    for cell in evidence.cells:
        told = {
            "acceptance": cell.server.get("drive.acceptance"),
            "tokens_per_step": None
            if (accepted := cell.server.get("drive.accepted_per_verify")) is None
            else 1 + accepted,
        }
        lacking = {tag: v for tag, v in told.items() if v is not None and cell.metrics.get(tag) is None}
        cells.append(cell.model_copy(update={"metrics": {**cell.metrics, **lacking}}) if lacking else cell)
    return evidence.with_cells(cells)


def best_width(evidence: Evidence) -> str | None:
    """The drafting arm with the most output at the largest load at which any was measured well; None without one."""
    sweep = steady(evidence).sweep()
    drafting = [arm for arm in sweep.arms if (width_of(arm) or 0) > 0]
    for load in reversed(sweep.loads):
        known = {arm: e.mean for arm in drafting if (e := sweep.estimate("output_tps", arm, load))}
        if known:
            return max(known, key=lambda arm: known[arm])
    return None


def rungs(evidence: Evidence, width: int | None = None) -> list[tuple[str, str | None]]:
    """The ablation's arms, each with what separates it from the one before: a → a-capped → b0s → b0 → b<width>.

    Without ``width`` the last is :func:`best_width`. Raises NotRecorded where the experiment is no ablation.
    """
    present = {c.cell.arm for c in evidence.cells if c.status == "ok"}
    last = best_width(evidence) if width is None else next((a for a in present if width_of(a) == width), None)
    if "a" not in present or last is None:
        raise NotRecorded("the ablation needs arm a (no speculation) and a drafting width; they were not recorded")
    pools = [_pool(evidence, arm) for arm in ("a", "a-capped")]
    sizes = f" (pool {pools[0]:,} → {pools[1]:,})" if all(pools) else ""
    return [
        ("a", None),
        ("a-capped", "MTP's pool (never near full)" if pool_unused(evidence) else f"capacity{sizes}"),
        ("b0s", "fixed cost of carrying MTP"),
        ("b0", "draft-extend"),
        (last, "drafting + verification"),
    ]


def rungs_in_gpu_time(evidence: Evidence) -> list[tuple[str, str | None]]:
    """The same without the pools: while all requests decode together none waits for room in one."""
    return [(arm, None if arm == "a-capped" else step) for arm, step in rungs(evidence) if arm != "a"]


def _pool(evidence: Evidence, arm: str) -> int | None:
    """Tokens that the arm's KV pool holds, as its server resolved it; None if cells differ or none tells."""
    told = {c.resolved.get("max_total_num_tokens") for c in evidence.cells if c.status == "ok" and c.cell.arm == arm}
    (only,) = told if len(told) == 1 else (None,)
    return only if isinstance(only, int) else None


def ladder_flags(evidence: Evidence, *, every: bool = False) -> list[str]:
    """The labels of the ladder's own cells, with which of them carry each; ``every``: of unsteady windows too."""
    usable = evidence if every else steady(evidence)
    present = usable.sweep().arms
    return list(usable.sweep(arms=[arm for arm, _ in rungs(usable) if arm in present]).flags)


def pool_caption(evidence: Evidence) -> str:
    """Who decided the pools, and what memory they and the drafts' states take; empty where no pool was declared."""
    if not any(c.arm.settings.get("pool") == "mtp" and c.arm.settings.get("mtp_pool_tokens") for c in evidence.cells):
        return ""
    good = [c for c in evidence.cells if c.status == "ok"]
    pools = []
    for arm in ("a", "a-capped"):
        size = next((v for c in good if c.cell.arm == arm and (v := c.server.get("log.kv_gib"))), None)
        tokens = _pool(evidence, arm)
        if size is None or tokens is None:
            return ""
        pools.append(f"{tokens:,} tokens ({size:.2g} GiB)")
    text = (
        f"MTP's pool of {pools[1]} is the card's choice; without MTP it is {pools[0]}, as much as all requests can "
        "use. The capacity step is as large as that choice makes it."
    )
    states = [v for c in good if (v := c.server.get("log.mamba_intermediate_ssm_state_cache_gib"))]
    if states:
        text += (
            f" Beside its pool the MTP server reserves {max(states):.1f} GiB for recurrent states, one for every draft "
            "token of every request that may run."
        )
    return text


def ladder(evidence: Evidence, width: int | None = None) -> list[Ladder]:
    """The ablation in output throughput, at the loads where every rung that was measured has a steady cell.

    Raises NotRecorded where the experiment is no ablation, or no load has them all.
    """
    usable = steady(evidence)
    steps = rungs(usable, width)
    sweep = usable.sweep()
    measured = [arm for arm, _ in steps if any(c.cell.arm == arm and c.status == "ok" for c in evidence.cells)]
    whole = [load for load in sweep.loads if all(sweep.estimate("output_tps", arm, load) for arm in measured)]
    if not whole:
        raise NotRecorded("no load has a steady cell of every rung of the ablation")
    return [made for made in ladders(sweep, steps) if made.load in whole]


RUNGS = {
    "a": "no speculation",
    "a-capped": "MTP's pool without MTP",
    "b0s": "draft-extend skipped",
    "b0": "drafting off",
}


def ladder_caption(evidence: Evidence) -> str:
    """Which rungs were not measured, so that the steps they would part stay joined; which loads are left out."""
    said = []
    missing = [f"{arm} ({text})" for arm, text in RUNGS.items() if arm not in evidence.sweep().arms]
    if missing:
        said.append(
            f"Not measured: {listed(missing)}; the steps on its two sides are one here and cannot be told apart."
        )
    lost = sorted({c.cell.load.value for c in evidence.cells if c.status == "ok"} - {m.load for m in ladder(evidence)})
    if lost:
        sweep = evidence.sweep()
        said.append(f"Not drawn: {listed([sweep.at(load) for load in lost])}, where windows were not steady.")
    return " ".join(said)


QUEUED = "sglang:num_queue_reqs"

NEAR_FULL = 0.5
"""Below this part of the KV pool in use, with nothing queued, a smaller pool cannot have cost anything."""


def pool_unused(evidence: Evidence) -> float | None:
    """The largest part of a KV pool that was in use, if it never came near full and nothing was queued; else None."""
    good = [c for c in evidence.cells if c.status == "ok"]
    usage = [u for c in good if (u := c.server.get("sglang:token_usage")) is not None]
    queued = any(c.server.get(QUEUED) for c in good)
    return max(usage) if usage and max(usage) < NEAR_FULL and not queued else None


def timers(evidence: Evidence) -> gpu_time.GpuTimes | None:
    """The server's GPU time (:mod:`kit.report.gpu_time`); None where it was not recorded."""
    try:
        return gpu_time.gpu_times(evidence)
    except NotRecorded:
        return None


def causes(evidence: Evidence, times_there: gpu_time.GpuTimes | None = None) -> list[str]:
    """Which cause the data support, from the ladder, the widths and the server's own figures; each with its n.

    ``times_there``: of :func:`timers`, if they were read already.

    Raises NotRecorded where the experiment is no ablation.
    """
    if "a" not in evidence.sweep().arms:
        raise NotRecorded("causes need the arms of the ablation; they were not recorded")
    usable = steady(evidence)
    sweep, pair = usable.sweep(), isolation(evidence)
    best = best_width(evidence)
    said = [*_whole(sweep, best), *_drafting(usable, pair)]
    carried = _steps_between(sweep, "a-capped", "b0")
    if carried:
        said.append(
            "Fixed cost with draft-extend: carrying MTP with drafting off, against the same pool without it, changes "
            f"output by {_told(sweep, carried)} ({_n(carried)}).{_extend_share(evidence)}"
        )
    said += _capacity(evidence, sweep)
    times_there = times_there or timers(evidence)
    if times_there and best:
        loads, rough = evidence.sweep().loads, unsteady_loads(evidence)
        told = counted(evidence).sweep()
        texts = (
            gpu_time.steps(times_there, rungs_in_gpu_time(evidence)),
            gpu_time.shrinking(
                times_there,
                "a-capped",
                best,
                tokens_per_step={
                    load: e.mean if (e := told.estimate("tokens_per_step", best, load)) else None for load in loads
                },
                steady=[load for load in loads if load not in rough],
            ),
        )
        said += [text for text in texts if text]
    said += left_out(evidence)
    bad = [c for c in evidence.cells if c.status == "invalid"]
    if bad:
        loads = sorted({c.cell.load.value for c in bad} - {c.cell.load.value for c in evidence.cells
                                                            if c.status == "ok"})  # fmt: skip
        if loads:
            said.append(
                f"{sweep.load_letter}\u00a0=\u00a0{listed([f'{v:g}' for v in loads])}: no valid cell, so nothing is "
                "said of the load at which the answer may turn."
            )
    return said


def _whole(sweep: Sweep, best: str | None) -> list[str]:
    """The question of an operator: a deployment with MTP against one without."""
    effects = _steps_between(sweep, "a", best) if best else []
    if not effects:
        return []
    told = [f"{times_within(e.ratio)} at {sweep.at(e.load)}" for e in effects]
    return [
        f"The whole: against a deployment without MTP ({sweep.label('a')}), {sweep.label(best or '')} gives "
        f"{listed(told)} of the output ({_n(effects)})."
    ]


def _drafting(evidence: Evidence, pair: Sweep) -> list[str]:
    effects = [e for load in pair.loads for arm in pair.others() if (e := pair.effect("output_tps", arm, load))]
    if not pair.baseline or not effects:
        return []
    crossed = [e for e in effects if e.verdict == "below" or (e.verdict == "unknown" and e.ratio.mean < 1)]
    loads = list(dict.fromkeys(e.load for e in effects))
    where = f"{pair.load_letter}\u00a0=\u00a0{listed([f'{load:g}' for load in loads])}"
    text = (
        f"Drafting: every width gave more than {pair.label(pair.baseline)} at {where}, so no crossover was reached"
        if not crossed
        else f"Drafting: {listed([f'{pair.label(e.arm)} at {pair.at(e.load)}' for e in crossed])} gave less than "
        f"{pair.label(pair.baseline)}"
    )
    drafting = [c for c in evidence.cells if c.status == "ok" and (width_of(c.cell.arm) or 0) > 0]
    known = [rate for c in drafting if (rate := c.server.get("drive.acceptance")) is not None]
    if known:
        text += (
            f". Acceptance, by the server's counters, is {min(known):.2f} to {max(known):.2f} by cell, this "
            "stand-in's own; a model that accepts fewer gains less"
        )
    return [f"{text} ({_n(effects)})."]


def _capacity(evidence: Evidence, sweep: Sweep) -> list[str]:
    """What MTP's smaller pool costs: nothing where no pool came near full; where one did, who ran and who waited."""
    said = []
    loads = sorted({c.cell.load.value for c in evidence.cells if c.status == "ok"})
    at_load = {load: [c for c in evidence.cells if c.cell.load.value == load] for load in loads}
    usage = {load: pool_unused(evidence.with_cells(cells)) for load, cells in at_load.items()}
    idle = [load for load in loads if usage[load] is not None]
    steps = {e.load: e for e in _steps_between(sweep, "a", "a-capped")}
    pool = [e for load, e in steps.items() if load in idle]
    if pool:
        most = max(usage[e.load] or 0.0 for e in pool)
        said.append(
            f"Capacity cannot be tested at {listed([sweep.at(e.load) for e in pool])}: at most "
            f"{most * 100:.0f}\u00a0% of a KV pool was in use and nothing was queued. What differs between the two "
            f"pools ({_told(sweep, pool)}) is therefore not capacity, and shows how far apart single cells lie "
            f"({_n(pool)})."
        )
    for load in loads:
        held, free = _together(evidence, "a-capped", load, waiting=True), _together(evidence, "a", load, waiting=False)
        if load in idle or held is None or free is None:
            continue
        step = steps.get(load)
        cost = f"In output that is {percent(step.ratio.mean)} ({_n([step])})." if step else ""
        said.append(
            f"Capacity at {sweep.at(load)}: where MTP's pool is full it holds {held[0]:.0f} requests and {held[1]:.0f} "
            f"wait; without MTP {free[0]:.0f} run and {free[1]:.0f} wait. "
            f"{cost or 'What that costs in output these windows do not tell.'} {pool_caption(evidence)}".strip()
        )
    return said


def _together(evidence: Evidence, arm: str, load: float, *, waiting: bool) -> tuple[float, float] | None:
    """Requests running and waiting: mean over the samples in which nearly all clients have one there (``waiting``: and
    some wait). None without such samples."""
    found = []
    for run in evidence.runs:
        for cell in run.cells():
            if cell.cell.experiment != evidence.experiment or (cell.cell.arm, cell.cell.load.value) != (arm, load):
                continue
            start, end = cell.window_ns or (0, 0)
            for sample in run.samples(cell.cell):
                running, queued = sample.values.get(gpu_time.RUNNING), sample.values.get(QUEUED)
                if running is None or queued is None or not start <= sample.t_ns <= end:
                    continue
                if running + queued >= gpu_time.ALL_RUNNING * load and (queued > 0 or not waiting):
                    found.append((running, queued))
    if not found:
        return None
    return sum(r for r, _ in found) / len(found), sum(q for _, q in found) / len(found)


def _extend_share(evidence: Evidence) -> str:
    """How much of a step at width 0 draft-extend is, by the server's own timers."""
    shares = []
    for cell in evidence.cells:
        extend, verify = (cell.server.get(f"drive.gpu_s.{kind}") for kind in ("eagle_draft_extend", "target_verify"))
        if cell.status == "ok" and cell.cell.arm == "b0" and extend and verify:
            shares.append(extend / (extend + verify) * 100)
    if not shares:
        return ""
    low, high = f"{min(shares):.0f}", f"{max(shares):.0f}"
    share = low if low == high else f"{low} to {high}"
    return (
        f" By the server's timers draft-extend is {share}\u00a0% of the GPU time of such a step, so most of "
        "the cost lies elsewhere."
    )


def _steps_between(sweep: Sweep, before: str, after: str) -> list[Effect]:
    if before not in sweep.arms or after not in sweep.arms:
        return []
    return [e for load in sweep.loads if (e := sweep.effect("output_tps", after, load, baseline=before))]


def _told(sweep: Sweep, effects: Sequence[Effect]) -> str:
    return listed(
        [f"{percent(e.ratio.mean)}{' (noise)' if e.verdict == 'noise' else ''} at {sweep.at(e.load)}" for e in effects]
    )


def _n(effects: Sequence[Effect]) -> str:
    counts = [e.ratio.n for e in effects]
    n = f"n = {min(counts)}" if min(counts) == max(counts) else f"n = {min(counts)} to {max(counts)}"
    return n + (", no interval" if max(counts) < MIN_REPEATS_FOR_INTERVAL else "")


def timelines(evidence: Evidence, bin_s: float = 1.0) -> list[Timeline]:
    """Each arm's first good repeat over time, from the raw requests and the server's samples beside them.

    Raises NotRecorded if no cell has samples.
    """
    found = []
    totals: dict[str, list[float]] = {}
    first: dict[str, tuple[Run, CellRecord]] = {}
    for run in evidence.runs:
        for cell in run.cells():
            if cell.cell.experiment != evidence.experiment or cell.status != "ok":
                continue
            if (tps := cell.metrics.get("output_tps")) is not None:
                totals.setdefault(cell.cell.arm, []).append(tps)
            first.setdefault(cell.cell.arm, (run, cell))
    order = [arm for arm in evidence.order if arm in first] or sorted(first)
    for arm in order:
        run, cell = first[arm]
        samples = run.samples(cell.cell)
        if samples and cell.window_ns:
            found.append(_timeline(run, cell, samples, bin_s, totals.get(arm, [])))
    if not found:
        raise NotRecorded("no server samples over time were recorded")
    return found


def _timeline(
    run: Run, cell: CellRecord, samples: Sequence[ServerSample], bin_s: float, totals: Sequence[float]
) -> Timeline:
    """Samples within the window; tokens are summed over the ``bin_s`` seconds that end at each."""
    if cell.window_ns is None:
        raise KitError(f"cell {cell.cell.id} has no window")
    start, end = cell.window_ns
    arrivals = [(t, n) for request in run.requests(cell) for t, n, _ in chunk_tokens(request)]
    inside = [s for s in samples if start <= s.t_ns <= end]
    width = int(bin_s * 1e9)
    return Timeline(
        label=cell.arm.label,
        t_s=[(s.t_ns - start) / 1e9 for s in inside],
        running=[_value(s, _RUNNING) for s in inside],
        width=[_value(s, _WIDTH_SAMPLE) for s in inside],
        tps=[sum(n for t, n in arrivals if s.t_ns - width < t <= s.t_ns) / bin_s for s in inside],
        total_tps=list(totals),
    )


def _value(sample: ServerSample, name: re.Pattern[str]) -> float | None:
    return next((v for key, v in sample.values.items() if name.search(key.partition("{")[0])), None)


def policy_table(evidence: Evidence) -> pd.DataFrame:
    """What each choice of the width gave under the load that rises and falls; means over the repeats."""
    order = [arm for arm in evidence.order if any(c.cell.arm == arm for c in evidence.cells)]
    rows = []
    for arm in order or sorted({c.cell.arm for c in evidence.cells}):
        good = [c for c in evidence.cells if c.cell.arm == arm and c.status == "ok"]
        if not good:
            continue
        figures = {
            "tok/s": [c.metrics.get("output_tps") for c in good],
            "median time to finish (s)": [c.metrics.get("e2e_scheduled_p50") for c in good],
            "median TTFT (s)": [c.metrics.get("ttft_scheduled_p50") for c in good],
            "mean width": [c.server.get("drive.mean_width") for c in good],
            "queued": [c.server.get(QUEUED) for c in good],
        }
        means = {name: e.mean if (e := estimate(values)) else None for name, values in figures.items()}
        rows.append({"arm": good[0].arm.label, **means, "n": str(len(good))})
    return pd.DataFrame(rows)


def policy_notes(evidence: Evidence) -> list[str]:
    """What the comparison can show: the load is offered, and a policy of one row has nothing to switch."""
    said = [
        "The load is offered at a rate of its own, so arms that keep up give the same tokens; they differ in how long "
        "a request takes, counted from when it was due."
    ]
    tables = {text for c in evidence.cells if isinstance(text := c.asked.get("policy"), str)}
    widths_there = {row["width"] for text in tables for row in json.loads(text)["rows"]}
    if len(widths_there) == 1:
        (only,) = widths_there
        said.append(
            f"The sweep found width {only} best at every load it measured, so the policy's table has one row and the "
            "policy never changed the width: here it is that fixed width, and its switching is not tested by this load."
        )
    return said


def switching_notes(evidence: Evidence) -> list[str]:
    """What the switching proof shows, and what it does not."""
    cells = {c.cell.arm: c for c in evidence.cells if c.status == "ok"}
    switched, again = cells.get("switched"), cells.get("plain-again")
    if switched is None:
        return []
    s = switched.server
    said = [
        f"The width of the running server was changed {s.get('switches') or 0:.0f} times under "
        f"{s.get('requests') or 0:.0f} long requests; {s.get('complete') or 0:.0f} of them came back complete."
    ]
    if again is not None and (s.get("identical") or 0) < (again.server.get("identical") or 0):
        said.append(
            f"{s.get('identical') or 0:.0f} of {s.get('requests') or 0:.0f} outputs are those of plain decoding; two "
            f"plain runs agreed in {again.server.get('identical') or 0:.0f} of {again.server.get('requests') or 0:.0f}."
            " So what comes out under changing widths is not always what plain decoding gives here. Verification sums "
            "in another order, which can flip a near-tie; that this is the only reason was not shown."
        )
    return said


def switching_table(evidence: Evidence) -> pd.DataFrame:
    """What became of long requests while the width was changed under them."""
    keys = ("requests", "complete", "identical", "switches")
    return pd.DataFrame(
        [
            {"server": cell.arm.label, "repeat": str(cell.cell.repeat + 1)}
            | {key: cell.server.get(key) for key in keys}
            | {"status": cell.status if cell.status == "ok" else f"{cell.status}: {cell.reason}"}
            for cell in evidence.cells
        ]
    )
