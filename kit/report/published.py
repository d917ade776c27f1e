"""The two published notes: their numbers as transcribed, every ratio they state recomputed, and the same as figures.

``data/published/<name>.csv`` holds one printed number a line, with the line of the note's text it stands on;
``<name>.yaml`` says what the note measured, which of its numbers follow from others (*claims*), which cannot be
checked, and where the note contradicts itself. A claim agrees if the stated number, known only to its printed digits,
can follow from numbers known only to theirs: two intervals that overlap.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import yaml

from kit.cards import ROOT
from kit.deferred.model import chunk_bytes
from kit.errors import KitError
from kit.figures.figure import Source, number
from kit.figures.memory_bill import MIB, MemoryRow
from kit.figures.prefill_depth import DepthPoint, DepthSeries, fit_depths
from kit.figures.sweep import Sweep

FOLDER = ROOT / "data" / "published"

CHUNK_TOKENS = 3072
"""Of the ExLlamaV3 note (its line 108)."""


@dataclass(frozen=True)
class Value:
    """One printed number. ``kind``: stated in the text, axis (end or tick of a figure's axis), or exact (a setting)."""

    id: str
    line: int
    where: str
    quantity: str
    arm: str
    load: float | None
    value: float
    unit: str
    printed: str
    kind: str

    @property
    def half(self) -> float:
        """Half a unit of the last printed digit: how well the number is known. 0 for an exact one."""
        return 0.0 if self.kind == "exact" else half_digit(self.printed)


@dataclass(frozen=True)
class Claim:
    """A stated number that follows from others, recomputed. ``low`` and ``high`` hold what the rounding allows."""

    name: str
    stated: Value
    operands: tuple[Value, ...]
    recomputed: float
    low: float
    high: float
    agrees: bool


@dataclass(frozen=True)
class Published:
    """A note: its numbers by id and what the YAML says of it."""

    name: str
    title: str
    values: Mapping[str, Value]
    meta: Mapping

    def source(self, which: str) -> Source:
        """Where the note says a group of numbers comes from."""
        s = self.meta["sources"][which]
        return Source(s["run"], s["file"], s.get("lines", ""), s.get("commit") or None)


def load(name: str, folder: Path = FOLDER) -> Published:
    """A note by name. Raises KitError for an unknown one, or a claim about a number that is not transcribed."""
    path = folder / f"{name}.csv"
    if not path.is_file():
        raise KitError(
            f"no published note {name!r}; the notes are: {', '.join(sorted(p.stem for p in folder.glob('*.csv')))}"
        )
    with path.open(encoding="utf-8", newline="") as handle:
        values = [
            Value(r["id"], int(r["line"]), r["where"], r["quantity"], r["arm"], float(r["c"]) if r["c"] else None,
                  float(r["value"]), r["unit"], r["printed"], r["kind"])
            for r in csv.DictReader(handle)
        ]  # fmt: skip
    meta = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    by_id = {v.id: v for v in values}
    for claim in meta["claims"]:
        for value in [claim["stated"], *claim["of"]]:
            if value not in by_id:
                raise KitError(
                    f"{folder / f'{name}.yaml'}: claim {claim['id']!r} names {value!r}, which is not in {path}"
                )
    return Published(name, meta["title"], by_id, meta)


def half_digit(printed: str) -> float:
    """Half a unit of the last digit of the number in a printed text: 52.7 tok/s → 0.05; 125K → 500; 4:40.9 → 0.05.

    Raises KitError if the text holds no number.
    """
    found = _printed_number(printed)
    if found is None:
        raise KitError(f"no number in {printed!r}")
    digits, thousand = found
    decimals = len(digits.partition(".")[2])
    return 0.5 * 10**-decimals * (1000 if thousand else 1)


def printed_value(printed: str) -> float | None:
    """The number in a printed text, with its sign; minutes:seconds as seconds. None if there is none."""
    minutes = re.fullmatch(r"(\d+):(\d+\.\d+)", printed)
    if minutes:
        return int(minutes[1]) * 60 + float(minutes[2])
    found = _printed_number(printed)
    if found is None:
        return None
    sign = -1 if re.match(r"[−-]", printed) else 1
    return sign * float(found[0]) * (1000 if found[1] else 1)


def _printed_number(text: str) -> tuple[str, bool] | None:
    """(digits, whether a K follows). In "4:40.9" it is the seconds, in "depth 8" the 8."""
    found = re.findall(r"(\d+(?:\.\d+)?)(K\b)?", text.rpartition(":")[2])
    return (found[0][0], bool(found[0][1])) if found else None


def recompute(note: Published) -> list[Claim]:
    """Every claim of the note from the numbers it names."""
    claims = []
    for spec in note.meta["claims"]:
        stated = note.values[spec["stated"]]
        of = tuple(note.values[i] for i in spec["of"])
        mid, low, high = _evaluate(spec["as"], of, float(spec.get("unit_scale", 1)))
        s_low, s_high = stated.value - stated.half, stated.value + stated.half
        if spec["as"] == "at_least":
            agrees = high >= s_low
        elif spec["as"] == "at_most":
            agrees = low <= s_high
        else:
            agrees = low <= s_high and high >= s_low
        claims.append(Claim(spec["id"], stated, of, mid, low, high, agrees))
    return claims


def _evaluate(kind: str, of: Sequence[Value], scale: float) -> tuple[float, float, float]:
    """(value, lowest, highest) of a claim's formula, by interval arithmetic. Percent for changes."""
    bounds = [(v.value, v.value - v.half, v.value + v.half) for v in of]
    if kind == "same":
        return bounds[0]
    if kind == "change":
        (a, a_low, a_high), (b, b_low, b_high) = bounds
        return 100 * (a / b - 1), 100 * (a_low / b_high - 1), 100 * (a_high / b_low - 1)
    if kind == "mean_change":
        tops, (b, b_low, b_high) = bounds[:-1], bounds[-1]
        mean, low, high = (sum(t[i] for t in tops) / len(tops) for i in range(3))
        return 100 * (mean / b - 1), 100 * (low / b_high - 1), 100 * (high / b_low - 1)
    if kind in ("product", "at_least", "at_most"):
        result = []
        for i in range(3):
            product = 1.0
            for bound in bounds:
                product *= bound[i]
            result.append(product / scale)
        return result[0], result[1], result[2]
    raise KitError(f"unknown formula {kind!r} in a claim; known: same, change, mean_change, product, at_least, at_most")


def claims_table(note: Published) -> pd.DataFrame:
    """The claims as a table: stated, recomputed, and whether they agree within the printed digits."""
    return pd.DataFrame(
        [
            {
                "claim": c.name,
                "line": str(c.stated.line),
                "stated": c.stated.printed,
                "from": " and ".join(v.printed for v in c.operands),
                "recomputed": f"{c.recomputed:+.2f}\u00a0%".replace("-", "−")
                if c.stated.unit == "%"
                else f"{number(c.recomputed, 4)} {c.stated.unit}",
                "rounding allows": f"{number(c.low, 4)} to {number(c.high, 4)}",
                "agrees": "yes" if c.agrees else "NO",
            }
            for c in recompute(note)
        ]
    )


def unchecked_table(note: Published) -> pd.DataFrame:
    """Stated results that no stated numbers allow to recompute, and why."""
    return pd.DataFrame(
        [
            {
                "stated": ", ".join(note.values[i].printed for i in entry["ids"]),
                "what": f"{note.values[entry['ids'][0]].quantity} ({note.values[entry['ids'][0]].arm or 'all'})",
                "lines": ", ".join(dict.fromkeys(str(note.values[i].line) for i in entry["ids"])),
                "why": entry["why"],
            }
            for entry in note.meta["not_recomputable"]
        ]
    )


def kvtop_sweep(note: Published) -> Sweep:
    """KVTop's concurrency sweep: the baseline as printed, the MTP arms as base × (1 + printed change)."""
    values: dict[str, dict[float, dict[int, float | None]]] = {"baseline": {}, "mtp": {}, "mtp-ngram": {}}
    loads = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    for c in loads:
        base = note.values[f"fig3.base.c{c:g}"].value
        values["baseline"][c] = {0: base}
        for arm in ("mtp", "mtp-ngram"):
            values[arm][c] = {0: base * (1 + note.values[f"fig3.{arm}.c{c:g}"].value / 100)}
    return Sweep(
        arms={arm: note.meta["arms"][arm] for arm in values},
        loads=loads,
        values={"output_tps": values},
        baseline="baseline",
        comparison="Deployments are compared: besides drafting, the MTP arms change KV settings and the layer split. "
        "Tok/s of the MTP arms are implied: the printed base times the printed ratio, each rounded.",
        sources=[note.source("sweep")],
        flags=["published numbers, not measured by this kit"],
    )


def kvtop_isolation(note: Published) -> Sweep:
    """KVTop's isolation pair: one deployment, drafting off and on, at c = 1 and c = 8."""
    values = {
        arm: {c: {0: note.values[f"core.c{c:g}.{arm}"].value} for c in (1.0, 8.0)} for arm in ("off", "on")
    }  # fmt: skip
    return Sweep(
        arms={arm: note.meta["arms"][arm] for arm in values},
        loads=[1.0, 8.0],
        values={"output_tps": values},
        baseline="off",
        comparison="One switch differs: the draft width of the same MTP deployment.",
        sources=[note.source("isolation")],
        flags=["published numbers, not measured by this kit"],
    )


def depth_series(note: Published) -> list[DepthSeries]:
    """The ExLlamaV3 note's input throughput by defer depth, for both contexts."""
    v = {name: value.value for name, value in note.values.items()}
    long = [
        DepthPoint(1, [v["long.stock.1.input"], v["long.stock.2.input"]]),
        *(DepthPoint(n, [v[f"long.d{n}.input"]]) for n in (4, 6, 8)),
    ]
    short = [
        DepthPoint(1, [v["short.stock.input"]]),
        DepthPoint(4, [v["short.d4.1.input"], v["short.d4.2.input"]]),
    ]
    s = note.meta["series"]
    return [
        DepthSeries(
            s["long"]["label"], s["long"]["context_tokens"], long, [v["long.nomtp.input"]],
            fit_depths(long, CHUNK_TOKENS), published=True,
        ),
        # Two depths fix a line exactly: a fit through them would test nothing, so none is drawn.
        DepthSeries(s["short"]["label"], s["short"]["context_tokens"], short, (), None, published=True),
    ]  # fmt: skip


def memory_rows(note: Published) -> list[MemoryRow]:
    """The note's own estimate of the queue, in bytes (it measured no peak)."""
    rows = [MemoryRow(f"depth {n}", (), note.values[f"mem.d{n}"].value * MIB) for n in (4, 6, 8)]
    whole = chunk_bytes(int(note.values["mem.context"].value), int(note.values["mem.hidden"].value))
    return [*rows, MemoryRow("whole prompt", (), whole)]


def runs_table(note: Published) -> pd.DataFrame:
    """The ExLlamaV3 note's runs, with the wall time that input and output rates add up to (1,024 output tokens).

    The difference is what the rates leave out; it is nearly the same in all runs of a context, so the note's wall
    times and rates belong together.
    """
    rows = []
    for group, label, context in (("long", "124,928", 124928), ("short", "16,384", 16384)):
        names = sorted({i.rsplit(".", 1)[0] for i in note.values if i.startswith(f"{group}.") and i.endswith(".wall")})
        for name in sorted(names, key=lambda n: note.values[f"{n}.wall"].line):
            v = {q: note.values.get(f"{name}.{q}") for q in ("input", "output", "wall", "acceptance")}
            added = context / v["input"].value + 1024 / v["output"].value
            rows.append(
                {
                    "run": name.split(".", 1)[1].replace(".", ", run ").replace("d", "depth ", 1)
                    if ".d" in name
                    else name.split(".", 1)[1].replace(".", ", run "),
                    "input tokens": label,
                    "input t/s": v["input"].value,
                    "output t/s": v["output"].value,
                    "acceptance": v["acceptance"].printed if v["acceptance"] else None,
                    "wall (s)": v["wall"].value,
                    "rates add up to (s)": round(added, 1),
                    "left (s)": round(v["wall"].value - added, 1),
                }
            )
    return pd.DataFrame(rows)
