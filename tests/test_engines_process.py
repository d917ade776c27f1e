"""A server child: started, found ready, ended in every way its parent can end, and never left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kit.engines import guard, process
from kit.engines.process import EngineError, ServerProcess, end_leftovers, inherited_environment, records_folder

# A server with a worker in its group and one in a session of its own; it tells their ids in the log.
FAMILY = """
import json, os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
workers = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
print("PIDS", json.dumps([os.getpid(), *(w.pid for w in workers)]), flush=True)
time.sleep(600)
"""

# A kit that starts the family, says so, and then waits for its fate (given on its command line).
PARENT = """
import sys, time, os, threading
from pathlib import Path
from kit.engines.process import ServerProcess, inherited_environment
family, log, how = sys.argv[1:4]

def start():
    return ServerProcess([sys.executable, "-c", family], name="family", log_path=Path(log), env=inherited_environment())

if how == "thread":  # the thread that started the server ends long before the process does
    box = []
    thread = threading.Thread(target=lambda: box.append(start())); thread.start(); thread.join()
    server = box[0]
else:
    server = start()
server.wait_ready(lambda: "PIDS" in server.log_text(), 20)
if how == "fork" and os.fork() == 0:  # a forked child holds the lifeline's end open
    time.sleep(600)
print("up", flush=True)
if how == "exit":
    sys.exit(0)
