"""Recorded runs (`data/runs`): every number can be had again from the raw lines, and what is said of them is so."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from kit.cards import ROOT
from kit.figures.waterfall import waterfall
from kit.load.window import UNSTEADY_FLAG, is_unsteady, measure
from kit.records import metrics
from kit.records.store import Run, find_runs
from kit.report import gpu_time, prefill, widths
from kit.report import notebook as nb
from kit.report.notebook import Evidence

RUNS = sorted(path.parent for path in (ROOT / "data" / "runs").glob("*/*/run.json"))


@pytest.fixture(params=RUNS, ids=lambda path: path.name)
def run(request: pytest.FixtureRequest) -> Run:
    """Each recorded run."""
    return Run.open(request.param)


def test_metrics_of_served_cells_are_those_of_their_requests(run: Run) -> None:
    """Counts and metrics; flags are those known when the run was made (`start-up in window` came later)."""
    for cell in run.cells():
        if cell.window_ns is None or not cell.metrics:
            continue
        again = measure(list(run.requests(cell)), cell.window_ns, samples=run.samples(cell.cell))
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


def test_layouts_share_no_chart_and_the_one_with_most_arms_comes_first(parts: list[prefill.Part]) -> None:
    assert [(p.gpus, p.run.folder.name[:16], p.n(p.lengths[-1])) for p in parts] == [
        (2, "20261129T184026Z", (3, 3)),
        (2, "20261129T161202Z", (3, 3)),
        (2, "20261129T185910Z", (3, 3)),
        (1, "20261129T190221Z", (2, 3)),
    ]
    assert len({p.title for p in parts}) == len({p.suffix for p in parts}) == 4
    assert parts[0].title == "2 GPUs, layers 17 + 15, scans of 3,072 tokens"


def test_a_remedy_is_praised_only_where_three_repeats_bear_it(parts: list[prefill.Part]) -> None:
    best, *_, one = ([text for text in prefill.answers(p) if "stock MTP reads" in text] for p in parts)
    assert "unblocked inputs, head on the last GPU 1.76× (1.63 to 1.9)" in best[1]
    assert "(of the other remedies 5 more above the noise and 1 not above it)" in best[1]
    eight = parts[0].sweep.effect("input_tps", "depth-8", 124928, baseline="stock")
    assert eight.verdict == "above" and eight.ratio.mean == pytest.approx(1.306, abs=0.001)
    assert "whole prompt deferred" not in best[0]  # its first cell carries one-time costs: no interval clears the noise
    assert "with n = 2 of stock no remedy can be judged against it. Against no MTP: " in one[1]
    assert "unblocked inputs 0.96× (0.945 to 0.966)" in one[1] and "depth 8 0.91×" in one[1]


def test_no_mtp_gains_from_unblocked_inputs_too_and_that_is_said(parts: list[prefill.Part]) -> None:
    said = "\n".join(prefill.answers(parts[0]))
    assert (
        "124,928 tokens: against no MTP as it comes, the best remedy (unblocked inputs, head on the last GPU)" in said
    )
    assert "1.16× (1.04 to 1.29) the speed" in said
    assert "124,928 tokens: unblocked inputs also change no MTP, 1.24× (1.1 to 1.4). Against that, unblocked" in said
    assert "0.94× (0.92 to 0.954)" in said and "this is what MTP still costs" in said


def test_what_no_scheduling_wins_back_is_the_mtp_passes_own_work(parts: list[prefill.Part]) -> None:
    table = prefill.own_work_table(parts)
    late = table[table["chunks"] == "from token 98,304 on"]
    assert list(late["MTP ÷ target"]) == ["8.3 %"] and list(late["at best ÷ no MTP"]) == [0.924]
    assert set(table[table["chunks"] == "early in the prompt"]["MTP ÷ target"]) == {"3.6 %", "3.7 %"}


def test_every_exact_arm_left_stocks_draft_cache_and_output(parts: list[prefill.Part]) -> None:
    for part, cells in zip(parts, (54, 6, 6, 44), strict=True):
        (text,) = [t for t in prefill.answers(part) if t.startswith("Output identical")]
        assert f"bit-identical in {cells} of {cells} cells" in text
        assert ("in 0 of 3 with coalesced passes, which do not claim it" in text) is (part.gpus == 1)


def test_cells_with_one_time_costs_are_named(parts: list[prefill.Part]) -> None:
    apart = [[t for t in prefill.answers(p) if t.startswith("Apart from")] for p in parts]
    assert [len(found) for found in apart] == [1, 0, 0, 1]
    assert "whole prompt deferred, 16,384 tokens, repeat 1 (6,544 t/s against 18,884)" in apart[0][0]
    assert "depth 8, coalesced passes, 16,384 tokens, repeat 1 (5,467 t/s against 15,055)" in apart[3][0]


def test_like_is_compared_with_like_in_the_headline(parts: list[prefill.Part]) -> None:
    best = "Stock MTP reads 124,928 tokens at 0.66× the speed of no MTP; unblocked inputs, head on the last GPU: 0.94×"
    assert prefill.arms_headline(parts[0]) == f"{best} that of no MTP, unblocked inputs"
    assert prefill.arms_headline(parts[3]) is None  # one GPU: no such pair was measured
    assert "64 tokens. Half the remedies' intervals against stock are wider than" in prefill.decode_caption(parts[0])


def test_the_timeline_with_the_engines_own_scans_says_that_the_host_sets_the_pace(parts: list[prefill.Part]) -> None:
    (t,) = prefill.host_times(parts[1])
    assert t.own > max(t.gpus.values())
    assert t.total == pytest.approx(3072 / parts[1].mean("input_tps", "no-mtp", 61440) * 1000, rel=0.05)
    assert any("the host is slower than either GPU" in text for text in prefill.answers(parts[1]))
    assert "the host sets the pace" in prefill.timeline(parts[1]).headline


def test_with_one_scan_a_chunk_and_unblocked_inputs_a_gpu_sets_the_pace(parts: list[prefill.Part]) -> None:
    plain = next(t for t in prefill.host_times(parts[0]) if t.label == "no MTP, unblocked inputs")
    assert plain.own < max(plain.gpus.values()) and plain.waiting == 0 and plain.mtp == 0
    assert {t.label for t in prefill.host_times(parts[0])} == {
        "no MTP, unblocked inputs", "stock MTP", "unblocked inputs, head on the last GPU",
    }  # fmt: skip
    stock = next(t for t in prefill.host_times(parts[0]) if t.label == "stock MTP")
    assert stock.waiting > 60 and 0 < stock.mtp < 5


def test_the_model_fitted_to_depths_meets_every_arm_of_the_long_prompt(parts: list[prefill.Part]) -> None:
    table = prefill.model_table(parts[0]).set_index("arm")["model ÷ measured, 124,928"]
    assert len(table) == 12 and table.between(0.94, 1.03).all()
    assert prefill.advice(parts[0])[1].startswith("Within 256 MiB, depth 7 (210 MiB) reaches 96 %")


def test_the_causes_are_told_as_far_as_the_cells_go(widths_evidence: Evidence) -> None:
    whole, drafting, fixed, tested, capacity, steps, shrinking, left_out = widths.causes(widths_evidence)
    assert "2.76× (2.42 to 3.15) at c\u00a0=\u00a01 and 1.99× (1.4 to 2.84) at c\u00a0=\u00a08 of the output" in whole
    assert "no crossover was reached" in drafting and "0.88 to 0.96" in drafting
    assert (
        "−11.2" in fixed and "−16.6" in fixed and "(noise) at c\u00a0=\u00a01" in fixed and "draft-extend is 4" in fixed
    )
    assert tested.startswith("Capacity cannot be tested at c\u00a0=\u00a01 and c\u00a0=\u00a08")
    assert "it holds 33 requests and 31 wait; without MTP 63 run and 1 wait" in capacity
    assert "these windows do not tell" in capacity and "16,384 tokens (0.26 GiB) is the card's choice" in capacity
    assert "at c\u00a0=\u00a064 fixed cost of carrying MTP −21.7\u00a0% (−24.8\u00a0% to −18.4\u00a0%)" in steps
    assert "1.35× at c\u00a0=\u00a01 (for 4.6 tokens), 1.59× at c\u00a0=\u00a08" in shrinking
    assert "3.05× at c\u00a0=\u00a064 (for 4.5 tokens)" in shrinking
    assert "left out of every throughput here are all cells" in left_out
    pair = widths.isolation(widths_evidence)
    assert pair.estimate("acceptance", "b4", 8).mean == pytest.approx(0.895, abs=0.001)  # the server's own counters
    assert widths.COUNTED in pair.caption("acceptance")


def test_the_ladder_is_drawn_where_windows_were_steady_and_in_gpu_time_everywhere(widths_evidence: Evidence) -> None:
    made = widths.ladder(widths_evidence)
    assert [ladder.load for ladder in made] == [1, 8] and all(len(ladder.rungs) == 5 for ladder in made)
    assert "Not drawn: c\u00a0=\u00a064" in widths.ladder_caption(widths_evidence)
    assert all(ladder.noise > 0.1 for ladder in made)  # b2 on two servers differs by as much
    assert "b0s" in " ".join(widths.ladder_flags(widths_evidence))
    assert "22.9 GiB for recurrent states" in widths.pool_caption(widths_evidence)
    rungs = widths.rungs_in_gpu_time(widths_evidence)
    assert rungs[0] == ("a-capped", None)
    inside = gpu_time.ladder(gpu_time.gpu_times(widths_evidence), rungs)
    assert [ladder.load for ladder in inside] == [1, 8, 64]
    assert max(ladder.noise for ladder in inside) < 0.05
    steps = waterfall(inside).table.set_index(["c", "step"])["change"]
    assert [steps[c, "fixed cost of carrying MTP"] for c in ("1", "8", "64")] == [
        "−3.9\u00a0%", "−9.0\u00a0%", "−21.7\u00a0%",
    ]  # fmt: skip
    assert [steps[c, "drafting + verification"][:4] for c in ("1", "8", "64")] == ["+263", "+230", "+94."]


def test_late_in_the_prompt_nothing_blocks_with_unblocked_inputs(parts: list[prefill.Part]) -> None:
    (late,) = prefill.lanes(parts[2])
    assert late.busy(0) > 0.94 and late.busy(1) > 0.96, "but for one copy of the recurrent states"
    (host,) = prefill.host_times(parts[2])
    assert host.checkpoint == pytest.approx(276, abs=1) and host.waiting < 8


def test_unsteady_windows_are_those_that_the_raw_lines_say(widths_evidence: Evidence) -> None:
    (run,) = widths_evidence.runs
    for cell in widths_evidence.cells:
        unsteady = is_unsteady(list(run.requests(cell)), cell.window_ns)
        assert (UNSTEADY_FLAG in cell.flags) is unsteady, cell.cell.id
        assert not unsteady or cell.cell.load.value == 64


def test_the_policy_had_nothing_to_switch_and_that_is_said() -> None:
    policy = nb.find("standin-27b", "policy")
    assert policy is not None and "never changed the width" in widths.policy_notes(policy)[1]


def test_the_switching_proof_tells_what_changed_too() -> None:
    evidence = nb.find("standin-27b", "switching")
    assert evidence is not None
    lost, changed = widths.switching_notes(evidence)
    assert "changed 12 times under 8 long requests; 8 of them came back complete" in lost
    assert "5 of 8 outputs are those of plain decoding" in changed and "7 of 8" in changed
