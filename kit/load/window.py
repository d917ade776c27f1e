"""From requests to numbers: a window's counts and metrics, recomputable from raw lines.

Pure: requests, window, samples and targets in; counts, metrics, the server's own figures and flags out. Formulas
are those of :mod:`kit.records.metrics`. Everything is placed by event time, in the window ``[start, end)``:

* A token counts if its chunk arrived in the window, whatever request it belongs to: also of requests that were
  under way when the window opened, and of those cut off at its end.
* TTFT belongs to the window in which the first token arrived; TPOT, decode rate, end-to-end latency, goodput and
  completed requests to the one in which the request ended, and these are of ``ok`` requests. Schedule lag goes by
  when the request was sent.
* A failed or timed-out request does not leave the percentiles: one that never gave a token ranks as an unbounded
  TTFT, and each as an unbounded end-to-end latency. A percentile that falls among them is None.
* Counts are over all requests that were in flight at any moment of the window, each by what it was at the
  window's end: ``sent`` = completed + failed + timed out + cancelled + cut off. ``sent`` is the denominator of
  attainment, so requests cut off by the window's end count against it; ``attainment_ended`` leaves them out.
* Targets are judged from the scheduled time where there is one (open loop): waiting because the client was late is
  waiting all the same.

Mid-stream token counts come from the server. Where it gives none, a request's tokens are spread over its chunks
in proportion to characters, which matters only for requests that cross an edge; a request cut off before any
count came is estimated at the cell's pooled tokens per character. ``window_tokens_estimated`` is the share of the
window's tokens that rest on either. Where no request of the cell has a count, throughput is None.

A closed loop whose clients go through their answers in step is all prefill at one moment and all decode at the next;
what a window then holds depends on the phase it happens to meet, another for each arm. :data:`UNSTEADY_FLAG` tells
the windows where that shows (:func:`is_unsteady`). A window that happens to hold whole waves is not told.

TPOT divides by the tokens after the first chunk: a first chunk known to hold k tokens starts the clock with all of
them, so (last − first) covers n − k; k is 1 where it is not known.

What this does not own: when the window is and how long to warm up (the driver), what a cell is and whether it is
comparable to another (records), repeats and intervals (stats), and the text of the answers.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kit.errors import KitError
from kit.records.metrics import acceptance, percentile, ratio, tokens_per_step, tpot
from kit.records.schema import Counts, RequestRecord, ServerSample

CLIENT_BOUND_S = 0.005
"""Event-loop delay (p99) above which the client may be what is measured."""

RAMP_FLAG = "start-up in window"
"""A closed-loop client's very first token came after the window had opened: the load was not yet steady."""

UNSTEADY_FLAG = "unsteady window"
"""A closed loop's requests begun and ended in the window differ by more than its edges explain."""

UNSTEADY_SHARE = 0.25
"""Difference of begun and ended requests, as a share of the larger, that is still taken for steady."""

UNSTEADY_AT_LEAST = 8
"""The larger of the two must be this many: of fewer, a quarter is a request or two."""

SLO_TARGETS = ("ttft", "tpot", "e2e")

# Larger than any latency, yet finite, so that interpolating between two of them gives no NaN.
_UNBOUNDED = sys.float_info.max / 4

# Counters of (accepted tokens, drafted tokens, verify steps), by server.
_SPECULATION_COUNTERS = (
    ("llamacpp:spec_decode_num_accepted_tokens_total", "llamacpp:spec_decode_num_draft_tokens_total",
     "llamacpp:spec_decode_num_drafts_total"),
    ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total",
     "vllm:spec_decode_num_drafts_total"),
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """What a window gave."""

    counts: Counts
    metrics: dict[str, float | None]
    """By tag of :data:`kit.records.metrics.METRICS`."""
    server: dict[str, float | None]
    """Means of samples; differences of counters."""
    flags: list[str]
    errors: dict[str, int]


