"""The page as a PDF, through a Chromium that is there (or WeasyPrint where it is installed).

Chromium prints an error page and exits with 0 when the input is missing, so the input is checked first and the
result afterwards: it must be a PDF and hold the page's title.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path

from kit.errors import KitError

_BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)  # fmt: skip


HOW_TO_GET = (
    "needs Chromium or Chrome (Debian, Ubuntu: apt install chromium; or set KIT_CHROMIUM to one), "
    "or WeasyPrint (pip install weasyprint)"
)


def find_browser() -> str | None:
    """The Chromium to print with: $KIT_CHROMIUM, else the first known name on the path; None if there is none."""
    named = os.environ.get("KIT_CHROMIUM")
    for name in [named] if named else _BROWSERS:
        found = shutil.which(name)
        if found:
            return found
    return None


def print_pdf(page: Path, out: Path) -> Path:
    """Print an HTML page to A4 with all tables open.

    Raises KitError if the page is missing, nothing can print it, or the result is not that page.
    """
    if not page.is_file():
        raise KitError(f"{page} is missing: build the report first")
    text = page.read_text(encoding="utf-8")
    browser = find_browser()
    with tempfile.TemporaryDirectory(prefix="kit-pdf-") as folder:
        # A closed <details> prints closed: the numbers belong on paper too.
        source = Path(folder) / "page.html"
        source.write_text(text.replace("<details>", "<details open>"), encoding="utf-8")
        partial = Path(folder) / "page.pdf"
        if browser:
            _chromium(browser, source, partial, Path(folder))
        elif not _weasyprint(source, partial):
            raise KitError(f"no PDF was made: it {HOW_TO_GET}. The page itself is complete: {page}")
        _check(partial, _title_of(text))
        # Beside the target first: a move across file systems is not atomic.
        beside = out.with_name(f"{out.stem}.partial.pdf")
        shutil.copyfile(partial, beside)
        os.replace(beside, out)
    return out


def _chromium(browser: str, source: Path, out: Path, folder: Path) -> None:
    command = [
        browser, "--headless", "--disable-gpu", "--no-first-run", f"--user-data-dir={folder / 'profile'}",
        "--no-pdf-header-footer", f"--print-to-pdf={out}",
    ]  # fmt: skip
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--no-sandbox")  # Chromium refuses its sandbox to root; the page is the kit's own
    try:
        done = subprocess.run([*command, source.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        raise KitError(f"{browser} did not print the page within 120 s") from None
    if done.returncode != 0 or not out.is_file():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise KitError(f"{browser} could not print the page (exit {done.returncode}): {last}")


def _weasyprint(source: Path, out: Path) -> bool:
    try:
        from weasyprint import HTML  # optional: only where no browser is found
    except (ImportError, OSError):  # OSError: its native libraries are missing
        return False
    HTML(filename=str(source)).write_pdf(str(out))
    return True


def _title_of(text: str) -> str:
    found = re.search(r"<title>(.*?)</title>", text, re.DOTALL)
    return unescape(found[1]).strip() if found else ""


def _check(pdf: Path, title: str) -> None:
    data = pdf.read_bytes()
    if not data.startswith(b"%PDF-"):
        raise KitError(f"what was printed is not a PDF ({len(data)} bytes)")
    if shutil.which("pdftotext"):
        done = subprocess.run(["pdftotext", str(pdf), "-"], capture_output=True, text=True, timeout=60, check=False)
        shown = " ".join(done.stdout.split())
        if done.returncode == 0 and " ".join(title.split()) not in shown:
            raise KitError(f"the PDF does not hold the report's title {title!r}: {shown[:120]!r}")
        return
    # Without pdftotext the document information is all that can be read (parentheses are escaped there).
    readable = title.isascii() and not re.search(r"[()\\]", title)
    if readable and f"({title})".encode("latin-1") not in data and title.encode("utf-16-be") not in data:
        raise KitError(f"the PDF's title is not the report's ({title!r})")
