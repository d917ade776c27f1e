"""The embedded server, for real: a small generated model behind llama.cpp's HTTP server in a child process."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_gguf

from kit.engines import llamacpp
from kit.engines.base import SAMPLED_ROLES, HttpError, Server, request, request_json
from kit.engines.guard import started
from kit.engines.llamacpp import LlamaCppSettings
from kit.engines.process import EngineError
from kit.records.provenance import model_stamp

ARMS = {
    "baseline": {},
    "mtp-1": {"speculation": "mtp", "draft_width": 1},
    "mtp-2": {"speculation": "mtp", "draft_width": 2},
    "ngram": {"speculation": "ngram", "ngram_match": 4, "ngram_max": 6},
    "mtp-2+ngram": {"speculation": "mtp+ngram", "draft_width": 2, "ngram_match": 4, "ngram_max": 6},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("model") / "peaked.gguf")


@pytest.fixture(scope="module")
def servers(model, tmp_path_factory):
    """Servers by arm, each started once for all tests of this file."""
    running: dict[str, Server] = {}

    def get(arm: str) -> Server:
        if arm not in running:
            settings = LlamaCppSettings.checked(model=model, slots=2, tokens_per_slot=2048, threads=1, **ARMS[arm])
            running[arm] = llamacpp.start(settings, tmp_path_factory.mktemp(arm))
        return running[arm]

    yield get
    for server in running.values():
        server.close()


def complete(server: Server, prompt: str, tokens: int = 40, **more) -> dict:
    body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
    return request_json("POST", f"{server.base_url}/v1/completions", body=body, timeout_s=60)


def text_of(answer: dict) -> str:
    return answer["choices"][0]["text"]


def events(server: Server, path: str, body: dict) -> list[dict]:
    """The stream's events, parsed; the closing [DONE] must be there."""
    connection = http.client.HTTPConnection(server.base_url.removeprefix("http://"), timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    lines = [line.decode().strip() for line in connection.getresponse()]
    connection.close()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(word) for word in data[:-1]]


def counters(server: Server) -> dict[str, float]:
    page = request("GET", server.metrics_url)
    return {name: float(value) for name, value in re.findall(r"^(\S+) (\S+)$", page, re.MULTILINE)}


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_says_what_the_model_says(servers, arm):
    server = servers(arm)
    assert text_of(complete(server, "hello abc")) == tiny_gguf.successor("abc", 40)


def test_arms_give_equal_text_alone_and_together(servers):
    prompts = [f"prompt {n} {tiny_gguf.CYCLE[n * 5]}" for n in range(4)]
    wanted = [tiny_gguf.successor(prompt, 60) for prompt in prompts]
    for arm in ("baseline", "mtp-2"):
        server = servers(arm)
        with ThreadPoolExecutor(4) as pool:
            assert [text_of(a) for a in pool.map(lambda p: complete(server, p, 60), prompts)] == wanted  # noqa: B023


def test_drafts_are_counted_and_the_counts_are_the_models_own(servers):
    """Along the cycle the head is wrong after 8 of 36 letters, so that at width 1 the counts can be told in advance."""
    server = servers("mtp-1")
    before = counters(server)
    answer = complete(server, "hello 9", tokens=37)
    # The first token, a, comes from the prompt. Then each step drafts from the token before it, right or wrong:
    drafted = accepted = steps = 0
    at, done = 0, 1
    while done < 37:
        room = 37 - done
        right = tiny_gguf.CYCLE[at] not in tiny_gguf.WRONG_AFTER
        if room > 1:
            drafted, accepted, steps = drafted + 1, accepted + right, steps + 1
        made = 1 + (right and room > 1)
        at, done = (at + made) % 36, done + made
    assert answer["timings"]["draft_n"] == drafted
    assert answer["timings"]["draft_n_accepted"] == accepted
    gained = {role: counters(server)[server.sampled[role]] - before[server.sampled[role]] for role in
              ("drafted", "accepted", "drafts")}  # fmt: skip
    assert gained == {"drafted": drafted, "accepted": accepted, "drafts": steps}


