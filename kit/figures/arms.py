"""Many arms at few load points: a row per arm, as ratios to the baseline (dumbbells from 1×) or plain values (bars).

For experiments whose arms are many and whose loads are two or three, where lines over load would be a tangle.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kit.figures.figure import TOO_FEW, Figure, NotRecorded, interval_text, listed, number, percent, times
from kit.figures.style import BLUE, FONT_PT, GRID, INK, MUTED, RED, Look, panels, styled, to_svg
from kit.figures.sweep import Sweep
from kit.records.metrics import METRICS
from kit.records.stats import Estimate

_LABEL, _LINES = 24, 2
"""Characters in a line of an arm's label, and lines before it is cut."""

_TICKS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 3, 4, 5, 7, 10]


def arms(
    sweep: Sweep,
    metric: str,
    *,
    relative: bool = True,
    stock: str | None = None,
    candidates: Sequence[str] = (),
    loads: Sequence[float] | None = None,
    caption: str = "",
    flags: Sequence[str] | None = None,
    name: str = "arms",
    headline: str | None = None,
) -> Figure:
    """A panel per load, a row per arm; faint dots are the repeats, thin bars 95 % intervals where there are three.

    ``relative``: ÷ the baseline, paired by repeat; the baseline's own value stands in the panel's title. ``stock`` is
    the arm that the ``candidates`` are to improve: they have colours of their own, and the headline says how far stock
    falls short of the baseline and how far the best of them does, unless ``headline`` says something else. ``loads``:
    those drawn (the table has all).
    Raises NotRecorded if the metric was not recorded, or no ratio can be formed.
    """
    rows = {load: found for load in sweep.loads if (found := _rows(sweep, metric, load, relative))}
    drawn = [load for load in rows if loads is None or load in loads] or list(rows)[-1:]
    if not drawn:
        raise NotRecorded(f"{METRICS[metric].title} of the arms was not recorded")
    colors = {arm: _look(arm, stock, candidates) for arm in sweep.arms}
    with styled():
        figure, all_axes = panels([sum(_height(sweep, arm) for arm, _, _ in rows[load]) + 0.85 for load in drawn])
        limits = _limits([r for load in drawn for r in rows[load]], relative)
        for axes, load in zip(all_axes, drawn, strict=True):
            _panel(axes, sweep, metric, load, rows[load], limits, relative, colors)
        svg = to_svg(figure, name)
    base = sweep.label(sweep.baseline or "")
    what = METRICS[metric].title
    high = sweep.count(metric)[1]
    bars = "Thin bars are 95 % intervals" if high >= 3 else f"n = {high}: no interval can be estimated"
    dots = "; faint dots are the repeats" if high > 1 else ""
    said = f"{what.capitalize()} ÷ {base}, paired by repeat." if relative else f"{what.capitalize()} by arm."
    return Figure(
        name=name,
        svg=svg,
        headline=headline or _headline(sweep, metric, drawn[-1], relative, stock, candidates),
        caption=f"{caption} {said} {bars}{dots}.{_key(sweep, stock)}".strip(),
        alt=f"{what} by arm. "
        + listed([f"{sweep.at(load)}: " + ", ".join(_words(sweep, r, relative) for r in rows[load]) for load in drawn]),
        table=_table(sweep, metric, rows, relative),
        sources=sweep.sources,
        n=sweep.n_text(metric),
        flags=sweep.flags if flags is None else flags,
    )


def _look(arm: str, stock: str | None, candidates: Sequence[str]) -> Look:
    if arm == stock:
        return Look(RED, "D")
    return Look(BLUE, "o") if arm in candidates else Look("#777777", "s")


def _key(sweep: Sweep, stock: str | None) -> str:
    if stock is None:
        return ""
    return f" Red: {sweep.label(stock)}; blue: what is to improve on it; grey: other arms."


def _lines(sweep: Sweep, arm: str) -> list[str]:
    lines = textwrap.wrap(sweep.label(arm), _LABEL)
    return lines if len(lines) <= _LINES else textwrap.wrap(sweep.label(arm), _LABEL + 8)


def _height(sweep: Sweep, arm: str) -> float:
    """Of a row, in inches."""
    return 0.27 if len(_lines(sweep, arm)) == 1 else 0.37


Row = tuple[str, Estimate, list[float]]
"""Arm, estimate, values by repeat."""