with server:
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_records(tmp_path, monkeypatch):
    """A folder of records of its own, so that a test never meets another run's servers."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KIT_TEST_TOKEN", raising=False)


def python(code: str, log: Path, **more) -> ServerProcess:
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    return ServerProcess(argv, name="test server", log_path=log, env=inherited_environment(), **more)


def alive(pid: int) -> bool:
    return guard.started(pid) is not None


def gone(pids: list[int], within_s: float = 15.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def family_pids(log: Path) -> list[int]:
    line = next(line for line in log.read_text().splitlines() if line.startswith("PIDS"))
    return json.loads(line.removeprefix("PIDS "))


def start_parent(log: Path, how: str) -> subprocess.Popen:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, FAMILY, str(log), how], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    for line in parent.stdout:
        if line.strip() == "up":
            return parent
    raise AssertionError(f"the parent did not come up: {log.read_text() if log.exists() else 'no log'}")


def test_leaving_the_block_ends_the_server_and_all_its_workers(tmp_path):
    log = tmp_path / "log"
    with python(FAMILY, log) as server:
        server.wait_ready(lambda: "PIDS" in server.log_text(), 20)
        pids = family_pids(log)
        assert all(alive(pid) for pid in pids)
        assert os.getsid(server.pid) != os.getsid(0)
        assert len(list(records_folder().glob("*.json"))) == 1
    assert not any(alive(pid) for pid in pids)
    assert not list(records_folder().iterdir())


@pytest.mark.parametrize(
    ("how", "fate"),
    [
        ("wait", signal.SIGKILL),
        ("thread", signal.SIGKILL),
        ("fork", signal.SIGKILL),
        ("wait", signal.SIGTERM),
        ("wait", signal.SIGINT),
        ("exit", None),
    ],
)
def test_server_ends_with_its_parent_however_that_ends(tmp_path, how, fate):
    log = tmp_path / "log"
    parent = start_parent(log, how)
    pids = family_pids(log)
    try:
        if fate is not None:
            assert alive(pids[0])
            os.kill(parent.pid, fate)
        assert gone(pids)
        assert gone([parent.pid])
    finally:
        os.killpg(parent.pid, signal.SIGKILL) if how == "fork" else None
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_ctrl_c_on_the_terminal_reaches_the_kit_only(tmp_path):
    """The terminal signals the kit's process group: the server is not in it, and ends in order afterwards."""
    log = tmp_path / "log"
    parent = start_parent(log, "wait")
    os.killpg(parent.pid, signal.SIGINT)
    assert gone(family_pids(log))
    parent.wait(10)
    parent.stdout.close()
    assert not list(records_folder().iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_server_dies_with_its_guard_and_the_next_start_ends_the_workers_left(tmp_path):
    log = tmp_path / "log"
    parent = start_parent(log, "wait")
    pids = family_pids(log)
    record = json.loads(next(records_folder().glob("*.json")).read_text())
    parent.kill()
    os.kill(record["guard"], signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(pids[:1])
    assert alive(pids[1]) and alive(pids[2])
    assert len(end_leftovers()) == 1
    assert gone(pids)
    assert not list(records_folder().iterdir())


def test_next_start_ends_a_server_left_over_and_says_so(tmp_path):
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    record = {"name": "old", "parent": dead.pid, "parent_started": "long ago", "guard": dead.pid,
              "server": orphan.pid, "server_started": guard.started(orphan.pid)}  # fmt: skip
    path = records_folder() / "old.json"
    path.write_text(json.dumps(record))
    said = end_leftovers()
    assert orphan.wait(10) == -signal.SIGTERM
    assert len(said) == 1 and str(orphan.pid) in said[0]
    assert not path.exists()


@pytest.mark.parametrize("change", ["server_started", "parent_alive"])
def test_a_reused_pid_or_a_server_of_a_living_kit_is_left_alone(tmp_path, change):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    record = {"name": "old", "parent": os.getpid(), "parent_started": guard.started(os.getpid()), "guard": -1,
              "server": other.pid, "server_started": guard.started(other.pid)}  # fmt: skip
    if change == "server_started":
        record |= {"parent_started": "another", "server_started": "another"}
    (records_folder() / "old.json").write_text(json.dumps(record))
    try:
        assert end_leftovers() == []
        time.sleep(0.1)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_early_exit_is_an_error_with_the_status_and_the_last_lines(tmp_path):
    server = python("import sys; print('no such model'); sys.exit(7)", tmp_path / "log")
    with pytest.raises(EngineError, match=r"status 7(.|\n)*no such model"):
        server.wait_ready(lambda: None, 20)


def test_only_this_starts_lines_are_quoted(tmp_path):
    (tmp_path / "log").write_text("an older failure\n")
    server = python("import sys; print('this failure'); sys.exit(1)", tmp_path / "log")
    with pytest.raises(EngineError) as caught:
        server.wait_ready(lambda: None, 20)
    assert "this failure" in str(caught.value) and "an older failure" not in str(caught.value)


def test_a_server_that_is_never_ready_is_ended_at_the_deadline(tmp_path):
    server = python("import time; print('still loading', flush=True); time.sleep(600)", tmp_path / "log")
    pid = server.pid
    with pytest.raises(EngineError, match=r"not ready after 1\.5 s(.|\n)*still loading"):
        server.wait_ready(lambda: None, 1.5)
    assert not alive(pid)


def test_a_server_deaf_to_term_is_killed_after_its_grace(tmp_path):
    code = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(600)
    """
    with python(code, tmp_path / "log", grace_s=0.3) as server:
        server.wait_ready(lambda: "deaf" in server.log_text(), 20)
    assert server.poll() == 128 + signal.SIGKILL


def test_a_command_that_cannot_run_is_named(tmp_path):
    with pytest.raises(EngineError, match="no-such-program"):
        ServerProcess(["/no-such-program"], name="x", log_path=tmp_path / "log", env={})


def test_stdin_and_environment_are_what_was_given(tmp_path):
    code = "import os, sys, json; print(json.dumps([sys.stdin.read(), dict(os.environ)]), flush=True)"
    argv = [sys.executable, "-I", "-c", code]
    server = ServerProcess(argv, name="x", log_path=tmp_path / "log", env={"ONLY": "this"}, stdin="{'ü': 1}")
    with server:
        while server.poll() is None:
            time.sleep(0.02)
    text, env = json.loads(server.log_text())
    assert text == "{'ü': 1}"
    # LC_CTYPE: Python sets it itself where no locale is given.
    assert {k: v for k, v in env.items() if k not in ("LC_CTYPE", process.MARK)} == {"ONLY": "this"}


def test_secrets_reach_the_server_but_no_argv_and_no_message(tmp_path):
    secret = {"KIT_TEST_TOKEN": "s3cret-value"}
    log = tmp_path / "log"
    code = "import os, sys; print('token', os.environ['KIT_TEST_TOKEN']); sys.exit(1)"
    server = python(code, log, secrets=secret)
    with pytest.raises(EngineError) as caught:
        server.wait_ready(lambda: None, 20)
    assert "token ***" in str(caught.value) and "s3cret" not in str(caught.value)
    with pytest.raises(EngineError, match="command line") as caught:
        ServerProcess(["echo", "--key=s3cret-value"], name="x", log_path=log, env={}, secrets=secret)
    assert "s3cret" not in str(caught.value)


def test_inherited_environment_leaves_secrets_out(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "x")
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    monkeypatch.setenv("CUDA_HOME", "/cuda")
    env = inherited_environment({"MORE": "1"})
    assert env["CUDA_HOME"] == "/cuda" and env["MORE"] == "1"
    assert "HF_TOKEN" not in env and "OPENAI_API_KEY" not in env


def test_a_folder_of_records_others_could_write_is_refused(tmp_path):
    (tmp_path / f"mtp-kit-{os.getuid()}").mkdir()
    (tmp_path / f"mtp-kit-{os.getuid()}").chmod(0o777)
    with pytest.raises(EngineError, match="0700"):
        process.records_folder()
