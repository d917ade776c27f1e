"""Every metric the kit reports: its tag, unit and formula, in one place.

The scalar formulas are here, whoever calls them (the load driver's window, the in-process engines). A formula
gives ``None`` where it is not defined; it never invents a count. Definitions follow the design's table:
TTFT is the first non-empty generated delta minus send; TPOT is (last − first token) / (n − 1); acceptance pools
counts and is never a mean of rates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

METRICS_VERSION = 1
"""Raise when a formula changes, with a line here saying which.

1: first version.
"""


@dataclass(frozen=True)
class Metric:
    """A reported quantity: how it is called, in what unit, by what formula, and which way is better."""

    tag: str
    title: str
    unit: str
    formula: str
    better: Literal["higher", "lower", "neither"]


_ALL = [
    Metric("output_tps", "output throughput", "tok/s", "tokens that arrived in the window / window", "higher"),
    Metric("request_rate", "completed requests", "1/s", "requests that ended ok in the window / window", "higher"),
    Metric("input_tps", "input throughput", "tok/s", "Σ(prompt − cached) / Σ server prefill time", "higher"),
    Metric("input_tps_ttft", "input throughput by TTFT", "tok/s", "Σ(prompt − cached) / Σ TTFT", "higher"),
    Metric("ttft_p50", "TTFT p50", "s", "median of first non-empty delta − sent", "lower"),
    Metric("ttft_p90", "TTFT p90", "s", "90th percentile of first non-empty delta − sent", "lower"),
    Metric("ttft_p99", "TTFT p99", "s", "99th percentile of first non-empty delta − sent", "lower"),
    Metric("ttft_answer_p50", "time to first non-reasoning token p50", "s", "median, text deltas only", "lower"),
    Metric("tpot_p50", "TPOT p50", "s", "median of (last − first token) / (n − 1)", "lower"),
    Metric("tpot_p99", "TPOT p99", "s", "99th percentile of (last − first token) / (n − 1)", "lower"),
    Metric("decode_rate_p50", "per-stream decode rate p50", "tok/s", "median of 1 / TPOT", "higher"),
    Metric("icl_p50", "inter-chunk latency p50", "s", "median gap between non-empty deltas of a request", "lower"),
    Metric("icl_p99", "inter-chunk latency p99", "s", "99th percentile of the same", "lower"),
    Metric("tokens_per_chunk", "tokens per chunk", "tok", "Σ tokens / Σ chunks of whole requests", "neither"),
    Metric("e2e_p50", "end-to-end p50", "s", "median of last token − sent", "lower"),
    Metric("e2e_p99", "end-to-end p99", "s", "99th percentile of last token − sent", "lower"),
    Metric("e2e_scheduled_p50", "end-to-end from schedule p50", "s", "median of last token − scheduled", "lower"),
    Metric("ttft_scheduled_p50", "TTFT from schedule p50", "s", "median of first delta − scheduled", "lower"),
    Metric("schedule_lag_p99", "schedule lag p99", "s", "99th percentile of sent − scheduled", "lower"),
    Metric("acceptance", "acceptance rate", "1", "Σ accepted / Σ drafted", "higher"),
    Metric("tokens_per_step", "tokens per verify step", "tok", "1 + Σ accepted / Σ verify steps", "higher"),
    Metric("cached_share", "cached prompt share", "1", "Σ cached / Σ prompt tokens", "neither"),
    Metric("goodput", "goodput", "1/s", "requests meeting every target / window", "higher"),
    Metric("attainment", "attainment", "1", "requests meeting every target / all sent", "higher"),
    Metric("attainment_ended", "attainment of ended", "1", "the same / (all sent − cut off)", "higher"),
    Metric("client_lag_p99", "client lag p99", "s", "99th percentile of the driver's event-loop delay", "lower"),
    Metric("in_flight_mean", "requests in flight", "1", "time-weighted mean over the window, client side", "neither"),
    Metric("wall_s", "wall time", "s", "sent to last token of a single request", "lower"),
    Metric("ttft_s", "TTFT", "s", "first token − sent of a single request", "lower"),
    Metric("prefill_s", "prefill time", "s", "the engine's own time_prefill", "lower"),
    Metric("decode_tps", "output rate", "tok/s", "new tokens / the engine's own time_generate", "higher"),
    Metric("peak_memory_bytes", "peak GPU memory", "B", "allocator peak during the cell, all GPUs", "lower"),
    Metric("window_tokens_estimated", "tokens placed by characters", "1",
           "share of window tokens whose chunk counts the server did not give", "lower"),
]  # fmt: skip

METRICS: dict[str, Metric] = {m.tag: m for m in _ALL}
"""Every tag a :class:`~kit.records.schema.CellRecord` may carry in ``metrics``."""


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """``numerator / denominator``; None where either is unknown or the denominator is 0."""
    if numerator is None or not denominator:
        return None
    return numerator / denominator


def tpot(first_s: float, last_s: float, tokens: int | None) -> float | None:
    """Time per output token, (last − first) / (n − 1) in seconds; None for n < 2 or n unknown."""
    if tokens is None or tokens < 2:
        return None
    return (last_s - first_s) / (tokens - 1)


def acceptance(pairs: Iterable[tuple[int | None, int | None]]) -> float | None:
    """Pooled acceptance Σ accepted / Σ drafted over ``(accepted, drafted)``; unknown pairs are left out."""
    known = [(a, d) for a, d in pairs if a is not None and d is not None]
    return ratio(sum(a for a, _ in known), sum(d for _, d in known))


def tokens_per_step(pairs: Iterable[tuple[int | None, int | None]]) -> float | None:
    """1 + Σ accepted / Σ verify steps over ``(accepted, steps)``; unknown pairs are left out."""
    known = [(a, s) for a, s in pairs if a is not None and s is not None]
    per_step = ratio(sum(a for a, _ in known), sum(s for _, s in known))
    return None if per_step is None else 1 + per_step


def percentile(values: Iterable[float], q: float) -> float | None:
    """The q-th percentile (0–100) by linear interpolation (numpy's default); None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    position = (len(ordered) - 1) * q / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
