"""One look for every figure: sizes, colours, axes, labels, and matplotlib's SVG made fit for a page.

Figures are drawn at phone width (a viewBox of about 390 points) and scaled up by the page, so that their text is
readable on both. Text stays text (``svg.fonttype: none``) and is drawn in the reader's system font; it is laid out
in DejaVu Sans, which is wider, so nothing is cut off.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

WIDTH_IN = 5.4
"""Native width of a figure in inches (72 points each)."""

FONT_PT = 11.0

INK = "#222222"
MUTED = "#666666"
GRID = "#e3e3e3"
BAND = "#dddddd"

# Okabe & Ito (2008), without yellow, which cannot be read on white.
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip

_FREE = [ORANGE, BLUE, GREEN, RED, PURPLE, SKY]
_MARKERS = ["s", "^", "D", "v", "P", "X", "<", ">", "h", "*"]

# Arms that the cards and the published notes name have one look for ever, in whatever company they are drawn.
_KNOWN = {
    "baseline": (BLACK, "o"), "no-mtp": (BLACK, "o"), "a": (BLACK, "o"),
    "mtp": (BLUE, "s"), "mtp-1": (BLUE, "s"), "mtp-w1": (BLUE, "s"),
    "mtp-2": (GREEN, "^"), "mtp-w2": (GREEN, "^"),
    "mtp-4": (PURPLE, "v"), "mtp-w4": (PURPLE, "v"),
    "mtp-ngram": (RED, "D"), "mtp+ngram": (RED, "D"),
    "ngram": (ORANGE, "P"),
    "off": ("#777777", "o"), "width-0": ("#777777", "o"), "w0": ("#777777", "o"), "b0": ("#777777", "o"),
    "on": (BLUE, "s"), "width-1": (BLUE, "s"), "w1": (BLUE, "s"), "b1": (BLUE, "s"),
    "width-2": (GREEN, "^"), "w2": (GREEN, "^"), "b2": (GREEN, "^"),
    "width-4": (PURPLE, "v"), "w4": (PURPLE, "v"), "b4": (PURPLE, "v"),
    "stock": (RED, "D"),
}  # fmt: skip

_SYSTEM_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Look:
    """An arm's colour and marker, the same in every figure."""

    color: str
    marker: str

    @property
    def text(self) -> str:
        """The colour darkened, so that a label in it has contrast on white."""
        r, g, b = mpl.colors.to_rgb(self.color)
        return mpl.colors.to_hex((r * 0.72, g * 0.72, b * 0.72))


def looks(arms: Sequence[str]) -> dict[str, Look]:
    """A look for every arm. Known arms have fixed ones; the others take free ones in the given order.

    Give all arms of an experiment, also those a figure leaves out, so that an arm looks alike in all figures.
    """
    found: dict[str, Look] = {}
    for arm in arms:
        if arm in _KNOWN:
            found[arm] = Look(*_KNOWN[arm])
    used = {look.color for look in found.values()}
    free = [color for color in _FREE if color not in used] or _FREE
    markers = [m for m in _MARKERS if m not in {look.marker for look in found.values()}] or _MARKERS
    for index, arm in enumerate(arm for arm in arms if arm not in found):
        found[arm] = Look(free[index % len(free)], markers[index % len(markers)])
    return {arm: found[arm] for arm in arms}


@contextmanager
def styled() -> Iterator[None]:
    """matplotlib's settings for a figure; the process's own settings are left alone."""
    with mpl.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "mtp-kit",
            "font.family": ["DejaVu Sans"],
            "font.size": FONT_PT,
            "axes.titlesize": FONT_PT,
            "axes.titlelocation": "left",
            "axes.titlecolor": INK,
            "axes.labelsize": FONT_PT,
            "axes.labelcolor": MUTED,
            "axes.edgecolor": MUTED,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.axisbelow": True,
            "grid.color": GRID,
            "grid.linewidth": 0.8,
            "xtick.labelsize": FONT_PT - 0.5,
            "ytick.labelsize": FONT_PT - 0.5,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "lines.linewidth": 1.8,
            "lines.markersize": 5.5,
            "text.color": INK,
            # Labels come from records: a $ in one is a dollar, not mathematics.
            "text.parse_math": False,
            "axes.unicode_minus": True,
        }
    ):
        yield


