"""Build a model's report: run its notebooks, render them into one page, print that page.

reports/<model>/index.html     the page, self-contained
reports/<model>/<notebook>.ipynb  each executed notebook (<notebook>.<card>.ipynb for a related card's)
reports/<model>/index.pdf      the page as a PDF, where a printer was found
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kit.cards import ROOT, load_card
from kit.errors import KitError
from kit.report.execute import check_parameters, execute
from kit.report.page import render

NOTEBOOKS = ROOT / "notebooks"


@dataclass(frozen=True)
class Section:
    """A notebook drawn for another card than the page's. ``note`` stands at its top: whose records, from where.

    ``of`` tells its title from that of the same notebook drawn for the page's own card.
    """

    notebook: str | Path
    model: str
    note: str
    of: str = ""


def build(
    model: str,
    notebooks: Sequence[str | Path | Section],
    params: Mapping[str, object] | None = None,
    out_dir: Path | None = None,
    pdf: bool = False,
    title: str | None = None,
    missing: Mapping[str, str] | None = None,
) -> Path:
    """Run the notebooks (names in ``notebooks/`` or paths) in order and return the path of ``index.html``.

    ``params`` go to the notebooks that have them; MODEL is set to ``model``, or a section's own. ``out_dir``: default
    ``reports/<model>``. The page replaces an older one only when all notebooks have run. If ``pdf`` is asked for and
    no printer is found, the page is kept and a line on stderr says how to get one.

    ``missing`` (experiment → reason) is told on the page.

    Raises KitError for an unknown notebook or parameter, or a cell that failed.
    """
    if not notebooks:
        raise KitError("a report needs at least one notebook")
    sections = [n if isinstance(n, Section) else Section(n, model, "") for n in notebooks]
    paths = [_find(section.notebook) for section in sections]
    out = out_dir or ROOT / "reports" / model
    given = check_parameters(
        paths, {**(params or {}), "MODEL": model} if _any_takes_model(paths) else dict(params or {})
    )
    executed: dict[Path, str] = {}
    apart: dict[Path, str] = {}
    for section, path in zip(sections, paths, strict=True):
        own = section.model == model
        target = out / (path.name if own else f"{path.stem}.{section.model}.ipynb")
        print(f"{target.stem}: running the notebook", file=sys.stderr, flush=True)
        mine = given[path] | ({"MODEL": section.model} if "MODEL" in given[path] else {})
        made = execute(path, target, mine)
        executed[made], apart[made] = section.note, section.of
    page = out / "index.html"
    partial = out / "index.partial.html"
    text = render(list(executed), title or _title(model), model, missing, executed, apart)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, page)
    if pdf:
        from kit.report.pdf import print_pdf

        try:
            print_pdf(page, out / "index.pdf")
        except KitError as error:
            print(error, file=sys.stderr)
    return page


def _find(notebook: str | Path) -> Path:
    path = Path(notebook)
    return path if path.suffix == ".ipynb" else NOTEBOOKS / f"{path}.ipynb"


def _any_takes_model(paths: Sequence[Path]) -> bool:
    from kit.report.execute import parameters_of

    return any("MODEL" in parameters_of(path) for path in paths)


def _title(model: str) -> str:
    try:
        return load_card(model).title
    except KitError:
        return model
