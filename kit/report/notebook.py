"""What the notebooks call: ask for records, show figures and text made from them. The notebooks hold no logic.

    from kit.report import notebook as nb
    evidence = nb.records(MODEL, "concurrency", PROFILE, MEASURE)
    nb.show(throughput, evidence.sweep())

Everything shown is HTML with all texts of records and models escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from kit.cards import ROOT, load_card
from kit.errors import KitError
from kit.figures.figure import Figure, NotRecorded, Source, listed, table_html, times
from kit.figures.sweep import Sweep, from_cells
from kit.measure import plan
from kit.records.metrics import METRICS, ratio
from kit.records.schema import CellRecord, RunRecord
from kit.records.store import RESULTS, Run, find_runs
from kit.report import limits as _limits
from kit.report import method as _method

LONG_TABLE = 18
"""Rows above which a table is folded."""


@dataclass(frozen=True)
class Evidence:
    """The records of one experiment of one model, as :func:`records` found them."""

    experiment: str
    runs: Sequence[Run]

    @cached_property
    def cells(self) -> list[CellRecord]:
        """All cells of the experiment, in the order measured."""
        return [cell for run in self.runs for cell in self._cells_of(run)]

    def _cells_of(self, run: Run) -> list[CellRecord]:
        return [cell for cell in run.cells() if cell.cell.experiment == self.experiment]

    def with_cells(self, cells: Sequence[CellRecord]) -> Evidence:
        """The same runs, with these cells in place of theirs."""
        made = Evidence(self.experiment, self.runs)
        made.__dict__["cells"] = list(cells)  # what the cached property would hold
        return made

    @property
    def run_records(self) -> list[RunRecord]:
        """``run.json`` of each run."""
        return [run.record for run in self.runs]

    @cached_property
    def _cards(self) -> list[dict[str, Any]]:
        """What each run's own card says of the experiment; of a run made without one, today's card of its model."""
        found = []
        for run in self.runs:
            card = run.record.card.get("experiments", {}).get(self.experiment)
            if not isinstance(card, dict):
                try:
                    card = load_card(run.record.model).model_dump(mode="json")["experiments"].get(self.experiment)
                except KitError:
                    card = None
            found.append(card or {})
        return found

    @cached_property
    def baseline(self) -> str | None:
        """The arm the card names as the baseline of this experiment."""
        return next((str(card["baseline"]) for card in self._cards if card.get("baseline")), None)

    @cached_property
    def order(self) -> list[str]:
        """The card's arms of this experiment, in the card's order."""
        return list(dict.fromkeys(arm for card in self._cards for arm in card.get("arms", ())))

    @cached_property
    def labels(self) -> list[str]:
        """Labels of whole runs: stand-in, recorded elsewhere, notes."""
        found: list[str] = []
        for run in self.runs:
            record = run.record
            if record.stand_in:
                found.append("stand-in model")
            if "runs" in run.folder.parts[-3:-1]:
                found.append(f"recorded {when_and_where(record, self._cells_of(run))}")
            # A note of a sentence or more belongs into the method table; a word follows every number.
            found.extend(n for n in record.notes if len(n) <= 40 or "forced" in n or "simulated" in n)
        return list(dict.fromkeys(found))

    @property
    def sources(self) -> Sequence[Source]:
        """Where the experiment's cells lie."""
        return self.sweep().sources

    def sweep(self, arms: Sequence[str] | None = None, baseline: str | None = None) -> Sweep:
        """The cells arranged for drawing. Raises KitError if the arms must not share a chart."""
        lines = {}
        for run in self.runs:
            file = _shown(run.folder / RESULTS)
            for number, cell in enumerate(run.cells(), 1):
                lines[(run.record.run_id, cell.cell.id)] = (file, number)
        commits = {r.run_id: (r.provenance.commit, r.provenance.dirty) for r in self.run_records}
        if baseline is None and any(c.cell.arm == self.baseline for c in self.cells):
            baseline = self.baseline  # a run that was cut short may not have it
        return from_cells(self.cells, baseline, lines, commits, self.labels, arms, self.order)

    @cached_property
    def identical(self) -> list[tuple[str, int, int]]:
        """(arm, outputs equal to the baseline's, outputs compared), from the raw request lines."""
        pairs = (
            (cell.cell.arm, request)
            for run in self.runs
            for cell in run.cells()
            if cell.cell.experiment == self.experiment and cell.raw and (run.folder / cell.raw).is_file()
            for request in run.requests(cell)
        )
        return _method.identical(_method.outputs_by_arm(pairs), self.baseline or "baseline")


