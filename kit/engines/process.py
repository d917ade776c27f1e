"""A server as a child process that cannot outlive the kit.

The server runs under a small guard (:mod:`kit.engines.guard`) in a session and process group of its own, so that
Ctrl-C reaches the kit alone and the kit ends the server in order: TERM to the group, a grace, KILL. The guard holds one
end of a pipe from this process. However this process ends (return, exception, Ctrl-C, SIGKILL, a killed Jupyter
kernel), the pipe closes and the guard ends the server. Should the guard be killed as well, the next start finds the
server in the folder of records and ends it (:func:`end_leftovers`).

stdout and stderr of the server go to a log file; errors quote its last lines. Settings and secrets travel over a pipe
and in the environment, never in argv, which every user of the machine can read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from kit.engines import guard
from kit.errors import KitError

T = TypeVar("T")

TAIL_LINES = 15
MARK = "MTP_KIT_SERVER"
"""Environment variable by which a server's processes are known, whatever became of their parents."""
_SECRET_NAME = re.compile(r"(?:^|_)(?:API)?KEYS?(?:_|$)|TOKENS?(?:_|$)|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


class EngineError(KitError):
    """A server did not start, ended early, or could not be reached. The message quotes the log where there is one."""


def inherited_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what looks like a secret by its name, plus ``extra``.

    An engine needs many variables of its host (CUDA, conda, caches), so names are dropped, not listed.
    """
    kept = {name: value for name, value in os.environ.items() if not _SECRET_NAME.search(name)}
    return {**kept, **(extra or {})}


def records_folder() -> Path:
    """The user's private folder with one file per running server, made if missing.

    Raises EngineError if the folder is not this user's own and closed to others.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path(tempfile.gettempdir())
    folder = base / f"mtp-kit-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise EngineError(
            f"{folder} must be a folder of yours with mode 0700 (running servers are recorded there); "
            "remove it or set its owner and mode right"
        )
    return folder


