"""The driver as users run it: its own process against a real local server, its files read back."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from load_server import Answer, serving, spec, steady

from kit.errors import KitError
from kit.load import load_requests, load_result, load_samples, recompute, run_cell
from kit.load.spec import parse_spec
from kit.load.window import chunk_tokens
from kit.records.schema import RequestRecord

DRIVER = [sys.executable, "-m", "kit.load.driver"]


async def drive(load_spec, folder: Path, progress=None):
    """run_cell beside the test's own server."""
    return await asyncio.to_thread(run_cell, load_spec, folder, progress)


def firsts(requests: Iterable[RequestRecord]) -> dict[int, RequestRecord]:
    """Each client's first request: a part of an answer, in the middle of a session."""
    found: dict[int, RequestRecord] = {}
    for r in sorted(requests, key=lambda r: r.sent_ns):
        found.setdefault(r.client, r)
    return found


def after_first(requests: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The requests that are no client's first."""
    all_ = list(requests)
    first = {r.request_id for r in firsts(all_).values()}
    return [r for r in all_ if r.request_id not in first]


async def test_a_cell_is_driven_written_and_recomputed_from_raw_lines(tmp_path):
    events = []
    metrics = '# TYPE a:jobs gauge\na:jobs 3\na:tokens_total{model="m"} COUNT\nb:other 5\n'
    async with serving(steady(), metrics=metrics) as server:
        asked = spec(
            server.url, slo="ttft:5000", metrics_urls=[server.url + "/metrics"], metrics_names=["a:*"],
            metrics_interval_s=0.2,
        )  # fmt: skip
        result = await drive(asked, tmp_path, events.append)
    assert result.complete and result.model == "scripted" and result.errors == {}
    counts = result.counts
    assert counts.completed > 5 and counts.failed == 0 and counts.cut_off == 2
    assert counts.sent == counts.completed + counts.cut_off
    assert result.metrics["attainment_ended"] == 1 and result.metrics["attainment"] < 1
    assert set(result.server) == {"a:jobs", "a:tokens_total"}
    assert result.server["a:jobs"] == 3
    assert result.server["a:tokens_total"] == 10 * (len(load_samples(tmp_path)) - 1)
    again = recompute(tmp_path)
    assert (again.counts, again.metrics, again.server) == (counts, result.metrics, result.server)
    assert again.flags == result.flags
    assert {e["phase"] for e in events if e["event"] == "progress"} >= {"burn-in", "window"}
    assert events[-1]["event"] == "done"
    assert load_result(tmp_path) == result
    requests = list(load_requests(tmp_path))
    assert {r.requested_tokens for r in after_first(requests)} == {10}
    assert {b["max_tokens"] for b in server.bodies} == {r.requested_tokens for r in requests}
    assert all(b["temperature"] == 0 and b["ignore_eos"] for b in server.bodies)


async def test_several_tokens_in_a_chunk_are_counted_as_tokens(tmp_path):
    """Faults 4 and 5: inter-token latency too high and throughput too low where a chunk holds several tokens."""
    async with serving(steady(tokens=40, chunk=4)) as server:
        result = await drive(spec(server.url), tmp_path)
    opens, closes = result.window_ns
    requests = list(load_requests(tmp_path))
    chunks = sum(opens <= c.t_ns < closes for r in requests for c in r.chunks)
    seconds = (closes - opens) / 1e9
    assert result.metrics["output_tps"] == pytest.approx(4 * chunks / seconds)
    assert result.metrics["tokens_per_chunk"] == pytest.approx(4)
    # Ten chunks have nine gaps, forty tokens thirty-nine: the time per token is not the time per chunk.
    assert result.metrics["tpot_p50"] < 0.5 * result.metrics["icl_p50"]


async def test_load_flows_across_the_windows_edges(tmp_path):
    """Fault 8 end to end: answers longer than the cell; only what arrived in the window counts, and it does count."""

    async def endless(answer: Answer, _: dict) -> None:
        for n in range(1, 10_000):
            await answer.delta("abcd", usage=n)
            await asyncio.sleep(0.01)

    async with serving(endless) as server:
        result = await drive(spec(server.url, continuous_usage=True), tmp_path)
    requests = list(load_requests(tmp_path))
    assert [r.status for r in requests] == ["cut_off", "cut_off"]
    assert (result.counts.cut_off, result.counts.completed) == (2, 0)
    opens, closes = result.window_ns
    inside = sum(opens <= c.t_ns < closes for r in requests for c in r.chunks)
    assert result.metrics["output_tps"] == pytest.approx(inside / 0.8)
    assert 0 < inside < sum(r.completion_tokens for r in requests), "tokens of warm-up counted too"
    assert sum(n for r in requests for _, n, _ in chunk_tokens(r)) == sum(r.completion_tokens for r in requests)


async def test_clients_start_spread_over_burn_in(tmp_path):
    """Fault 9: all clients start at once and the burst is in p99 TTFT."""
    async with serving(steady(tokens=2)) as server:
        result = await drive(
            spec(server.url, load={"kind": "closed", "value": 5}, burn_in_s=1.0, warm_up_s=0.2), tmp_path
        )
    start = result.window_ns[0] - 1_200_000_000
    first = firsts(load_requests(tmp_path))
    assert sorted(first) == [0, 1, 2, 3, 4]
    assert all(r.sent_ns >= start + client * 200_000_000 for client, r in first.items())


async def test_clients_begin_in_the_middle_of_sessions_and_answers(tmp_path):
    """Lockstep: clients that begin whole answers side by side prefill and decode in waves, another phase for each arm.

    And who begins at first turns, whose prompts are short, gets to longer ones the sooner the faster the arm is.
    """

    async def asked_for(answer: Answer, body: dict) -> None:
        for _ in range(body["max_tokens"] // 10 + 1):
            await asyncio.sleep(0.01)
            await answer.delta("abcd")
        await answer.end(body["max_tokens"])

    def begins(folder: Path) -> list[tuple]:
        found = firsts(load_requests(folder))
        return [(client, r.session, r.turn, r.requested_tokens, r.prompt_sha256) for client, r in sorted(found.items())]

    workload = {"kind": "synthetic", "input_tokens": 8, "output_tokens": 100, "turns": 6}
    common = {"workload": workload, "load": {"kind": "closed", "value": 12}, "window_s": 0.4}
    async with serving(asked_for) as server:
        for name, more in {
            "arm-a": {}, "arm-b": {"processes": 3}, "repeat": {"repeat": 1}, "short": {"burn_in_s": 0.3},
        }.items():  # fmt: skip
            await drive(spec(server.url, **{**common, "burn_in_s": 1.0, "warm_up_s": 1.0, **more}), tmp_path / name)
    begun = begins(tmp_path / "arm-a")
    lengths, turns = [b[3] for b in begun], {b[2] for b in begun}
    assert len(set(lengths)) > 6 and min(lengths) < 40 and max(lengths) > 60 and max(lengths) <= 100
    assert len(turns) > 3, "sessions begin at the same turn"
    assert begins(tmp_path / "arm-b") == begun, "the arms did different work"
    repeat = begins(tmp_path / "repeat")
    assert [b[2] for b in repeat] != [b[2] for b in begun] and [b[3] for b in repeat] != lengths
    short = begins(tmp_path / "short")
    assert {b[2] for b in short} == {0}, "histories that a slow server would still read in the window"
    assert [b[3] for b in short] == lengths
    requests = list(load_requests(tmp_path / "arm-a"))
    assert {r.requested_tokens for r in after_first(requests)} == {100}
    for client, first in firsts(requests).items():
        turns = [r.turn for r in requests if r.client == client]
        assert turns == [(first.turn + n) % 6 for n in range(len(turns))], "a session was not gone on with"


async def test_a_server_whose_pages_are_slow_delays_no_request(tmp_path):
    """The page that opens the connections took a second (SGLang's /health does): the window began within the ramp."""
    async with serving(steady(tokens=2), page_s=0.6) as server:
        result = await drive(
            spec(server.url, load={"kind": "closed", "value": 3}, burn_in_s=0.3, warm_up_s=0.1), tmp_path
        )
    start = result.window_ns[0] - 400_000_000
    first = {client: (r.sent_ns - start) / 1e9 for client, r in firsts(load_requests(tmp_path)).items()}
    assert all(sent < client * 0.1 + 0.3 for client, sent in first.items()), first


async def test_prompts_are_unique_between_cells_and_the_same_between_arms(tmp_path):
    """Fault 10: the second arm finds the first one's prompts in the prefix cache."""

    def openings(bodies):
        return {json.dumps(b["messages"])[:80] for b in bodies}

    def work(folder):
        return {(r.client, r.session, r.turn): r.prompt_sha256 for r in load_requests(folder)}

    async def cached(answer: Answer, _: dict) -> None:
        await answer.delta("abcd")
        await asyncio.sleep(0.02)
        await answer.end(1, prompt=20, cached=5)

    async with serving(cached) as server:
        bodies = []
        for name, repeat in (("arm-a", 0), ("arm-b", 0), ("arm-a-again", 1)):
            server.bodies.clear()
            result = await drive(spec(server.url, repeat=repeat), tmp_path / name)
            bodies.append(list(server.bodies))
    assert result.metrics["cached_share"] == pytest.approx(0.25)
    assert not openings(bodies[0]) & openings(bodies[2]), "a prompt of another cell came again"
    one, other = work(tmp_path / "arm-a"), work(tmp_path / "arm-b")
    common = one.keys() & other.keys()
    assert len(common) >= 10 and all(one[k] == other[k] for k in common), "the arms did different work"
    prompts = [json.dumps(b["messages"]) for b in bodies[0]]
    assert len(prompts) == len(set(prompts)), "a prompt was sent twice in one cell"
    by_opening: dict[str, list[list]] = {}
    for body in bodies[0]:
        by_opening.setdefault(body["messages"][0]["content"], []).append(body["messages"])
    talks = [t for t in by_opening.values() if len(t) == 2]
    assert talks, "no session had both its turns"
    for first, second in (sorted(t, key=len) for t in talks):
        assert second[: len(first)] == first, "turns of one session do not share their prefix"


async def test_failures_are_counted_and_stay_in_the_percentiles(tmp_path):
    """Fault 11 end to end."""
    async with serving(steady(tokens=2), status=lambda n: 500 if n % 2 else 200) as server:
        result = await drive(spec(server.url, load={"kind": "closed", "value": 4}, window_s=1.5), tmp_path)
    assert result.counts.failed > 0 and result.counts.completed > 0
    assert result.metrics["ttft_p99"] is None and "failures" in result.flags
    assert result.errors == {"HTTP 500: no room": result.counts.failed}


async def test_no_local_cap_on_concurrency_and_no_wait_left_out(tmp_path):
    """Faults 7 and 13: a client's own limit of 100 connections, or a local queue outside the latency.

    The server answers nobody until 130 requests are there at the same time, which a cap would never let happen.
    """
    there = asyncio.Event()
    released: list[int] = []

    async def together(answer: Answer, _: dict) -> None:
        if server.active >= 130:
            released.append(time.perf_counter_ns())
            there.set()
        await there.wait()
        await answer.delta("abcd")
        await asyncio.sleep(0.2)
        await answer.end(1)

    async with serving(together) as server:
        result = await drive(
            spec(server.url, load={"kind": "closed", "value": 130}, burn_in_s=1.0, warm_up_s=2.0, window_s=1.0),
            tmp_path,
        )
    assert server.most_active >= 130
    first = firsts(load_requests(tmp_path))
    assert all(r.sent_ns < released[0] < r.chunks[0].t_ns for r in first.values()), "the wait is not in the latency"
    assert result.counts.failed == 0


async def test_an_open_loop_sends_on_whether_or_not_answers_come(tmp_path):
    """Fault 7 for the open loop: latency is also given from when a request should have been sent."""
    there = asyncio.Event()

    async def stuck(answer: Answer, _: dict) -> None:
        if server.active >= 20:
            there.set()
        await there.wait()
        await answer.delta("abcd")
        await answer.end(1)

    async with serving(stuck) as server:
        asked = spec(server.url, load={"kind": "open", "value": 40}, arrivals={"process": "constant"})
        result = await drive(asked, tmp_path)
    requests = list(load_requests(tmp_path))
    assert server.most_active >= 20
    gaps = {b.scheduled_ns - a.scheduled_ns for a, b in pairwise(requests)}
    assert all(abs(gap - 25_000_000) <= 2 for gap in gaps)
    assert all(r.sent_ns >= r.scheduled_ns for r in requests)
    assert result.metrics["e2e_scheduled_p50"] >= result.metrics["e2e_p50"]
    assert result.metrics["schedule_lag_p99"] is not None


async def test_connections_are_kept_and_opened_before_they_are_timed(tmp_path):
    """Fault 13: a session a request, whose connect time is in TTFT."""
    async with serving(steady(tokens=3)) as server:
        result = await drive(spec(server.url, load={"kind": "closed", "value": 3}), tmp_path)
    assert len(server.bodies) > 20
    # A client that warms may take the connection of one that is just between two requests.
    assert len(server.connections) <= 6
    assert result.connections.opened_by_requests == 0 and result.connections.connect_max_s is None
    assert result.connections.warmed >= 3


async def test_a_server_that_drops_kept_connections_costs_no_request(tmp_path):
    async with serving(steady(tokens=3), drops=True) as server:
        result = await drive(spec(server.url, load={"kind": "closed", "value": 3}), tmp_path)
    assert len(server.bodies) > 15 and result.counts.failed == 0 and result.errors == {}
    # Learnt at the latest when each client has met it once; from then on each request finds a new, open connection.
    assert result.connections.resent <= 6
    assert len(server.connections) == len(server.bodies)


async def test_processes_share_one_load(tmp_path):
    async with serving(steady(tokens=3)) as server:
        common = {"load": {"kind": "open", "value": 30}, "seed": 4}
        one = await drive(spec(server.url, **common), tmp_path / "one")
        two = await drive(spec(server.url, **common, processes=2), tmp_path / "two")
        closed = await drive(spec(server.url, load={"kind": "closed", "value": 3}, processes=3), tmp_path / "closed")

    def schedule(result, folder):
        start = result.window_ns[0] - 300_000_000
        return {(r.scheduled_ns - start) // 1000: r.prompt_sha256 for r in load_requests(folder)}

    single, merged = schedule(one, tmp_path / "one"), schedule(two, tmp_path / "two")
    assert len(single) > 20
    assert dict(sorted(single.items())[:20]) == dict(sorted(merged.items())[:20]), "times or prompts differ"
    ids = [r.request_id for r in load_requests(tmp_path / "two")]
    assert ids == list(range(1, len(ids) + 1))
    assert {r.client for r in load_requests(tmp_path / "closed")} == {0, 1, 2}
    assert two.complete and closed.counts.failed == 0
    assert recompute(tmp_path / "two").metrics == two.metrics


async def test_the_key_is_sent_to_its_server_and_written_nowhere(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("LOAD_TEST_KEY", "sk-very-secret")
    events = []
    async with (
        serving(steady(tokens=2), status=lambda n: 401 if n % 2 else 200) as server,
        serving(steady(), metrics="# TYPE m gauge\nm 1\n") as other,
    ):
        server.error_body = '{"error": {"message": "wrong key sk-very-secret"}}'
        asked = spec(server.url, key_env="LOAD_TEST_KEY", metrics_urls=[other.url + "/metrics"], metrics_names=["m"])
        result = await drive(asked, tmp_path, events.append)
    assert {h["Authorization"] for h in server.headers} == {"Bearer sk-very-secret"}
    assert other.metrics_headers and not any("Authorization" in h for h in other.metrics_headers)
    assert result.errors == {"HTTP 401: wrong key ***": result.counts.failed}
    written = b"".join(
        gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes() for p in tmp_path.rglob("*.*")
    )
    out, err = capfd.readouterr()
    assert b"LOAD_TEST_KEY" in written
    assert "sk-very-secret" not in written.decode() + json.dumps(events) + out + err


async def test_a_key_variable_that_is_not_set_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    async with serving(steady()) as server:
        with pytest.raises(KitError, match=r"NO_SUCH_KEY.*is not set"):
            await drive(spec(server.url, key_env="NO_SUCH_KEY"), tmp_path)


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(entry.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def eventually(condition, seconds: float = 15.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        await asyncio.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_cell_and_keeps_what_there_is(tmp_path, number):
    async with serving(steady(tokens=1000, gap_s=0.02)) as server:
        asked = spec(server.url, window_s=60.0)
        process = await asyncio.create_subprocess_exec(
            *DRIVER, str(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        process.stdin.write(asked.model_dump_json().encode())
        process.stdin.close()
        while json.loads(await process.stdout.readline()).get("phase") != "window":
            pass
        await asyncio.sleep(0.3)
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), 20) == 3
    result = load_result(tmp_path)
    assert not result.complete and "incomplete" in result.flags
    assert result.window_ns[1] - result.window_ns[0] < 60e9
    assert {r.status for r in load_requests(tmp_path)} == {"cancelled"}
    assert result.counts.cancelled == 2
    assert recompute(tmp_path).metrics == result.metrics


async def test_stopping_before_the_window_gives_no_numbers(tmp_path):
    async with serving(steady()) as server:
        process = await asyncio.create_subprocess_exec(
            *DRIVER, str(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        process.stdin.write(spec(server.url, warm_up_s=60).model_dump_json().encode())
        process.stdin.close()
        await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 20) == 3
    result = load_result(tmp_path)
    assert (result.window_ns, result.counts, result.metrics) == (None, None, {})
    with pytest.raises(KitError, match="before its window"):
        recompute(tmp_path)


CALLER = """
import json, sys
from pathlib import Path
from kit.load import run_cell
try:
    run_cell(json.loads(sys.argv[1]), Path(sys.argv[2]), lambda event: print(event, flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""


async def caller(server, folder: Path, **changes):
    asked = spec(server.url, window_s=60.0, **changes).model_dump_json()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CALLER, asked, str(folder), stdout=subprocess.PIPE
    )
    async for line in process.stdout:
        if b"'window'" in line:
            return process
    raise AssertionError("the driver ended before its window")


async def test_ctrl_c_in_the_caller_is_forwarded_and_what_there_is_is_kept(tmp_path):
    async with serving(steady(tokens=1000, gap_s=0.02)) as server:
        process = await caller(server, tmp_path)
        drivers = children(process.pid)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 25) == 130
        assert drivers and not any(map(alive, drivers))
    assert not load_result(tmp_path).complete


async def test_no_driver_outlives_a_caller_that_was_killed(tmp_path):
    async with serving(steady(tokens=1000, gap_s=0.02)) as server:
        process = await caller(server, tmp_path, processes=2)
        drivers = children(process.pid)
        workers = [w for d in drivers for w in children(d)]
        assert len(drivers) == 1 and len(workers) == 2
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        assert await eventually(lambda: not any(map(alive, drivers + workers)))
    assert not load_result(tmp_path).complete


async def test_an_older_result_does_not_pass_for_a_failed_cells(tmp_path):
    async with serving(steady(tokens=2)) as server:
        await drive(spec(server.url), tmp_path)
        gone = server.url
    with pytest.raises(KitError, match="does not answer"):
        await drive(spec(gone), tmp_path)
    with pytest.raises(KitError, match=r"holds no driven cell: result\.json is missing"):
        load_result(tmp_path)


async def test_a_mooncake_trace_is_replayed_at_its_own_times(tmp_path):
    rows = [
        {"timestamp": at, "input_length": 600, "output_length": 3, "hash_ids": [7, i]}
        for i, at in enumerate([0, 100, 400, 500, 600])
    ]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with serving(steady(tokens=3)) as server:
        asked = spec(
            server.url,
            workload={"kind": "mooncake", "path": str(tmp_path / "m.jsonl")},
            load={"kind": "trace", "value": 5.0},
            arrivals={"process": "trace"},
        )
        result = await drive(asked, tmp_path / "out")
    requests = list(load_requests(tmp_path / "out"))
    start = requests[0].scheduled_ns
    # The recorded mean gap is 150 ms; at 5 requests a second it is 200 ms, and the shape is kept.
    assert [round((r.scheduled_ns - start) / 1e6) for r in requests] == pytest.approx([0, 133, 533, 667, 800], abs=1)
    texts = [b["messages"][0]["content"] for b in server.bodies]
    assert len({t[:2000] for t in texts}) == 1 and len(set(texts)) == 5, "the shared block is not shared"
    assert result.lengths == "recorded" and {b["max_tokens"] for b in server.bodies} == {3}


async def test_output_lengths_are_asked_of_the_tokenizer_or_else_by_characters(tmp_path):
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "x" * 40}]
    (tmp_path / "s.json").write_text(json.dumps([{"conversations": talk}]))
    async with serving(steady(tokens=2)) as server:
        asked = spec(server.url, workload={"kind": "sharegpt", "path": str(tmp_path / "s.json")})
        result = await drive(asked, tmp_path / "out")
    assert result.lengths == "characters"
    assert {r.requested_tokens for r in after_first(load_requests(tmp_path / "out"))} == {10}
    assert {r.completion_tokens for r in load_requests(tmp_path / "out") if r.status == "ok"} == {2}
    assert str(tmp_path) not in (tmp_path / "out" / "result.json").read_text(), "a folder of this machine was recorded"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arm": "mtp"}, "arm: Extra inputs"),
        ({"load": {"kind": "closed", "value": 1.5}}, "whole number of clients"),
        ({"load": {"kind": "closed", "value": 2}, "burn_in_s": 0}, "burn_in_s must be above 0"),
        ({"load": {"kind": "prefill", "value": 2}}, "no prefill load"),
        ({"base_url": "localhost:80"}, "is not a URL"),
        ({"base_url": "http://me:secret@host"}, "name it in key_env"),
        ({"slo": "ttft=5"}, "slo: target 'ttft=5'"),
        ({"workload": {"kind": "messages"}}, "needs the path"),
        ({"load": {"kind": "trace", "value": 2}}, "needs arrivals.process"),
    ],
)
def test_a_wrong_spec_is_named_field_by_field(changes, says):
    good = spec("http://127.0.0.1:1").model_dump(mode="json")
    with pytest.raises(KitError, match=says):
        parse_spec(json.dumps({**good, **changes}))
