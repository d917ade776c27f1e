"""Run a notebook with parameters and keep the result: papermill, with errors told the short way.

The executed notebook is written to ``X.partial.ipynb`` while it runs and is moved to ``X.ipynb`` when it has
succeeded, so a finished name always means a finished run. Whether it did is told by papermill's exception, never by
the metadata it left (a killed kernel leaves cells marked complete).
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from kit.errors import KitError

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def parameters_of(notebook: Path) -> dict[str, str]:
    """Names and default values (as source text) of a notebook's parameters.

    Raises KitError if there is no such notebook or it has no cell tagged ``parameters``.
    """
    import papermill

    if not notebook.is_file():
        known = ", ".join(sorted(path.stem for path in notebook.parent.glob("*.ipynb"))) or "none"
        raise KitError(f"there is no notebook {notebook}; the notebooks there are: {known}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = papermill.inspect_notebook(str(notebook))
    if not found:
        raise KitError(f"{notebook} has no parameters; tag the cell that sets them with 'parameters'")
    return {name: parameter["default"] for name, parameter in found.items()}


def check_parameters(notebooks: Sequence[Path], params: Mapping[str, object]) -> dict[Path, dict[str, object]]:
    """The parameters each notebook takes, of those given.

    Raises KitError for a name that none of the notebooks has (papermill itself would only warn).
    """
    known = {notebook: parameters_of(notebook) for notebook in notebooks}
    every = sorted({name for names in known.values() for name in names})
    unknown = sorted(set(params) - set(every))
    if unknown:
        raise KitError(f"unknown parameter {', '.join(unknown)}; the notebooks' parameters are: {', '.join(every)}")
    return {nb: {name: value for name, value in params.items() if name in known[nb]} for nb in notebooks}


def execute(notebook: Path, out: Path, params: Mapping[str, object]) -> Path:
    """Run ``notebook`` with ``params`` and write the executed notebook to ``out``; what cells print is passed on.

    The parameters are also written beside it (``X.params.yaml``), for ``papermill -k python3 -f``.
    Raises KitError, naming the failing cell and its error, with the partial notebook's path.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.stem}.partial.ipynb")
    out.with_name(f"{out.stem}.params.yaml").write_text(yaml.safe_dump(dict(params), sort_keys=True))
    try:
        with tempfile.TemporaryDirectory(prefix="kit-kernel-") as private:
            # Sockets in a private folder instead of TCP ports that other users of the machine could reach. They are
            # named after the connection file, and would else lie (and, of a killed run, stay) in the notebook's folder.
            sockets = {"transport": "ipc", "connection_file": os.path.join(private, "kernel.json")}
            papermill.execute_notebook(
                str(notebook), str(partial), parameters=dict(params), kernel_name="python3", progress_bar=False,
                log_output=False, stdout_file=sys.stderr, stderr_file=sys.stderr, cwd=str(notebook.parent),
                config=Config() if os.name == "nt" else Config(KernelManager=sockets),
            )  # fmt: skip
    except PapermillExecutionError as error:
        message = _ANSI.sub("", f"{error.ename}: {error.evalue}")
        if error.ename == "KitError":  # a message for the user: it needs no exception's name
            message = _ANSI.sub("", str(error.evalue))
        raise KitError(
            f"{notebook.name}, cell {error.cell_index + 1} failed: {message}\n"
            f"The notebook up to there: {_shown(partial)}"
        ) from None
    except DeadKernelError:
        raise KitError(
            f"{notebook.name}: its kernel died (killed, or out of memory). The notebook up to there: {_shown(partial)}"
        ) from None
    _clean(partial)
    os.replace(partial, out)
    return out


def _clean(path: Path) -> None:
    """Drop this machine's paths from the executed notebook's metadata (papermill records them)."""
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.pop("papermill", None)
    for cell in notebook.cells:
        cell.metadata.pop("papermill", None)
    nbformat.write(notebook, path)


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