def end_leftovers(folder: Path | None = None, grace_s: float = 5.0) -> list[str]:
    """End servers whose kit process is gone, and return a line for each one ended.

    A process is taken for what the record says only if its start time agrees too: ids are given out again. Workers
    that outlived their server are known by the record's name in their environment (Linux).
    """
    ended = []
    for path in sorted((folder or records_folder()).glob("*.json")):
        try:
            record = json.loads(path.read_text())
            parent, parent_started = record["parent"], record["parent_started"]
            server, server_started = record["server"], record["server_started"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # gone meanwhile, or not a record of ours
        if parent_started is not None and guard.started(parent) == parent_started:
            continue  # its kit still runs
        left = _marked(path.stem)
        if server_started is not None and guard.started(server) == server_started:
            left.add(server)
        if left:
            _end_all(left, grace_s)
            pids = ", ".join(map(str, sorted(left)))
            ended.append(f"ended {record.get('name', 'a server')} (pid {pids}), left over from an earlier run")
        # If the guard lives it is ending the server itself, and removes the record.
        if guard.started(record.get("guard", -1)) is None:
            path.unlink(missing_ok=True)
    return ended


def _marked(mark: str) -> set[int]:
    """Ids of this user's processes that carry the mark in their environment; empty where /proc does not tell."""
    needle = f"\0{MARK}={mark}\0".encode()
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in b"\0" + (entry / "environ").read_bytes() + b"\0":
                found.add(int(entry.name))
    return found


def _end_all(pids: set[int], grace_s: float) -> None:
    """TERM, grace, KILL for processes that are not our children."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if all(guard.started(pid) is None for pid in pids):
                return
            time.sleep(0.02)


class ServerProcess:
    """One server process, its log and its end. A context manager; leaving it stops the server.

    ``argv``: the command. ``env``: its environment (see :func:`inherited_environment`), to which only the kit's mark
    is added. ``secrets``: further variables whose values must show nowhere: refused in ``argv``, masked in quoted log
    lines. ``stdin``: text the server gets on its stdin. ``name``: for messages and the record. ``grace_s``: seconds
    between TERM and KILL.

    Starting raises EngineError if the command cannot be run.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str,
        log_path: Path,
        env: Mapping[str, str],
        secrets: Mapping[str, str] | None = None,
        stdin: str | None = None,
        cwd: Path | None = None,
        grace_s: float = 10.0,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._grace_s = grace_s
        self._secrets = [value for value in (secrets or {}).values() if value]
        self._record = records_folder() / f"{os.getpid()}-{uuid.uuid4().hex[:12]}.json"
        if any(secret in word for secret in self._secrets for word in argv):
            raise EngineError(f"{name}: a secret is part of the command line, where every user can read it")
        for line in end_leftovers():
            logging.getLogger(__name__).warning(line)
        order: guard.Order = {
            "argv": list(argv),
            "env": {**env, **(secrets or {}), MARK: self._record.stem},
            "cwd": None if cwd is None else str(cwd),
            "stdin": stdin,
            "parent": os.getpid(),
            "grace_s": grace_s,
            "record": str(self._record),
            "about": {"name": name, "log": str(log_path.absolute())},
        }
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            # Errors quote this start's lines only, even if the file holds those of an earlier one.
            self._log_start = log.tell()
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.pid: int | None = None
        try:
            self._guard.stdin.write(json.dumps(order).encode() + b"\n")
            self._guard.stdin.flush()
            answer = json.loads(self._guard.stdout.readline() or b'{"error": "the guard process ended"}')
            if "error" in answer:
                raise EngineError(f"{name}: cannot run {argv[0]}: {answer['error']}{self.log_quote()}")
            self.pid = answer["pid"]
        except BrokenPipeError as error:
            self.stop()
            raise EngineError(f"{name}: the guard process ended at once{self.log_quote()}") from error
        except BaseException:
            self.stop()
            raise

    def poll(self) -> int | None:
        """The server's exit status (128 + n for signal n), or None while it runs."""
        return self._guard.poll()

    def wait_ready(self, check: Callable[[], T | None], deadline_s: float, interval_s: float = 0.05) -> T:
        """Call ``check`` until it gives something other than None or False, and return that.

        ``check`` should return soon (give it a time-out of its own) and not raise for "not yet"; it may raise
        EngineError to give up. Raises EngineError, and stops the server, if the server exits first or ``deadline_s``
        seconds pass.
        """
        deadline = time.monotonic() + deadline_s
        try:
            while True:
                found = check()
                if found is not None and found is not False:
                    return found
                status = self.poll()
                if status is not None:
                    raise EngineError(f"{self.name} ended with status {status} before it was ready{self.log_quote()}")
                if time.monotonic() > deadline:
                    raise EngineError(f"{self.name} was not ready after {deadline_s:g} s{self.log_quote()}")
                time.sleep(interval_s)
        except BaseException:
            self.stop()
            raise

    def log_text(self) -> str:
        """What this start has logged so far."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(self._log_start)
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def log_quote(self, lines: int = TAIL_LINES) -> str:
        """The log's last lines, secrets masked, as the end of an error message."""
        text = self.log_text()
        for secret in self._secrets:
            text = text.replace(secret, "***")
        tail = [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
        if not tail:
            return f"; its log {self.log_path} is empty"
        return f"; the last lines of {self.log_path}:\n" + "\n".join(f"  | {line}" for line in tail)

    def stop(self) -> None:
        """End the server and wait for its end. May be called again; a Ctrl-C while waiting leaves it to the guard."""
        with contextlib.suppress(OSError):
            self._guard.stdin.close()  # the lifeline
        try:
            self._guard.wait(self._grace_s + 10.0)
        except subprocess.TimeoutExpired:
            # Not seen to happen; the server dies with the guard, and its group is ended to be sure.
            self._guard.kill()
            self._guard.wait()
            if self.pid is not None:
                guard.signal_group(self.pid, signal.SIGKILL)
                _end_all(_marked(self._record.stem), 0.0)
        self._guard.stdout.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
