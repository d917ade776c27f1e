"""From the baseline to MTP in steps: what each single difference between two neighbouring arms costs or gains.

The arms form a ladder in which each rung differs from the one before in one thing (capacity; the fixed cost of
carrying MTP; draft-extend; drafting and verification). Steps are ratios paired by repeat, so they multiply to the
whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from kit.figures.figure import Figure, NotRecorded, Source, listed, number, percent, percent_within
from kit.figures.style import BLACK, BLUE, FONT_PT, GREEN, MUTED, RED, panels, styled, to_svg
from kit.figures.sweep import Sweep
from kit.records.stats import Estimate, ratio_estimate, within_noise


@dataclass(frozen=True)
class Rung:
    """One arm of the ladder at one load: its label and value by repeat. ``step`` names what separates it from the
    rung before (None for the first)."""

    label: str
    values: Mapping[int, float | None]
    step: str | None = None

    @property
    def mean(self) -> float | None:
        """Mean of the known repeats."""
        known = [v for v in self.values.values() if v is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Ladder:
    """All rungs at one load point, first to last.

    ``noise``: half-width of the spread of an arm measured twice (A/A), as a natural logarithm of a ratio; None without.
    """

    load: float
    rungs: Sequence[Rung]
    noise: float | None = None


def waterfall(
    ladders: Sequence[Ladder],
    unit: str = "tok/s",
    letter: str = "c",
    caption: str = "",
    sources: Sequence[Source] = (),
    flags: Sequence[str] = (),
    name: str = "waterfall",
    of: str = "",
) -> Figure:
    """A panel per load: the first and last arm as bars from 0, the steps between as floating bars with their change.

    ``of``: what the changes are changes of, where it is not the output.

    A step whose 95 % interval covers no change is drawn pale and marked (noise). Raises NotRecorded if no ladder has
    two known rungs.
    """
    usable = [
        replace(ladder, rungs=[r for r in ladder.rungs if r.mean is not None])
        for ladder in ladders
        if sum(r.mean is not None for r in ladder.rungs) >= 2
    ]
    if not usable:
        raise NotRecorded("the ablation needs at least two of its arms at one load")
    table, largest = [], []
    with styled():
        heights = [(len(ladder.rungs) + 1) * 0.36 + 0.6 for ladder in usable]
        figure, all_axes = panels(heights)
        for axes, ladder in zip(all_axes, usable, strict=True):
            steps = steps_of(ladder)
            values = [r.mean or 0.0 for r in ladder.rungs]
            labels = [ladder.rungs[0].label]
            axes.barh(0, values[0], height=0.66, color=BLACK, alpha=0.85, zorder=2)
            _value(axes, values[0], 0, f"{number(values[0])} {unit}")
            for row, (before, after, (title, change)) in enumerate(
                zip(values[:-1], values[1:], steps, strict=True), start=1
            ):
                quiet = change is not None and within_noise(change, ladder.noise)
                color = MUTED if quiet else GREEN if after >= before else RED
                axes.barh(
                    row, after - before, left=before, height=0.66, color=color, alpha=0.4 if quiet else 0.9, zorder=2
                )
                axes.plot([before, before], [row - 1.33, row + 0.33], color=MUTED, lw=0.7, zorder=1)
                text = percent(change.mean) if change else "–"
                text += " (noise)" if quiet else ""
                _value(axes, max(before, after), row, text)
                labels.append(title)
                largest.append((ladder.load, title, change))
                table.append(
                    {
                        letter: f"{ladder.load:g}",
                        "step": title,
                        f"from ({unit})": before,
                        f"to ({unit})": after,
                        "change": percent(change.mean) if change else None,
                        "95 % interval": percent_within(change) if change else None,
                        "n": change.n if change else 0,
                    }
                )
            last = len(values)
            axes.barh(last, values[-1], height=0.66, color=BLUE, alpha=0.85, zorder=2)
            _value(axes, values[-1], last, f"{number(values[-1])} {unit}")
            labels.append(ladder.rungs[-1].label)
            axes.set_yticks(range(last + 1), labels)
            axes.tick_params(axis="y", length=0, labelcolor="#333333")
            axes.set_ylim(last + 0.55, -0.55)
            axes.set_xlim(0, max(values) * 1.5)
            axes.set_xticks([])
            axes.grid(False)
            axes.spines["bottom"].set_visible(False)
            axes.set_title(f"{letter}\u00a0=\u00a0{ladder.load:g}", fontweight="bold")
        svg = to_svg(figure, name)
    counts = [change.n for _, _, change in largest if change]
    banded = any(ladder.noise is not None for ladder in usable)
    spread = (
        "Pale steps have a 95 % interval that covers no change"
        + (", or lie within the spread of an arm measured twice (A/A)." if banded else ".")
        if counts and max(counts) >= 3
        else "Too few repeats for intervals."
    )
    return Figure(
        name=name,
        svg=svg,
        headline=_headline(usable, letter) + (f" {of}" if of else ""),
        caption=f"{caption} Each step is the ratio of two neighbouring arms, paired by repeat. {spread}".strip(),
        alt="Waterfall from the first arm to the last. "
        + listed([f"at {letter} = {load:g} {title} {percent(c.mean)}" for load, title, c in largest if c]),
        table=pd.DataFrame(table),
        sources=sources,
        n=(f"n = {min(counts)}" if min(counts) == max(counts) else f"n = {min(counts)} to {max(counts)} per step")
        if counts
        else "",
        flags=flags,
    )


def steps_of(ladder: Ladder) -> list[tuple[str, Estimate | None]]:
    """What separates each rung from the one before, with their ratio paired by repeat."""
    return [
        (after.step or f"{before.label} → {after.label}", ratio_estimate(after.values, before.values))
        for before, after in zip(ladder.rungs[:-1], ladder.rungs[1:], strict=True)
    ]


def _value(axes, x: float, y: float, text: str) -> None:  # noqa: ANN001 (matplotlib Axes)
    axes.annotate(text, (x, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=FONT_PT - 0.5)


def _headline(ladders: Sequence[Ladder], letter: str) -> str:
    """The costliest step at the largest load, if it is larger than the noise."""
    ladder = max(ladders, key=lambda ladder: ladder.load)
    steps = [(title, c) for title, c in steps_of(ladder) if c is not None]
    where = f"at {letter}\u00a0=\u00a0{ladder.load:g}"
    if not steps:
        return f"From baseline to MTP {where}"
    sure = [(title, c) for title, c in steps if c.low is not None and not within_noise(c, ladder.noise)]
    if not sure and all(c.low is not None for _, c in steps):
        return f"No single step between baseline and MTP is larger than the noise {where}"
    if not sure:
        told = listed([f"{title} {percent(c.mean)}" for title, c in steps])
        n = min(c.n for _, c in steps)
        return f"From baseline to drafting {where}: {told} (n = {n}, so the noise is unknown)"
    title, change = min(sure, key=lambda pair: pair[1].mean)
    if change.mean >= 1:
        return f"No cost larger than the noise {where}; the largest gain is {max(sure, key=lambda p: p[1].mean)[0]}"
    return f"{title[:1].upper()}{title[1:]} is the largest cost {where}: {percent(change.mean)}"


def ladders(sweep: Sweep, steps: Sequence[tuple[str, str | None]], metric: str = "output_tps") -> list[Ladder]:
    """A ladder per load from a sweep's arms. ``steps``: (arm, what separates it from the one before)."""
    return [
        ladder_of(
            load,
            [(sweep.label(arm), sweep.repeats(metric, arm, load), step) for arm, step in steps],
            sweep.noise(metric, load),
        )
        for load in sweep.loads
    ]


def ladder_of(
    load: float, steps: Sequence[tuple[str, Mapping[int, float | None], str | None]], noise: float | None = None
) -> Ladder:
    """A ladder from (label, values by repeat, what separates it from the one before).

    One without a value is left out, and its step is joined to the next one's name.
    """
    rungs: list[Rung] = []
    pending: list[str] = []
    for label, values, step in steps:
        pending += [step] if step else []
        if any(v is not None for v in values.values()):
            rungs.append(Rung(label, values, " + ".join(pending) if rungs else None))
            pending = []
    return Ladder(load, rungs, noise)
