"""The draft-width notebook's own evidence: isolation, ladder, timeline, from records of the arms' real names."""

from __future__ import annotations

import gzip
from pathlib import Path

import figures_data as data
import pytest

from kit.figures.figure import NotRecorded
from kit.figures.timeline_policy import timeline_policy
from kit.figures.waterfall import waterfall
from kit.records.schema import Arm, CellKey, CellRecord, Chunk, Load, ServerSample
from kit.report import widths
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
    path = run.folder / "raw" / f"{cell.cell.id}.samples.jsonl.gz"
    path.write_bytes(gzip.compress("".join(s.model_dump_json() + "\n" for s in samples).encode()))
    (line,) = widths.timelines(Evidence("policy", [run]))
    assert list(line.t_s) == [0, 1, 2, 3, 4]
    assert list(line.running) == [0, 1, 2, 3, 4] and set(line.width) == {2.0}
    assert list(line.tps) == [0, 10, 10, 10, 10]
    assert timeline_policy([line]).table["mean width"].iloc[0] == 2


def test_no_samples_no_timeline(tmp_path: Path) -> None:
    run = data.make_run(tmp_path / "run", [width_cell("b1", 0, "policy")], card={})
    with pytest.raises(NotRecorded):
        widths.timelines(Evidence("policy", [run]))
