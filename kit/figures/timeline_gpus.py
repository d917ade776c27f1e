"""What each GPU did during a few chunks of a prompt: lanes of busy spans, with the gaps between them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd
from matplotlib.axes import Axes

from kit.figures.figure import Figure, NotRecorded, Source, listed, number
from kit.figures.style import BLUE, FONT_PT, GREEN, MUTED, ORANGE, panels, styled, to_svg

COLORS = {"target": BLUE, "mtp": ORANGE, "copy": GREEN, "other": "#999999"}
WORDS = {"target": "target", "mtp": "MTP pass", "copy": "copies", "other": "other"}

WAITING = "#dddddd"
AT_ONCE_US = 10_000.0
"""A gap longer than this, around a pause or beginning this soon after it, is the pause's doing."""

Span = tuple[float, float, str]
"""Begin and end in µs, and what ran."""


@dataclass(frozen=True)
class Lanes:
    """One arm: the busy spans of each GPU (by its number), and of the host's calls, in µs from the first."""

    label: str
    gpus: Mapping[int, Sequence[Span]]
    host: Sequence[Span] = ()
    chunks: int | None = None
    waits: Sequence[tuple[float, float]] = ()
    """When the host waited for a GPU, µs."""
    pauses: Sequence[tuple[float, float]] = ()
    """When something else than the passes stopped all GPUs (a checkpoint of the model's states), µs."""

    @property
    def end(self) -> float:
        """When the last GPU span ends, µs."""
        return max((spans[-1][1] for spans in self.gpus.values() if spans), default=0.0)

    def busy(self, gpu: int) -> float:
        """Share of the time between the GPU's first and last work in which it ran anything.

        Before it and after it the profile has no say: there the pipeline fills and drains, once per profile. A gap in
        which a pause lies, or that follows it at once while the pipeline fills again, is left out.
        """
        joined = merged(self.gpus[gpu], 0.0, labels=False)
        if not joined:
            return 0.0
        idle = [(a[1], b[0]) for a, b in pairwise(joined)]
        paused = sum(
            e - b
            for b, e in idle
            if any(b <= end + AT_ONCE_US and e > begin and e - b > AT_ONCE_US for begin, end in self.pauses)
        )
        return sum(end - begin for begin, end, _ in joined) / (joined[-1][1] - joined[0][0] - paused)


def merged(spans: Sequence[Span], gap: float, labels: bool = True) -> list[Span]:
    """Spans that overlap or lie closer together than ``gap`` µs as one, within a label or regardless of labels."""
    found: list[Span] = []
    for begin, end, label in sorted(spans):
        if found and (not labels or found[-1][2] == label) and begin - found[-1][1] <= gap:
            found[-1] = (found[-1][0], max(found[-1][1], end), found[-1][2])
        else:
            found.append((begin, end, label))
    return found


