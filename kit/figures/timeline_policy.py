"""A load that rises and falls, over time: running requests, the draft width a policy chose, and tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kit.figures.figure import Figure, NotRecorded, Source, listed, number, times
from kit.figures.style import end_labels, looks, panels, styled, to_svg
from kit.records.stats import estimate


@dataclass(frozen=True)
class Timeline:
    """One policy's run: samples over time in seconds from the start of the window.

    ``running`` (requests) and ``width`` (draft tokens per step) are sampled; ``tps`` is output tokens per second in
    the interval that ends at the sample. A value that was not told is None. ``total_tps`` holds one value per repeat:
    output tokens ÷ window over the whole run.
    """

    label: str
    t_s: Sequence[float]
    running: Sequence[float | None]
    width: Sequence[float | None]
    tps: Sequence[float | None]
    total_tps: Sequence[float] = ()


def timeline_policy(
    timelines: Sequence[Timeline],
    reference: str | None = None,
    caption: str = "",
    sources: Sequence[Source] = (),
    flags: Sequence[str] = (),
    name: str = "timeline-policy",
) -> Figure:
    """Three panels over time. ``reference`` is the label the totals are compared with (default: the first).

    Raises NotRecorded without samples.
    """
    usable = [t for t in timelines if len(t.t_s)]
    if not usable:
        raise NotRecorded("no samples over time were recorded")
    style = looks([t.label for t in usable])
    with styled():
        heights = [1.9, 1.7, 2.7]
        figure, all_axes = panels(heights)
        titles = ("running requests", "draft width", "output (tok/s)")
        for axes, field, title, height in zip(all_axes, ("running", "width", "tps"), titles, heights, strict=True):
            ends, highest = [], 0.0
            for t in usable:
                ys = np.array([np.nan if v is None else v for v in getattr(t, field)], dtype=float)
                if np.isnan(ys).all():
                    continue
                step = "post" if field == "width" else "default"
                axes.plot(
                    t.t_s, ys, color=style[t.label].color, lw=1.6, drawstyle=f"steps-{step}" if step == "post" else step
                )
                highest = max(highest, float(np.nanmax(ys)))
                ends.append((float(ys[~np.isnan(ys)][-1]), t.label, style[t.label]))
            axes.set_ylim(0, highest * 1.1 or 1)
            axes.set_xlim(min(min(t.t_s) for t in usable), max(max(t.t_s) for t in usable))
            axes.set_title(title)
            if field == "width":
                axes.set_yticks(sorted({int(v) for t in usable for v in t.width if v is not None}))
            if field == "tps":  # one label a line is enough; colours are the same above
                end_labels(axes, ends, height * 0.72)
        all_axes[-1].set_xlabel("time (s)")
        svg = to_svg(figure, name)
    first = reference or usable[0].label
    base = next((estimate(list(t.total_tps)) for t in usable if t.label == first), None)
    table = []
    for t in usable:
        e = estimate(list(t.total_tps))
        widths = [v for v in t.width if v is not None]
        table.append(
            {
                "policy": t.label,
                "output over the run (tok/s)": e.mean if e else None,
                f"÷ {first}": round(e.mean / base.mean, 3) if e and base else None,
                "mean width": float(np.mean(widths)) if widths else None,
                "n": e.n if e else 0,
            }
        )
    counts = [len(t.total_tps) for t in usable if t.total_tps]
    return Figure(
        name=name,
        svg=svg,
        headline=_headline(usable, first),
        caption=f"{caption} Lines are one repeat; totals are over all.".strip(),
        alt="Running requests, draft width and tokens per second over time for " + listed([t.label for t in usable]),
        table=pd.DataFrame(table),
        sources=sources,
        n=f"n = {min(counts)}" if counts and min(counts) == max(counts) else "",
        flags=flags,
    )


def _headline(timelines: Sequence[Timeline], reference: str) -> str:
    base = next((estimate(list(t.total_tps)) for t in timelines if t.label == reference), None)
    others = [(t.label, e) for t in timelines if t.label != reference and (e := estimate(list(t.total_tps)))]
    if base is None or not others:
        return "Draft width, running requests and throughput over time"
    label, best = max(others, key=lambda pair: pair[1].mean)
    ratio = best.mean / base.mean
    # Policies that held one width all along are that width, whatever their names.
    held = {t.label: w for t in timelines if len(w := {v for v in t.width if v is not None}) == 1}
    same = [name for name, _ in others if name in held and held[name] == held.get(label)]
    if len(same) > 1:
        label = f"Width {next(iter(held[label])):g} all along ({listed(same)})"
    if best.low is None or base.low is None:
        said = f"{label} gives {times(ratio)} the tokens of {reference} over the run"
        return f"{said} (n = {best.n}, so the noise is unknown)"
    if best.low <= (base.high or 0) and base.low <= (best.high or 0):
        return f"No policy differs from {reference} by more than the noise over the run ({number(base.mean)} tok/s)"
    return f"{label} gives {times(ratio)} the tokens of {reference} over the run"
