"""Uncertainty from repeats: means, intervals and ratios of arms.

Repeats are the unit: a cell gives one number, and an interval comes from three or more repeats (Student's t,
95 %). With fewer no interval is given, since none can be estimated honestly. A ratio of two arms is taken
repeat by repeat (the arms are interleaved, so a repeat's cells share the machine's state) and its interval is
computed on the logarithms, so that 2× and 0.5× are symmetric.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_REPEATS_FOR_INTERVAL = 3

# Two-sided 95 % quantiles of Student's t by degrees of freedom (any statistics table; NIST handbook 1.3.6.7.2).
_T975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
         2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
         2.045, 2.042]  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` repeats, with its 95 % interval where n ≥ 3 (else ``low`` and ``high`` are None)."""

    mean: float
    low: float | None
    high: float | None
    n: int


def t_quantile(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t. Raises ValueError for degrees < 1."""
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1, not {degrees}")
    return _T975[degrees - 1] if degrees <= len(_T975) else 1.960


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """Mean and interval of the known values; None if there are none."""
    known = [v for v in values if v is not None]
    if not known:
        return None
    n = len(known)
    mean = math.fsum(known) / n
    if n < MIN_REPEATS_FOR_INTERVAL:
        return Estimate(mean, None, None, n)
    variance = math.fsum((v - mean) ** 2 for v in known) / (n - 1)
    half = t_quantile(n - 1) * math.sqrt(variance / n)
    return Estimate(mean, mean - half, mean + half, n)


def ratio_estimate(numerator: Mapping[int, float | None], denominator: Mapping[int, float | None]) -> Estimate | None:
    """The ratio of two arms, paired by repeat number: geometric mean and its interval.

    Keys are repeat numbers; only repeats known and positive in both take part. None if there are none.
    """
    found = estimate(_log_ratios(numerator, denominator))
    if found is None:
        return None
    bounds = [None if x is None else math.exp(x) for x in (found.low, found.high)]
    return Estimate(math.exp(found.mean), bounds[0], bounds[1], found.n)


def aa_spread(first: Mapping[int, float | None], again: Mapping[int, float | None]) -> float | None:
    """The noise that an arm measured twice (A/A) shows: the largest |ln(again ÷ first)| over the repeats.

    None if no repeat is known and positive in both.
    """
    return max(map(abs, _log_ratios(again, first)), default=None)


def within_noise(ratio: Estimate, noise: float | None) -> bool:
    """Whether a ratio is no larger than the noise: its interval holds 1, or it lies in the A/A :func:`aa_spread`."""
    covered = ratio.low is not None and ratio.high is not None and ratio.low <= 1 <= ratio.high
    return covered or (noise is not None and abs(math.log(ratio.mean)) <= noise)


def _log_ratios(numerator: Mapping[int, float | None], denominator: Mapping[int, float | None]) -> list[float]:
    logs: list[float] = []
    for repeat in sorted(numerator.keys() & denominator.keys()):
        top, bottom = numerator[repeat], denominator[repeat]
        if top is not None and bottom is not None and top > 0 and bottom > 0:
            logs.append(math.log(top / bottom))
    return logs
