"""Recorded runs (`data/runs`): every number can be had again from the raw lines, and what is said of them is so."""

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
from kit.records.store import Run, find_runs
from kit.report import notebook as nb
from kit.report import prefill, widths
from kit.report.notebook import Evidence

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
    """Counts and metrics; flags are those known when the run was made (`start-up in window` came later)."""
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


# --------------------------------------------------------------------------------------------- what is said of the runs


@pytest.fixture(scope="module")
def parts() -> list[prefill.Part]:
    """The layouts of the recorded prefill runs of the stand-in."""
    return prefill.parts(Evidence("prefill", find_runs([ROOT / "data" / "runs"], "standin-27b", "prefill")))


@pytest.fixture(scope="module")
def widths_evidence() -> Evidence:
    """The recorded ablation."""
    return Evidence("draft_width", find_runs([ROOT / "data" / "runs"], "standin-27b", "draft_width"))


def test_runs_of_other_requests_share_no_chart_and_three_repeats_come_first(parts: list[prefill.Part]) -> None:
    assert [(p.gpus, p.run.folder.name[:16], p.n(p.lengths[-1])) for p in parts] == [
        (2, "20261129T161202Z", (3, 3)),
        (2, "20261129T155915Z", (1, 2)),
        (1, "20261129T160500Z", (1, 3)),
    ]
    assert len({p.title for p in parts}) == len({p.suffix for p in parts}) == 3


def test_a_remedy_is_praised_only_where_three_repeats_bear_it(parts: list[prefill.Part]) -> None:
    three, few, one = ([text for text in prefill.answers(p) if "stock MTP reads" in text] for p in parts)
    assert "unblocked inputs, head on the last GPU 1.35× (1.12 to 1.63)" in three[0]
    for text in few + one:
        assert "no remedy can be told from another" in text and "against stock" not in text


def test_no_mtp_gains_from_unblocked_inputs_too_and_that_is_said(parts: list[prefill.Part]) -> None:
    (text,) = [t for t in prefill.answers(parts[0]) if "also change no MTP" in t]
    assert "1.27× (1.18 to 1.36)" in text and "this is what MTP still costs" in text


def test_cells_with_one_time_costs_are_named(parts: list[prefill.Part]) -> None:
    apart = [[t for t in prefill.answers(p) if "stands apart" in t] for p in parts]
    assert [len(found) for found in apart] == [1, 1, 1]
    assert "14.8 t/s out" in apart[0][0] and "unblocked inputs" in apart[0][0]
    assert "3,749" in apart[1][0] and "rows in pinned memory" in apart[1][0]
    assert "5,145" in apart[2][0] and "coalesced" in apart[2][0]


def test_the_timeline_says_that_the_host_sets_the_pace(parts: list[prefill.Part]) -> None:
    (t,) = prefill.host_times(parts[0])
    assert t.launching + t.between > max(t.gpus.values())
    assert t.total == pytest.approx(3072 / parts[0].mean("input_tps", "no-mtp", 61440) * 1000, rel=0.05)
    assert any("the host sets the pace" in text for text in prefill.answers(parts[0]))
    assert "the host sets the pace" in prefill.timeline(parts[0]).headline


def test_the_model_gives_no_advice_where_its_premise_fails(parts: list[prefill.Part]) -> None:
    assert "that does not hold here" in prefill.advice(parts[1])[0]


def test_the_causes_are_told_as_far_as_the_cells_go(widths_evidence: Evidence) -> None:
    drafting, fixed, capacity, missing = widths.causes(widths_evidence)
    assert "no crossover was reached" in drafting and "0.90 to 0.97" in drafting
    assert "−11.7" in fixed and "−18.5" in fixed and "no interval" in fixed and "draft-extend is 4" in fixed
    assert capacity.startswith("Capacity cannot be tested at these loads")
    assert "64" in missing and "no valid cell" in missing
    assert "b0s" in widths.ladder_caption(widths_evidence)
    assert 64 not in widths_evidence.sweep().loads
    assert "capacity" not in {rung.step for ladder in widths.ladder(widths_evidence) for rung in ladder.rungs}
    pair = widths.isolation(widths_evidence)
    assert pair.estimate("acceptance", "b4", 8).mean == pytest.approx(0.922, abs=0.001)  # the server's own counters
    assert widths.COUNTED in pair.caption("acceptance")


def test_the_switching_proof_tells_what_changed_too() -> None:
    evidence = nb.find("standin-27b", "switching")
    assert evidence is not None
    lost, changed = widths.switching_notes(evidence)
    assert "changed 11 times under 8 long requests; 8 of them came back complete" in lost
    assert "5 of 8 outputs are those of plain decoding" in changed and "8 of 8" in changed
