"""A report from notebooks: real papermill, real nbconvert, one page that needs nothing else."""

from __future__ import annotations

import re
import shutil
import stat
import sys
from html.parser import HTMLParser
from pathlib import Path

import figures_data as data
import nbformat
import pytest
import yaml

from kit import measure
from kit.errors import KitError
from kit.records.schema import CellKey, Load
from kit.report import build
from kit.report.execute import check_parameters, parameters_of
from kit.report.page import Chapter, Finding, render
from kit.report.pdf import find_browser, print_pdf

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"

EXAMPLE = """
from pathlib import Path

from kit.figures.ratio import ratio
from kit.figures.goodput import goodput
from kit.records.store import Run
from kit.report import notebook as nb

evidence = nb.Evidence("concurrency", [Run.open(Path(RUN))])
sweep = evidence.sweep()
nb.answer(sweep)
nb.show(ratio, sweep)
nb.show(goodput, sweep)
nb.method(evidence)
nb.limits(evidence)
print("<script>printed()</script>")
"""


def notebook(path: Path, code: str, parameters: str = 'RUN = ""\nMODEL = ""', title: str = "A <title> & more") -> Path:
    book = nbformat.v4.new_notebook()
    book.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "title": title,
    }
    first = nbformat.v4.new_code_cell(parameters)
    first.metadata["tags"] = ["parameters"]
    book.cells = [nbformat.v4.new_markdown_cell(f"# {title}\n\nWhy *this*?"), first, nbformat.v4.new_code_cell(code)]
    nbformat.write(book, path)
    return path


class Page(HTMLParser):
    """What of a page matters here: ids, links, loads, headings."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name == "href" and tag == "a":
                self.links.append(value or "")
            elif name in ("src", "href", "srcset", "data", "poster") or name == "xlink:href":
                self.loads.append(value or "")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two notebooks that draw the same figure."""
    folder = tmp_path_factory.mktemp("report")
    data.make_run(folder / "runs" / "synthetic" / "r1")
    books = [notebook(folder / "one.ipynb", EXAMPLE), notebook(folder / "two.ipynb", EXAMPLE, title="Two")]
    params = {"RUN": str(folder / "runs" / "synthetic" / "r1")}
    return build("synthetic", books, params, folder / "out", title="Numbers <for> tests")


def test_the_page_stands_alone(report: Path) -> None:
    text = report.read_text()
    page = Page(text)
    assert [load for load in page.loads if not load.startswith("#")] == []
    assert "script" not in page.tags and "iframe" not in page.tags and "link" not in page.tags
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert '<html lang="en">' in text and "main" in page.tags and page.tags.count("h1") == 1
    assert "<title>Numbers &lt;for&gt; tests</title>" in text


def test_ids_are_unique_and_links_lead_somewhere(report: Path) -> None:
    page = Page(report.read_text())
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids, link
        else:
            assert (report.parent / link).is_file(), link


def test_findings_come_first_and_sources_last(report: Path) -> None:
    text = report.read_text()
    finding = "1.58×"
    assert 0 < text.index(finding) < text.index("<nav")
    assert "synthetic/r1/results.jsonl:1–48" in text and "commit 0123456789" in text
    assert "Not drawn: goodput was not recorded" in text


def test_the_same_notebook_of_another_model_has_a_title_of_its_own(tmp_path: Path) -> None:
    books = [notebook(tmp_path / f"{name}.ipynb", "1", title="Why?") for name in ("one", "two")]
    text = render(books, "t", "m", apart={book: "B & C" for book in books})
    assert "Why? (B &amp; C)</h2>" in text
    assert text.count(">Why?</a>") == 1 and text.count(">Why? (B &amp; C)</a>") == 1


def test_what_states_no_finding_is_not_in_the_summary() -> None:
    texts = [
        "Output rate by arm: n = 1 to 2, too few repeats to call one best",
        "Undecided at c = 1: w2 +5 % (n = 2: the noise is unknown); undecided at c = 8: w1 +3 % (n = 2: …)",
        "Drafting gains 5 % at c = 1 (w2, n = 3); undecided at c = 8: w1 +3 % (n = 2: …)",
    ]
    chapter = Chapter("t", "a", "", tuple(Finding(text, "x", ()) for text in texts), "n.ipynb")
    assert [f.text for f in chapter.told] == texts[2:]