def parse_slo(text: str) -> dict[str, float]:
    """Targets in seconds from ``ttft:500 tpot:50`` (milliseconds; ttft, tpot, e2e; spaces or commas between).

    Raises KitError, which names the part that is wrong.
    """
    targets: dict[str, float] = {}
    for part in re.split(r"[\s,]+", text.strip()):
        name, colon, value = part.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if not colon or name not in SLO_TARGETS or not 0 < limit < float("inf"):
            raise SloError(
                f"target {part!r} is not NAME:MILLISECONDS with NAME one of {', '.join(SLO_TARGETS)}, "
                "as in 'ttft:500 tpot:50'"
            )
        if name in targets:
            raise SloError(f"target {name} is given twice in {text!r}")
        targets[name] = limit / 1000
    return targets


class SloError(KitError, ValueError):
    """Targets that cannot be read. A ValueError too, so that a spec's validation names the field."""


def measure(
    requests: Sequence[RequestRecord],
    window_ns: tuple[int, int],
    *,
    slo: Mapping[str, float] | None = None,
    client_lag_s: Sequence[float] = (),
    samples: Sequence[ServerSample] = (),
) -> Measured:
    """Counts and metrics of a window ``[start, end)`` in ``perf_counter_ns``.

    ``requests``: all of the cell, in any order, those of burn-in and warm-up too. ``slo``: seconds by name,
    as :func:`parse_slo` gives. Raises ValueError if the window is empty.
    """
    start, end = window_ns
    if end <= start:
        raise ValueError(f"window {window_ns} ends before it starts")
    seconds = (end - start) / 1e9
    active = [r for r in requests if r.sent_ns < end and r.ended_ns >= start]
    outcomes = {id(r): _outcome(r, end) for r in active}
    tally = Counter(outcomes.values())
    counts = Counts(
        sent=len(active),
        completed=tally["ok"],
        failed=tally["failed"],
        timed_out=tally["timed_out"],
        cancelled=tally["cancelled"],
        cut_off=tally["cut_off"],
    )
    server = server_figures(samples, window_ns)

    first = [r for r in active if r.chunks and start <= r.chunks[0].t_ns < end]
    broken = [r for r in active if outcomes[id(r)] in ("failed", "timed_out")]
    completed = [r for r in active if outcomes[id(r)] == "ok"]
    sent = [r for r in active if start <= r.sent_ns < end]
    scheduled = [r for r in active if r.scheduled_ns is not None]

    metrics: dict[str, float | None] = {}
    metrics.update(_throughput(active, requests, window_ns))
    metrics["request_rate"] = len(completed) / seconds
    metrics.update(_input(first))

    # Requests that ended without a token have no TTFT to give, but must not vanish: unbounded.
    tokenless = [_UNBOUNDED for r in broken if not r.chunks]
    ttft = [ttft_s(r) for r in first] + tokenless
    for q in (50, 90, 99):
        metrics[f"ttft_p{q}"] = _bounded(percentile(ttft, q))
    answers = [(_first_answer_ns(r), r) for r in active]
    metrics["ttft_answer_p50"] = percentile(
        [(t - r.sent_ns) / 1e9 for t, r in answers if t is not None and start <= t < end], 50
    )
    tpots = [t for r in completed if (t := tpot_s(r)) is not None]
    metrics["tpot_p50"] = percentile(tpots, 50)
    metrics["tpot_p99"] = percentile(tpots, 99)
    metrics["decode_rate_p50"] = percentile([1 / t for t in tpots if t > 0], 50)
    gaps = [
        (b.t_ns - a.t_ns) / 1e9
        for r in active
        for a, b in zip(r.chunks, r.chunks[1:], strict=False)
        if start <= b.t_ns < end
    ]
    metrics["icl_p50"] = percentile(gaps, 50)
    metrics["icl_p99"] = percentile(gaps, 99)
    counted = [r for r in completed if r.completion_tokens is not None]
    metrics["tokens_per_chunk"] = ratio(
        sum(r.completion_tokens or 0 for r in counted), sum(len(r.chunks) for r in counted)
    )
    ended = [_UNBOUNDED for _ in broken]
    e2e = [e2e_s(r) for r in completed] + ended
    metrics["e2e_p50"] = _bounded(percentile(e2e, 50))
    metrics["e2e_p99"] = _bounded(percentile(e2e, 99))
    if scheduled:
        late = [e2e_s(r, scheduled=True) for r in completed] + ended
        metrics["e2e_scheduled_p50"] = _bounded(percentile(late, 50))
        late = [ttft_s(r, scheduled=True) for r in first] + tokenless
        metrics["ttft_scheduled_p50"] = _bounded(percentile(late, 50))
        metrics["schedule_lag_p99"] = percentile(
            [(r.sent_ns - r.scheduled_ns) / 1e9 for r in sent if r.scheduled_ns is not None], 99
        )

    metrics.update(_speculation([*completed, *(r for r in active if outcomes[id(r)] == "cut_off")], server))
    known = [r for r in first if r.cached_tokens is not None and r.prompt_tokens is not None]
    metrics["cached_share"] = ratio(sum(r.cached_tokens or 0 for r in known), sum(r.prompt_tokens or 0 for r in known))
    if slo:
        verdicts = [meets(r, slo) for r in completed]
        good = None if None in verdicts else sum(map(bool, verdicts))
        metrics["goodput"] = ratio(good, seconds)
        metrics["attainment"] = ratio(good, counts.sent)
        metrics["attainment_ended"] = ratio(good, counts.sent - counts.cut_off)
    metrics["client_lag_p99"] = percentile(client_lag_s, 99)
    metrics["in_flight_mean"] = sum(min(r.ended_ns, end) - max(r.sent_ns, start) for r in active) / (end - start)

    flags = []
    if (metrics["client_lag_p99"] or 0) > CLIENT_BOUND_S:
        flags.append("client-bound")
    if broken:
        flags.append("failures")
    if in_ramp(requests, window_ns):
        flags.append(RAMP_FLAG)
    if is_unsteady(requests, window_ns):
        flags.append(UNSTEADY_FLAG)
    errors = Counter(r.error or r.status for r in broken)
    return Measured(counts, metrics, server, flags, dict(errors.most_common(10)))


