"""What the draft-width notebook shows beyond a sweep: the isolation pair, the ladder of the ablation, the policy.

Arms are known by name (``kit.draftwidth.experiment`` explains the ladder): ``b<k>`` or ``width-<k>`` is one MTP
deployment at width k; ``a``, ``a-capped`` and ``b0s`` are deployments of their own.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence

import pandas as pd

from kit.errors import KitError
from kit.figures.figure import NotRecorded
from kit.figures.sweep import Sweep
from kit.figures.timeline_policy import Timeline
from kit.figures.waterfall import Ladder, ladders
from kit.load.window import chunk_tokens
from kit.records.schema import CellRecord, ServerSample
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

    An experiment whose arms have other names is taken whole, with the card's baseline.
    """
    present = list(dict.fromkeys(c.cell.arm for c in evidence.cells if c.status == "ok"))
    widths = sorted((arm for arm in present if width_of(arm) is not None), key=lambda arm: width_of(arm) or 0)
    if len(widths) < 2:
        return evidence.sweep()
    return evidence.sweep(arms=widths, baseline=widths[0])


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
        ("a-capped", "capacity"),
        ("b0s", "fixed cost of carrying MTP"),
        ("b0", "draft-extend"),
        (best, "drafting + verification"),
    ]
    return ladders(sweep, steps)


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
