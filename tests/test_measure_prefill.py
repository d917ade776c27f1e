"""From a card to the engine's process and back: the same cells, resumed, found again. The process here is a fake."""

import json
import os
import sys
from datetime import UTC, datetime

import pytest

from kit import cards, cli, measure
from kit.engines import exllamav3
from kit.errors import KitError
from kit.measure import plan, prefill
from kit.records.provenance import collect
from kit.records.schema import Gpu, RunRecord
from kit.records.store import Run

CARD = cards.load_card("standin-27b")
EXPERIMENT = CARD.experiments["prefill"]
SMOKE = cards.profile("smoke")

# Records every cell that it is asked for, but stops after KIT_TEST_CELLS of them.
ENGINE = """
import json, os, sys
from datetime import UTC, datetime
from kit.engines.exllamav3 import PrefillPlan
from kit.records.schema import CellRecord
from kit.records.store import Run

plan = PrefillPlan.model_validate_json(sys.stdin.read())
run = Run.open(plan.folder)
(plan.folder / "plan.json").write_text(plan.model_dump_json())
for number, (cell, arm) in enumerate(plan.cells(run.done())):
    if number == int(os.environ.get("KIT_TEST_CELLS", 10**6)):
        sys.exit("the engine died")
    run.append(CellRecord(metrics_version=1, run_id=run.record.run_id, cell=cell, arm=arm, workload_hash="w", seed=1,
                          started_at=datetime.now(UTC), status="ok", metrics={"input_tps": 1.0}))
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    (tmp_path / "fake_prefill_engine.py").write_text(ENGINE)
    monkeypatch.setattr(exllamav3, "RUNNER", "fake_prefill_engine")
    monkeypatch.setattr("kit.engines.exllamav3.measure.__defaults__", (0.05,))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def weights(tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 33}}))
    return folder


def new_run(folder, gpus):
    provenance = collect([]).model_copy(update={"gpus": [Gpu(name="NVIDIA Test")] * gpus})
    record = RunRecord(
        run_id="r", model=CARD.name, title="t", stand_in=True, engine="exllamav3", profile="smoke",
        created_at=datetime.now(UTC), seed=plan.SEED, card=CARD.model_dump(mode="json"), provenance=provenance,
    )  # fmt: skip
    return Run.create(folder, record)


@pytest.mark.parametrize(("gpus", "split"), [(1, ()), (2, (17, 16)), (8, (17, 16))])
def test_the_engine_measures_the_cells_of_the_plan_and_no_others(tmp_path, engine, weights, gpus, split):
    run = new_run(tmp_path / "run", gpus)
    assert not plan.is_complete(run, "prefill", EXPERIMENT, SMOKE)
    prefill.measure(run, CARD, "prefill", EXPERIMENT, SMOKE, weights)
    assert plan.is_complete(run, "prefill", EXPERIMENT, SMOKE)
    planned = {c.id for b in plan.blocks("prefill", EXPERIMENT.on(gpus), SMOKE) for c in b.cells}
    assert {c.cell.id for c in run.cells()} == planned
    assert ("prefill.stock-last.in16384.r0" in planned) == (gpus > 1)
    asked = json.loads((run.folder / "plan.json").read_text())
    assert tuple(asked["layout"]["split"]) == split
    assert (asked["layout"]["chunk"], asked["output_tokens"]) == (3072, 1024)
    assert asked["timeline"] == ["stock", "unblock", *(["no-mtp-unblocked"] if gpus > 1 else [])]
    assert asked["layout"]["scan_tokens"] == EXPERIMENT.settings.get("scan_tokens", 0)
    assert "chunk" not in json.dumps([arm["settings"] for arm in asked["arms"]])


def test_a_run_that_was_cut_short_goes_on_where_it_stopped(tmp_path, engine, weights, monkeypatch):
    run = new_run(tmp_path / "run", 1)
    monkeypatch.setenv("KIT_TEST_CELLS", "3")
    with pytest.raises(KitError, match="the engine died"):
        prefill.measure(run, CARD, "prefill", EXPERIMENT, SMOKE, weights)
    first = [c.cell.id for c in run.cells()]
    assert len(first) == 3
    monkeypatch.delenv("KIT_TEST_CELLS")
    prefill.measure(run, CARD, "prefill", EXPERIMENT, SMOKE, weights)
    again = [c.cell.id for c in run.cells()]
    assert again[:3] == first and len(again) == len(set(again))
    (run.folder / "plan.json").unlink()
    prefill.measure(run, CARD, "prefill", EXPERIMENT, SMOKE, weights)
    assert not (run.folder / "plan.json").exists()  # nothing was left, so no engine was started


def test_only_visible_gpus_count(tmp_path, weights, monkeypatch):
    run = new_run(tmp_path / "run", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    made = prefill.plan_of(run, CARD, "prefill", EXPERIMENT, SMOKE, weights)
    assert made.layout.split == () and "stock-last" not in {arm.name for arm in made.arms}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chnk": 3072}, r"unknown setting 'chnk'"),
        ({"chunk": 1000}, r"standin-27b\.yaml: experiments\.prefill\.settings: chunk: .*multiple of the cache page"),
        ({"output_tokens": 0}, r"experiments\.prefill\.settings: output_tokens"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, weights, settings, message):
    run = new_run(tmp_path / "run", 1)
    wrong = EXPERIMENT.model_copy(update={"settings": settings})
    with pytest.raises(KitError, match=message):
        prefill.plan_of(run, CARD, "prefill", wrong, SMOKE, weights)


def test_a_recorded_run_is_found_where_nothing_can_be_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "LOCAL", tmp_path / "local")
    monkeypatch.setattr(plan, "RECORDED", tmp_path / "runs")
    monkeypatch.setattr(measure, "obstacles", lambda *a: ["no GPU"])
    import prefill_data

    prefill_data.make_run(tmp_path / "runs" / "standin-27b" / "one", ["no-mtp", "stock"], 1, repeats=1)
    found = measure.ensure_all(measure.Request("standin-27b"))
    assert [run.folder.name for run in found.runs["prefill"]] == ["one"]
    assert set(found.missing) == {"draft_width", "policy"}


def test_a_model_without_gpu_and_weights_ends_at_once_with_everything_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plan, "LOCAL", tmp_path)
    monkeypatch.setattr(plan, "RECORDED", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    assert cli.main(["report", "qwen3.8-27b"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.count("no weights were given: give WEIGHTS=FOLDER") == 1 and "WEIGHTS=standin" in said
    for name in ("prefill", "concurrency", "draft_width"):
        assert name in said
    assert "no NVIDIA GPU is visible" in said
    assert list(tmp_path.iterdir()) == []


def test_a_stand_in_is_labelled_even_where_the_card_is_a_products(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "LOCAL", tmp_path)
    made = []
    monkeypatch.setattr(measure, "obstacles", lambda *a: [])
    monkeypatch.setattr(measure, "resolve", lambda *a: None)
    monkeypatch.setattr(measure, "_runner", lambda engine: lambda run, *a: made.append(run.record))
    measure.ensure_all(measure.Request("qwen3.8-27b", weights="standin"), ["prefill"])
    assert [record.stand_in for record in made] == [True]
