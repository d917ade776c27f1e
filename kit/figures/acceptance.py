"""Acceptance against load: the share of drafted tokens that survives, and the tokens a verify step yields.

The two are kept apart: acceptance says how good the drafts are, tokens per step what a step is worth. Neither says
what the step costs.
"""

from __future__ import annotations

from dataclasses import replace

from kit.figures.figure import Figure, NotRecorded, number
from kit.figures.lines import draw_lines, line_table
from kit.figures.style import panels, styled, to_svg
from kit.figures.sweep import Sweep
from kit.records.metrics import METRICS


def acceptance(sweep: Sweep, name: str = "acceptance") -> Figure:
    """Acceptance rate and tokens per verify step of the drafting arms.

    Raises NotRecorded if no arm drafted or the server told no counts.
    """
    tags = [tag for tag in ("acceptance", "tokens_per_step") if sweep.known(tag)]
    if not tags:
        raise NotRecorded("acceptance was not recorded: no arm drafted, or the server tells no counts")
    drafting = {arm: label for arm, label in sweep.arms.items() if any(sweep.known(tag, arm) for tag in tags)}
    drawn = replace(sweep, arms=drafting, styles={arm: sweep.look(arm) for arm in sweep.arms})
    with styled():
        heights = [2.55] * (len(tags) - 1) + [2.85]
        figure, all_axes = panels(heights)
        for axes, tag, height in zip(all_axes, tags, heights, strict=True):
            title = "accepted ÷ drafted tokens" if tag == "acceptance" else "tokens per verify step"
            draw_lines(axes, drawn, tag, title, height, last=tag == tags[-1], top=1.0 if tag == "acceptance" else None)
        svg = to_svg(figure, name)
    return Figure(
        name=name,
        svg=svg,
        headline=_headline(drawn, tags[0]),
        caption=f"Pooled counts over the window, never a mean of rates. {sweep.caption(tags[0])}",
        alt=f"Line charts of {' and '.join(METRICS[t].title for t in tags)} against {sweep.load_title}.",
        table=line_table(drawn, tags),
        sources=sweep.sources,
        n=drawn.n_text(tags[0]),
        flags=sweep.flags,
    )


def _headline(sweep: Sweep, tag: str) -> str:
    """How far the value moves over the loads, by the arm that moves most."""
    spans = []
    for arm in sweep.arms:
        means = [e.mean for load in sweep.loads if (e := sweep.estimate(tag, arm, load))]
        if means:
            spans.append((max(means) - min(means), min(means), max(means), arm))
    span, low, high, arm = max(spans)
    title = METRICS[tag].title.capitalize()
    if len(sweep.loads) == 1 or span == 0:
        return f"{title}: {number(high)} ({sweep.label(arm)})"
    if span < 0.1 * high:
        within = f"{number(span / high * 100, 2)}\u00a0%"
        return f"{title} stays within {within} over all {sweep.load_letter}: drafts are as good under load"
    return f"{title} moves with load: {number(low)} to {number(high)} ({sweep.label(arm)})"