def timeline_gpus(
    arms: Sequence[Lanes],
    caption: str = "",
    sources: Sequence[Source] = (),
    flags: Sequence[str] = (),
    name: str = "timeline-gpus",
) -> Figure:
    """A panel per arm on one time axis, a lane per GPU and one for the host's calls. Raises NotRecorded without any."""
    arms = [a for a in arms if a.end > 0]
    if not arms:
        raise NotRecorded("no timeline of the GPUs was recorded")
    longest = max(a.end for a in arms)
    with styled():
        heights = [0.38 * (len(a.gpus) + bool(a.host)) + 0.85 for a in arms]
        figure, all_axes = panels([*heights[:-1], heights[-1] + 0.75])
        for axes, lanes in zip(all_axes, arms, strict=True):
            _panel(axes, lanes, longest)
        all_axes[-1].set_xlabel("ms", color=MUTED)
        shown = [k for k in COLORS if any(s[2] == k for a in arms for spans in a.gpus.values() for s in spans)]
        handles = [all_axes[-1].barh(0, 0, color=COLORS[k], label=WORDS[k]) for k in shown]
        if any(a.waits for a in arms):
            handles.append(all_axes[-1].barh(0, 0, color=WAITING, label="host waits"))
        all_axes[-1].legend(handles=handles, loc="upper left", bbox_to_anchor=(-0.12, -0.34), ncols=4, frameon=False,
                            fontsize=FONT_PT - 1, handlelength=1.0, columnspacing=1.0)  # fmt: skip
        svg = to_svg(figure, name)
    rows = [
        {
            "arm": lanes.label,
            "GPU": str(gpu),
            "busy, first to last work": f"{lanes.busy(gpu) * 100:.0f} %",
            "profile": f"{lanes.end / 1000:.1f} ms",
            "longest gap (ms)": longest_gap(lanes.gpus[gpu]) / 1000,
            **{f"{WORDS[k]} (ms)": sum(e - b for b, e, label in lanes.gpus[gpu] if label == k) / 1000 for k in COLORS},
        }
        for lanes in arms
        for gpu in lanes.gpus
    ]
    return Figure(
        name=name,
        svg=svg,
        headline=_headline(arms),
        caption=f"{caption} Taken with torch's profiler, which slows the host: read the shape, not the speed. "
        "White between the bars is a GPU that waits, and a host that does something else than launching. Busy: between "
        f"a GPU's first and last work{_paused(arms)}.".strip(),
        alt="Timelines of the GPUs. "
        + listed([f"{a.label}: " + ", ".join(f"GPU {g} busy {a.busy(g):.0%}" for g in a.gpus) for a in arms]),
        table=pd.DataFrame(rows),
        sources=sources,
        n="one profile per arm",
        flags=flags,
    )


def _paused(arms: Sequence[Lanes]) -> str:
    longest = max((e - b for a in arms for b, e in a.pauses), default=0.0)
    if not longest:
        return ""
    return f", but for the gap that copying recurrent states to the host makes ({longest / 1000:.0f} ms, once)"


def longest_gap(spans: Sequence[Span]) -> float:
    """The longest time without work between a GPU's first and last span, µs."""
    joined = merged(spans, 0.0, labels=False)
    return max((b[0] - a[1] for a, b in pairwise(joined)), default=0.0)


def _panel(axes: Axes, lanes: Lanes, longest: float) -> None:
    gap = longest / 600  # finer than a line is wide
    rows: list[tuple[str, Sequence[Span]]] = [(f"GPU {gpu}", spans) for gpu, spans in lanes.gpus.items()]
    if lanes.host:
        rows.append(("host", lanes.host))
    for y, (_, spans) in enumerate(rows):
        for label, color in COLORS.items():
            mine = merged([s for s in spans if s[2] == label], gap)
            axes.broken_barh(
                [(b / 1000, max(e - b, gap / 2) / 1000) for b, e, _ in mine], (y - 0.32, 0.64), color=color, lw=0
            )
    if lanes.host:
        last = [(b / 1000, (min(e, lanes.end) - b) / 1000) for b, e in lanes.waits if b < lanes.end]
        axes.broken_barh(last, (len(rows) - 1 - 0.32, 0.64), color=WAITING, lw=0, zorder=3)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.tick_params(axis="y", length=0, labelcolor="#333333")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, longest / 1000)
    axes.grid(False)
    busy = ", ".join(f"GPU {gpu} busy {lanes.busy(gpu):.0%}" for gpu in lanes.gpus)
    axes.set_title(textwrap.fill(f"{lanes.label}: {busy}", 46))


def _headline(arms: Sequence[Lanes]) -> str:
    first = arms[0]
    least = min(first.busy(gpu) for gpu in first.gpus)
    chunks = f"{first.chunks} chunks" if first.chunks else "the profile"
    text = (
        f"{first.label[:1].upper()}{first.label[1:]}: in {chunks} a GPU stands still for up to "
        f"{(1 - least) * 100:.0f}\u00a0% of the time between its first and last work"
    )
    for other in arms[1:]:
        rest = min(other.busy(gpu) for gpu in other.gpus)
        text += f"; {other.label}: {number((1 - rest) * 100, 2)}\u00a0%"
    return text
