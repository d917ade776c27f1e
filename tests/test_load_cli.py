"""``kit load URL``: the table, the records it can write, and its errors; also against a real llama.cpp server."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
import tiny_gguf
from load_server import serving, steady

from kit import cli
from kit.engines import llamacpp
from kit.load import load_requests, load_samples, run_cell
from kit.records.store import Run

SHORT = ["--burn-in", "0.2", "--warm-up", "0.1", "--window", "0.8"]
WORDS = ["--input-tokens", "12", "--output-tokens", "20", "--turns", "2"]


async def load(*words: str) -> int:
    return await asyncio.to_thread(cli.main, ["load", *words])


async def test_a_table_and_records_and_going_on_where_it_stopped(tmp_path, capsys):
    async with serving(steady(tokens=20)) as server:
        words = [server.url + "/v1", "-c", "1,2", *SHORT, *WORDS, "--slo", "ttft:9000", "--out", str(tmp_path / "run")]
        assert await load(*words) == 0
        out = capsys.readouterr().out
        sent = len(server.bodies)
        assert await load(*words) == 0
        again = capsys.readouterr()
        assert len(server.bodies) == sent, "recorded cells were driven again"
        assert again.out == out, "the table is that of the recorded cells"
    rows = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines() if re.match(r"\s+\d", line)]
    assert [row[0] for row in rows] == ["1", "2"]
    assert "TTFT p99 (ms)" in out and "goodput" in out and "client lag" in out
    assert all(float(row[5]) > 0 for row in rows)
    assert again.err.count("recorded before") == 2
    run = Run.open(tmp_path / "run")
    cells = run.cells()
    assert [c.cell.load.label for c in cells] == ["c1", "c2"]
    assert all(c.status == "ok" and c.counts.completed and c.metrics["output_tps"] for c in cells)
    assert len(list(run.requests(cells[1]))) > cells[1].counts.completed
    assert cells[0].asked["window_s"] == 0.8


async def test_a_folder_keeps_to_its_settings(tmp_path, capsys):
    def out(*words: str) -> list[str]:
        return [server.url, *SHORT, *WORDS, *words, "--out", str(tmp_path / "run")]

    async with serving(steady(tokens=20)) as server:
        assert await load(*out("-c", "1")) == 0
        sent = len(server.bodies)
        for words, says in [
            (["--window", "0.9"], "window_s: 0.8 there, 0.9 asked for"),
            (
                ["-c", "2", "--turns", "1", "--seed", "7"],
                "seed: 0 there, 7 asked for; workload.turns: 2 there, 1 asked",
            ),
            (["--rate", "5", "--body", '{"top_k": 1}'], 'extra_body: {} there, {"top_k": 1} asked for'),
        ]:
            capsys.readouterr()
            assert await load(*out(*words)) == 2
            told = capsys.readouterr()
            assert says in told.err and "choose another folder" in told.err and told.out == ""
        assert len(server.bodies) == sent, "something was driven before the error"
        assert await load(*out("--rate", "5", "--arrivals", "constant")) == 0, "another load point of the same settings"
        assert await load(*out("--rate", "6")) == 2, "other arrivals"
        assert "arrivals: constant there, poisson asked for" in capsys.readouterr().err
    assert [c.cell.load.label for c in Run.open(tmp_path / "run").cells()] == ["c1", "r5"]


async def test_a_point_that_failed_may_be_asked_for_with_other_settings(tmp_path):
    async with serving(steady(tokens=20), status=lambda n: 200 if fixed else 400) as server:
        fixed = False
        words = [server.url, *SHORT, *WORDS, "--out", str(tmp_path / "run")]
        assert await load(*words) == 1
        fixed = True
        assert await load(*words, "--no-ignore-eos") == 0


async def test_a_run_of_another_kind_is_not_gone_on_with(tmp_path, capsys):
    async with serving(steady()) as server:
        words = [server.url, *SHORT, *WORDS, "--out", str(tmp_path / "run")]
        assert await load(*words) == 0
        record = tmp_path / "run" / "run.json"
        record.write_text(record.read_text().replace('"command-line"', '"smoke"'))
        assert await load(*words) == 2
    assert "that `kit load` did not make; choose another folder" in capsys.readouterr().err


async def test_a_trace_of_other_content_is_another_workload(tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    async with serving(steady(tokens=20)) as server:
        for text, status in (("a", 0), ("other", 2)):
            talk = [{"role": "user", "content": text}, {"role": "assistant", "content": "b", "output_tokens": 20}]
            trace.write_text(json.dumps({"messages": talk}) + "\n")
            assert await load(server.url, *SHORT, "--trace", str(trace), "--out", str(tmp_path / "run")) == status
    assert "workload.sha256" in capsys.readouterr().err


async def test_the_open_loop_a_trace_and_the_completions_api(tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "output_tokens": 20}]
    trace.write_text(json.dumps({"messages": talk}) + "\n")
    async with serving(steady(tokens=20)) as server:
        words = ["--rate", "20", "--arrivals", "gamma", "--burstiness", "0.5", "--api", "completions"]
        assert await load(server.url, *words, *SHORT, "--trace", str(trace), "--no-ignore-eos") == 0
    assert server.bodies and all("prompt" in b and "ignore_eos" not in b for b in server.bodies)
    assert "λ (1/s)" in capsys.readouterr().out


async def test_a_point_that_completes_nothing_says_why(capsys):
    async with serving(steady(), status=lambda n: 400) as server:
        assert await load(server.url, *SHORT, *WORDS) == 1
    assert re.search(r"\d+ × HTTP 400: no room", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-c", "1,x"], "-c 1,x: expected numbers"),
        (["-c", "1.5"], "whole numbers above 0"),
        (["--slo", "ttft=5"], "ttft:500 tpot:50"),
        (["--trace", "no-such-file"], "trace no-such-file is not a file"),
        (["--trace", "no-such-file", "--trace-kind", "messages"], "trace no-such-file is not a file"),
        (["--body", "[1]"], "--body must be a JSON object"),
        (["--turns", "2"], "--turns goes with --input-tokens"),
        (["--key-env", "NO_SUCH_KEY_HERE"], "NO_SUCH_KEY_HERE is not set"),
    ],
)
async def test_what_a_user_can_put_right_is_one_message(words, says, capsys):
    async with serving(steady()) as server:
        assert await load(server.url, *words) == 2
    assert says in capsys.readouterr().err


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """llama.cpp's own server with a small random model whose drafts are mostly right."""
    folder = tmp_path_factory.mktemp("llamacpp")
    model = tiny_gguf.write(folder / "peaked.gguf")
    settings = llamacpp.LlamaCppSettings.checked(
        model=model, slots=3, tokens_per_slot=2048, threads=1, speculation="mtp", draft_width=2
    )
    with llamacpp.start(settings, folder) as server:
        yield server


