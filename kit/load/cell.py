"""Drive one cell from anywhere: start the driver's process, follow it, read what it wrote."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kit.errors import KitError
from kit.load.files import RESULT, read_requests, read_samples
from kit.load.spec import DriverResult, LoadSpec, parse_spec
from kit.load.window import Measured, measure, parse_slo
from kit.records.schema import RequestRecord, ServerSample

LOG = "driver.log"
STOP_S = 20.0
"""How long a driver that was told to stop may take to write what it has."""

Progress = Callable[[Mapping[str, Any]], None]


def run_cell(spec: LoadSpec | Mapping[str, Any], folder: Path, progress: Progress | None = None) -> DriverResult:
    """Drive one cell in a process of its own and return its result; the files stay in ``folder``.

    ``progress`` is called with each progress event (phase, elapsed_s, total_s, in_flight, sent, ok, failed).
    Ctrl-C is forwarded to the driver, which writes what it has marked as incomplete; then KeyboardInterrupt is
    raised again. A driver stopped by SIGTERM gives a result with ``complete`` False.

    Raises KitError if the spec is wrong, the server does not answer or the driver fails.
    """
    if not isinstance(spec, LoadSpec):
        spec = parse_spec(json.dumps(dict(spec), default=str))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).unlink(missing_ok=True)  # an older cell's result must not pass for this one's
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kit.load.driver", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # the terminal's Ctrl-C comes through us, once
        )
    error = _Told()
    reader = threading.Thread(target=_follow, args=(process, progress, error), daemon=True)
    try:
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.write(spec.model_dump_json().encode())
                process.stdin.close()
        reader.start()
        code = process.wait()
    except BaseException:
        # Whatever interrupts the wait (Ctrl-C first of all), the driver is asked to write and then made to go.
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    reader.join(5)
    if code not in (0, 3):
        told = error.message or _tail(folder / LOG) or f"it ended with status {code}"
        raise KitError(told if code == 2 else f"the load driver failed: {told} (see {folder / LOG})")
    return load_result(folder)


class _Told:
    """The error that the driver told of."""

    message: str | None = None


def _follow(process: subprocess.Popen[bytes], progress: Progress | None, error: _Told) -> None:
    for line in process.stdout or ():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event.get("event") == "error":
            error.message = event.get("message")
        elif progress is not None:
            progress(event)


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def load_result(folder: Path) -> DriverResult:
    """The result in a driver's folder. Raises KitError if there is none or it cannot be read."""
    path = folder / RESULT
    if not path.is_file():
        raise KitError(f"{folder} holds no driven cell: {RESULT} is missing")
    try:
        return DriverResult.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise KitError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def load_requests(folder: Path) -> Iterator[RequestRecord]:
    """The raw request lines in a driver's folder, by time sent."""
    return read_requests(folder)


def load_samples(folder: Path) -> list[ServerSample]:
    """The server's sampled metrics in a driver's folder."""
    return read_samples(folder)


def recompute(folder: Path) -> Measured:
    """The window's numbers again, from the raw lines in a driver's folder.

    Raises KitError if the cell was stopped before its window.
    """
    result = load_result(folder)
    if result.window_ns is None:
        raise KitError(f"{folder}: the cell was stopped before its window")
    return measure(
        list(load_requests(folder)),
        result.window_ns,
        slo=parse_slo(result.spec.slo) if result.spec.slo else None,
        client_lag_s=result.client_lag_s,
        samples=load_samples(folder),
    )
