"""The draft-width notebook's own evidence: isolation, ladder, timeline, from records of the arms' real names."""

from __future__ import annotations

import json
from pathlib import Path

import figures_data as data
import pytest

from kit.figures.figure import NotRecorded
from kit.figures.timeline_policy import timeline_policy
from kit.figures.waterfall import waterfall
from kit.load.window import UNSTEADY_FLAG
from kit.records.schema import Arm, CellKey, CellRecord, Chunk, Load, ServerSample
from kit.report import gpu_time, widths
from kit.report.notebook import Evidence

S = 10**9
TPS = {"a": 100.0, "a-capped": 90.0, "b0s": 89.0, "b0": 85.0, "b1": 80.0, "b2": 70.0}


def width_cell(arm: str, repeat: int, experiment: str = "draft_width", **changes) -> CellRecord:
    return data.cell(
        "baseline",
        8,
        repeat,
        cell=CellKey(experiment=experiment, arm=arm, load=Load(kind="closed", value=8), repeat=repeat),
        arm=Arm(name=arm, label=arm.upper()),
        metrics={"output_tps": TPS.get(arm, 50.0) * (1 + 0.002 * repeat)},
        **changes,
    )


def evidence(tmp_path: Path, arms: list[str]) -> Evidence:
    card = {"experiments": {"draft_width": {"baseline": "a", "arms": {arm: {} for arm in TPS}}}}
    cells = [width_cell(arm, repeat) for repeat in range(3) for arm in reversed(arms)]
    return Evidence("draft_width", [data.make_run(tmp_path / "run", cells, card=card)])


def test_isolation_takes_the_widths_of_one_deployment_against_width_0(tmp_path: Path) -> None:
    sweep = widths.isolation(evidence(tmp_path, list(TPS)))
    assert list(sweep.arms) == ["b0", "b1", "b2"] and sweep.baseline == "b0"
    assert sweep.effect("output_tps", "b2", 8).ratio.mean == pytest.approx(70 / 85)


def test_the_ladder_climbs_one_difference_at_a_time_and_multiplies_to_the_whole(tmp_path: Path) -> None:
    (ladder,) = widths.ladder(evidence(tmp_path, list(TPS)))
    assert [r.step for r in ladder.rungs] == [
        None, "capacity", "fixed cost of carrying MTP", "draft-extend", "drafting + verification",
    ]  # fmt: skip
    assert ladder.rungs[-1].label == "B1"  # the better width at that load
    figure = waterfall([ladder])
    product = 1.0
    for text in figure.table["change"]:
        product *= 1 + float(text.replace("\u00a0%", "").replace("−", "-")) / 100
    assert product == pytest.approx(0.8, abs=0.002)
    assert figure.headline.startswith("Capacity is the largest cost")


def test_a_missing_rung_joins_its_step_to_the_next(tmp_path: Path) -> None:
    (ladder,) = widths.ladder(evidence(tmp_path, ["a", "b0", "b1"]))
    assert ladder.rungs[1].step == "capacity + fixed cost of carrying MTP + draft-extend"


def test_without_the_ablations_arms_there_is_no_ladder(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded):
        widths.ladder(evidence(tmp_path, ["b0", "b1"]))


