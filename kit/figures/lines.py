"""Lines of a metric against load: what throughput, latency, acceptance and goodput share."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kit.figures.figure import interval_text
from kit.figures.style import end_labels, load_axis
from kit.figures.sweep import Sweep
from kit.records.metrics import METRICS

_AXES_SHARE = 0.74
"""Share of a panel's height that is left for the axes under constrained layout (for spacing labels only)."""


FEW_REQUESTS = 10
"""Below so many, a 99th percentile is little else than the largest value."""


def draw_lines(
    axes: Axes, sweep: Sweep, metric: str, y_title: str, height_in: float, last: bool = True, top: float | None = None
) -> None:
    """One line per arm: the mean of the repeats, its interval where n ≥ 3, the repeats as faint dots.

    The unit is in the panel's title, which takes less width than a rotated axis label.
    """
    ends = []
    highest = 0.0
    for arm in sweep.arms:
        look = sweep.look(arm)
        points = [(load, e) for load in sweep.loads if (e := sweep.estimate(metric, arm, load)) is not None]
        if not points:
            continue
        xs, ys = [load for load, _ in points], [e.mean for _, e in points]
        axes.plot(xs, ys, color=look.color, marker=look.marker, markeredgecolor="white", markeredgewidth=0.7, zorder=3)
        barred = [(load, e) for load, e in points if e.low is not None and e.high is not None]
        if barred:
            errors = np.array([[e.mean - max(0.0, e.low), e.high - e.mean] for _, e in barred]).T
            axes.errorbar(
                [x for x, _ in barred], [e.mean for _, e in barred], yerr=errors,
                fmt="none", ecolor=look.color, elinewidth=1.1, capsize=2.5, zorder=2,
            )  # fmt: skip
        for load, e in points:
            known = [v for v in sweep.repeats(metric, arm, load).values() if v is not None]
            highest = max([highest, e.high or e.mean, *known])
            if e.n > 1:
                axes.plot([load] * len(known), known, ".", color=look.color, alpha=0.35, markersize=5, zorder=1)
        ends.append((ys[-1], sweep.label(arm), look))
    load_axis(axes, sweep.loads, sweep.load_title if last else "")
    axes.set_ylim(0, top if top is not None else (highest * 1.06 or 1))
    axes.set_title(y_title)
    end_labels(axes, ends, height_in * _AXES_SHARE)


def line_table(sweep: Sweep, metrics: list[str]) -> pd.DataFrame:
    """Rows of arm × load with the mean, interval, repeats and ratio to the baseline of each metric."""
    rows = []
    for load in sweep.loads:
        for arm in sweep.arms:
            row: dict[str, object] = {"arm": sweep.label(arm), sweep.load_letter: f"{load:g}"}
            found = False
            for metric in metrics:
                e = sweep.estimate(metric, arm, load)
                title = METRICS[metric].title + (f" ({METRICS[metric].unit})" if METRICS[metric].unit != "1" else "")
                row[title] = None if e is None else e.mean
                found = found or e is not None
                if len(metrics) == 1:
                    row["95 % interval"] = None if e is None else interval_text(e.low, e.high)
                    row["n"] = e.n if e is not None else 0
                    effect = sweep.effect(metric, arm, load) if arm != sweep.baseline else None
                    row["÷ baseline"] = None if effect is None else round(effect.ratio.mean, 3)
                    row["n of the ratio"] = None if effect is None else str(effect.ratio.n)
            if any(metric.endswith("_p99") for metric in metrics) and sweep.requests:
                ended = sweep.requests.get(arm, {}).get(load)
                few = ended is not None and ended < FEW_REQUESTS
                row["requests ended, fewest"] = (
                    None if ended is None else f"{ended}" + (" (few for a p99)" if few else "")
                )
            if found:
                rows.append(row)
    return pd.DataFrame(rows)
