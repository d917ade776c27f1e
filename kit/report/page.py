"""One page from executed notebooks: each is rendered through the kit's nbconvert template and put into one frame.

The page loads nothing from outside and runs no script. Code cells are not shown (they are in the executed notebooks
beside the page); every output that is not made by the kit is escaped text. A summary at the top lists the findings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from kit.errors import KitError
from kit.figures.figure import TOO_FEW

TEMPLATE = Path(__file__).parent / "template"

HIDDEN_TAGS = {"parameters", "injected-parameters", "hide", "remove-cell"}


@dataclass(frozen=True)
class Finding:
    """A figure's headline and where on the page it stands."""

    text: str
    anchor: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Chapter:
    """One rendered notebook."""

    title: str
    anchor: str
    body: str
    findings: tuple[Finding, ...]
    notebook: str
    note: str = ""

    @property
    def told(self) -> list[Finding]:
        """Findings for the summary: what figures with too few repeats for one say stands with them alone."""
        return [f for f in self.findings if TOO_FEW not in f.text and not _all_undecided(f.text)]


def _all_undecided(headline: str) -> bool:
    return all("ndecided at" in part for part in headline.split("; "))


def render(
    notebooks: Sequence[Path],
    title: str,
    model: str,
    missing: Mapping[str, str] | None = None,
    notes: Mapping[Path, str] | None = None,
    apart: Mapping[Path, str] | None = None,
) -> str:
    """The whole page as HTML text; ``missing`` experiments are told with their reason, ``notes`` top their notebooks.

    ``apart``: of what a notebook is, added to its title where an earlier chapter has the same.

    Raises KitError for a file that is not an executed notebook.
    """
    from jinja2 import Environment, FileSystemLoader, select_autoescape

    chapters = []
    for path in notebooks:
        chapter = replace(_chapter(path), note=(notes or {}).get(path, ""))
        # A notebook drawn of several models' records has one title: what it is of tells them apart.
        if any(chapter.title == other.title for other in chapters) and (of := (apart or {}).get(path)):
            chapter = replace(chapter, title=f"{chapter.title} ({of})", body=_title_says(chapter.body, of))
        # Two notebooks may draw a figure of the same name: ids on the page must differ.
        chapters.append(_unique_ids(chapter, chapters))
    sources = list(dict.fromkeys(s for c in chapters for f in c.findings for s in f.sources))
    environment = Environment(loader=FileSystemLoader(TEMPLATE), autoescape=select_autoescape(["j2", "html"]))
    style = (TEMPLATE / "style.css").read_text()
    return environment.get_template("page.html.j2").render(
        title=title, model=model, chapters=chapters, sources=sources, style=style, missing=missing or {}
    )


def _chapter(path: Path) -> Chapter:
    import nbformat
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:
        raise KitError(f"{path} cannot be read as a notebook: {error}") from error
    config = Config()
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_cell_tags = HIDDEN_TAGS
    exporter = HTMLExporter(
        config=config, template_file=str(TEMPLATE / "chapter.html.j2"), exclude_input=True, exclude_anchor_links=True
    )
    exporter.register_preprocessor("nbconvert.preprocessors.TagRemovePreprocessor", enabled=True)
    body, _ = exporter.from_notebook_node(notebook)
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            meta = output.get("metadata", {}).get("text/html", {}).get("kit_figure")
            if meta:
                found.append(Finding(meta["headline"], meta["anchor"], tuple(meta.get("sources", ()))))
    title = notebook.metadata.get("title") or path.stem.replace("_", " ").capitalize()
    return Chapter(title, f"chapter-{_slug(path.stem)}", _shift_headings(body), tuple(found), path.name)


def _title_says(body: str, of: str) -> str:
    """The body with ``of`` behind its first heading."""
    return re.sub(r"(<h2\b[^>]*>.*?)(</h2>)", lambda m: f"{m[1]} ({escape(of)}){m[2]}", body, count=1, flags=re.DOTALL)


def _shift_headings(body: str) -> str:
    """A notebook's ``#`` becomes the chapter's h2, ``##`` an h3, and so on: the page has one h1.

    A figure's headline (h3 with class) goes below its section's heading. Figures nest no headings of their own.
    """
    return re.sub(r"<(/?)h([1-5])\b", lambda m: f"<{m[1]}h{int(m[2]) + 1}", body)


def _unique_ids(chapter: Chapter, earlier: Sequence[Chapter]) -> Chapter:
    taken = {id_ for c in earlier for id_ in re.findall(r'\bid="([^"]+)"', c.body)}
    mine = set(re.findall(r'\bid="([^"]+)"', chapter.body))
    if not taken & mine:
        return chapter
    prefix = f"{chapter.anchor}-"

    def renamed(text: str) -> str:
        text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', text)
        text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}\1"', text)
        return re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", text)

    findings = tuple(Finding(f.text, prefix + f.anchor, f.sources) for f in chapter.findings)
    return replace(chapter, body=renamed(chapter.body), findings=findings)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
