"""Recorded runs (`data/runs`): every number can be had again from the raw lines beside it."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from kit.cards import ROOT
from kit.load.window import measure
from kit.records import metrics
from kit.records.schema import CellRecord, ServerSample
from kit.records.store import Run

RUNS = sorted(path.parent for path in (ROOT / "data" / "runs").glob("*/*/run.json"))


@pytest.fixture(params=RUNS, ids=lambda path: path.name)
def run(request: pytest.FixtureRequest) -> Run:
    """Each recorded run."""
    return Run.open(request.param)


def _samples(run: Run, cell: CellRecord) -> list[ServerSample]:
    path = run.folder / "raw" / f"{cell.cell.id}.samples.jsonl.gz"
    if not path.is_file():
        return []
    with gzip.open(path, "rt") as lines:
        return [ServerSample.model_validate_json(line) for line in lines]


def test_metrics_of_served_cells_are_those_of_their_requests(run: Run) -> None:
    for cell in run.cells():
        if cell.window_ns is None or not cell.metrics:
            continue
        again = measure(list(run.requests(cell)), cell.window_ns, samples=_samples(run, cell))
        assert again.counts == cell.counts, cell.cell.id
        for tag, value in again.metrics.items():
            if tag != "client_lag_p99":  # of the driver's event loop, whose ticks are not kept
                assert cell.metrics[tag] == pytest.approx(value), f"{cell.cell.id}: {tag}"


def test_metrics_of_prefill_cells_are_those_of_their_request(run: Run) -> None:
    for cell in run.cells():
        if cell.cell.experiment != "prefill":
            continue
        (request,) = run.requests(cell)
        assert request.prompt_tokens == cell.cell.load.value
        read = request.prompt_tokens - (request.cached_tokens or 0)
        assert cell.metrics["input_tps"] == pytest.approx(metrics.ratio(read, request.server_prompt_s))
        assert cell.metrics["wall_s"] == pytest.approx((request.ended_ns - request.sent_ns) / 1e9)
        assert cell.metrics["acceptance"] == pytest.approx(
            metrics.acceptance([(request.accepted_tokens, request.drafted_tokens)])
        )


def test_each_run_says_where_it_comes_from_and_nothing_private(run: Run) -> None:
    record = run.record
    assert re.fullmatch(r"[0-9a-f]{40}", record.provenance.commit or "")
    assert record.provenance.machine and record.provenance.gpus and record.provenance.model_stamp
    assert record.run_id == run.folder.name
    texts = [path.read_text() for path in run.folder.rglob("*.json*") if path.suffix != ".gz"]
    texts += [gzip.decompress(path.read_bytes()).decode() for path in run.folder.rglob("*.gz")]
    for text in texts:
        assert not re.search(r"/(home|root|Users)/\w|hf_[A-Za-z]{20}|sk-[A-Za-z0-9]{20}", text)


def test_a_cell_that_is_not_ok_says_why(run: Run) -> None:
    for cell in run.cells():
        assert cell.status == "ok" or cell.reason, cell.cell.id


def test_details_name_recorded_cells_only(run: Run) -> None:
    path: Path = run.folder / "prefill.jsonl"
    if path.is_file():
        named = {json.loads(line)["cell"] for line in path.read_text().splitlines()}
        assert named == {cell.cell.id for cell in run.cells()}