def in_ramp(requests: Iterable[RequestRecord], window_ns: tuple[int, int]) -> bool:
    """Whether a client had no first token before the window opened.

    Only a closed loop has clients; of other loads no request names one, and nothing is told.
    """
    first: dict[int, int] = {}
    for request in requests:
        if request.client is not None:
            seen = request.chunks[0].t_ns if request.chunks else window_ns[1]
            first[request.client] = min(seen, first.get(request.client, seen))
    return any(seen >= window_ns[0] for seen in first.values())


def is_unsteady(requests: Iterable[RequestRecord], window_ns: tuple[int, int]) -> bool:
    """Whether a closed loop began (first token) and ended well clearly unequal numbers of requests in the window.

    The two differ by how many clients were between first token and end at one edge and not at the other. Of clients
    that are independent of each other, each is so with some probability at either edge: the standard deviation of the
    difference is at most √(c/2) for c clients, and twice that, √(2c), is what the edges explain. More than this, more
    than a quarter of the larger number, and the larger at least 8: the clients go in step. Requests that failed or
    timed out are in neither number. Other loops have no clients, and nothing is told.
    """
    start, end = window_ns
    mine = [r for r in requests if r.client is not None and r.status not in ("failed", "timed_out")]
    begun = sum(bool(r.chunks) and start <= r.chunks[0].t_ns < end for r in mine)
    ended = sum(r.status == "ok" and start <= r.ended_ns < end for r in mine)
    apart, most = abs(begun - ended), max(begun, ended)
    by_edges = math.sqrt(2 * len({r.client for r in mine}))
    return most >= UNSTEADY_AT_LEAST and apart > UNSTEADY_SHARE * most and apart > by_edges


def ttft_s(request: RequestRecord, *, scheduled: bool = False) -> float:
    """First non-empty delta − sent (or scheduled), seconds; the request must have a chunk."""
    return (request.chunks[0].t_ns - _origin_ns(request, scheduled)) / 1e9