def when_and_where(record: RunRecord, cells: Sequence[CellRecord] = ()) -> str:
    """The day of a run and the GPUs its cells used: 2026-11-29 on 1 × NVIDIA H200 (of a machine with 2).

    Where the cells do not say how many, the machine alone is named.
    """
    gpus = [g.name for g in record.provenance.gpus]
    machine = ", ".join(f"{gpus.count(g)} × {g}" for g in dict.fromkeys(gpus))
    used = max(counts) if cells and None not in (counts := {gpus_used(c) for c in cells}) else None
    if not machine:
        where = f"on {record.provenance.cpu}" if record.provenance.cpu else ""
    elif used == len(gpus) or len(gpus) == 1:
        where = f"on {machine}"
    elif used is None or len(set(gpus)) > 1 or used > len(gpus):
        where = f"on a machine with {machine}"
    else:
        where = f"on {used} × {gpus[0]} (of a machine with {len(gpus)})"
    return f"{record.created_at:%Y-%m-%d} {where}".strip()


_LAYOUT_SIZE = re.compile(r"(?:tp|pp|dp)(\d+)")


def gpus_used(cell: CellRecord) -> int | None:
    """GPUs that the cell's deployment ran on, as its record tells by count or by layout (tp2pp4); else None."""
    told, layout = cell.resolved.get("gpus"), str(cell.resolved.get("layout") or "")
    if isinstance(told, int) and not isinstance(told, bool):
        return told
    if not re.fullmatch(r"(?:(?:tp|pp|dp)\d+)+", layout):
        return None
    return math.prod(int(size) for size in _LAYOUT_SIZE.findall(layout))


def records(
    model: str,
    experiment: str,
    profile: str = "quick",
    measure: str = "auto",
    weights: str | None = None,
    base_url: str | None = None,
) -> Evidence:
    """Records of an experiment: read if there are any, measured first if not (``measure``: auto, always, never).

    Raises KitError where there are none and none can be measured, with what is missing.
    """
    from kit.measure import ensure

    return Evidence(
        experiment, ensure(model, experiment, profile=profile, measure=measure, weights=weights, base_url=base_url)
    )


def find(
    model: str, experiment: str, profile: str = "quick", weights: str | None = None, base_url: str | None = None
) -> Evidence | None:
    """Records of an experiment that a model may not have; nothing is measured for it. None if there are none."""
    try:
        return records(model, experiment, profile, "never", weights, base_url)
    except KitError:
        if base_url:
            return None
    # What a driver recorded beside a card's experiments (the switching proof) is in no card.
    runs = find_runs([plan.LOCAL, plan.RECORDED], model, experiment)
    return Evidence(experiment, runs[:1]) if runs else None


def show(figure: Callable[..., Figure], *args: Any, under: str = "", **kwargs: Any) -> None:
    """Draw and display a figure; where the quantity was not recorded, a line says so instead.

    ``under``: of which records the finding is, where a page has the same figure of several.
    """
    try:
        made = _under(under, figure(*args, **kwargs))
    except NotRecorded as error:
        _display(f'<p class="missing">Not drawn: {escape(str(error))}.</p>')
        return
    html, metadata = made._repr_html_()
    _display(html, metadata)


def section(title: str, text: str, make: Callable[[], Figure | pd.DataFrame], given: object = True) -> None:
    """A section that only some models' records can fill: its heading and text stand there only if they do.

    ``given`` is None where its records were not found.
    """
    if given is not None:
        sections(title, text, {"": make})