def _rows(sweep: Sweep, metric: str, load: float, relative: bool) -> list[Row]:
    found: list[Row] = []
    for arm in sweep.others() if relative else sweep.arms:
        values = sweep.repeats(metric, arm, load)
        if relative:
            effect = sweep.effect(metric, arm, load)
            if effect is None:
                continue
            base = sweep.repeats(metric, sweep.baseline or "", load)
            dots = [v / b for r, v in values.items() if v and (b := base.get(r))]
            found.append((arm, effect.ratio, dots))
        elif (estimate := sweep.estimate(metric, arm, load)) is not None:
            found.append((arm, estimate, [v for v in values.values() if v is not None]))
    return found


def _limits(rows: Sequence[Row], relative: bool) -> tuple[float, float]:
    ends = [v for _, e, dots in rows for v in (e.mean, e.low, e.high, *dots) if v is not None]
    if not relative:
        return 0.0, max(ends) * 1.22 or 1.0
    low, high = math.log(min([1.0, *(v for v in ends if v > 0)])), math.log(max([1.0, *ends]))
    span = max(high - low, 0.06)
    return math.exp(low - 0.08 * span), math.exp(high + 0.32 * span)


def _panel(
    axes: Axes,
    sweep: Sweep,
    metric: str,
    load: float,
    rows: Sequence[Row],
    limits: tuple[float, float],
    relative: bool,
    colors: Mapping[str, Look],
) -> None:
    unit = METRICS[metric].unit
    places, edge = [], 0.0
    for arm, _, _ in rows:  # rows are as high as their labels
        places.append(edge + _height(sweep, arm) / 2)
        edge += _height(sweep, arm)
    for y, (arm, estimate, dots) in zip(places, rows, strict=True):
        look = colors[arm]
        if relative:
            axes.plot([1, estimate.mean], [y, y], color=look.color, lw=2.2, zorder=3, solid_capstyle="butt")
            axes.plot([estimate.mean], [y], marker=look.marker, color=look.color, markersize=7, zorder=4)
        else:
            axes.barh(y, estimate.mean, height=0.18, color=look.color, alpha=0.8, zorder=2)
        _spread(axes, y, estimate, dots, look)
        tip = max(v for v in (estimate.mean, estimate.high, *dots, 1.0 if relative else None) if v is not None)
        text = times(estimate.mean) if relative else number(estimate.mean)
        axes.annotate(text, (tip, y), xytext=(7, 0), textcoords="offset points", va="center", color=look.text,
                      fontsize=FONT_PT - 0.5)  # fmt: skip
    axes.set_yticks(places, ["\n".join(_lines(sweep, arm)) for arm, _, _ in rows])
    axes.tick_params(axis="y", length=0, labelcolor="#333333", labelsize=FONT_PT - 1.5)
    axes.set_ylim(edge, 0)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x", color=GRID)
    axes.spines["left"].set_visible(False)
    title = f"{load:,.0f} tokens" if sweep.load_kind == "prefill" else sweep.at(load)
    if relative:
        base = sweep.estimate(metric, sweep.baseline or "", load)
        axes.set_xscale("log")
        ticks = [t for t in _TICKS if limits[0] <= t <= limits[1]]
        apart = math.log(limits[1] / limits[0]) / 8  # nearer ones would overlap
        kept = [1.0]
        for tick in sorted(ticks, key=lambda t: abs(math.log(t))):
            if all(abs(math.log(tick / other)) >= apart for other in kept):
                kept.append(tick)
        ticks = sorted(kept)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}×"))
        axes.axvline(1, color=MUTED, lw=1.2, zorder=2)
        if base:
            shown = number(base.mean) + ("" if unit == "1" else f" {unit}")
            title += f" ({sweep.label(sweep.baseline or '')}: {shown})"
        axes.set_xlabel(f"{METRICS[metric].title} ÷ {sweep.label(sweep.baseline or '')}", color=MUTED)
    else:
        axes.set_xlabel(METRICS[metric].title + (f" ({unit})" if unit != "1" else ""), color=MUTED)
    axes.set_xlim(*limits)
    axes.set_title(title, x=0.0)