def test_code_is_hidden_and_printed_text_is_escaped(report: Path) -> None:
    text = report.read_text()
    assert "nb.answer(" not in text and "import notebook" not in text
    assert "&lt;script&gt;printed()" in text


def test_method_and_limits_are_told_from_the_records(report: Path) -> None:
    text = report.read_text()
    for expected in (
        "Synthetic numbers &lt;for&gt; tests (stand-in model)",
        "3 per point; arms interleaved",
        "MTP, width 1: 12 of 12",
        "MTP, width 2: 8 of 12",
        "What this does not show",
        "the loop is closed",
        "server and load driver share one CPU (2 cores)",
        "Not recorded: inter-chunk latency p50",
    ):
        assert expected in text, expected


def test_executed_notebooks_lie_beside_without_this_machines_paths(report: Path) -> None:
    names = {p.name for p in report.parent.iterdir()}
    assert {"index.html", "one.ipynb", "two.ipynb", "one.params.yaml"} <= names
    assert not [name for name in names if "partial" in name]
    assert "papermill" not in nbformat.read(report.parent / "one.ipynb", 4).metadata
    assert set(yaml.safe_load((report.parent / "one.params.yaml").read_text())) == {"RUN", "MODEL"}


def test_a_failing_cell_is_told_shortly_and_keeps_the_old_page(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "index.html").write_text("old")
    book = notebook(tmp_path / "bad.ipynb", "def f():\n    raise ValueError('the reason')\nf()")
    with pytest.raises(KitError) as error:
        build("m", [book], {}, out)
    message = str(error.value)
    assert "bad.ipynb, cell 4 failed: ValueError: the reason" in message  # papermill adds a cell of parameters
    assert "Traceback" not in message and "bad.partial.ipynb" in message
    assert (out / "bad.partial.ipynb").is_file() and not (out / "bad.ipynb").exists()
    assert (out / "index.html").read_text() == "old"


def test_a_kit_error_in_a_cell_is_passed_on_as_it_is(tmp_path: Path) -> None:
    book = notebook(tmp_path / "kit.ipynb", "from kit.errors import KitError\nraise KitError('do this instead')")
    with pytest.raises(KitError, match="cell 4 failed: do this instead"):
        build("m", [book], {}, tmp_path / "out")


def test_experiments_that_could_not_be_had_are_told(tmp_path: Path) -> None:
    book = notebook(tmp_path / "one.ipynb", "1")
    page = build("m", [book], {}, tmp_path / "out", missing={"prefill": "needs <two> GPUs"})
    assert "Not in this report: prefill. needs &lt;two&gt; GPUs" in page.read_text()


def test_unknown_parameters_and_notebooks_are_refused_with_the_known(tmp_path: Path) -> None:
    book = notebook(tmp_path / "one.ipynb", "1")
    with pytest.raises(KitError, match="unknown parameter PROFLE; the notebooks' parameters are: MODEL, RUN"):
        check_parameters([book], {"PROFLE": "quick"})
    with pytest.raises(KitError, match="the notebooks there are: one"):
        parameters_of(tmp_path / "two.ipynb")
    bare = notebook(tmp_path / "bare.ipynb", "1", parameters="")
    with pytest.raises(KitError, match="parameters"):
        parameters_of(bare)


def test_parameters_keep_their_types(tmp_path: Path) -> None:
    book = notebook(
        tmp_path / "types.ipynb",
        "assert (A, B, C, D) == ([1, 2], '123e4567', None, 3.10), (A, B, C, D)",
        parameters="A = []\nB = ''\nC = 1\nD = 0.0",
    )
    build("m", [book], {"A": [1, 2], "B": "123e4567", "C": None, "D": 3.10}, tmp_path / "out")


def test_a_kernels_sockets_lie_in_a_private_folder_that_goes_away(tmp_path: Path) -> None:
    book = notebook(
        tmp_path / "where.ipynb",
        "import os, stat\n"
        "from pathlib import Path\n"
        "from ipykernel.connect import get_connection_file\n"
        "place = Path(get_connection_file()).parent\n"
        "assert list(place.glob('kernel-ipc-*')) and not os.stat(place).st_mode & (stat.S_IRWXG | stat.S_IRWXO)\n"
        "Path(OUT).write_text('\\n'.join([str(place), *sorted(os.listdir())]))",
        parameters="OUT = ''",
    )
    build("m", [book], {"OUT": str(tmp_path / "told.txt")}, tmp_path / "out")
    place, *beside = (tmp_path / "told.txt").read_text().splitlines()
    assert beside == ["out", "where.ipynb"], "a killed run would leave what lies there"
    assert not Path(place).exists()


