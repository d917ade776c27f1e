"""What a figure function returns: the picture, what it says, what it rests on, and the same numbers as a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import pandas as pd

from kit.errors import KitError
from kit.records.stats import Estimate

TOO_FEW = "too few repeats"
"""In a headline that states no finding: it stands with its figure, and not in a page's summary."""


class NotRecorded(KitError):
    """There is nothing to draw: the quantity was not recorded. The message says what would record it."""


@dataclass(frozen=True)
class Source:
    """Where a figure's numbers come from, as it is printed under the figure."""

    run: str
    file: str
    lines: str = ""
    """Line numbers in ``file``, compact: 3–8, 11."""
    commit: str | None = None
    dirty: bool | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.lines}" if self.lines else self.file
        parts = [self.run, where]
        if self.commit:
            parts.append(f"commit {self.commit[:10]}" + (" with uncommitted changes" if self.dirty else ""))
        return " · ".join(part for part in parts if part)


@dataclass(frozen=True)
class Figure:
    """A finished figure. Every text is plain text; :meth:`to_html` escapes it.

    ``headline`` is the finding, computed from the numbers. ``caption`` says what differs between the arms, n and how
    uncertainty is shown. ``flags`` are labels that must follow the numbers (simulated, client-bound, …).
    """

    name: str
    svg: str
    headline: str
    caption: str
    alt: str
    table: pd.DataFrame
    sources: Sequence[Source] = ()
    n: str = ""
    flags: Sequence[str] = field(default_factory=tuple)

    @property
    def anchor(self) -> str:
        """The id of the figure on a page."""
        return "fig-" + re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def to_html(self) -> str:
        """The figure for a page or a notebook: headline, SVG with its text alternative, caption, table."""
        flags = "".join(f'<li class="flag">{escape(flag)}</li>' for flag in self.flags)
        flags = f'<ul class="flags" aria-label="Labels of these numbers">{flags}</ul>' if flags else ""
        source = "; ".join(str(s) for s in self.sources)
        note = " · ".join(part for part in (source, self.n) if part)
        source_html = f'<p class="source">Source: {escape(note)}</p>' if note else ""
        # Size and ground stand in the element itself, for notebooks (which know no style sheet and may be dark).
        style = "display:block;width:100%;max-width:35rem;height:auto;background:#fff"
        svg = self.svg.replace("<svg ", f'<svg role="img" aria-label="{escape(self.alt)}" style="{style}" ', 1)
        return (
            f'<section class="finding" id="{escape(self.anchor)}">'
            f'<div class="keep"><h3 class="headline">{escape(_unbroken(self.headline))}</h3>'
            f"<figure>{svg}<figcaption>{flags}<p>{escape(self.caption)}</p>{source_html}</figcaption></figure></div>"
            f"<details><summary>The numbers as a table</summary>{table_html(self.table)}</details></section>"
        )

    def _repr_html_(self) -> tuple[str, dict]:
        """For notebooks. The metadata lets a report collect the findings without reading HTML."""
        meta = {"headline": _unbroken(self.headline), "anchor": self.anchor, "sources": [str(s) for s in self.sources]}
        return self.to_html(), {"kit_figure": meta}


def _unbroken(text: str) -> str:
    """No line break within "n = 3"."""
    return text.replace(" = ", "\u00a0=\u00a0")


def table_html(table: pd.DataFrame, caption: str | None = None) -> str:
    """A plain table that scrolls sideways within itself on a phone. All cells are escaped.

    None is shown as –; a column that holds nothing else is left out.
    """
    table = table.dropna(axis=1, how="all")
    numeric = [bool(pd.api.types.is_numeric_dtype(table[column])) for column in table.columns]
    # The first column names the row, so it is set as text whatever it holds.
    head = "".join(
        ('<th scope="col" class="num">' if number and position else '<th scope="col">') + f"{escape(str(column))}</th>"
        for position, (column, number) in enumerate(zip(table.columns, numeric, strict=True))
    )
    rows = []
    for values in table.itertuples(index=False):
        cells = []
        for position, (value, number) in enumerate(zip(values, numeric, strict=True)):
            text = escape(show(value))
            if position == 0:
                cells.append(f'<th scope="row">{text}</th>')
            else:
                cells.append(f'<td class="num">{text}</td>' if number else f"<td>{text}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption or "table")}"><table>{title}'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def show(value: object) -> str:
    """A value for a table: four significant digits, – for unknown."""
    if value is None or (isinstance(value, float) and value != value):
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return number(value, 4)


def number(value: float, digits: int = 3) -> str:
    """A number as people write it: ``digits`` significant, no exponent, thousands unrounded (1234, 0.0123)."""
    if value == 0:
        return "0"
    if abs(value) >= 10**digits or (float(value).is_integer() and abs(value) < 1e15):
        return f"{value:,.0f}".replace("-", "−")
    text = f"{value:.{digits}g}"
    if "e" in text:
        text = f"{value:.10f}".rstrip("0")
    return text.replace("-", "−")


def interval_text(low: float | None, high: float | None) -> str | None:
    """The interval of a quantity that cannot be below 0; one that reaches there is cut, and says so."""
    if low is None or high is None:
        return None
    return f"0 (clipped) to {number(high)}" if low < 0 else f"{number(low)} to {number(high)}"


def times(value: float) -> str:
    """A ratio: 1.21×, with a third decimal only where it is needed to tell it from 1."""
    decimals = 3 if 0 < abs(value - 1) < 0.005 else 2
    return f"{value:.{decimals}f}×"


def times_within(ratio: Estimate) -> str:
    """A ratio with its interval, where it has one: 2.76× (2.42 to 3.15)."""
    if ratio.low is None or ratio.high is None:
        return times(ratio.mean)
    return f"{times(ratio.mean)} ({number(ratio.low)} to {number(ratio.high)})"


def percent_within(ratio: Estimate) -> str | None:
    """The interval of a ratio as changes: −24.8 % to −18.4 %; None where there is none."""
    if ratio.low is None or ratio.high is None:
        return None
    return f"{percent(ratio.low)} to {percent(ratio.high)}"


def percent(ratio: float, decimals: int = 1) -> str:
    """A ratio as a change: +20.9 %."""
    change = (ratio - 1) * 100
    return f"{change:+.{decimals}f}\u00a0%".replace("-", "−")


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    words = list(words)
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else ""


def ranges(numbers: Sequence[int]) -> str:
    """Compact line numbers: 3–8, 11."""
    found: list[list[int]] = []
    for value in sorted(set(numbers)):
        if found and value == found[-1][1] + 1:
            found[-1][1] = value
        else:
            found.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in found)