def e2e_s(request: RequestRecord, *, scheduled: bool = False) -> float:
    """Last token − sent (or scheduled), seconds."""
    return (_last_ns(request) - _origin_ns(request, scheduled)) / 1e9


def tpot_s(request: RequestRecord) -> float | None:
    """Time per output token of a whole request, seconds; None where the count is unknown or too small."""
    if not request.chunks or request.completion_tokens is None:
        return None
    # Tokens of the first chunk beyond one arrived at its start: no time of the interval is theirs.
    surplus = max((request.chunks[0].tokens_so_far or 1) - 1, 0)
    return tpot(request.chunks[0].t_ns / 1e9, request.chunks[-1].t_ns / 1e9, request.completion_tokens - surplus)


def meets(request: RequestRecord, slo: Mapping[str, float]) -> bool | None:
    """Whether an ok request met every target; None where a target cannot be judged."""
    values: dict[str, float | None] = {}
    if request.chunks:
        values["ttft"] = ttft_s(request, scheduled=True)
    values["e2e"] = e2e_s(request, scheduled=True)
    values["tpot"] = tpot_s(request)
    if values["tpot"] is None and request.completion_tokens is not None:
        values["tpot"] = 0.0  # a single token (or chunk) has no time between tokens to be late by
    verdicts = [None if (v := values.get(name)) is None else v <= limit for name, limit in slo.items()]
    if False in verdicts:
        return False
    return None if None in verdicts else True


def server_figures(samples: Sequence[ServerSample], window_ns: tuple[int, int]) -> dict[str, float | None]:
    """The server's own figures over the window: gauges as means, counters as last − first.

    Counters are told by name, as Prometheus asks for: ``_total``, ``_sum``, ``_count``, ``_bucket``. Their
    difference needs two samples; with fewer, or after a restart of the server, it is None. A labelled counter that the
    first sample's page lacks began at 0: servers list such a series only once it has counted something.
    """
    start, end = window_ns
    inside = [s for s in samples if start <= s.t_ns <= end]
    figures: dict[str, float | None] = {}
    for name in sorted({name for s in inside for name in s.values}):
        values = [v for s in inside if (v := s.values.get(name)) is not None]
        if re.search(r"_(total|sum|count|bucket)(\{|$)", name):
            before = [0.0] if _unborn(name, inside[0]) else []
            values = before + values
            rise = values[-1] - values[0] if len(values) > 1 else None
            figures[name] = rise if rise is not None and rise >= 0 else None
        else:
            figures[name] = ratio(sum(values), len(values))
    return figures


def _unborn(name: str, sample: ServerSample) -> bool:
    """Whether the sample's page was there, yet without this labelled series.

    Only a page that holds figures of the same server says so, and none of the same name by other labels: such a
    series may be this one, named otherwise while it was the only one (see :mod:`kit.load.samples`).
    """
    bare, brace, labels = name.partition("{")
    if not brace or name in sample.values:
        return False
    keys = re.findall(r'(\w+)="', labels)
    for other in sample.values:
        same, _, theirs = other.partition("{")
        if same == bare and re.findall(r'(\w+)="', theirs) != keys:
            return False
    source = bare.partition(":")[0]
    return any(n.partition(":")[0] == source and v is not None for n, v in sample.values.items())


def chunk_tokens(request: RequestRecord, tokens: float | None = None) -> list[tuple[int, float, bool]]:
    """(arrival, tokens, placed by characters) of each chunk; the tokens sum up to the request's count.

    Between two counts that the server gave, tokens are spread by characters. What the final count has beyond
    the last mid-stream one (an end-of-sequence token has no text) belongs to the last chunk. ``tokens``:
    the total, if it is not the request's own. An empty list where there is no count at all.
    """
    total = tokens if tokens is not None else request.completion_tokens
    chunks = request.chunks
    if not chunks or (total is None and chunks[-1].tokens_so_far is None):
        return []
    placed: list[tuple[int, float, bool]] = []
    group: list[int] = []
    before = 0.0
    for index, chunk in enumerate(chunks):
        group.append(index)
        last = index == len(chunks) - 1
        if chunk.tokens_so_far is None and not last:
            continue
        told = chunk.tokens_so_far
        # The final count never takes back what was told mid-stream.
        upto = max(told or 0, total or 0) if last else told or 0
        chars = sum(chunks[i].chars for i in group) or len(group)
        for i in group:
            weight = chunks[i].chars / chars if len(group) > 1 else 1.0
            placed.append((chunks[i].t_ns, (upto - before) * weight, len(group) > 1 or told is None))
        before, group = upto, []
    return placed


