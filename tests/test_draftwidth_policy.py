"""The load-adaptive policy: a table with hysteresis, derived from an isolation sweep."""

import json

import pytest

from kit.cli import main
from kit.draftwidth.policy import (
    PolicyState,
    Row,
    SweepPoint,
    WidthPolicy,
    derive_policy,
    load_policy,
    next_state,
    policy_from_json,
    policy_from_settings,
)
from kit.errors import KitError

TABLE = WidthPolicy((Row(1, 4), Row(6, 1), Row(12, 0)), margin=1, dwell_steps=3)


def widths(policy, loads):
    state, found = PolicyState(), []
    for running in loads:
        state = next_state(policy, state, running)
        found.append(policy.rows[state.row].width)
    return found


def test_a_load_that_stays_past_a_boundary_changes_the_width_after_the_dwell():
    assert widths(TABLE, [8] * 4) == [4, 4, 1, 1]
    assert widths(TABLE, [20] * 4) == [4, 4, 0, 0], "rows in between are skipped, not visited"
    assert widths(TABLE, [8] * 3 + [2] * 3) == [4, 4, 1, 1, 1, 4]


def test_a_load_that_hovers_at_a_boundary_changes_nothing():
    assert set(widths(TABLE, [5, 6] * 50)) == {4}, "within the margin"
    assert set(widths(TABLE, [8, 8, 3] * 50)) == {4}, "never long enough"
    assert widths(TABLE, [8] * 3 + [5, 6] * 50)[3:] == [1] * 100, "nor on the way back"


def test_the_dwell_restarts_when_another_row_is_asked_for():
    assert widths(TABLE, [8, 8, 20, 20, 20]) == [4, 4, 4, 4, 0]


def test_a_policy_survives_json_and_the_numbers_only_form(tmp_path):
    assert policy_from_json(TABLE.to_json()) == TABLE
    assert policy_from_settings(TABLE.to_settings()) == TABLE
    assert all(isinstance(value, int) for value in TABLE.to_settings().values())
    (tmp_path / "p.json").write_text(TABLE.to_json())
    assert load_policy(tmp_path / "p.json") == TABLE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "not a width policy"),
        ('{"rows": []}', "must rise in running requests from 1"),
        ('{"rows": [{"running": 2, "width": 1}]}', "must rise in running requests from 1"),
        ('{"rows": [{"running": 1, "width": -1}]}', "width must be a whole number"),
        ('{"rows": [{"running": 1, "width": 1, "x": 2}]}', "not a width policy"),
        ('{"rows": [{"running": 1, "width": 1}], "dwell_steps": 0}', "dwell_steps"),
    ],
)
def test_a_bad_policy_is_refused_with_the_reason(text, reason):
    with pytest.raises(KitError, match=reason):
        policy_from_json(text)
    with pytest.raises(KitError, match="cannot read"):
        load_policy(__import__("pathlib").Path("/nowhere/policy.json"))


def sweep(table):
    return [SweepPoint(load, width, tps) for load, row in table.items() for width, tps in row.items()]


def test_the_table_takes_the_fastest_width_at_each_load():
    policy = derive_policy(sweep({1: {0: 50, 1: 60, 2: 70}, 4: {0: 200, 1: 220, 2: 210}, 16: {0: 700, 1: 600, 2: 500}}))
    assert policy.rows == (Row(1, 2), Row(2, 1), Row(8, 0))


def test_a_gain_within_the_noise_goes_to_the_narrower_width():
    table = {1: {0: 100, 2: 101}, 8: {0: 100, 2: 110}}
    assert derive_policy(sweep(table), min_gain=0.02).rows == (Row(1, 0), Row(3, 2))
    assert derive_policy(sweep(table), min_gain=0.0).rows == (Row(1, 2),)


def test_repeats_are_averaged():
    points = [*sweep({1: {0: 100, 2: 150}}), *sweep({1: {0: 100, 2: 40}})]
    assert derive_policy(points).rows == (Row(1, 0),)


def test_an_incomplete_sweep_gives_no_policy():
    with pytest.raises(KitError, match="at 8 running requests has widths"):
        derive_policy(sweep({1: {0: 1, 2: 2}, 8: {0: 1}}))
    with pytest.raises(KitError, match="measure the isolation sweep first"):
        derive_policy([])


def test_tune_reads_a_recorded_run(tmp_path, isolation_run, capsys):
    out = tmp_path / "policy.json"
    assert main(["width", "tune", str(isolation_run), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["rows"] == [{"running": 1, "width": 2}, {"running": 3, "width": 0}]
    assert main(["width", "tune", str(isolation_run), "--experiment", "other"]) == 2
    assert "the run's experiments are: isolation" in capsys.readouterr().err


@pytest.fixture
def isolation_run(tmp_path):
    from datetime import UTC, datetime

    from kit.records.schema import Arm, CellKey, CellRecord, Load, Provenance, RunRecord
    from kit.records.store import Run

    now = datetime.now(UTC)
    run = Run.create(
        tmp_path / "run",
        RunRecord(run_id="r", model="m", title="t", stand_in=True, engine="sglang", profile="quick", created_at=now,
                  seed=1, card={}, provenance=Provenance()),
    )  # fmt: skip
    for load, tps_by_width in {1: {0: 50.0, 2: 80.0}, 8: {0: 400.0, 2: 300.0}}.items():
        for width, tps in tps_by_width.items():
            for repeat, status in enumerate(("ok", "ok", "invalid")):
                key = CellKey(
                    experiment="isolation", arm=f"w{width}", load=Load(kind="closed", value=load), repeat=repeat
                )
                run.append(
                    CellRecord(metrics_version=1, run_id="r", cell=key, arm=Arm(name=key.arm, label=key.arm),
                               resolved={"draft_width": width}, workload_hash="w", seed=1, started_at=now,
                               status=status,
                               metrics={"output_tps": tps if status == "ok" else 9e9 * (width == 0)})
                )  # fmt: skip
    return run.folder
