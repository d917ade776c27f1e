"""Input throughput against defer depth: how much of the prompt speed that MTP prefill costs a deeper queue wins back.

Depth 1 is stock; ``None`` defers the whole prompt. A chunk's time falls as t(N) = a + b/N (the interruption b is paid
once in N chunks), so throughput rises towards chunk/a. The fitted curve is a model and is labelled so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kit.deferred.model import Line, fit_line
from kit.figures.figure import TOO_FEW, Figure, NotRecorded, Source, listed, number, percent
from kit.figures.style import BLUE, FONT_PT, GREEN, MUTED, ORANGE, PURPLE, RED, Look, end_labels, panels, styled, to_svg
from kit.records.stats import MIN_REPEATS_FOR_INTERVAL, Estimate, estimate

_LOOKS = [Look(BLUE, "s"), Look(ORANGE, "^"), Look(GREEN, "D"), Look(PURPLE, "v"), Look(RED, "P")]


@dataclass(frozen=True)
class DepthPoint:
    """Input tokens per second at a defer depth, one value per repeat. ``depth`` None: the whole prompt."""

    depth: int | None
    input_tps: Sequence[float]


@dataclass(frozen=True)
class DepthFit:
    """The model's line t(N) = a + b/N (``kit.deferred.model``), for chunks of ``chunk_tokens`` tokens."""

    line: Line
    chunk_tokens: int

    def input_tps(self, depth: float) -> float:
        """Tokens per second the model gives at a depth (``inf``: the limit)."""
        return self.chunk_tokens / self.line.at(depth)


@dataclass(frozen=True)
class DepthSeries:
    """One context length on one machine. ``no_mtp``: input t/s without MTP, by repeat (the level to reach)."""

    label: str
    context_tokens: int
    points: Sequence[DepthPoint]
    no_mtp: Sequence[float] = ()
    fit: DepthFit | None = None
    published: bool = False


def fit_depths(points: Sequence[DepthPoint], chunk_tokens: int) -> DepthFit | None:
    """The line fitted to all repeats of the points, the whole prompt as N = ∞; None for fewer than two depths."""
    pairs = [(math.inf if p.depth is None else p.depth, chunk_tokens / v) for p in points for v in p.input_tps]
    if len({depth for depth, _ in pairs}) < 2:
        return None
    return DepthFit(fit_line(pairs), chunk_tokens)


def prefill_depth(
    series: Sequence[DepthSeries],
    caption: str = "",
    sources: Sequence[Source] = (),
    flags: Sequence[str] = (),
    name: str = "prefill-depth",
) -> Figure:
    """A panel for the measured series and one for the published ones; lines are contexts.

    Raises NotRecorded without any point, or without any depth but stock.
    """
    groups = [[s for s in series if not s.published and s.points], [s for s in series if s.published and s.points]]
    groups = [g for g in groups if g]
    if not groups or not any(p.depth != 1 for g in groups for s in g for p in s.points):
        raise NotRecorded("input throughput by defer depth was not recorded")
    with styled():
        heights = [3.2] * len(groups)
        figure, all_axes = panels(heights)
        for axes, group, height in zip(all_axes, groups, heights, strict=True):
            _panel(axes, group, height, bool(len(groups) > 1 or group[0].published))
        svg = to_svg(figure, name)
    rows = []
    for group in groups:
        for s in group:
            stock = _at(s, 1)
            for p in sorted(s.points, key=lambda p: float("inf") if p.depth is None else p.depth):
                e = estimate(list(p.input_tps))
                if e is None:
                    continue
                depth = "whole prompt" if p.depth is None else str(p.depth)
                rows.append(
                    {
                        "series": s.label,
                        "depth": f"{depth} (stock)" if p.depth == 1 else depth,
                        "input t/s": e.mean,
                        "n": e.n,
                        "÷ stock": None if stock is None else round(e.mean / stock.mean, 3),
                        "model t/s": None
                        if s.fit is None
                        else s.fit.input_tps(float("inf") if p.depth is None else p.depth),
                        "published": "yes" if s.published else "no",
                    }
                )
            if s.no_mtp and (e := estimate(list(s.no_mtp))):
                rows.append({"series": s.label, "depth": "no MTP", "input t/s": e.mean, "n": e.n})
    fits = [
        f"{s.label}: a = {s.fit.line.a:.3g} s, b = {s.fit.line.b:.3g} s per {s.fit.chunk_tokens}-token chunk, "
        f"limit {number(s.fit.input_tps(float('inf')))} t/s"
        for group in groups
        for s in group
        if s.fit
    ]
    model = (
        f" Dotted: model t(N) = a + b/N fitted to the points, not a measurement ({'; '.join(fits)})." if fits else ""
    )
    counts = [len(p.input_tps) for group in groups for s in group for p in s.points]
    spread = "Bars are 95 % intervals where n ≥ 3." if max(counts) >= 3 else "Too few repeats for intervals."
    return Figure(
        name=name,
        svg=svg,
        headline=_headline(groups[0]),
        caption=f"{caption} {spread}{model}".strip(),
        alt="Input tokens per second against defer depth. "
        + listed([f"{s.label}: " + ", ".join(_words(p) for p in s.points) for g in groups for s in g]),
        table=pd.DataFrame(rows),
        sources=sources,
        n=f"n = {min(counts)}" if min(counts) == max(counts) else f"n = {min(counts)} to {max(counts)} per point",
        flags=flags,
    )