def canvas(height_in: float) -> Canvas:
    """An empty figure of the common width. Call within :func:`styled`."""
    return Canvas(figsize=(WIDTH_IN, height_in), layout="constrained")


def panels(heights_in: Sequence[float]) -> tuple[Canvas, list[Axes]]:
    """Stacked panels, one column (a phone has no room for two). Call within :func:`styled`."""
    figure = canvas(sum(heights_in))
    grid = figure.subplots(len(heights_in), 1, squeeze=False, height_ratios=list(heights_in))
    return figure, [row[0] for row in grid]


def load_axis(axes: Axes, loads: Sequence[float], label: str) -> None:
    """A log2 axis with a tick at each measured load and nowhere else."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(loads)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = min(loads), max(loads)
    pad = 1.13 if len(loads) > 1 else 1.6
    axes.set_xlim(low / pad, high * pad)
    axes.set_xlabel(label)


def end_labels(axes: Axes, ends: Sequence[tuple[float, str, Look]], height_in: float, wrap: int = 13) -> None:
    """Label lines directly at their right ends, pushed apart where they would overlap.

    ``ends``: (y in data units, text, look) of each line's last point. The axis' y limits must be final.
    ``height_in`` is the axes' height, from which the room a line of text takes is known.
    """
    if not ends:
        return
    line = (FONT_PT * 1.3 / 72) / height_in
    wrapped = [textwrap.wrap(text, wrap) or [""] for _, text, _ in ends]
    to_fraction = (axes.transData + axes.transAxes.inverted()).transform
    x = axes.dataLim.x1 if axes.lines else axes.get_xlim()[1]
    from_x = float(to_fraction((x, 1.0))[0]) + 0.02
    wanted = [float(to_fraction((x, y))[1]) for y, _, _ in ends]
    placed = spread(wanted, [len(lines) * line for lines in wrapped])
    for (_, _, look), lines, want, got in zip(ends, wrapped, wanted, placed, strict=True):
        if abs(want - got) > line * 0.5:
            axes.plot([from_x, 1.02], [want, got], transform=axes.transAxes, color=look.color, lw=0.7, clip_on=False)
        axes.text(
            1.03, got, "\n".join(lines), transform=axes.transAxes, color=look.text, va="center", ha="left",
            fontsize=FONT_PT - 0.5, linespacing=1.05,
        )  # fmt: skip


def spread(wanted: Sequence[float], heights: Sequence[float], low: float = 0.0, high: float = 1.02) -> list[float]:
    """Centres as near as possible to ``wanted`` such that boxes of the given heights do not overlap.

    Boxes that touch form a group that is centred on its members' mean wish, and groups merge until none overlap
    (pool adjacent violators). The result keeps the order of ``wanted``; boxes are kept inside [low, high] if they fit.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[list[int]] = []

    def start(group: list[int]) -> float:
        total = sum(heights[i] for i in group)
        wish, offset = 0.0, 0.0
        for i in group:
            wish += wanted[i] - offset - heights[i] / 2
            offset += heights[i]
        return max(low, min(wish / len(group), high - total))

    for i in order:
        groups.append([i])
        while len(groups) > 1 and start(groups[-2]) + sum(heights[j] for j in groups[-2]) > start(groups[-1]) + 1e-12:
            groups[-2:] = [groups[-2] + groups[-1]]
    placed = [0.0] * len(wanted)
    for group in groups:
        y = start(group)
        for i in group:
            placed[i] = y + heights[i] / 2
            y += heights[i]
    return placed


def to_svg(figure: Canvas, name: str) -> str:
    """The figure as an SVG element to be put into a page: no prolog, no date, ids unique to ``name``, system fonts."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    # The page sets the size: without width and height the viewBox alone gives the proportions.
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(?:width|height|version)="[^"]*"', "", head)
    svg = f"{head}>{rest}"
    prefix = re.sub(r"[^a-z0-9]+", "-", name.lower())
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    return svg.replace("'DejaVu Sans'", _SYSTEM_FONTS).strip()
