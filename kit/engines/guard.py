"""Run one server and end it when asked, or when whoever asked for it is gone.

A stand-alone script (standard library only, run with ``python -I -S``), started by
:class:`kit.engines.process.ServerProcess`:

* stdin: one JSON line (see :class:`Order`), then nothing; the pipe stays open as the *lifeline*. Its end means that the
  parent has closed it or has died, in whatever way: SIGKILL, a killed Jupyter kernel, a crash.
* stdout: one JSON line, ``{"pid": …}`` or ``{"error": …}``.
* stderr: the server's log; the server's stdout and stderr go there.

The exit status is the server's (128 + n if signal n ended it).

Three more nets lie under the lifeline. The parent's id is watched too, since a process forked from the parent may
hold the pipe open. On Linux the server dies with this guard (``PR_SET_PDEATHSIG``; the guard has one thread, so the
rule that it is the *thread* that counts does no harm), and the guard adopts its orphaned descendants
(``PR_SET_CHILD_SUBREAPER``), so that a worker that left the process group is ended as well. And a record of the running
server lies in a file, which the next start checks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import TypedDict

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
PARENT_CHECK_S = 0.5


class Order(TypedDict):
    """What the parent asks for, in one JSON line."""

    argv: list[str]
    env: dict[str, str]
    cwd: str | None
    stdin: str | None
    parent: int
    grace_s: float
    record: str
    """Path of the file that names the running server while it runs."""
    about: dict[str, str]
    """Put into the record as it is."""


def started(pid: int) -> str | None:
    """When a process started, as a token to compare: a process id alone may have been given to another.

    None if there is no such process (or only a zombie is left of it).
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as handle:
            # Fields after the command, which may itself hold spaces and parentheses (proc(5)).
            fields = handle.read().rpartition(")")[2].split()
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as handle:
            boot = handle.read().strip()
        return None if fields[0] in "ZX" else f"{boot}/{fields[19]}"
    except FileNotFoundError:
        if os.path.exists("/proc/self/stat"):
            return None
    found = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, when = found.stdout.strip().partition(" ")
    return None if not when or state.startswith("Z") else when.strip()


def signal_group(pgid: int, number: int) -> None:
    """Send a signal to a process group; no error if nothing is left of it."""
    # PermissionError: macOS says so of a group that holds only zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def group_alive(pgid: int) -> bool:
    """Whether any process of the group is left."""
    try:
        os.killpg(pgid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _children() -> list[int]:
    """Ids of this process's children, adopted ones too; empty where the system does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as handle:
            return [int(word) for word in handle.read().split()]
    except (OSError, ValueError):
        return []


class _Family:
    """The server and all that came of it."""

    def __init__(self, server: int) -> None:
        self.server = server
        self.status: int | None = None

    def reap(self) -> None:
        """Collect ended children, adopted ones too, and keep the server's exit status."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.server:
                    self.status = os.waitstatus_to_exitcode(status)

    def left(self) -> bool:
        self.reap()
        return group_alive(self.server) or bool(_children())

    def end(self, grace_s: float) -> None:
        """TERM to the group, then KILL to whatever is left, adopted orphans included, after ``grace_s`` seconds."""
        signal_group(self.server, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.left() and time.monotonic() < deadline:
            # Once the server itself is gone, what is left of it is not owed the whole grace.
            if self.status is not None:
                deadline = min(deadline, time.monotonic() + 1.0)
                for pid in _children():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
            time.sleep(0.02)
        last = time.monotonic() + 5.0
        while self.left() and time.monotonic() < last:
            signal_group(self.server, signal.SIGKILL)
            for pid in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def _read_order() -> Order | None:
    """The first line of stdin, read byte by byte so that nothing of the lifeline is buffered; None at its end."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(0, 65536)
        if not piece:
            return None
        line += piece
    return json.loads(line)


def _start(order: Order) -> subprocess.Popen[bytes]:
    guard = os.getpid()

    def bind_to_guard() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it died before the line above
            os._exit(1)

    return subprocess.Popen(
        order["argv"],
        stdin=subprocess.DEVNULL if order["stdin"] is None else subprocess.PIPE,
        stdout=2,
        stderr=2,
        env=order["env"],
        cwd=order["cwd"],
        start_new_session=True,
        preexec_fn=bind_to_guard,
    )


def main() -> int:
    """Run the order on stdin; return the server's exit status."""
    wake_out, wake_in = os.pipe()
    for end in (wake_out, wake_in):
        os.set_blocking(end, False)
    asked_to_stop = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: asked_to_stop.append(True))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    order = _read_order()
    if order is None:
        return 0
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        server = _start(order)
    except (OSError, subprocess.SubprocessError) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return 127
    family = _Family(server.pid)
    try:
        record = {**order["about"], "parent": order["parent"], "parent_started": started(order["parent"]),
                  "guard": os.getpid(), "guard_started": started(os.getpid()),
                  "server": server.pid, "server_started": started(server.pid)}  # fmt: skip
        # A new name, then a rename: whoever reads the folder sees whole records only.
        with open(order["record"] + ".new", "w", encoding="utf-8") as handle:
            json.dump(record, handle)
        os.replace(order["record"] + ".new", order["record"])
        print(json.dumps({"pid": server.pid}), flush=True)
        if order["stdin"] is not None:
            with contextlib.suppress(BrokenPipeError):
                server.stdin.write(order["stdin"].encode())
                server.stdin.close()
        while not asked_to_stop and os.getppid() == order["parent"]:
            readable, _, _ = select.select([0, wake_out], [], [], PARENT_CHECK_S)
            if wake_out in readable:
                os.read(wake_out, 4096)
            family.reap()
            if family.status is not None or (0 in readable and not os.read(0, 4096)):
                break
    finally:
        family.end(order["grace_s"])
        with contextlib.suppress(FileNotFoundError):
            os.unlink(order["record"])
    status = family.status if family.status is not None else -signal.SIGKILL
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
