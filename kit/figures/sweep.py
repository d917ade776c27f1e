"""Cells arranged for drawing: values by metric, arm, load point and repeat, and what they support.

A :class:`Sweep` is made from records (:func:`from_cells`) or from published numbers. It answers what every figure
asks: the estimate at a point, the ratio to the baseline paired by repeat, and whether that ratio is larger than the
noise. An effect counts as larger than the noise when its 95 % interval leaves 1 out *and* it lies outside the spread
of the A/A pair (the same arm measured twice) where one was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kit.errors import KitError
from kit.figures.figure import Source, listed, ranges, times
from kit.figures.style import Look, looks
from kit.records.compare import Comparison, require_comparable
from kit.records.metrics import METRICS
from kit.records.schema import CellRecord
from kit.records.stats import MIN_REPEATS_FOR_INTERVAL, Estimate, aa_spread, estimate, ratio_estimate, within_noise

AGAIN = "-again"
"""Suffix of the arm that is measured twice (the A/A pair)."""

Verdict = Literal["above", "below", "noise", "unknown"]

_LOAD_WORDS = {
    "closed": ("c", "closed-loop concurrency c (clients)"),
    "open": ("λ", "arrival rate λ (requests/s)"),
    "prefill": ("input", "input tokens"),
    "trace": ("mean λ", "mean arrival rate λ (requests/s)"),
}


@dataclass(frozen=True)
class Effect:
    """An arm against the baseline at one load point.

    ``noise`` is the half-width of the A/A spread as a natural logarithm of a ratio (None: no A/A pair).
    ``verdict``: above or below (larger than the noise), noise, or unknown (too few repeats to say).
    """

    arm: str
    load: float
    ratio: Estimate
    noise: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Sweep:
    """Values of several arms over load points, with what a caption must say about them.

    ``values[metric][arm][load][repeat]`` is a number or None (not recorded). ``arms`` maps names to labels in
    drawing order and leaves out the A/A twin, which only gives the noise. ``comparison`` says what differs.
    """

    arms: Mapping[str, str]
    loads: Sequence[float]
    values: Mapping[str, Mapping[str, Mapping[float, Mapping[int, float | None]]]]
    baseline: str | None = None
    load_kind: str = "closed"
    comparison: str = ""
    sources: Sequence[Source] = ()
    flags: Sequence[str] = ()
    notes: Sequence[str] = ()
    twin: tuple[str, str] | None = None
    """(arm, the same arm measured again)."""
    styles: Mapping[str, Look] = field(default_factory=dict)
    requests: Mapping[str, Mapping[float, int]] = field(default_factory=dict)
    """Requests that ended well in the window, by arm and load: the fewest of the repeats, where they were counted."""

    def look(self, arm: str) -> Look:
        """Colour and marker of an arm."""
        return self.styles[arm] if arm in self.styles else looks(list(self.arms))[arm]

    def label(self, arm: str) -> str:
        """The name a reader sees."""
        return self.arms.get(arm, arm)

    @property
    def load_letter(self) -> str:
        """c, λ or input."""
        return _LOAD_WORDS[self.load_kind][0]

    @property
    def load_title(self) -> str:
        """Title of the load axis."""
        return _LOAD_WORDS[self.load_kind][1]

    def at(self, load: float) -> str:
        """ "c = 8", unbreakable."""
        return f"{self.load_letter}\u00a0=\u00a0{load:g}"

    def repeats(self, metric: str, arm: str, load: float) -> Mapping[int, float | None]:
        """Values by repeat; empty where the point was not measured."""
        return self.values.get(metric, {}).get(arm, {}).get(load, {})

    def estimate(self, metric: str, arm: str, load: float) -> Estimate | None:
        """Mean and interval over the repeats; None where nothing is known."""
        return estimate(list(self.repeats(metric, arm, load).values()))

    def known(self, metric: str, arm: str | None = None) -> bool:
        """Whether any value of the metric (of the arm) was recorded."""
        arms = self.values.get(metric, {})
        chosen = arms.values() if arm is None else [arms.get(arm, {})]
        return any(v is not None for loads in chosen for repeats in loads.values() for v in repeats.values())

    def others(self) -> list[str]:
        """All arms but the baseline."""
        return [arm for arm in self.arms if arm != self.baseline]

    def noise(self, metric: str, load: float) -> float | None:
        """Largest |ln(again / first)| of the A/A pair over the repeats at a load; None without a pair there."""
        if self.twin is None:
            return None
        first, again = (self.repeats(metric, arm, load) for arm in self.twin)
        return aa_spread(first, again)

    def effect(self, metric: str, arm: str, load: float, baseline: str | None = None) -> Effect | None:
        """The arm ÷ the baseline at a load, with the verdict; None where either is unknown or there is no baseline."""
        base = baseline or self.baseline
        if base is None:
            return None
        found = ratio_estimate(self.repeats(metric, arm, load), self.repeats(metric, base, load))
        if found is None:
            return None
        noise = self.noise(metric, load)
        verdict: Verdict
        if within_noise(found, noise):
            verdict = "noise"
        elif found.low is None or found.high is None:
            # Too few repeats for an interval: the A/A spread alone cannot vouch for an effect, only explain one away.
            verdict = "unknown"
        else:
            verdict = "above" if found.mean > 1 else "below"
        return Effect(arm, load, found, noise, verdict)

    def effects(self, metric: str) -> list[Effect]:
        """All known effects, by arm and load."""
        found = (self.effect(metric, arm, load) for arm in self.others() for load in self.loads)
        return [effect for effect in found if effect is not None]

    def count(self, metric: str) -> tuple[int, int]:
        """(fewest, most) repeats behind the points of a metric; (0, 0) if it is not known."""
        counts = [
            sum(v is not None for v in self.repeats(metric, arm, load).values())
            for arm in self.arms
            for load in self.loads
            if self.repeats(metric, arm, load)
        ]
        known = [n for n in counts if n]
        return (min(known), max(known)) if known else (0, 0)

    def n_text(self, metric: str) -> str:
        """ "n = 3 per point"."""
        low, high = self.count(metric)
        return f"n = {low} per point" if low == high else f"n = {low} to {high} per point"

    def caption(self, metric: str) -> str:
        """What differs between the arms and what the bars mean."""
        low, high = self.count(metric)
        if high < MIN_REPEATS_FOR_INTERVAL:
            n = f"{high}" if low == high else f"{low} to {high}"
            spread = f"n = {n}: no interval can be estimated, none is drawn."
        elif low < MIN_REPEATS_FOR_INTERVAL:
            spread = "Bars are 95 % intervals (Student's t), drawn where there are three repeats or more."
        else:
            spread = (
                f"Bars are 95 % intervals over {low} interleaved repeats (Student's t); faint dots are the repeats."
            )
        return " ".join(part for part in (self.comparison, spread, *self.notes) if part)


def from_cells(
    cells: Sequence[CellRecord],
    baseline: str | None = None,
    lines: Mapping[tuple[str, str], tuple[str, int]] | None = None,
    runs: Mapping[str, tuple[str | None, bool | None]] | None = None,
    flags: Iterable[str] = (),
    arms: Sequence[str] | None = None,
    order: Sequence[str] = (),
) -> Sweep:
    """Arrange the cells of one experiment.

    ``lines`` maps (run id, cell id) to (file, line) and ``runs`` a run id to (commit, dirty), for the source line.
    ``flags`` are labels of the whole run (stand-in, simulated). ``arms`` picks and orders the arms drawn; all arms of
    the experiment still share out the colours, in ``order`` (the card's). Repeats of several runs are kept apart. Cells
    that failed or broke a rule are left out, and the notes say how many and why.

    Raises KitError for no cells, a mixture of experiments, an unknown arm, or arms that must not share one chart.
    """
    if not cells:
        raise KitError("there are no cells to draw: nothing has been recorded for this experiment")
    experiments = sorted({cell.cell.experiment for cell in cells})
    if len(experiments) > 1:
        raise KitError(f"one figure shows one experiment, not {listed(experiments)}")
    present = list(dict.fromkeys(cell.cell.arm for cell in cells))
    twins = {arm for arm in present if arm.endswith(AGAIN) and arm.removesuffix(AGAIN) in present}
    every = [arm for arm in in_order(cells, present, order) if arm not in twins]
    if baseline is None and "baseline" in every:
        baseline = "baseline"
    if baseline is not None and baseline not in every:
        raise KitError(f"no cell of the baseline arm {baseline!r}; the recorded arms are: {', '.join(every)}")
    for arm in arms or ():
        if arm not in every:
            raise KitError(f"no cell of arm {arm!r}; the recorded arms are: {', '.join(every)}")
    drawn = list(arms) if arms is not None else every
    good = [c for c in cells if c.status == "ok" and (c.cell.arm in drawn or c.cell.arm in twins)]
    if not good:
        raise KitError("no cell of this experiment ended well: " + "; ".join(left_out(cells)))
    shown = [arm for arm in drawn if any(c.cell.arm == arm for c in good)]
    by_arm = {arm: [c for c in good if c.cell.arm == arm] for arm in shown}
    comparison = require_comparable(by_arm)

    run_order = list(dict.fromkeys(c.run_id for c in good))
    values: dict[str, dict[str, dict[float, dict[int, float | None]]]] = {}
    for cell in good:
        repeat = cell.cell.repeat + 10_000 * run_order.index(cell.run_id)
        for tag, value in cell.metrics.items():
            values.setdefault(tag, {}).setdefault(cell.cell.arm, {}).setdefault(cell.cell.load.value, {})[repeat] = (
                value
            )
    requests: dict[str, dict[float, int]] = {}
    for cell in good:
        if cell.counts is not None:
            of_arm, load = requests.setdefault(cell.cell.arm, {}), cell.cell.load.value
            of_arm[load] = min(of_arm.get(load, cell.counts.completed), cell.counts.completed)
    twin = next(((t.removesuffix(AGAIN), t) for t in sorted(twins) if any(c.cell.arm == t for c in good)), None)
    labels = {c.cell.arm: c.arm.label for c in good}
    kinds = {c.cell.load.kind for c in good}
    if len(kinds) > 1:
        raise KitError(f"one figure shows one kind of load, not {listed(sorted(kinds))}")
    return Sweep(
        arms={arm: labels[arm] for arm in shown},
        loads=sorted({c.cell.load.value for c in good}),
        values=values,
        baseline=baseline if baseline in shown else None,
        load_kind=kinds.pop(),
        comparison=comparison_sentence(comparison) if len(shown) > 1 else "",
        sources=_sources(good, lines or {}, runs or {}),
        flags=[*flags, *_cell_flags(good)],
        notes=[f"Left out: {text}." for text in left_out(cells)],
        twin=twin,
        styles=looks(every),
        requests=requests,
    )


def in_order(cells: Sequence[CellRecord], arms: list[str], order: Sequence[str]) -> list[str]:
    """Arms in the given order; those it does not name after them, by draft width (cells come in a shuffled order)."""
    first = {arm: next(c for c in cells if c.cell.arm == arm) for arm in arms}

    def key(arm: str) -> tuple:
        if arm in order:
            return (False, order.index(arm))
        settings = first[arm].arm.settings
        width = settings.get("draft_width")
        plain = arm == "baseline" or settings.get("speculation") == "none"
        numeric = width if isinstance(width, int | float) and not isinstance(width, bool) else 0 if plain else 99
        return (True, not plain, numeric, len(first[arm].arm.label), arm)

    return sorted(arms, key=key)


def left_out(cells: Sequence[CellRecord]) -> list[str]:
    """The cells that did not end well, by what was wrong with them."""
    found: dict[str, list[str]] = {}
    for c in cells:
        if c.status != "ok":
            place = f"{c.cell.arm} at {c.cell.load.label} repeat {c.cell.repeat + 1}"
            found.setdefault(f"{c.status}: {c.reason or 'no reason recorded'}", []).append(place)
    return [
        f"{len(places)} cell{'s' if len(places) > 1 else ''} ({why}): {', '.join(places[:6])}"
        + (" …" if len(places) > 6 else "")
        for why, places in found.items()
    ]


def comparison_sentence(comparison: Comparison, most: int = 4) -> str:
    """What differs between the arms, short enough for a caption: beyond ``most`` settings only their names."""
    if len(comparison.differences) <= most:
        return comparison.sentence()
    names = [d.field for d in comparison.differences]
    shown = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
    return f"Deployments are compared: {len(names)} settings differ ({shown}; all are in the method table)."


def _cell_flags(cells: Sequence[CellRecord]) -> list[str]:
    """Each label once, with the cells it holds for where it does not hold for all."""
    found: dict[str, list[CellRecord]] = {}
    for cell in cells:
        for flag in cell.flags:
            found.setdefault(flag, []).append(cell)
    texts = []
    for flag, flagged in found.items():
        where = sorted({f"{c.cell.arm} at {c.cell.load.label}" for c in flagged})
        texts.append(flag if len(flagged) == len(cells) else f"{flag} ({len(flagged)} cells: {', '.join(where)})")
    return texts


def _sources(
    cells: Sequence[CellRecord],
    lines: Mapping[tuple[str, str], tuple[str, int]],
    runs: Mapping[str, tuple[str | None, bool | None]],
) -> list[Source]:
    sources = []
    for run in dict.fromkeys(c.run_id for c in cells):
        places = [lines[key] for c in cells if c.run_id == run and (key := (run, c.cell.id)) in lines]
        file = places[0][0] if places else "results.jsonl"
        commit, dirty = runs.get(run, (None, None))
        sources.append(Source(f"run {run}", file, ranges([n for _, n in places]), commit, dirty))
    return sources


def finding(sweep: Sweep, metric: str, quantity: str | None = None) -> str:
    """A headline for a metric against the baseline: the largest gain and loss beyond the noise, and where none is.

    With fewer than three repeats it gives the numbers and says that their uncertainty is unknown.
    """
    quantity = quantity or METRICS[metric].title
    effects = sweep.effects(metric)
    if not effects:
        return f"{sentence_case(quantity)} by {sweep.load_letter}" + ("" if sweep.baseline else " (no baseline arm)")
    base = sweep.label(sweep.baseline or "")
    one_arm = len({e.arm for e in effects}) == 1
    if all(e.verdict == "unknown" for e in effects):
        low, high = min(e.load for e in effects), max(e.load for e in effects)
        parts = []
        for load in dict.fromkeys((low, high)):
            there = sorted((e for e in effects if e.load == load), key=lambda e: e.ratio.mean)
            least, most = there[0], there[-1]
            if least is most:
                parts.append(f"{times(most.ratio.mean)} at {sweep.at(load)} ({sweep.label(most.arm)})")
            else:  # no arm is singled out by numbers whose noise is unknown
                parts.append(f"{times(least.ratio.mean)} to {times(most.ratio.mean)} at {sweep.at(load)}")
        n = min(e.ratio.n for e in effects)
        return f"{sentence_case(quantity)} against {base}: {' and '.join(parts)}; n = {n}, so the noise is unknown"
    above = [e for e in effects if e.verdict == "above"]
    below = [e for e in effects if e.verdict == "below"]
    open_ = undecided(sweep, effects)
    if not above and not below:
        if not open_:
            return f"No difference in {quantity} larger than the noise at any {sweep.load_letter} measured"
        undecided_at = {e.load for e in effects if e.verdict == "unknown"}
        quiet = [load for load in sweep.loads if load not in undecided_at and any(e.load == load for e in effects)]
        where = f"{sweep.load_letter}\u00a0=\u00a0{listed([f'{q:g}' for q in quiet])}"
        none = f"No difference in {quantity} larger than the noise at {where}; " if quiet else f"{quantity}: "
        return sentence_case(none + open_)
    parts = []
    if above:
        top = max(above, key=lambda e: e.ratio.mean)
        parts.append(
            f"{sweep.label(top.arm)} at {sweep.at(top.load)}: {times(top.ratio.mean)} the {quantity} of {base}"
        )
    if below:
        low = min(below, key=lambda e: e.ratio.mean)
        who = "" if one_arm and above else f"{sweep.label(low.arm)} "
        tail = "" if above else f" the {quantity} of {base}"
        parts.append(f"{who}at {sweep.at(low.load)}: {times(low.ratio.mean)}{tail}")
    quiet = [load for load in sweep.loads if not any(e.load == load for e in above + below)]
    quiet = [q for q in quiet if {e.verdict for e in effects if e.load == q} == {"noise"}]
    text = "; ".join(parts)
    if quiet:
        where = listed([f"{q:g}" for q in quiet])
        text += f"; no difference larger than the noise at {sweep.load_letter}\u00a0=\u00a0{where}"
    if open_:
        text += f"; {open_}"
    return sentence_case(text)


def undecided(sweep: Sweep, effects: Sequence[Effect]) -> str:
    """ "undecided at c = 2 and 4 (n = 2)", of arms with too few repeats there; empty where all is decided."""
    found = [e for e in effects if e.verdict == "unknown"]
    if not found:
        return ""
    where = f"{sweep.load_letter}\u00a0=\u00a0{listed([f'{load:g}' for load in sorted({e.load for e in found})])}"
    arms = list(dict.fromkeys(e.arm for e in found))
    who = "" if {e.arm for e in effects} == set(arms) else f"{listed([sweep.label(a) for a in arms])}, "
    counts = sorted({e.ratio.n for e in found})
    return f"undecided at {where} ({who}n = {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))})"


def sentence_case(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]