def _panel(axes: Axes, group: Sequence[DepthSeries], height: float, titled: bool) -> None:
    depths = sorted({p.depth for s in group for p in s.points if p.depth is not None})
    whole_at = depths[-1] * 2 if depths else 1
    whole = any(p.depth is None for s in group for p in s.points)
    ticks = [*depths, *([whole_at] if whole else [])]
    ends, highest = [], 0.0
    for index, s in enumerate(group):
        look = _LOOKS[index % len(_LOOKS)]
        points = sorted(s.points, key=lambda p: float("inf") if p.depth is None else p.depth)
        xs = [whole_at if p.depth is None else p.depth for p in points]
        es = [estimate(list(p.input_tps)) for p in points]
        ys = [e.mean for e in es if e]
        axes.plot(xs, ys, color=look.color, marker=look.marker, markeredgecolor="white", markeredgewidth=0.7, zorder=3,
                  lw=0 if s.fit else 1.8)  # fmt: skip
        for x, e, p in zip(xs, es, points, strict=True):
            if e and e.low is not None and e.high is not None:
                below = e.mean - max(0.0, e.low)
                axes.errorbar([x], [e.mean], yerr=[[below], [e.high - e.mean]], fmt="none", ecolor=look.color,
                              elinewidth=1.1, capsize=2.5, zorder=2)  # fmt: skip
            if len(p.input_tps) > 1:
                axes.plot([x] * len(p.input_tps), p.input_tps, ".", color=look.color, alpha=0.35, markersize=5)
            highest = max(highest, *(p.input_tps or [0.0]))
        if s.fit:
            grid = np.geomspace(min(xs), max(xs), 60)
            axes.plot(grid, [s.fit.input_tps(n) for n in grid], ":", color=look.color, lw=1.5, zorder=2)
        if s.no_mtp:
            level = float(np.mean(s.no_mtp))
            highest = max(highest, level)
            axes.axhline(level, color=look.color, lw=1, ls="--", alpha=0.7)
            ends.append((level, "no MTP" if len(group) == 1 else f"no MTP, {s.context_tokens:,}", look))
        ends.append((ys[-1], s.label, look))
        if s.fit and index == 0:
            middle = float(np.sqrt(min(xs) * max(xs)))
            axes.annotate("model", (middle, s.fit.input_tps(middle)), xytext=(4, -12), textcoords="offset points",
                          color=look.text, fontsize=FONT_PT - 1, style="italic")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: "whole" if whole and v == whole_at else f"{v:g}"))
    axes.set_xlim(min(ticks) / 1.15, max(ticks) * 1.15)
    axes.set_ylim(0, highest * 1.25)  # an interval of few repeats can be wider than the axis: it is cut there
    kind = "published" if group[0].published else "measured"
    axes.set_title(f"input t/s, {kind}" if titled else "input t/s")
    axes.set_xlabel("defer depth (chunks; 1 = stock)", color=MUTED)
    end_labels(axes, ends, height * 0.74)


def _at(s: DepthSeries, depth: int | None) -> Estimate | None:
    return next((estimate(list(p.input_tps)) for p in s.points if p.depth == depth), None)


def _words(p: DepthPoint) -> str:
    mean = float(np.mean(p.input_tps)) if p.input_tps else float("nan")
    return f"{'whole prompt' if p.depth is None else f'depth {p.depth}'} {number(mean)} t/s"


def _headline(group: Sequence[DepthSeries]) -> str:
    """The best depth against stock in the longest context, and how much of the loss to no MTP it wins back."""
    s = max(group, key=lambda s: s.context_tokens)
    stock = _at(s, 1)
    deferred = [(p, e) for p in s.points if p.depth != 1 and (e := estimate(list(p.input_tps)))]
    if stock is None or not deferred:
        return f"Input throughput by defer depth, {s.label}"
    counts = [stock.n, *(e.n for _, e in deferred)]
    if min(counts) < MIN_REPEATS_FOR_INTERVAL and not s.published and len(deferred) > 1:
        n = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        return f"Input throughput by defer depth, {s.label}: n = {n}, {TOO_FEW} to tell depths apart"
    best, e = max(deferred, key=lambda pair: pair[1].mean)
    depth = "deferring the whole prompt" if best.depth is None else f"depth {best.depth}"
    overlap = None not in (stock.low, stock.high, e.low, e.high) and e.low <= stock.high and stock.low <= e.high
    if overlap:
        return f"No defer depth differs from stock by more than the noise ({s.label})"
    text = (
        f"{depth[:1].upper()}{depth[1:]} gives {percent(e.mean / stock.mean)} input throughput over stock ({s.label})"
    )
    if s.no_mtp:
        lost = float(np.mean(s.no_mtp)) - stock.mean
        if lost > 0:
            text += f", {number((e.mean - stock.mean) / lost * 100, 2)}\u00a0% of what MTP prefill had cost"
    if e.low is None or stock.low is None:
        text += f"; n = {min(e.n, stock.n)}, so the noise is unknown"
    return text