def test_baseline_reports_no_drafts_rather_than_zero(servers):
    timings = complete(servers("baseline"), "abc")["timings"]
    assert "draft_n" not in timings and "draft_n_accepted" not in timings


def test_ngram_arm_drafts_from_the_request_and_remembers_no_other(servers):
    server = servers("ngram")
    repeating = tiny_gguf.CYCLE * 3
    first = complete(server, repeating, tokens=36)["timings"]
    assert first["draft_n_accepted"] == first["draft_n"] > 0
    fresh = "z9k2m4"  # 30 tokens on, nothing in this request's own text has occurred twice
    assert "draft_n" not in complete(server, fresh, tokens=30)["timings"]


@pytest.mark.parametrize("role", SAMPLED_ROLES)
def test_sampled_metrics_are_on_the_servers_page(servers, role):
    server = servers("mtp-2")
    complete(server, "abc")
    name = server.sampled[role] + ('{position="0"}' if role == "accepted_per_position" else "")
    assert name in counters(server)


def test_counts_come_with_the_last_event_of_both_endpoints(servers):
    server = servers("mtp-2")
    common = {"max_tokens": 12, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    told = events(server, "/v1/completions", {"prompt": "hello abc", "ignore_eos": True, **common})
    assert [("usage" in e, "timings" in e) for e in told] == [(False, False)] * (len(told) - 1) + [(True, True)]
    assert told[-1]["usage"]["completion_tokens"] == told[-1]["timings"]["predicted_n"] == 12
    assert told[-1]["choices"][0]["finish_reason"] == "length"
    assert "".join(e["choices"][0]["text"] for e in told) == tiny_gguf.successor("c", 12)

    told = events(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "xyz"}], **common})
    assert told[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert told[-1]["choices"] == [] and told[-1]["usage"]["completion_tokens"] == 12
    assert {"prompt_n", "cache_n", "draft_n", "draft_n_accepted"} <= told[-1]["timings"].keys()


def test_each_token_is_an_event_and_timings_per_token_count_them(servers):
    body = {"prompt": "abc", "max_tokens": 9, "temperature": 0, "stream": True, "timings_per_token": True}
    told = events(servers("mtp-2"), "/v1/completions", body)
    assert [e["timings"]["predicted_n"] for e in told if e["choices"][0]["text"]] == list(range(1, 10))


def test_closing_the_connection_cancels_the_request(servers):
    server = servers("mtp-1")
    connection = http.client.HTTPConnection(server.base_url.removeprefix("http://"), timeout=60)
    body = {"prompt": "abc", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.readline()
    before = counters(server)[server.sampled["running"]]
    answer.close()
    connection.close()
    server.flush()  # waits until nothing runs
    assert (before, counters(server)[server.sampled["running"]]) == (1, 0)


def test_pinned_sessions_keep_their_prefix_less_the_checkpoint_distance(servers):
    server = servers("baseline")
    server.flush()
    shared = "s" * 100
    turns = {slot: shared + str(slot) * 50 for slot in (0, 1)}
    for slot, prompt in turns.items():
        complete(server, prompt, id_slot=slot, tokens=10)
    for slot, prompt in turns.items():
        # The history continues with what the client recorded, not with what was generated.
        answer = complete(server, prompt + "m" * 30, id_slot=slot, tokens=10)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 4


def test_flush_empties_the_prefix_cache_of_every_slot(servers):
    server = servers("mtp-2")
    prompts = ["p" * 80, "q" * 80]
    for slot, prompt in enumerate(prompts):
        complete(server, prompt, id_slot=slot, tokens=4)
    server.flush()
    for slot, prompt in enumerate(prompts):
        assert complete(server, prompt, id_slot=slot, tokens=4)["timings"]["cache_n"] == 0


def test_flush_waits_for_a_cancelled_request_and_refuses_a_running_one(servers):
    server = servers("baseline")
    connection = http.client.HTTPConnection(server.base_url.removeprefix("http://"), timeout=60)
    body = {"prompt": "abc", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.readline()
    try:
        with pytest.raises(EngineError, match="still serves a request"):
            llamacpp.flush(server, wait_s=0)
    finally:
        answer.close()
        connection.close()
    server.flush()


def test_what_the_server_resolved_is_reported(servers, model):
    server = servers("mtp-2")
    found = server.resolved
    assert found["slots"] == 2 and found["tokens_per_slot"] == 2048
    assert found["threads"] == 1 and found["layout"] == "cpu, 1 thread"
    assert (found["draft_width"], found["mtp_loaded"], found["ngram"]) == (2, True, None)
    assert found["forced_acceptance"] is None and server.flags == []
    assert found["model_file"] == "peaked.gguf" and found["model_stamp"] == model_stamp(model)
    assert found["engine_build"].startswith("xllamacpp 20")
    assert str(model.parent) not in json.dumps(found)
    assert server.model in request("GET", f"{server.base_url}/v1/models")


def test_arms_that_differ_in_one_switch_differ_in_one_resolved_setting(servers, model, tmp_path):
    """Else a comparison of them could not say that it isolates the switch."""

    def difference(one, two):
        return {key for key in one | two if one.get(key) != two.get(key)}

    widths = [servers(arm).resolved for arm in ("mtp-1", "mtp-2")]
    assert difference(*widths) == {"draft_width"}
    assert difference(servers("mtp-2").resolved, servers("mtp-2+ngram").resolved) == {"ngram"}
    assert difference(servers("baseline").resolved, widths[0]) == {"draft_width", "mtp_loaded"}
    carried = LlamaCppSettings.checked(model=model, slots=2, tokens_per_slot=2048, threads=1, load_mtp=True)
    with llamacpp.start(carried, tmp_path) as server:
        assert difference(server.resolved, widths[0]) == {"draft_width"}


def test_the_port_is_open_on_loopback_only(servers):
    port = int(servers("baseline").base_url.rsplit(":", 1)[1])
    table = Path("/proc/net/tcp")
    if not table.exists():
        pytest.skip("this system has no /proc/net/tcp to look the listener up in")
    listeners = [line.split() for line in table.read_text().splitlines()[1:]]
    addresses = {f[1] for f in listeners if f[3] == "0A" and int(f[1].split(":")[1], 16) == port}
    assert addresses == {f"0100007F:{port:04X}"}
    six = Path("/proc/net/tcp6")
    assert not six.exists() or f":{port:04X} " not in six.read_text()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) == 0


def test_web_pages_may_not_read_answers(servers):
    asked = urllib.request.Request(
        f"{servers('baseline').base_url}/v1/models", headers={"Origin": "https://evil.example"}
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        assert answer.headers.get("Access-Control-Allow-Origin") not in ("*", "https://evil.example")


def test_forced_acceptance_follows_every_number(model, tmp_path):
    settings = LlamaCppSettings.checked(
        model=model, slots=1, tokens_per_slot=512, speculation="mtp", draft_width=1, forced_acceptance="1.0", threads=1
    )
    with llamacpp.start(settings, tmp_path) as server:
        timings = complete(server, "hello abc")["timings"]
        assert timings["draft_n_accepted"] == timings["draft_n"]
        assert server.resolved["forced_acceptance"] == "1"
        assert server.flags == ["forced-acceptance"]


def test_leaving_the_block_ends_the_server(model, tmp_path):
    with llamacpp.start(LlamaCppSettings.checked(model=model, slots=1, threads=1), tmp_path) as server:
        pid = server.process.pid
        assert started(pid) is not None
    assert started(pid) is None
    with pytest.raises(HttpError):
        request("GET", f"{server.base_url}/health")


PARENT = """
import sys, time
from pathlib import Path
from kit.engines import llamacpp
settings = llamacpp.LlamaCppSettings.checked(model=sys.argv[1], slots=1, threads=1)
server = llamacpp.start(settings, Path(sys.argv[2]))
print(server.process.pid, server.base_url, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_server_is_gone_when_its_parent_is_killed_under_load(model, tmp_path, fate):
    parent = subprocess.Popen(
        [sys.executable, "-u", "-c", PARENT, str(model), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    pid, url = parent.stdout.readline().split()
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    body = {"prompt": "abc", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.readline()
    os.kill(parent.pid, fate)
    deadline = time.monotonic() + 15
    while started(int(pid)) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert started(int(pid)) is None
    parent.wait()
    parent.stdout.close()
    answer.close()
    connection.close()


def test_server_is_gone_when_its_notebook_kernel_is_killed(model, tmp_path):
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        code = PARENT.replace("sys.argv[1]", repr(str(model))).replace("sys.argv[2]", repr(str(tmp_path)))
        said: list[str] = []

        def hear(message):
            if message["msg_type"] in ("stream", "error"):
                said.append(message["content"].get("text") or str(message["content"]))

        client.execute_interactive(code.replace("time.sleep(600)", ""), output_hook=hear, timeout=60)
        pid = int("".join(said).split()[0])
        assert started(pid) is not None
    finally:
        manager.shutdown_kernel(now=True)  # SIGKILL, as the Restart button of a hung kernel does
        client.stop_channels()
    deadline = time.monotonic() + 15
    while started(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert started(pid) is None


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(EngineError, match=r"no-such\.gguf is not there"):
        llamacpp.start(LlamaCppSettings.checked(model=tmp_path / "no-such.gguf"), tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "weights.gguf").write_bytes(b"PK\x03\x04" + b"\0" * 100)
    with pytest.raises(EngineError, match="not a GGUF file"):
        llamacpp.start(LlamaCppSettings.checked(model=tmp_path / "weights.gguf"), tmp_path)


def test_a_cut_off_model_is_an_error_that_quotes_the_server(model, tmp_path):
    (tmp_path / "cut.gguf").write_bytes(model.read_bytes()[:500_000])
    with pytest.raises(EngineError, match=r"status 1 before it was ready(.|\n)*corrupted or incomplete"):
        llamacpp.start(LlamaCppSettings.checked(model=tmp_path / "cut.gguf"), tmp_path)


def test_a_model_without_mtp_block_is_not_served_silently_without_speculation(tmp_path):
    plain = tiny_gguf.write(tmp_path / "plain.gguf", mtp=False)
    settings = LlamaCppSettings.checked(model=plain, slots=1, speculation="mtp", draft_width=1, threads=1)
    with pytest.raises(EngineError):
        llamacpp.start(settings, tmp_path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"speculation": "mtp"}, "needs draft_width"),
        ({"draft_width": 2}, "does not use it"),
        ({"speculation": "eagle"}, "speculation"),
        ({"speculation": "mtp", "draft_width": 1, "load_mtp": False}, "needs the MTP block"),
        ({"draft_with": 2}, r"unknown setting 'draft_with'; the settings are: model, speculation, draft_width"),
        ({"speculation": "ngram", "ngram_match": 9, "ngram_max": 8}, "nothing is drafted"),
        ({"speculation": "mtp", "draft_width": 2, "forced_acceptance": "0.7"}, "needs 2 numbers"),
        ({"speculation": "mtp", "draft_width": 2, "forced_acceptance": "0.5,0.7"}, "never rise"),
        ({"speculation": "mtp", "draft_width": 1, "forced_acceptance": "many"}, "forced_acceptance"),
        ({"forced_acceptance": "0.5"}, "needs a speculation"),
        ({"slots": 0}, "slots"),
        ({"threads": 0}, "threads"),
    ],
)
def test_a_bad_setting_is_named_with_what_would_be_right(settings, says):
    with pytest.raises(EngineError, match=says):
        LlamaCppSettings.checked(model="model.gguf", **settings)


def test_the_client_is_left_a_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert llamacpp.default_threads() == 7
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert llamacpp.default_threads() == 1


def test_importing_the_engines_loads_no_engine():
    code = "import sys, kit.engines.llamacpp, kit.engines.openai; print('xllamacpp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