def _throughput(
    active: Sequence[RequestRecord], requests: Sequence[RequestRecord], window_ns: tuple[int, int]
) -> dict[str, float | None]:
    start, end = window_ns
    whole = [r for r in requests if r.completion_tokens and r.status == "ok" and r.chunks]
    per_char = ratio(sum(r.completion_tokens or 0 for r in whole), sum(c.chars for r in whole for c in r.chunks))
    total = estimated = 0.0
    unknown = False
    for request in active:
        if not any(start <= chunk.t_ns < end for chunk in request.chunks):
            continue
        placed, guessed = chunk_tokens(request), False
        if not placed:
            if per_char is None:
                unknown = True
                continue
            placed = chunk_tokens(request, per_char * sum(chunk.chars for chunk in request.chunks))
            guessed = True
        # Of a request that lies inside as a whole, every token counts wherever it was placed.
        crosses = not (start <= placed[0][0] and placed[-1][0] < end)
        for t_ns, tokens, by_characters in placed:
            if start <= t_ns < end:
                total += tokens
                estimated += tokens if guessed or (crosses and by_characters) else 0
    seconds = (end - start) / 1e9
    return {
        "output_tps": None if unknown else total / seconds,
        "window_tokens_estimated": None if unknown else ratio(estimated, total),
    }


def _input(first: Sequence[RequestRecord]) -> dict[str, float | None]:
    known = [r for r in first if r.prompt_tokens is not None and r.cached_tokens is not None]
    told = [r for r in known if r.server_prompt_s is not None]

    def computed(requests: Iterable[RequestRecord]) -> float:
        return sum((r.prompt_tokens or 0) - (r.cached_tokens or 0) for r in requests)

    return {
        "input_tps": ratio(computed(told), sum(r.server_prompt_s or 0 for r in told)) if told else None,
        "input_tps_ttft": ratio(computed(known), sum(ttft_s(r) for r in known)) if known else None,
    }


def _speculation(requests: Sequence[RequestRecord], server: Mapping[str, float | None]) -> dict[str, float | None]:
    """Pooled over the requests that tell; else from the server's counters over the window."""
    rate = acceptance((r.accepted_tokens, r.drafted_tokens) for r in requests)
    steps = tokens_per_step((r.accepted_tokens, r.verify_steps) for r in requests)
    for accepted, drafted, drafts in _SPECULATION_COUNTERS:
        if rate is None:
            rate = ratio(server.get(accepted), server.get(drafted))
        if steps is None and (per_draft := ratio(server.get(accepted), server.get(drafts))) is not None:
            steps = 1 + per_draft
    return {"acceptance": rate, "tokens_per_step": steps}


def _outcome(request: RequestRecord, end_ns: int) -> str:
    """What a request was at the window's end: still running is cut off, whatever became of it later."""
    return request.status if request.ended_ns < end_ns or request.status == "cancelled" else "cut_off"


def _last_ns(request: RequestRecord) -> int:
    return request.chunks[-1].t_ns if request.chunks else request.ended_ns


def _origin_ns(request: RequestRecord, scheduled: bool) -> int:
    if scheduled and request.scheduled_ns is not None:
        return request.scheduled_ns
    return request.sent_ns


def _first_answer_ns(request: RequestRecord) -> int | None:
    return next((chunk.t_ns for chunk in request.chunks if chunk.kind == "text"), None)


def _bounded(value: float | None) -> float | None:
    return None if value is None or value > _UNBOUNDED / 1e6 else value