def _spread(axes: Axes, y: float, estimate: Estimate, dots: Sequence[float], look: Look) -> None:
    if estimate.low is not None and estimate.high is not None:
        low = max(0.0, estimate.low)  # no quantity here can be below
        axes.plot([low, estimate.high], [y, y], color=INK, lw=0.9, zorder=5)
        for edge in (low, estimate.high):
            axes.plot([edge, edge], [y - 0.06, y + 0.06], color=INK, lw=0.9, zorder=5)
    if len(dots) > 1:
        axes.plot(dots, [y] * len(dots), ".", color=look.text, alpha=0.45, markersize=5, zorder=6)


def _words(sweep: Sweep, row: Row, relative: bool) -> str:
    arm, estimate, _ = row
    return f"{sweep.label(arm)} {times(estimate.mean) if relative else number(estimate.mean)}"


def _headline(
    sweep: Sweep, metric: str, load: float, relative: bool, stock: str | None, candidates: Sequence[str]
) -> str:
    what, where = METRICS[metric].title, f"{load:,.0f} tokens" if sweep.load_kind == "prefill" else sweep.at(load)
    known = [arm for arm in candidates if sweep.estimate(metric, arm, load)]
    ratios = [e.ratio for arm in sweep.others() if (e := sweep.effect(metric, arm, load))]
    if relative and ratios and all(abs(r.mean - 1) < 1e-9 for r in ratios):
        return f"Every arm has exactly the {what} of {sweep.label(sweep.baseline or '')} on the same prompts ({where})"
    if stock is None or sweep.estimate(metric, stock, load) is None or not known:
        return f"{what[:1].upper()}{what[1:]} by arm, {where}"
    effects = {arm: e for arm in known if (e := sweep.effect(metric, arm, load, baseline=stock)) is not None}
    if not effects:
        return f"{what[:1].upper()}{what[1:]} by arm, {where}"
    counts = [e.ratio.n for e in effects.values()]
    if len(effects) > 1 and all(e.verdict == "unknown" for e in effects.values()):
        n = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        return f"{what[:1].upper()}{what[1:]} by arm, {where}: n = {n}, {TOO_FEW} to call one best"
    sure = {arm: e for arm, e in effects.items() if e.verdict != "unknown"} or effects
    best = max(sure, key=lambda arm: sure[arm].ratio.mean)
    if all(e.verdict == "noise" for e in effects.values()):
        return f"No remedy's {what} differs from {sweep.label(stock)} by more than the noise ({where})"
    if effects[best].verdict == "noise":
        return f"No remedy improves {what} on {sweep.label(stock)} by more than the noise ({where})"
    unsure = "; too few repeats to know the noise" if effects[best].verdict == "unknown" else ""
    if relative and (of_base := sweep.effect(metric, stock, load)) and (best_of := sweep.effect(metric, best, load)):
        return (
            f"{sweep.label(stock)[:1].upper()}{sweep.label(stock)[1:]} has {times(of_base.ratio.mean)} the {what} of "
            f"{sweep.label(sweep.baseline or '')}, {sweep.label(best)} {times(best_of.ratio.mean)} ({where}{unsure})"
        )
    return (
        f"{sweep.label(best)[:1].upper()}{sweep.label(best)[1:]} changes {what} by "
        f"{percent(effects[best].ratio.mean)} against {sweep.label(stock)} ({where}{unsure})"
    )


def _table(sweep: Sweep, metric: str, rows: dict[float, list[Row]], relative: bool) -> pd.DataFrame:
    unit = METRICS[metric].unit
    value = METRICS[metric].title + (f" ({unit})" if unit != "1" else "")
    lines = []
    for load, found in rows.items():
        shown = [*([sweep.baseline] if relative and sweep.baseline else []), *(arm for arm, _, _ in found)]
        ratios = {arm: estimate for arm, estimate, _ in found} if relative else {}
        for arm in shown:
            absolute, ratio = sweep.estimate(metric, arm, load), ratios.get(arm)
            interval = ratio if relative else absolute
            lines.append(
                {
                    "arm": sweep.label(arm),
                    sweep.load_letter: f"{load:,.0f}",
                    value: absolute.mean if absolute else None,
                    "÷ baseline": round(ratio.mean, 3) if ratio else None,
                    "95 % interval": interval_text(interval.low, interval.high) if interval else None,
                    "n": absolute.n if absolute else 0,
                    "n of the ratio": str(ratio.n) if ratio else None,
                }
            )
    return pd.DataFrame(lines)