def sections(title: str, text: str, makes: Mapping[str, Callable[[], Figure | pd.DataFrame | Sequence[str]]]) -> None:
    """The same of several sets of records (layouts, say): each under its own name, those without records left out."""
    made: dict[str, Figure | pd.DataFrame | Sequence[str]] = {}
    for name, make in makes.items():
        try:
            made[name] = make()
        except NotRecorded:
            continue
    if not made:
        return
    _display(f"<h2>{escape(title)}</h2><p>{escape(text)}</p>")
    for name, item in made.items():
        if isinstance(item, Figure):
            _display(*_under(name, item)._repr_html_())
        elif isinstance(item, pd.DataFrame):
            table_of = table_html(item, name or None)
            if len(item) > LONG_TABLE:
                table_of = f"<details><summary>{escape(name)} ({len(item)} rows)</summary>{table_of}</details>"
            _display(table_of)
        else:
            notes(item, name)


def _under(name: str, figure: Figure) -> Figure:
    if not name:
        return figure
    said = figure.headline
    said = said if said[:2].isupper() else said[:1].lower() + said[1:]  # TTFT stays as it is
    return replace(figure, headline=f"{name[:1].upper()}{name[1:]}: {said}")


def answer(sweep: Sweep, metric: str = "output_tps") -> None:
    """For each arm, where it is better than the baseline, where worse, and where the noise hides any difference."""
    _display("".join(f"<p>{escape(text)}</p>" for text in verdicts(sweep, metric)))


def verdicts(sweep: Sweep, metric: str = "output_tps") -> list[str]:
    """The sentences of :func:`answer`."""
    base = sweep.label(sweep.baseline or "the baseline")
    words = {"higher": ("more", "less"), "lower": ("higher", "lower"), "neither": ("higher", "lower")}
    more, less = words[METRICS[metric].better]
    said = []
    for arm in sweep.others():
        effects = [e for load in sweep.loads if (e := sweep.effect(metric, arm, load)) is not None]
        by_verdict = {v: [f"{e.load:g}" for e in effects if e.verdict == v] for v in ("above", "below", "noise")}
        parts = []
        for verdict, text in (
            ("above", f"{more} {METRICS[metric].title} than {base}"),
            ("below", f"{less}"),
            ("noise", "no difference larger than the noise"),
        ):
            if by_verdict[verdict]:
                if verdict == "below" and not by_verdict["above"]:
                    text = f"{less} {METRICS[metric].title} than {base}"
                parts.append(f"{text} at {sweep.load_letter}\u00a0=\u00a0{listed(by_verdict[verdict])}")
        unknown = [f"{times(e.ratio.mean)} at {sweep.at(e.load)}" for e in effects if e.verdict == "unknown"]
        if unknown:
            parts.append(
                f"{listed(unknown)} of the {METRICS[metric].title} of {base}; with fewer than three repeats the noise "
                "is unknown, so none of this is more than an observation"
            )
        if parts:
            said.append(f"{sweep.label(arm)}: {'; '.join(parts)}.")
    return said


def server_table(evidence: Evidence, sweep: Sweep) -> None:
    """The server's own figures, mean over repeats by load and arm: what it did, beside what clients saw.

    Gauges stand as they are; of the counters only what they say of drafts is shown (the share of steps in which the
    draft at each position was accepted), since throughput and acceptance have figures of their own.
    """
    good = [c for c in evidence.cells if c.status == "ok" and c.cell.arm in sweep.arms and c.server]
    rows = []
    for load in sweep.loads:
        for arm in sweep.arms:
            mine = [_server_words(c.server) for c in good if c.cell.arm == arm and c.cell.load.value == load]
            row: dict[str, object] = {"arm": sweep.label(arm), sweep.load_letter: f"{load:g}"}
            for name in sorted({name for words in mine for name in words}, key=_server_order):
                known = [v for words in mine if (v := words.get(name)) is not None]
                row[name] = _short(sum(known) / len(known)) if known else None
            if len(row) > 2:
                rows.append(row)
    if not rows:
        _display('<p class="missing">The server told nothing of itself in this experiment.</p>')
        return
    columns = sorted({name for row in rows for name in list(row)[2:]}, key=_server_order)
    frame = pd.DataFrame(rows).reindex(columns=["arm", sweep.load_letter, *columns])
    timed = any(name in frame.columns for name in _STEP_PARTS.values())
    caption = "The server's own figures, mean of the repeats" + ("; ms: GPU time per step" if timed else "")
    _display(table_html(frame, caption))


