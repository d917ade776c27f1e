"""A model's whole report from one request: records first (measured where needed), then the notebooks that draw them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from kit import cards, measure
from kit.cards import ROOT, ModelCard
from kit.errors import KitError
from kit.figures.sweep import left_out
from kit.measure import plan
from kit.records.store import Run, find_runs
from kit.report import pdf as printer
from kit.report.build import NOTEBOOKS, Section, build
from kit.report.notebook import when_and_where

PUBLISHED = "published"
"""A MODEL= of its own: the two published notes' numbers. It has no card, since nothing can be measured for it."""


def make(request: measure.Request, out: Path | None = None, pdf: Literal["auto", "yes", "no"] = "auto") -> Path:
    """Measure what is not yet measured, draw it, and return the path of the page (``reports/<model>/index.html``).

    The notebooks only read: all measuring is done before them, in this process. An experiment that cannot be had is
    told on the page. Recorded experiments of the card's related cards follow as sections of their own, labelled.
    MODEL=published draws the published notes' numbers.
    ``pdf``: auto prints if a browser is found; yes raises KitError if none is.
    Raises KitError where no experiment can be had, or a notebook failed.
    """
    out = out or ROOT / "reports" / request.model
    if request.model == PUBLISHED:
        page = build(PUBLISHED, [PUBLISHED], {}, out, title="What the two published notes measured")
    else:
        page = _measured(request, out)
    if pdf == "yes" or (pdf == "auto" and printer.find_browser()):
        printer.print_pdf(page, page.with_suffix(".pdf"))
    return page


def _measured(request: measure.Request, out: Path) -> Path:
    found = measure.ensure_all(request)
    card = request.card()
    drawn, missing = drawable(card, found.runs)
    missing = {**found.missing, **missing}
    if not drawn:
        raise KitError("\n".join(f"{name}: {reason}" for name, reason in missing.items()))
    for name, reason in missing.items():
        print(f"{name} is not in the report: {reason}", file=sys.stderr)
    related = [] if request.base_url else [s for name in card.related for s in related_sections(name)]
    params = {"MODEL": request.model, "PROFILE": request.profile, "MEASURE": "never", "BASE_URL": request.base_url}
    return build(
        request.model,
        [*drawn, *related],
        {name: value for name, value in params.items() if value is not None},
        out,
        title=card.title,
        missing=missing,
    )


def drawable(card: ModelCard, runs: Mapping[str, Sequence[Run]]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """(notebooks that can draw these experiments, with the experiments of each; experiment → why it is not drawn).

    A notebook opens with the experiment of its own name, where the card has one: without it the others are not drawn.
    """
    wanted: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    for name, found in runs.items():
        cells = plan.experiment_cells(found, name)
        if not any(cell.status == "ok" for cell in cells):
            missing[name] = "no cell ended well: " + "; ".join(left_out(cells))
            continue
        notebook = card.experiments[name].notebook or name
        if not (NOTEBOOKS / f"{notebook}.ipynb").is_file():
            missing[name] = f"it was recorded, but no notebook draws it (notebooks/{notebook}.ipynb is missing)"
        else:
            wanted.setdefault(notebook, []).append(name)
    for notebook in [n for n, names in wanted.items() if n in card.experiments and n not in names]:
        for name in wanted.pop(notebook):
            missing[name] = f"it is drawn beside {notebook}, of which there are no records"
    return wanted, missing


def related_sections(name: str) -> list[Section]:
    """The recorded (or local) experiments of a related card as sections, each with a note on where they come from.

    One without records is left out, with a line on stderr.
    """
    card = cards.load_card(name)
    runs = {experiment: find_runs([plan.LOCAL, plan.RECORDED], name, experiment) for experiment in card.experiments}
    for experiment in [e for e, found in runs.items() if not found]:
        print(f"{name} / {experiment} is not on the page: nothing is recorded", file=sys.stderr)
    drawn, missing = drawable(card, {e: found for e, found in runs.items() if found})
    for experiment, reason in missing.items():
        print(f"{name} / {experiment} is not on the page: {reason}", file=sys.stderr)
    used = {notebook: [run for e in experiments for run in runs[e]] for notebook, experiments in drawn.items()}
    return [Section(notebook, name, _note(card, found), _of(card, found)) for notebook, found in used.items()]


_ENGINES = {"llamacpp": "llama.cpp", "sglang": "SGLang", "exllamav3": "ExLlamaV3"}


def _of(card: ModelCard, runs: Sequence[Run]) -> str:
    """Model and engine: the card's title as far as its brackets, and the engines of its runs."""
    engines = dict.fromkeys(_ENGINES.get(run.record.engine, run.record.engine) for run in runs)
    return ", ".join([card.title.partition(" (")[0], *engines])


def _note(card: ModelCard, runs: Sequence[Run]) -> str:
    """Whose records, made when and where."""
    where = ("measured here" if plan.LOCAL in run.folder.parents else "recorded" for run in runs)
    said = (when_and_where(run.record, list(run.cells())) for run in runs)
    made = dict.fromkeys(f"{how} {text}" for how, text in zip(where, said, strict=True))
    return f"From MODEL={card.name} ({card.title}), not measured for this page: {'; '.join(made)}."
