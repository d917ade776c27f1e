"""Goodput against load: requests per second that met every latency target, and their share of all sent."""

from __future__ import annotations

from kit.figures.figure import Figure, NotRecorded
from kit.figures.lines import draw_lines, line_table
from kit.figures.style import panels, styled, to_svg
from kit.figures.sweep import Sweep, finding


def goodput(sweep: Sweep, targets: str = "", name: str = "goodput") -> Figure:
    """Goodput and attainment. ``targets`` says the latency targets, as ``TTFT ≤ 500 ms, TPOT ≤ 50 ms``.

    Raises NotRecorded if no targets were set.
    """
    tags = [tag for tag in ("goodput", "attainment") if sweep.known(tag)]
    if "goodput" not in tags:
        raise NotRecorded("goodput was not recorded: no latency targets were set")
    titles = {"goodput": "requests/s that met every target", "attainment": "share of all requests sent"}
    with styled():
        heights = [2.55] * (len(tags) - 1) + [2.85]
        figure, all_axes = panels(heights)
        for axes, tag, height in zip(all_axes, tags, heights, strict=True):
            draw_lines(
                axes, sweep, tag, titles[tag], height, last=tag == tags[-1], top=1.03 if tag == "attainment" else None
            )
        svg = to_svg(figure, name)
    stated = f"Targets: {targets}. " if targets else ""
    return Figure(
        name=name,
        svg=svg,
        headline=finding(sweep, "goodput"),
        caption=f"{stated}The denominator of the share is every request sent, failures too. {sweep.caption('goodput')}",
        alt=f"Line charts of goodput and attainment against {sweep.load_title}.",
        table=line_table(sweep, tags),
        sources=sweep.sources,
        n=sweep.n_text("goodput"),
        flags=sweep.flags,
    )