def _short(value: float) -> float:
    """Three digits are all that such a mean is good for."""
    return float(f"{value:.3g}") if abs(value) < 1000 else value


_SERVER_NAMES = {
    "running": "running", "queued": "queued",
    "llamacpp:requests_processing": "running", "llamacpp:requests_deferred": "queued",
    "llamacpp:n_busy_slots_per_decode": "busy slots per decode",
    "sglang:num_running_reqs": "running", "sglang:num_queue_reqs": "queued",
    "sglang:token_usage": "pool in use", "sglang:spec_accept_length": "accept length",
    "sglang:max_total_num_tokens": "KV pool (tokens)",
    "drive.acceptance": "acceptance",
    "vllm:num_requests_running": "running", "vllm:num_requests_waiting": "queued",
    "vllm:kv_cache_usage_perc": "KV pool in use",
}  # fmt: skip

_PER_POSITION = re.compile(r"spec_decode_num_accepted_tokens_per_pos_total\{position=\"(\d+)\"\}$")


def _server_words(server: Mapping[str, float | None]) -> dict[str, float | None]:
    """The server's figures under the names a reader knows; unknown names are left out."""
    found = {_SERVER_NAMES[name]: value for name, value in server.items() if name in _SERVER_NAMES}
    drafts, accepted = (
        next((v for name, v in server.items() if name.endswith(f"spec_decode_num_{what}_total")), None)
        for what in ("drafts", "accepted_tokens")
    )
    positions = {int(p[1]): value for name, value in server.items() if (p := _PER_POSITION.search(name))}
    # Records made before a position's first acceptance was counted hold less than all: they say nothing.
    if accepted is not None and sum(v or 0 for v in positions.values()) == accepted:
        for position, value in positions.items():
            if (rate := ratio(value, drafts)) is not None:
                found[f"accepted at position {position + 1}"] = rate
    steps = server.get("drive.steps")
    for kind, name in _STEP_PARTS.items():
        per_step = ratio(server.get(f"drive.gpu_s.{kind}"), steps)
        if per_step is not None:
            found[name] = per_step * 1000
    return found


_STEP_PARTS = {"target_verify": "verify (ms)", "eagle_draft": "draft (ms)",
               "eagle_draft_extend": "extend (ms)"}  # fmt: skip


def _server_order(name: str) -> tuple:
    first = list(dict.fromkeys(_SERVER_NAMES.values()))
    return (first.index(name) if name in first else len(first), name)


def method(evidence: Evidence, metrics: Sequence[str] = ("output_tps", "ttft_p50"), title: str = "Method") -> None:
    """The method table."""
    rows = _method.method(evidence.run_records, evidence.cells, metrics, evidence.identical)
    _display(_method.method_html(rows, title))


def limits(evidence: Evidence, title: str = "What this does not show") -> None:
    """The section "What this does not show"."""
    said = _limits.limits(evidence.run_records, evidence.cells, evidence.identical)
    _display(_limits.limits_html(said, title))


def table(frame: pd.DataFrame, caption: str | None = None) -> None:
    """A table, escaped."""
    _display(table_html(frame, caption))


def paragraphs(texts: Sequence[str]) -> None:
    """Plain paragraphs, escaped."""
    _display("".join(f"<p>{escape(text)}</p>" for text in texts))


def notes(texts: Sequence[str], title: str) -> None:
    """A titled list, escaped."""
    # A percent sign stays with its number, and n with its value.
    kept = [escape(text).replace(" %", "\u00a0%").replace("n = ", "n\u00a0=\u00a0") for text in texts]
    items = "".join(f"<li>{text}</li>" for text in kept)
    _display(f'<section class="limits"><h3>{escape(title)}</h3><ul>{items}</ul></section>')


def _shown(path: Path) -> str:
    """The path within the checkout; of a folder elsewhere only its last parts (no home directory in a report)."""
    try:
        return str(path.resolve().relative_to(ROOT))
    except ValueError:
        return "/".join(path.parts[-3:])


def _display(html: str, metadata: dict | None = None) -> None:
    from IPython.display import display

    display({"text/html": html, "text/plain": ""}, raw=True, metadata={"text/html": metadata} if metadata else None)