def test_a_real_server_is_measured_with_its_own_counts(real, tmp_path):
    spec = {
        "base_url": real.base_url,
        "dialect": real.dialect,
        "workload": {"kind": "synthetic", "input_tokens": 12, "output_tokens": 40, "turns": 2},
        "load": {"kind": "closed", "value": 2},
        "burn_in_s": 0.3,
        "warm_up_s": 0.2,
        "window_s": 2.0,
        "metrics_urls": [real.metrics_url],
        "metrics_interval_s": 0.5,
    }
    result = run_cell(spec, tmp_path)
    requests = list(load_requests(tmp_path))
    whole = [r for r in requests if r.status == "ok"]
    assert result.errors == {} and len(whole) > 3
    for r in whole:
        assert r.completion_tokens == r.requested_tokens <= 40 and r.token_source == "usage"
        assert r.prompt_tokens is not None and r.cached_tokens is not None and r.server_prompt_s > 0
        assert 0 < r.accepted_tokens <= r.drafted_tokens
        told = [c.tokens_so_far for c in r.chunks]
        assert told == sorted(told) and told[-1] <= 40, "mid-stream counts fall"
    assert any(r.turn == 1 and r.cached_tokens > 20 for r in whole), "a second turn found nothing of its first"
    # Only the first tokens of a chat template may be common to two sessions.
    assert all(r.cached_tokens < 20 for r in whole if r.turn == 0), "a prompt of another session was cached"
    assert 0 < result.metrics["acceptance"] <= 1 and result.metrics["tokens_per_step"] > 1
    assert result.metrics["window_tokens_estimated"] == 0
    assert result.metrics["output_tps"] > 0 and result.metrics["input_tps"] > 0
    assert len(load_samples(tmp_path)) >= 3
    drafted = result.server["llamacpp:spec_decode_num_draft_tokens_total"]
    accepted = result.server["llamacpp:spec_decode_num_accepted_tokens_total"]
    assert accepted / drafted == pytest.approx(result.metrics["acceptance"], abs=0.1)


def test_the_command_line_finds_out_what_a_real_server_is(real, capsys):
    assert cli.main(["load", real.base_url, "-c", "2", *SHORT, *WORDS]) == 0
    out = capsys.readouterr().out
    assert "(llamacpp, chat)" in out
