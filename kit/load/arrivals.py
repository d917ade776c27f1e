"""When to send: arrival processes as pure, seeded generators.

A closed loop has no arrival process (a client sends when its last request has ended); everything here is for the
open loop, where requests come whether or not earlier ones have ended. Each generator yields seconds from the
start of the load, without end unless the process has one, and depends on its seed alone.

Several driver processes share one sequence: each draws all of it and keeps every n-th arrival
(:func:`share`). So the load is the same however many processes send it, which a split into n processes of λ/n
would give only for Poisson arrivals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from kit.records.schema import Strict


class Arrivals(Strict):
    """An arrival process; its mean rate is the load point's value (requests per second).

    ``poisson``: exponential gaps. ``constant``: equal gaps. ``gamma``: gaps with coefficient of variation
    ``1/√burstiness`` (burstiness 1 is Poisson, below 1 burstier, above 1 smoother). ``piecewise``: Poisson
    with a rate that follows ``points``. ``trace``: the workload's own timestamps, stretched to the mean rate.
    """

    process: Literal["poisson", "constant", "gamma", "piecewise", "trace"] = "poisson"
    burstiness: float = Field(default=1.0, gt=0)
    points: list[tuple[float, float]] | None = None
    """``piecewise``: (seconds from the window's start, relative rate), linear in between, held outside. The
    rates are scaled so that their mean over the points' span is the load point's value."""

    @field_validator("points")
    @classmethod
    def _rising(cls, points: list[tuple[float, float]] | None) -> list[tuple[float, float]] | None:
        if points is None:
            return None
        if len(points) < 2:
            raise ValueError("points needs at least two (seconds, rate) pairs")
        if any(b[0] <= a[0] for a, b in pairwise(points)):
            raise ValueError("the seconds of points must rise")
        if any(rate < 0 for _, rate in points) or not any(rate > 0 for _, rate in points):
            raise ValueError("the rates of points must be at least 0, and one of them above 0")
        return points

    @model_validator(mode="after")
    def _points_where_used(self) -> Arrivals:
        if (self.process == "piecewise") != (self.points is not None):
            raise ValueError("points goes with process piecewise, and piecewise needs points")
        if self.burstiness != 1.0 and self.process != "gamma":
            raise ValueError("burstiness goes with process gamma")
        return self


def poisson(rate: float, seed: np.random.SeedSequence) -> Iterator[float]:
    """Arrivals with independent exponential gaps of mean 1/rate seconds."""
    return gamma(rate, 1.0, seed)


def constant(rate: float) -> Iterator[float]:
    """Arrivals at equal gaps of 1/rate seconds, the first after one gap."""
    number = 0
    while True:
        number += 1
        yield number / rate


def gamma(rate: float, burstiness: float, seed: np.random.SeedSequence) -> Iterator[float]:
    """Arrivals with gamma gaps: shape = burstiness, mean 1/rate seconds."""
    rng = np.random.default_rng(seed)
    now = 0.0
    while True:
        for gap in rng.gamma(burstiness, 1.0 / (rate * burstiness), size=256):
            now += float(gap)
            yield now


def piecewise(
    points: Sequence[tuple[float, float]], mean_rate: float, offset_s: float, seed: np.random.SeedSequence
) -> Iterator[float]:
    """Poisson arrivals whose rate follows ``points``, by thinning (Lewis and Shedler 1979).

    ``offset_s`` seconds of the first rate go before the first point. Ends where the rate stays 0 for good.
    """
    times = np.array([t for t, _ in points])
    shape = np.array([r for _, r in points])
    mean = float(np.trapezoid(shape, times) / (times[-1] - times[0]))
    rates = shape * (mean_rate / mean)
    peak = float(rates.max())
    rng = np.random.default_rng(seed)
    for candidate in poisson(peak, seed.spawn(1)[0]):
        since = candidate - offset_s
        if since > times[-1] and rates[-1] == 0:
            return
        if rng.random() * peak < np.interp(since, times, rates):
            yield candidate


def timestamps(at_s: Sequence[float], mean_rate: float) -> Iterator[float]:
    """A trace's own arrival times, from 0 and stretched to ``mean_rate``; ends with the trace.

    Raises ValueError if the trace has fewer than two arrivals or lasts no time.
    """
    ordered = sorted(at_s)
    if len(ordered) < 2 or ordered[-1] <= ordered[0]:
        raise ValueError("trace arrivals need at least two requests with different timestamps")
    native = (len(ordered) - 1) / (ordered[-1] - ordered[0])
    for at in ordered:
        yield (at - ordered[0]) * native / mean_rate


def generate(
    arrivals: Arrivals,
    rate: float,
    seed: np.random.SeedSequence,
    *,
    window_start_s: float = 0.0,
    trace_s: Sequence[float] = (),
) -> Iterator[float]:
    """The arrival times of a process at a mean rate, in seconds from the start of the load."""
    match arrivals.process:
        case "poisson":
            return poisson(rate, seed)
        case "constant":
            return constant(rate)
        case "gamma":
            return gamma(rate, arrivals.burstiness, seed)
        case "piecewise":
            return piecewise(arrivals.points or (), rate, window_start_s, seed)
        case "trace":
            return timestamps(trace_s, rate)


def share(sequence: Iterator[float], index: int, of: int) -> Iterator[tuple[int, float]]:
    """Every ``of``-th arrival from ``index`` on, each with its number in the whole sequence."""
    return islice(enumerate(sequence), index, None, of)
