"""The record store: durable, append-only, strict, resumable."""

import gzip
import json
from datetime import UTC, datetime

import pytest

from kit.errors import KitError
from kit.records.schema import Arm, CellKey, CellRecord, Chunk, Load, Provenance, RequestRecord, RunRecord
from kit.records.store import Run, find_runs


def run_record(**changes):
    values = dict(
        run_id="r1",
        model="m",
        title="M",
        stand_in=True,
        engine="llamacpp",
        profile="smoke",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        seed=1,
        card={},
        provenance=Provenance(),
    )
    return RunRecord(**{**values, **changes})


def cell_record(arm="base", repeat=0, status="ok", **changes):
    values = dict(
        metrics_version=1,
        run_id="r1",
        cell=CellKey(experiment="concurrency", arm=arm, load=Load(kind="closed", value=4), repeat=repeat),
        arm=Arm(name=arm, label=arm),
        workload_hash="w",
        seed=1,
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        status=status,
        metrics={"output_tps": 12.5, "ttft_p50": None},
    )
    return CellRecord(**{**values, **changes})


def request_record(n):
    return RequestRecord(request_id=n, sent_ns=n, ended_ns=n + 5, status="ok", chunks=[Chunk(t_ns=n + 1, chars=3)])


def test_what_is_appended_is_read_back_with_its_raw_lines(tmp_path):
    run = Run.create(tmp_path / "r1", run_record())
    stored = run.append(cell_record(), [request_record(1), request_record(2)])
    again = Run.open(tmp_path / "r1")
    assert again.cells() == [stored]
    assert list(again.requests(stored)) == [request_record(1), request_record(2)]
    assert again.done() == {"concurrency.base.c4.r0"}


def test_an_unknown_value_stays_null_on_disk(tmp_path):
    run = Run.create(tmp_path / "r1", run_record())
    run.append(cell_record())
    line = json.loads((run.folder / "results.jsonl").read_text())
    assert line["metrics"]["ttft_p50"] is None


@pytest.mark.parametrize("status", ["failed", "invalid"])
def test_a_good_cell_is_immutable_but_a_bad_one_may_be_measured_again(tmp_path, status):
    run = Run.create(tmp_path / "r1", run_record())
    run.append(cell_record(status=status, reason="server died"), [request_record(1)])
    assert run.done() == set()
    kept = run.append(cell_record(), [request_record(2)])
    assert run.cells() == [kept]
    assert len((run.folder / "results.jsonl").read_text().splitlines()) == 2
    assert [r.request_id for r in run.requests(kept)] == [2]
    with pytest.raises(KitError, match="already recorded"):
        run.append(cell_record())


def test_a_torn_last_line_is_not_trusted_and_not_lost(tmp_path):
    run = Run.create(tmp_path / "r1", run_record())
    run.append(cell_record(repeat=0))
    path = run.folder / "results.jsonl"
    path.write_bytes(path.read_bytes() + b'{"schema_version": 1, "met')
    assert run.done() == {"concurrency.base.c4.r0"}
    run.append(cell_record(repeat=1))
    assert [c.cell.repeat for c in Run.open(run.folder).cells()] == [0, 1]
    assert (run.folder / "results.jsonl.torn").read_bytes() == b'{"schema_version": 1, "met'


def test_an_unknown_field_in_a_record_is_an_error_naming_line_and_field(tmp_path):
    run = Run.create(tmp_path / "r1", run_record())
    run.append(cell_record())
    path = run.folder / "results.jsonl"
    line = json.loads(path.read_text())
    path.write_text(json.dumps({**line, "speed": 3}) + "\n")
    with pytest.raises(KitError, match=r"results\.jsonl:1: speed"):
        run.cells()


def test_another_schema_version_is_named(tmp_path):
    run = Run.create(tmp_path / "r1", run_record())
    path = run.folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 99}))
    with pytest.raises(KitError, match="schema version 99"):
        Run.open(run.folder)


def test_a_missing_raw_file_is_an_error_not_an_empty_cell(tmp_path):
    run = Run.create(tmp_path / "r1", run_record())
    stored = run.append(cell_record(), [request_record(1)])
    (run.folder / stored.raw).unlink()
    with pytest.raises(KitError, match="missing"):
        list(run.requests(stored))


def test_equal_requests_give_equal_raw_bytes(tmp_path):
    runs = [Run.create(tmp_path / name, run_record()) for name in "ab"]
    paths = [run.folder / run.append(cell_record(), [request_record(1)]).raw for run in runs]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert gzip.decompress(paths[0].read_bytes()).endswith(b"\n")


def test_runs_are_found_newest_first_and_by_experiment(tmp_path):
    old = Run.create(tmp_path / "m" / "old", run_record(run_id="old"))
    new = Run.create(tmp_path / "m" / "new", run_record(run_id="new", created_at=datetime(2026, 2, 1, tzinfo=UTC)))
    old.append(cell_record())
    assert [r.record.run_id for r in find_runs([tmp_path], "m")] == ["new", "old"]
    assert [r.record.run_id for r in find_runs([tmp_path], "m", "concurrency")] == ["old"]
    assert new.done() == set()
