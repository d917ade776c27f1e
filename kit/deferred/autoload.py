"""Install deferring at interpreter start, for servers that are started by something else.

A ``.pth`` file in site-packages names this module's `activate`. It does nothing unless ``KIT_DEFER_DEPTH`` is set, and
then only arranges that ExLlamaV3's generator is interposed on right after it has been imported: nothing is imported
early, torch least of all. TabbyAPI's ``main.py``, its ``start.py`` and its container image all start a Python that
reads the file. Tensor-parallel worker processes import ExLlamaV3 too and are left alone.

::

    python -m kit.deferred.autoload --install      # writes kit-deferred.pth beside the installed packages
    KIT_DEFER_DEPTH=8 python main.py               # TabbyAPI, with deferring
    python -m kit.deferred.autoload --uninstall

===================== ================================================================================
KIT_DEFER_DEPTH       chunks to defer: a whole number, or ``all`` for the whole prompt; 1 is stock
KIT_DEFER_WHERE       ``device`` (default) or ``pinned``
KIT_DEFER_MAX_MIB     most MiB of queued hidden states (default: see `kit.deferred.install`)
KIT_DEFER_COALESCE    1 to run queued chunks as fewer, longer passes
KIT_DEFER_ROLLING     1 to replay only the oldest pass of a full queue (with ``pinned``; depth 2 or 3 is enough)
KIT_DEFER_UNBLOCK     1 to upload prefill inputs without blocking as well
KIT_DEFER_STRICT      1 to fail, instead of warning and staying stock, on an ExLlamaV3 this was not written for
===================== ================================================================================
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .install import MIB, DeferError, install, unblock

logger = logging.getLogger(__name__)

DEPTH = "KIT_DEFER_DEPTH"
AFTER = "exllamav3.generator"
PTH_NAME = "kit-deferred.pth"
PTH_LINE = f"import os; os.environ.get({DEPTH!r}) and __import__('kit.deferred.autoload', fromlist=['_']).activate()\n"
"""Python executes lines of a .pth file that begin with ``import``. Without the variable this one imports nothing."""


def options(environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments for `install` from environment variables.

    Raises:
        DeferError: For a value that means nothing.
    """
    chosen: dict[str, Any] = {"depth": parse_depth(environment.get(DEPTH, "1"))}
    where = environment.get("KIT_DEFER_WHERE")
    if where:
        chosen["where"] = where
    limit = environment.get("KIT_DEFER_MAX_MIB")
    if limit:
        if not limit.isdigit() or int(limit) == 0:
            raise DeferError(f"KIT_DEFER_MAX_MIB={limit!r}: give a whole number of MiB, 1 or more")
        chosen["max_bytes"] = int(limit) * MIB
    chosen["coalesce"] = _switch(environment, "KIT_DEFER_COALESCE")
    chosen["rolling"] = _switch(environment, "KIT_DEFER_ROLLING")
    return chosen


def parse_depth(text: str) -> int | None:
    """A depth as people write it: a whole number, or "all".

    Raises:
        DeferError: For anything else.
    """
    if text == "all":
        return None
    if not text.isdigit() or int(text) == 0:
        raise DeferError(f"{DEPTH}={text!r}: give a whole number of chunks, 1 (stock) or more, or 'all'")
    return int(text)


def _switch(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "0")
    if value not in ("", "0", "1"):
        raise DeferError(f"{name}={value!r}: give 1 for on or 0 for off")
    return value == "1"


def interpose() -> None:
    """Install what the environment asks for, now that ExLlamaV3 is imported."""
    import multiprocessing

    if multiprocessing.parent_process() is not None:  # a tensor-parallel worker
        return
    strict = _switch(os.environ, "KIT_DEFER_STRICT")
    on_mismatch = "raise" if strict else "warn"
    try:
        install(**options(os.environ), on_mismatch=on_mismatch)
        if _switch(os.environ, "KIT_DEFER_UNBLOCK"):
            unblock(on_mismatch=on_mismatch)
    except DeferError:
        if strict:
            raise
        logger.exception("MTP prefill stays stock")


def activate() -> None:
    """Interpose on ExLlamaV3 when it is imported, or at once if it has been. Inert without ``KIT_DEFER_DEPTH``."""
    if not os.environ.get(DEPTH):
        return
    if AFTER in sys.modules:
        interpose()
    elif not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport(AFTER, interpose))


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs ``action`` once, after the module ``name`` has been executed."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec with a loader that runs the action afterwards; None for every other module."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRun(spec.loader, self._action)
        return spec


class _ThenRun(importlib.abc.Loader):
    def __init__(self, loader: Any, action: Callable[[], None]) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__spec__.loader = self._loader  # type: ignore[union-attr]
        self._action()


def pth_path() -> Path:
    """Where the .pth file goes: this interpreter's site-packages."""
    return Path(sysconfig.get_paths()["purelib"]) / PTH_NAME


def main(argv: Sequence[str] | None = None) -> int:
    """Write or remove the .pth file."""
    parser = argparse.ArgumentParser(prog="python -m kit.deferred.autoload", description=__doc__.split("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--install", action="store_true", help=f"write {PTH_NAME} into this Python's site-packages")
    action.add_argument("--uninstall", action="store_true", help="remove it")
    path = pth_path()
    if parser.parse_args(argv).install:
        path.write_text(PTH_LINE)
        print(f"wrote {path}; set {DEPTH} to turn deferring on")
    else:
        path.unlink(missing_ok=True)
        print(f"removed {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
