"""What deferring costs in GPU memory: measured peaks over a reference arm, beside the bytes the queue should hold."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from kit.figures.figure import Figure, NotRecorded, Source, listed, number
from kit.figures.style import BLUE, FONT_PT, INK, MUTED, RED, canvas, styled, to_svg
from kit.records.stats import Estimate, estimate

MIB = 1024 * 1024


@dataclass(frozen=True)
class MemoryRow:
    """One arm: peak bytes by repeat (empty: not measured) and the queue's predicted bytes (None: unknown)."""

    label: str
    peak_bytes: Sequence[float] = ()
    predicted_bytes: float | None = None


def memory_bill(
    rows: Sequence[MemoryRow],
    reference: str | None = None,
    caption: str = "",
    sources: Sequence[Source] = (),
    flags: Sequence[str] = (),
    name: str = "memory-bill",
) -> Figure:
    """Bars: measured peak minus the reference arm's mean peak; ticks: the prediction. MiB.

    ``reference`` is the label of the arm without a queue; None where only predictions are drawn.
    Raises NotRecorded if there is neither a measured nor a predicted value.
    """
    base = next((estimate(list(r.peak_bytes)) for r in rows if r.label == reference), None)
    drawn = [r for r in rows if r.label != reference]
    measured: dict[str, Estimate | None] = {
        r.label: estimate([p - base.mean for p in r.peak_bytes]) if base else None for r in drawn
    }
    if not any(measured.values()) and all(r.predicted_bytes is None for r in drawn):
        raise NotRecorded("peak memory was not recorded, nor is the queue's size known")
    with styled():
        figure = canvas(len(drawn) * 0.42 + 1.25)
        axes = figure.subplots()
        top = 0.0
        for y, row in enumerate(drawn):
            e = measured[row.label]
            predicted = None if row.predicted_bytes is None else row.predicted_bytes / MIB
            if e is not None:
                axes.barh(y, e.mean / MIB, height=0.6, color=BLUE, alpha=0.8, zorder=2)
                axes.plot([(p - base.mean) / MIB for p in row.peak_bytes], [y] * len(row.peak_bytes), ".", color=INK,
                          alpha=0.5, zorder=3)  # fmt: skip
            if predicted is not None:
                axes.plot([predicted, predicted], [y - 0.38, y + 0.38], color=RED, lw=2.4, zorder=4)
            edge = max([v for v in (e.mean / MIB if e else None, predicted) if v is not None] or [0.0])
            top = max(top, edge)
            parts = [number(round(e.mean / MIB, 1))] if e is not None else []
            if predicted is not None:
                parts.append(f"predicted {number(predicted)}")
            axes.annotate(" · ".join(parts) or "–", (max(edge, 0), y), xytext=(6, 0), textcoords="offset points",
                          va="center", fontsize=FONT_PT - 0.5, color=INK)  # fmt: skip
        axes.set_yticks(range(len(drawn)), [textwrap.fill(r.label, 20) for r in drawn])
        axes.tick_params(axis="y", length=0, labelcolor="#333333")
        axes.set_ylim(len(drawn) - 0.4, -0.6)
        axes.set_xlim(min(0, axes.get_xlim()[0]), (top or 1) * 2.1)
        axes.grid(False, axis="y")
        axes.set_xlabel("MiB over the arm without a queue" if base else "MiB the queue holds", color=MUTED)
        svg = to_svg(figure, name)
    table = pd.DataFrame(
        [
            {
                "arm": r.label,
                "measured over reference (MiB)": round(m.mean / MIB, 1) + 0.0 if (m := measured[r.label]) else None,
                "predicted queue (MiB)": None if r.predicted_bytes is None else r.predicted_bytes / MIB,
                "n": len(r.peak_bytes),
            }
            for r in drawn
        ]
    )
    if reference and base:
        caption = f"{caption} Reference: {reference}, peak {number(base.mean / MIB)} MiB."
    counts = [len(r.peak_bytes) for r in drawn if r.peak_bytes]
    return Figure(
        name=name,
        svg=svg,
        headline=_headline(drawn, measured),
        caption=f"{caption} Red ticks: predicted size of the queue (chunks × tokens × hidden size × 2 bytes).".strip(),
        alt="Bars of queue memory in MiB: "
        + listed(
            [
                f"{r.label} measured {number(m.mean / MIB)}" if (m := measured[r.label]) else f"{r.label} predicted"
                for r in drawn
            ]
        ),
        table=table,
        sources=sources,
        n=(f"n = {min(counts)}" if min(counts) == max(counts) else f"n = {min(counts)} to {max(counts)} per arm")
        if counts
        else "",
        flags=flags,
    )


def _headline(rows: Sequence[MemoryRow], measured: dict[str, Estimate | None]) -> str:
    both = [(r, e) for r in rows if (e := measured[r.label]) is not None and r.predicted_bytes]
    if not both:
        known = [r for r in rows if r.predicted_bytes is not None]
        top = max(known, key=lambda r: r.predicted_bytes or 0)
        return (
            f"The queue should hold at most {number((top.predicted_bytes or 0) / MIB)} MiB ({top.label}); not measured"
        )
    gaps = [(e.mean - (r.predicted_bytes or 0)) / MIB for r, e in both]
    if max(gaps) <= 0 and min(-g / (r.predicted_bytes or 1) * MIB for g, (r, _) in zip(gaps, both, strict=True)) > 0:
        return f"The queue never costs more memory than predicted; at most {number(-min(gaps))} MiB less"
    worst, e = max(both, key=lambda pair: abs(pair[1].mean - (pair[0].predicted_bytes or 0)))
    gap = (e.mean - (worst.predicted_bytes or 0)) / MIB
    if abs(gap) <= 0.1 * (worst.predicted_bytes or 1) / MIB:
        return "The queue costs the memory that was predicted, within a tenth"
    side = "more" if gap > 0 else "less"
    return f"Memory is off the prediction by up to {number(abs(gap))} MiB {side} ({worst.label})"
