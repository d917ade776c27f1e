"""The product through its front door: a real server, measured, interrupted, resumed, recomputed and rendered."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.cards import load_card

pytest.importorskip("xllamacpp")
ROOT = Path(__file__).parents[1]
REQUEST = ["draft_width", "--profile", "smoke"]


def kit(local, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "kit", *words],
        env={**os.environ, "KIT_LOCAL": str(local)},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Whoever runs the tests in the background has interrupts ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def records(local):
    return [json.loads(line) for path in local.rglob("results.jsonl") for line in path.read_text().splitlines()]


def servers(local):
    """Processes of llama.cpp servers that were started for these records."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            mine = f"KIT_LOCAL={local}\0".encode() in (entry / "environ").read_bytes() + b"\0"
            if mine and b"llamacpp_server" in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The records of one measured experiment, which was interrupted once on the way."""
    folder = tmp_path_factory.mktemp("local")
    words = ["measure", "tiny-mtp", "--experiment", *REQUEST]
    process = kit(folder, *words)
    deadline = time.monotonic() + 200
    while not records(folder) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    kept = records(folder)
    assert kept, process.communicate()[0]
    assert servers(folder), "nothing is running that could be left behind"
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "The same command goes on" in said
    assert not servers(folder), "a server outlived the interrupted kit"
    process = kit(folder, *words)
    said, _ = process.communicate(timeout=280)
    assert process.returncode == 0, said
    assert records(folder)[: len(kept)] == kept, "finished cells were measured again"
    return folder


def test_an_interrupted_run_keeps_its_cells_and_the_same_command_goes_on(local):
    found = [((r["cell"]["arm"], r["cell"]["load"]["value"]), r["status"]) for r in records(local)]
    experiment = load_card("tiny-mtp").experiments["draft_width"]
    assert len({cell for cell, _ in found}) == len(experiment.arm_names()) * len(experiment.loads)
    good = [cell for cell, status in found if status == "ok"]
    assert good and len(good) == len(set(good)), "a good cell was measured twice"
    assert len(list(local.rglob("run.json"))) == 1


def test_every_number_of_a_cell_follows_from_its_raw_lines(local):
    """Recomputed here without the kit's own code."""
    for record in records(local):
        run = next(local.rglob("results.jsonl")).parent
        with gzip.open(run / record["raw"], "rt") as lines:
            requests = [json.loads(line) for line in lines]
        opens, closes = record["window_ns"]
        tokens = 0
        for request in requests:
            counted = 0
            for chunk in request["chunks"]:
                new = chunk["tokens_so_far"] - counted
                counted = chunk["tokens_so_far"]
                tokens += new if opens <= chunk["t_ns"] < closes else 0
        assert record["metrics"]["output_tps"] == pytest.approx(tokens / ((closes - opens) / 1e9))
        pairs = [(r["accepted_tokens"], r["drafted_tokens"]) for r in requests if r["drafted_tokens"] is not None]
        if record["arm"]["settings"]["speculation"] == "none":
            assert pairs == []
            assert record["metrics"]["acceptance"] is None


def test_the_arms_of_a_repeat_answer_the_same_prompts(local):
    prompts = {}
    for record in records(local):
        run = next(local.rglob("results.jsonl")).parent
        with gzip.open(run / record["raw"], "rt") as lines:
            first = min((json.loads(line) for line in lines), key=lambda r: (r["client"], r["sent_ns"]))
        prompts.setdefault(record["cell"]["load"]["value"], set()).add(first["prompt_sha256"])
    assert all(len(found) == 1 for found in prompts.values())
    assert prompts[1.0] != prompts[8.0], "prompts are unique per cell"


def test_the_report_is_drawn_from_the_records_and_loads_nothing_from_outside(local, tmp_path):
    process = kit(
        local, "report", "tiny-mtp", *REQUEST[1:], "--measure", "never", "--pdf", "no", "--out", str(tmp_path)
    )
    said, _ = process.communicate(timeout=280)
    assert process.returncode == 0, said
    page = (tmp_path / "index.html").read_text()
    assert "stand-in" in page
    assert "What this does not show" in page
    for forbidden in ('src="http', "url(http", "<script src", '<link rel="stylesheet" href="http'):
        assert forbidden not in page