def test_the_timeline_is_made_from_chunks_and_samples(tmp_path: Path) -> None:
    cell = width_cell("b1", 0, "policy", window_ns=(100 * S, 104 * S))
    run = data.make_run(tmp_path / "run", [], card={})
    chunks = [Chunk(t_ns=100 * S + S // 2 + i * S, chars=10, tokens_so_far=10 * (i + 1)) for i in range(4)]
    request = data.request(0, "p", "o").model_copy(update={"chunks": chunks, "completion_tokens": 40})
    run.append(cell, [request])
    samples = [
        ServerSample(
            t_ns=(100 + i) * S,
            values={"sglang:num_running_reqs": float(i), "internal_states.0.speculative_num_steps": 2.0},
        )
        for i in range(-1, 6)
    ]
    run.keep_samples(cell.cell, samples)
    (line,) = widths.timelines(Evidence("policy", [run]))
    assert list(line.t_s) == [0, 1, 2, 3, 4]
    assert list(line.running) == [0, 1, 2, 3, 4] and set(line.width) == {2.0}
    assert list(line.tps) == [0, 10, 10, 10, 10]
    assert timeline_policy([line]).table["mean width"].iloc[0] == 2


def test_no_samples_no_timeline(tmp_path: Path) -> None:
    run = data.make_run(tmp_path / "run", [width_cell("b1", 0, "policy")], card={})
    with pytest.raises(NotRecorded):
        widths.timelines(Evidence("policy", [run]))


def test_a_load_with_an_unsteady_rung_is_not_drawn_and_its_cells_are_named(tmp_path: Path) -> None:
    whole = evidence(tmp_path, list(TPS))
    flagged = [c.model_copy(update={"flags": [UNSTEADY_FLAG]}) for c in whole.cells if c.cell.arm == "b0"]
    elsewhere = [c.model_copy(update={"cell": c.cell.model_copy(update={"load": Load(kind="closed", value=64)})})
                 for c in [*flagged, *(c for c in whole.cells if c.cell.arm != "b0")]]  # fmt: skip
    run = data.make_run(tmp_path / "more", [*whole.cells, *elsewhere], card=whole.runs[0].record.card)
    both = Evidence("draft_width", [run])
    assert widths.unsteady_loads(both) == []  # three of eighteen
    assert [made.load for made in widths.ladder(both)] == [8]
    assert "Not drawn: c\u00a0=\u00a064" in widths.ladder_caption(both)
    assert widths.isolation(both).estimate("output_tps", "b0", 64) is None
    (said,) = widths.left_out(both)
    assert said.startswith("c\u00a0=\u00a064: left out of every throughput here are 3 of B0.")
    assert any(
        "The whole: against a deployment without MTP (A), B1 gives 0.80×" in text for text in widths.causes(both)
    )
    assert widths.left_out(whole) == []
    most = [c.model_copy(update={"flags": [] if c.cell.arm == "b1" else [UNSTEADY_FLAG]}) for c in elsewhere]
    run = data.make_run(tmp_path / "most", [*whole.cells, *most], card=whole.runs[0].record.card)
    rough = Evidence("draft_width", [run])
    assert widths.unsteady_loads(rough) == [64] and {c.cell.load.value for c in widths.steady(rough).cells} == {8}
    assert "left out of every throughput here are all cells. The windows of 15 of 18" in widths.left_out(rough)[0]
    rough = [c.model_copy(update={"flags": [UNSTEADY_FLAG]}) for c in whole.cells]
    only = Evidence("draft_width", [data.make_run(tmp_path / "rough", rough, card=whole.runs[0].record.card)])
    assert any(UNSTEADY_FLAG in flag for flag in widths.isolation(only).flags), "shown with the flag, not lost"


def timed(arm: str, load: int, repeat: int, per_token_s: float, prompt_s: float):
    """A cell of 4 s with 40 tokens a second, samples every second, and the server's timers."""
    key = CellKey(experiment="draft_width", arm=arm, load=Load(kind="closed", value=load), repeat=repeat)
    cell = width_cell(arm, repeat, window_ns=(100 * S, 104 * S)).model_copy(update={"cell": key})
    chunks = [Chunk(t_ns=100 * S + i * S // 10, chars=4, tokens_so_far=4 * (i + 1)) for i in range(-20, 60)]
    chunks = [c.model_copy(update={"tokens_so_far": 4 * (i + 1)}) for i, c in enumerate(chunks)]
    request = data.request(0, "p", "o").model_copy(update={"chunks": chunks, "completion_tokens": 320})
    names = (
        {"target_verify": per_token_s * 0.9, "eagle_draft": per_token_s * 0.1}
        if arm != "a"
        else {"decode": per_token_s}
    )
    samples = [
        ServerSample(
            t_ns=(100 + i) * S + S // 2,
            values={f'sglang:forward_execution_seconds_total{{category="{kind}"}}': 7 + 40 * i * cost
                    for kind, cost in names.items()}
            | {'sglang:forward_execution_seconds_total{category="extend"}': 3 + i * prompt_s}
            | {"sglang:num_running_reqs": load * (0.5 if i == 0 and load > 1 else 1.0)},
        )
        for i in range(-1, 6)
    ]  # fmt: skip
    return cell, request, samples


def test_gpu_time_per_token_comes_from_timers_and_the_tokens_between_two_samples(tmp_path: Path) -> None:
    run = data.make_run(tmp_path / "run", [], card={"experiments": {"draft_width": {"baseline": "a", "arms": {}}}})
    for load, plain, drafting, prompts in ((1, 0.016, 0.004, 0.1), (64, 0.008, 0.006, 0.4)):
        for arm, cost in (("a", plain), ("b2", drafting)):
            for repeat in range(3):
                cell, request, samples = timed(arm, load, repeat, cost, prompts)
                run.append(cell, [request])
                run.keep_samples(cell.cell, samples)
    times = gpu_time.gpu_times(Evidence("draft_width", [run]))
    one = times.found["b2", 1][0]
    assert one.seconds == 3 and one.tokens == 120 and one.per_token == pytest.approx(0.004)
    assert times.found["b2", 64][0].tokens == 80, "where half of the clients run there is no stretch"
    assert one.prompt_share == pytest.approx(0.1 / (0.1 + 40 * 0.004)) and one.busy == pytest.approx(0.26)
    row = gpu_time.table(times).set_index(["arm", "c"]).loc["B2", "64"]
    assert row["decode or verify (ms)"] == pytest.approx(5.4) and row["draft (ms)"] == pytest.approx(0.6)
    _, last = gpu_time.ladder(times, [("a", None), ("b0", "draft-extend"), ("b2", "drafting")])
    assert [r.label for r in last.rungs] == ["A", "B2"] and last.rungs[1].mean == pytest.approx(1 / 0.006)
    assert last.rungs[1].step == "draft-extend + drafting"
    said = gpu_time.shrinking(times, "a", "b2", tokens_per_step={1: 2.8, 64: 2.6}, steady=[1])
    expected = (
        "a step of B2 takes 0.70× at c\u00a0=\u00a01 (for 2.8 tokens) and 1.95× at c\u00a0=\u00a064 (for 2.6 tokens)"
    )
    assert expected in said and "14\u00a0% of the GPU's work for A and 38\u00a0% for B2 at c\u00a0=\u00a01." in said
    assert gpu_time.shrinking(times, "a", "b2", tokens_per_step={1: 2.8}, steady=[1]) is None
    assert gpu_time.steps(times, [("a", None), ("b2", "drafting")]).endswith(
        "at c\u00a0=\u00a01 drafting +300.0\u00a0% (+300.0\u00a0% to +300.0\u00a0%); "
        "at c\u00a0=\u00a064 drafting +33.3\u00a0% (+33.3\u00a0% to +33.3\u00a0%)."
    )
    with pytest.raises(NotRecorded):
        gpu_time.gpu_times(Evidence("policy", [run]))


def test_a_policy_of_one_row_is_said_to_switch_nothing(tmp_path: Path) -> None:
    rows = {"rows": [{"running": 1, "width": 4}], "margin": 0, "dwell_steps": 8}
    cells = [width_cell("b1", 0, "policy", asked={"policy": json.dumps(rows)}), width_cell("b0", 0, "policy")]
    policy = Evidence("policy", [data.make_run(tmp_path / "run", cells, card={})])
    assert "never changed the width" in widths.policy_notes(policy)[1]
    assert list(widths.policy_table(policy)["n"]) == ["1", "1"]
    rows["rows"].append({"running": 8, "width": 1})
    cells = [width_cell("b1", 0, "policy", asked={"policy": json.dumps(rows)})]
    assert len(widths.policy_notes(Evidence("policy", [data.make_run(tmp_path / "two", cells, card={})]))) == 1