def test_something_that_is_no_notebook_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.ipynb").write_text("{")
    with pytest.raises(KitError, match="cannot be read"):
        render([tmp_path / "x.ipynb"], "t", "m")


def test_the_repositorys_notebooks_have_parameters_and_no_outputs() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        book = nbformat.read(path, 4)
        assert book.metadata.get("title"), path
        assert parameters_of(path)
        assert all(
            not c.get("outputs") and c.get("execution_count") is None for c in book.cells if c.cell_type == "code"
        )


def test_published_notebook_runs_and_every_claim_agrees(tmp_path: Path) -> None:
    page = build("published", ["published"], {}, tmp_path / "out").read_text()
    assert "Ratios the note states, recomputed" in page and ">NO<" not in page
    assert page.count("published numbers, not measured by this kit") == 5


def test_without_a_printer_the_page_stays_and_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("KIT_CHROMIUM", "no-such-browser")
    monkeypatch.setitem(sys.modules, "weasyprint", None)
    page = build("m", [notebook(tmp_path / "one.ipynb", "1")], {}, tmp_path / "out", pdf=True)
    assert page.is_file() and not page.with_suffix(".pdf").exists()
    assert "apt install chromium" in capsys.readouterr().err


def test_a_browser_that_prints_an_error_page_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "browser"
    script = 'for a in "$@"; do case $a in --print-to-pdf=*) echo "%PDF-1.4 error page" > "${a#*=}";; esac; done'
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("KIT_CHROMIUM", str(fake))
    # Without pdftotext, so that the check does not depend on the machine.
    which = shutil.which
    monkeypatch.setattr("kit.report.pdf.shutil.which", lambda name: None if name == "pdftotext" else which(name))
    page = tmp_path / "index.html"
    page.write_text("<title>The report</title>")
    with pytest.raises(KitError, match="title"):
        print_pdf(page, tmp_path / "index.pdf")
    assert not (tmp_path / "index.pdf").exists()
    with pytest.raises(KitError, match="missing"):
        print_pdf(tmp_path / "none.html", tmp_path / "index.pdf")


@pytest.mark.skipif(find_browser() is None, reason="no Chromium on this machine to print with")
def test_a_real_browser_prints_the_report(report: Path, tmp_path: Path) -> None:
    out = print_pdf(report, tmp_path / "index.pdf")
    assert out.read_bytes().startswith(b"%PDF-") and out.stat().st_size > 50_000


def test_make_measures_first_then_draws_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["kit.report.make"]  # the package's attribute of that name is the function
    run = data.make_run(tmp_path / "runs" / "r1")
    key = CellKey(experiment="prefill", arm="mtp-1", load=Load(kind="closed", value=1), repeat=0)
    bad = data.cell("mtp-1", 1, 0, cell=key, status="invalid", reason="the server died")
    dead = data.make_run(tmp_path / "runs" / "r2", [bad])
    asked: list[measure.Request] = []

    def ensure_all(request: measure.Request) -> measure.Found:
        asked.append(request)
        return measure.Found({"concurrency": [run], "prefill": [dead]}, {"draft_width": "no such engine here"})

    monkeypatch.setattr(measure, "ensure_all", ensure_all)
    for name in ("kit.report.make", "kit.report.build"):
        monkeypatch.setattr(sys.modules[name], "NOTEBOOKS", tmp_path)
    notebook(
        tmp_path / "concurrency.ipynb",
        "print(f'reads {MODEL} {PROFILE} {MEASURE}')",
        parameters="MODEL = ''\nPROFILE = ''\nMEASURE = 'auto'\nBASE_URL = None",
    )
    request = measure.Request("tiny-mtp", "quick")
    page = module.make(request, out=tmp_path / "out", pdf="no")
    text = page.read_text()
    assert asked == [request]
    assert "reads tiny-mtp quick never" in text  # a notebook never measures behind the measurement's back
    assert "Not in this report: draft_width. no such engine here" in text
    assert "Not in this report: prefill. no cell ended well: 1 cell (invalid: the server died)" in text
