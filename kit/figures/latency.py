"""Latency against load: time to first token, time per output token, and the decode rate of a stream."""

from __future__ import annotations

from collections.abc import Sequence

from kit.figures.figure import Figure, NotRecorded, listed, number
from kit.figures.lines import FEW_REQUESTS, draw_lines, line_table
from kit.figures.style import panels, styled, to_svg
from kit.figures.sweep import Sweep, finding
from kit.records.metrics import METRICS

FIRST_TOKEN = ("ttft_p50", "ttft_p99")
STREAMING = ("decode_rate_p50", "tpot_p50")


def latency(sweep: Sweep, metrics: Sequence[str] = FIRST_TOKEN, name: str = "latency") -> Figure:
    """A panel per metric; the headline is about the first that was recorded.

    Raises NotRecorded if none of the metrics was.
    """
    found = [metric for metric in metrics if sweep.known(metric)]
    if not found:
        raise NotRecorded(f"not recorded in these cells: {listed([METRICS[m].title for m in metrics])}")
    missing = [METRICS[m].title for m in metrics if m not in found]
    with styled():
        heights = [2.55] * (len(found) - 1) + [2.85]
        figure, all_axes = panels(heights)
        for axes, metric, height in zip(all_axes, found, heights, strict=True):
            title = f"{METRICS[metric].title} ({METRICS[metric].unit})"
            draw_lines(axes, sweep, metric, title, height, last=metric == found[-1])
        svg = to_svg(figure, name)
    caption = sweep.caption(found[0])
    if any(metric.endswith("_p99") for metric in found):
        caption += _few_requests(sweep)
    if missing:
        caption += f" Not recorded: {listed(missing)}."
    texts = []
    for metric in found:
        for arm in sweep.arms:
            points = [(load, e.mean) for load in sweep.loads if (e := sweep.estimate(metric, arm, load))]
            if points:
                texts.append(
                    f"{METRICS[metric].title} of {sweep.label(arm)} from {number(points[0][1])} "
                    f"to {number(points[-1][1])} {METRICS[metric].unit}"
                )
    return Figure(
        name=name,
        svg=svg,
        headline=finding(sweep, found[0]),
        caption=caption,
        alt=f"Line charts against {sweep.load_title}: {listed(texts)}.",
        table=line_table(sweep, found) if len(found) > 1 else line_table(sweep, found[:1]),
        sources=sweep.sources,
        n=sweep.n_text(found[0]),
        flags=sweep.flags,
    )


def _few_requests(sweep: Sweep) -> str:
    """Where a p99 rests on few requests, by load."""
    fewest = {
        load: min(known)
        for load in sweep.loads
        if (known := [n for arm in sweep.arms if (n := sweep.requests.get(arm, {}).get(load)) is not None])
        and min(known) < FEW_REQUESTS
    }
    if not fewest:
        return ""
    where = listed([f"{n} at {sweep.at(load)}" for load, n in fewest.items()])
    return (
        f" Fewer than {FEW_REQUESTS} requests ended in some windows (as few as {where}): a p99 of so few is little "
        "else than their largest value."
    )
