"""A model's whole report from one request: records first (measured where needed), then the notebooks that draw them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from kit import cards, measure
from kit.cards import ROOT
from kit.errors import KitError
from kit.figures.sweep import left_out
from kit.report import pdf as printer
from kit.report.build import NOTEBOOKS, build


def make(request: measure.Request, out: Path | None = None, pdf: Literal["auto", "yes", "no"] = "auto") -> Path:
    """Measure what is not yet measured, draw it, and return the path of the page (``reports/<model>/index.html``).

    The notebooks only read: all measuring is done before them, in this process. An experiment that cannot be had is
    told on the page. ``pdf``: auto prints if a browser is found; yes raises KitError if none is.
    Raises KitError where no experiment can be had, or a notebook failed.
    """
    found = measure.ensure_all(request)
    card = request.card()
    missing = dict(found.missing)
    notebooks: list[str] = []
    for name, runs in found.runs.items():
        cells = [cell for run in runs for cell in run.cells() if cell.cell.experiment == name]
        if not any(cell.status == "ok" for cell in cells):
            missing[name] = "no cell ended well: " + "; ".join(left_out(cells))
            continue
        notebook = card.experiments[name].notebook or name
        if not (NOTEBOOKS / f"{notebook}.ipynb").is_file():
            missing[name] = f"it was recorded, but no notebook draws it (notebooks/{notebook}.ipynb is missing)"
        elif notebook not in notebooks:
            notebooks.append(notebook)
    if not notebooks:
        raise KitError("\n".join(f"{name}: {reason}" for name, reason in missing.items()))
    for name, reason in missing.items():
        print(f"{name} is not in the report: {reason}", file=sys.stderr)
    params = {"MODEL": request.model, "PROFILE": request.profile, "MEASURE": "never", "BASE_URL": request.base_url}
    page = build(
        request.model,
        notebooks,
        {name: value for name, value in params.items() if value is not None},
        out or ROOT / "reports" / request.model,
        title=cards.load_card(request.model).title,
        missing=missing,
    )
    if pdf == "yes" or (pdf == "auto" and printer.find_browser()):
        printer.print_pdf(page, page.with_suffix(".pdf"))
    return page
