"""Each arm ÷ the baseline at each load: dumbbells from 1× on a log axis, so that 2× and 0.5× are symmetric."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kit.figures.figure import Figure, NotRecorded, listed, number, times
from kit.figures.style import BAND, FONT_PT, GRID, MUTED, canvas, styled, to_svg
from kit.figures.sweep import Effect, Sweep, finding
from kit.records.metrics import METRICS
from kit.records.stats import MIN_REPEATS_FOR_INTERVAL

_TICKS = [0.1, 0.2, 0.25, 1 / 3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 7, 10, 20, 50]
_ROW = 0.27
"""Height of a row in inches."""


def ratio(sweep: Sweep, metric: str = "output_tps", name: str = "ratio") -> Figure:
    """A row per load and arm. The tip carries the value, a thin bar its interval, the band the A/A spread.

    Under each load stands the baseline's own value, without which a ratio says little.
    Raises NotRecorded if there is no baseline or no pair of values.
    """
    effects = sweep.effects(metric)
    if not effects:
        raise NotRecorded(f"no ratio of {METRICS[metric].title} can be formed: there is no baseline arm in these cells")
    base = sweep.baseline or ""
    loads = [load for load in sweep.loads if any(e.load == load for e in effects)]
    by_load = {load: [e for e in effects if e.load == load] for load in loads}
    rows = sum(max(2, len(by_load[load])) + 0.7 for load in loads)
    with styled():
        figure = canvas(rows * _ROW + 1.1)
        axes = figure.subplots()
        low, high = _limits(effects)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        ticks = [t for t in _TICKS if low <= t <= high]
        while len(ticks) > 6:
            ticks = [t for i, t in enumerate(ticks) if t == 1 or (i - ticks.index(1)) % 2 == 0]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}×"))
        axes.grid(False, axis="y")
        axes.grid(True, axis="x", color=GRID)
        axes.axvline(1, color=MUTED, lw=1.2, zorder=2)
        axes.spines["left"].set_visible(False)
        centres, y = [], 0.0
        for load in loads:
            group = by_load[load]
            size = max(2, len(group))
            centres.append(y + (size - 1) / 2)
            noise = group[0].noise
            if noise is not None:
                left, right = math.exp(-noise), math.exp(noise)
                axes.add_patch(Rectangle((left, y - 0.6), right - left, size + 0.2, color=BAND, lw=0, zorder=1))
            start = y + (size - len(group)) / 2
            for index, effect in enumerate(group):
                _dumbbell(axes, sweep, effect, start + index)
            y += size + 0.7
        axes.set_ylim(y - 0.4, -0.9)
        value = {load: sweep.estimate(metric, base, load) for load in loads}
        unit = METRICS[metric].unit
        axes.set_yticks(
            centres,
            [
                f"{sweep.at(load)}\nbase {number(value[load].mean)} {unit}" if value[load] else sweep.at(load)
                for load in loads
            ],
        )
        axes.tick_params(axis="y", length=0, labelcolor="#333333")
        axes.set_xlabel(f"÷ {sweep.label(base)} ({METRICS[metric].title})")
        _legend(axes, sweep, list(dict.fromkeys(e.arm for e in effects)), any(e.noise is not None for e in effects))
        svg = to_svg(figure, name)
    texts = [f"{sweep.label(e.arm)} {times(e.ratio.mean)} at {sweep.at(e.load)}" for e in effects]
    band = (
        f" The grey band is the largest ratio between two measurements of the same arm ({sweep.label(sweep.twin[0])},"
        " A/A), at the loads where it was measured twice."
        if sweep.twin
        else " No arm was measured twice, so there is no A/A noise band."
    )
    band += _key({e.verdict for e in effects})
    paired = ", paired by repeat" if sweep.count(metric)[1] > 1 else ""
    return Figure(
        name=name,
        svg=svg,
        headline=finding(sweep, metric),
        caption=f"{METRICS[metric].title.capitalize()} of each arm ÷ {sweep.label(base)}{paired}.{band} "
        + sweep.caption(metric).replace("; faint dots are the repeats", ""),
        alt=f"Dumbbell chart of ratios to {sweep.label(base)}: {listed(texts)}.",
        table=_table(sweep, metric, effects),
        sources=sweep.sources,
        n=sweep.n_text(metric),
        flags=sweep.flags,
    )


def _limits(effects: list[Effect]) -> tuple[float, float]:
    """Limits that hold all intervals and leave room for the values at the tips."""
    values = [1.0]
    for e in effects:
        values += [v for v in (e.ratio.mean, e.ratio.low, e.ratio.high) if v is not None]
        if e.noise is not None:
            values += [math.exp(e.noise), math.exp(-e.noise)]
    low, high = math.log(min(values)), math.log(max(values))
    span = max(high - low, 0.2)
    left = low - span * (0.3 if low < -0.01 else 0.08)
    right = high + span * (0.24 if high > 0.01 else 0.08)
    return math.exp(left), math.exp(right)


def _key(verdicts: set[str]) -> str:
    """What the marks that are drawn mean."""
    marks = []
    if verdicts & {"above", "below"}:
        marks.append("filled: larger than the noise")
    if "noise" in verdicts:
        marks.append("hollow: not larger than the noise (its interval covers 1×, or it lies in the band)")
    if "unknown" in verdicts:
        marks.append(f"faint, dotted, with ?: undecided, fewer than {MIN_REPEATS_FOR_INTERVAL} repeats")
    return f" Marks: {'; '.join(marks)}."


def _dumbbell(axes, sweep: Sweep, effect: Effect, y: float) -> None:  # noqa: ANN001 (matplotlib Axes)
    look = sweep.look(effect.arm)
    value = effect.ratio.mean
    quiet, unknown = effect.verdict == "noise", effect.verdict == "unknown"
    axes.plot(
        [1, value], [y, y], color=look.color, lw=1.2 if unknown else 2.2, ls=":" if unknown else "-",
        alpha=0.35 if unknown else 0.45 if quiet else 1, zorder=3, solid_capstyle="butt",
    )  # fmt: skip
    if effect.ratio.low is not None and effect.ratio.high is not None:
        axes.plot([effect.ratio.low, effect.ratio.high], [y, y], color=look.color, lw=0.9, zorder=3)
        for edge in (effect.ratio.low, effect.ratio.high):
            axes.plot([edge, edge], [y - 0.18, y + 0.18], color=look.color, lw=0.9, zorder=3)
    axes.plot(
        [value], [y], marker=look.marker, color=look.color, markersize=5.5 if unknown else 7, zorder=4,
        markerfacecolor="white" if quiet or unknown else look.color, alpha=0.45 if unknown else 1,
    )  # fmt: skip
    right = value >= 1
    edge = value
    if right and effect.ratio.high is not None:
        edge = max(value, effect.ratio.high)
    if not right and effect.ratio.low is not None:
        edge = min(value, effect.ratio.low)
    axes.annotate(
        times(value) + (" ?" if unknown else ""), (edge, y), xytext=(8 if right else -8, 0),
        textcoords="offset points", ha="left" if right else "right", va="center",
        color=MUTED if quiet or unknown else look.text, fontsize=FONT_PT - 0.5,
    )  # fmt: skip


def _legend(axes, sweep: Sweep, arms: list[str], band: bool) -> None:  # noqa: ANN001 (matplotlib Axes)
    """Arms are rows here, with no line end to label, so a legend above the rows names them."""
    handles = [
        axes.plot([], [], marker=sweep.look(arm).marker, color=sweep.look(arm).color, lw=2.2, label=sweep.label(arm))[0]
        for arm in arms
    ]
    if band:
        handles.append(Rectangle((0, 0), 1, 1, color=BAND, label="A/A noise"))
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(-0.32, 1.0), ncols=2, frameon=False, fontsize=FONT_PT - 0.5,
        handlelength=1.4, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip


def _table(sweep: Sweep, metric: str, effects: list[Effect]) -> pd.DataFrame:
    words = {"above": "above 1×", "below": "below 1×", "noise": "not larger than the noise", "unknown": "undecided"}
    rows = []
    for e in effects:
        base = sweep.estimate(metric, sweep.baseline or "", e.load)
        interval = None if e.ratio.low is None else f"{e.ratio.low:.3f} to {e.ratio.high:.3f}"
        rows.append(
            {
                "arm": sweep.label(e.arm),
                sweep.load_letter: f"{e.load:g}",
                "ratio": round(e.ratio.mean, 3),
                "95 % interval": interval,
                "A/A spread": None if e.noise is None else f"±{(math.exp(e.noise) - 1) * 100:.1f} %",
                "verdict": words[e.verdict],
                "n": e.ratio.n,
                f"baseline ({METRICS[metric].unit})": None if base is None else base.mean,
            }
        )
    return pd.DataFrame(rows)
