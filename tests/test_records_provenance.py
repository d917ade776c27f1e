"""Provenance names what took part, and nothing secret."""

import json
import os

import pytest

from kit.records import metrics, stats
from kit.records.provenance import collect, model_stamp, scrub, workload_hash


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--api-key", "sk-123", "x"], ["--api-key", "***", "x"]),
        (["--token=abc"], ["--token=***"]),
        (["--key-env", "MY_KEY"], ["--key-env", "MY_KEY"]),
        (["http://me:pw@host/v1"], ["http://***@host/v1"]),
        ([os.path.expanduser("~/models/x")], ["~/models/x"]),
    ],
)
def test_argv_is_scrubbed(argv, expected):
    assert scrub(argv) == expected


def test_collected_provenance_holds_no_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    found = collect(["kit", "measure", "/home/somebody/weights"])
    text = found.model_dump_json()
    assert "/home/somebody" not in text
    assert found.versions["python"]
    assert found.cores >= 1


def test_the_stamp_changes_with_the_weights_and_not_with_the_folder(tmp_path):
    def checkpoint(name, tensor_bytes):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        header = json.dumps({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + tensor_bytes)
        return model_stamp(folder)

    assert checkpoint("a", b"xy") == checkpoint("b", b"xy") != checkpoint("c", b"xz")
    assert model_stamp(tmp_path) is None


def test_workload_hash_ignores_key_order():
    assert workload_hash({"a": 1, "b": 2}) == workload_hash({"b": 2, "a": 1}) != workload_hash({"a": 2, "b": 2})


def test_acceptance_pools_counts_and_does_not_average_rates():
    assert metrics.acceptance([(9, 10), (0, 90), (None, 5)]) == pytest.approx(0.09)
    assert metrics.acceptance([(None, None)]) is None
    assert metrics.tokens_per_step([(3, 2), (1, 2)]) == pytest.approx(2.0)


def test_tpot_is_undefined_below_two_tokens():
    assert metrics.tpot(0.0, 1.0, 1) is None
    assert metrics.tpot(0.0, 1.0, None) is None
    assert metrics.tpot(1.0, 3.0, 5) == pytest.approx(0.5)


def test_percentile_interpolates_like_numpy():
    numpy = pytest.importorskip("numpy")
    values = [3.0, 1.0, 4.0, 1.5, 9.0]
    for q in (0, 10, 50, 90, 99, 100):
        assert metrics.percentile(values, q) == pytest.approx(float(numpy.percentile(values, q)))
    assert metrics.percentile([], 50) is None


def test_no_interval_below_three_repeats_and_a_t_interval_from_three():
    assert stats.estimate([1.0, None]) == stats.Estimate(1.0, None, None, 1)
    assert stats.estimate([1.0, 2.0]).low is None
    found = stats.estimate([9.0, 10.0, 11.0])
    # t(2) = 4.303, s = 1, n = 3
    assert (found.low, found.high) == pytest.approx((10 - 4.303 / 3**0.5, 10 + 4.303 / 3**0.5))


def test_a_ratio_is_paired_by_repeat():
    found = stats.ratio_estimate({0: 2.0, 1: 4.0, 2: 8.0, 3: None}, {0: 1.0, 1: 2.0, 2: 4.0, 3: 1.0})
    assert found.mean == pytest.approx(2.0)
    assert found.low == pytest.approx(2.0)
    assert found.n == 3
