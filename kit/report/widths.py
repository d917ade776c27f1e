"""What the draft-width notebook shows beyond a sweep: the isolation pair, the ladder of the ablation, the policy.

Arms are known by name (``kit.draftwidth.experiment`` explains the ladder): ``b<k>`` or ``width-<k>`` is one MTP
deployment at width k; ``a``, ``a-capped`` and ``b0s`` are deployments of their own.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from kit.errors import KitError
from kit.figures.figure import NotRecorded, listed, percent
from kit.figures.sweep import Effect, Sweep
from kit.figures.timeline_policy import Timeline
from kit.figures.waterfall import Ladder, ladders
from kit.load.window import chunk_tokens
from kit.records.schema import CellRecord, ServerSample
from kit.records.stats import MIN_REPEATS_FOR_INTERVAL
from kit.records.store import Run
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

    Where the requests carry no counts of drafts, acceptance and tokens per step are the server's own (:func:`counted`).
    An experiment whose arms have other names is taken whole, with the card's baseline.
    """
    evidence = counted(evidence)
    present = list(dict.fromkeys(c.cell.arm for c in evidence.cells if c.status == "ok"))
    widths = sorted((arm for arm in present if width_of(arm) is not None), key=lambda arm: width_of(arm) or 0)
    sweep = evidence.sweep() if len(widths) < 2 else evidence.sweep(arms=widths, baseline=widths[0])
    if any("drive.acceptance" in c.server for c in evidence.cells):
        sweep = replace(sweep, notes=[*sweep.notes, COUNTED])
    return sweep


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
    made = Evidence(evidence.experiment, evidence.runs)
    made.__dict__["cells"] = cells  # what the cached property would hold
    return made


def ladder(evidence: Evidence, width: int | None = None) -> list[Ladder]:
    """The ablation per load: a → a-capped → b0s → b0 → b<width> (default: the best width at the largest load).

    Raises NotRecorded where the experiment holds none of the deployments that make it an ablation.
    """
    sweep = evidence.sweep()
    drafting = [arm for arm in sweep.arms if (width_of(arm) or 0) > 0]
    if "a" not in sweep.arms or not drafting:
        raise NotRecorded("the ablation needs arm a (no speculation) and a drafting width; they were not recorded")
    if width is None:
        last = sweep.loads[-1]
        best = max(drafting, key=lambda arm: e.mean if (e := sweep.estimate("output_tps", arm, last)) else 0.0)
    else:
        best = next((arm for arm in drafting if width_of(arm) == width), drafting[0])
    steps = [
        ("a", None),
        ("a-capped", "MTP's pool (never near full)" if pool_unused(evidence) else "capacity"),
        ("b0s", "fixed cost of carrying MTP"),
        ("b0", "draft-extend"),
        (best, "drafting + verification"),
    ]
    return ladders(sweep, steps)


RUNGS = {
    "a": "no speculation",
    "a-capped": "MTP's pool without MTP",
    "b0s": "draft-extend skipped",
    "b0": "drafting off",
}


def ladder_caption(evidence: Evidence) -> str:
    """Which rungs were not measured, so that the steps they would part stay joined."""
    missing = [f"{arm} ({text})" for arm, text in RUNGS.items() if arm not in evidence.sweep().arms]
    if not missing:
        return ""
    return f"Not measured: {listed(missing)}; the steps on its two sides are one here and cannot be told apart."


NEAR_FULL = 0.5
"""Below this part of the KV pool in use, with nothing queued, a smaller pool cannot have cost anything."""


def pool_unused(evidence: Evidence) -> float | None:
    """The largest part of a KV pool that was in use, if it never came near full and nothing was queued; else None."""
    good = [c for c in evidence.cells if c.status == "ok"]
    usage = [u for c in good if (u := c.server.get("sglang:token_usage")) is not None]
    queued = any(c.server.get("sglang:num_queue_reqs") for c in good)
    return max(usage) if usage and max(usage) < NEAR_FULL and not queued else None


def causes(evidence: Evidence) -> list[str]:
    """Which cause the data support, from the ladder, the widths and the server's own figures; each with its n.

    Raises NotRecorded where the experiment is no ablation.
    """
    sweep, pair = evidence.sweep(), isolation(evidence)
    if "a" not in sweep.arms:
        raise NotRecorded("causes need the arms of the ablation; they were not recorded")
    said = []
    base = pair.baseline
    effects = [e for load in pair.loads for arm in pair.others() if (e := pair.effect("output_tps", arm, load))]
    if base and effects:
        crossed = [e for e in effects if e.verdict == "below" or (e.verdict == "unknown" and e.ratio.mean < 1)]
        where = f"{pair.load_letter}\u00a0=\u00a0{listed([f'{load:g}' for load in pair.loads])}"
        text = (
            f"Drafting: every width gave more than {pair.label(base)} at {where}, so no crossover was reached"
            if not crossed
            else f"Drafting: {listed([f'{pair.label(e.arm)} at {pair.at(e.load)}' for e in crossed])} gave less than "
            f"{pair.label(base)}"
        )
        drafting = [c for c in evidence.cells if c.status == "ok" and (width_of(c.cell.arm) or 0) > 0]
        known = [rate for c in drafting if (rate := c.server.get("drive.acceptance")) is not None]
        if known:
            text += (
                f". Acceptance, by the server's counters, is {min(known):.2f} to {max(known):.2f} by cell, this "
                "stand-in's own; a model that accepts fewer gains less"
            )
        said.append(f"{text} ({_n(effects)}).")
    carried = _steps_between(sweep, "a-capped", "b0")
    if carried:
        said.append(
            "Fixed cost: carrying MTP with drafting off, against the same pool without it, changes output by "
            f"{_told(sweep, carried)} ({_n(carried)}).{_extend_share(evidence)}"
        )
    pool = _steps_between(sweep, "a", "a-capped")
    usage = pool_unused(evidence)
    if pool and usage:
        said.append(
            f"Capacity cannot be tested at these loads: at most {usage * 100:.0f}\u00a0% of a KV pool was in use "
            f"and nothing was queued. What differs between the two pools ({_told(sweep, pool)}) is therefore not "
            f"capacity, and shows how far apart single cells lie ({_n(pool)})."
        )
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
    return listed([f"{percent(e.ratio.mean)} at {sweep.at(e.load)}" for e in effects])


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
        samples = _samples(run, cell)
        if samples and cell.window_ns:
            found.append(_timeline(run, cell, samples, bin_s, totals.get(arm, [])))
    if not found:
        raise NotRecorded("no server samples over time were recorded")
    return found


def _samples(run: Run, cell: CellRecord) -> list[ServerSample]:
    path = run.folder / "raw" / f"{cell.cell.id}.samples.jsonl.gz"
    if not path.is_file():
        return []
    with gzip.open(path, "rt") as handle:
        return [ServerSample.model_validate_json(line) for line in handle]


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
