"""Arrival processes: their statistics, their seeds, and how driver processes share one sequence."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest
from numpy.random import SeedSequence

from kit.load.arrivals import Arrivals, generate, share, timestamps

N = 20_000


def gaps(arrivals: Arrivals, rate: float = 4.0) -> np.ndarray:
    times = list(islice(generate(arrivals, rate, SeedSequence(1)), N))
    return np.diff([0.0, *times])


@pytest.mark.parametrize(
    ("arrivals", "variation"),
    [
        (Arrivals(process="poisson"), 1.0),
        (Arrivals(process="constant"), 0.0),
        (Arrivals(process="gamma", burstiness=0.25), 2.0),
        (Arrivals(process="gamma", burstiness=4.0), 0.5),
    ],
)
def test_mean_rate_and_variation(arrivals, variation):
    found = gaps(arrivals)
    # The standard error of the mean gap is variation/√N: five of them are no chance.
    assert found.mean() == pytest.approx(1 / 4, rel=5 * variation / N**0.5 + 1e-9)
    assert found.std() / found.mean() == pytest.approx(variation, abs=0.06 * variation + 1e-9)


def test_poisson_counts_are_as_variable_as_their_mean():
    times = np.cumsum(gaps(Arrivals()))
    counts = np.bincount(times[times < 4000].astype(int), minlength=4000)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.12)


def test_piecewise_rate_rises_and_falls_with_its_mean_as_asked():
    ramp = Arrivals(process="piecewise", points=[(0, 0), (1000, 2), (2000, 0)])
    times = np.array(list(generate(ramp, 5.0, SeedSequence(2), window_start_s=50)))
    assert times.min() >= 50 and times.max() <= 2050, "rate 0 before the first and after the last point"
    assert len(times) == pytest.approx(5 * 2000, rel=0.05)
    thirds = np.histogram(times - 50, bins=4, range=(0, 2000))[0] / len(times)
    assert thirds == pytest.approx([1 / 8, 3 / 8, 3 / 8, 1 / 8], abs=0.02)


def test_trace_times_keep_their_shape_at_the_mean_rate_asked_for():
    assert list(timestamps([10, 11, 14], 4.0)) == pytest.approx([0, 1 / 8, 4 / 8])
    with pytest.raises(ValueError, match="different timestamps"):
        list(timestamps([3, 3], 1.0))


def test_seeds_decide_and_processes_share_one_sequence():
    def whole(seed: int) -> list[float]:
        return list(islice(generate(Arrivals(), 3.0, SeedSequence(seed)), 60))

    assert whole(5) == whole(5) != whole(6)
    parts = [list(islice(share(generate(Arrivals(), 3.0, SeedSequence(5)), k, 3), 20)) for k in range(3)]
    merged = sorted(arrival for part in parts for arrival in part)
    assert [at for _, at in merged] == whole(5) and [number for number, _ in merged] == list(range(60))
    assert all(a < b for (_, a), (_, b) in pairwise(merged))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"process": "piecewise"}, "needs points"),
        ({"process": "poisson", "burstiness": 2}, "goes with process gamma"),
        ({"process": "piecewise", "points": [(0, 1), (0, 2)]}, "must rise"),
        ({"process": "piecewise", "points": [(0, 0), (1, 0)]}, "above 0"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        Arrivals.model_validate(wrong)
