"""Window arithmetic on hand-made requests: whose tokens count, what a percentile is over, who is the denominator."""

from __future__ import annotations

import pytest

from kit.errors import KitError
from kit.load.window import RAMP_FLAG, UNSTEADY_FLAG, chunk_tokens, measure, parse_slo
from kit.records.metrics import METRICS
from kit.records.schema import Chunk, RequestRecord, ServerSample

S = 1_000_000_000
WINDOW = (10 * S, 20 * S)


def request(
    sent: float, chunks: list[tuple], tokens: int | None = None, ended: float | None = None, status: str = "ok", **more
) -> RequestRecord:
    """Times in seconds; a chunk is (time, characters[, tokens so far])."""
    made = [Chunk(t_ns=round(c[0] * S), chars=c[1], tokens_so_far=c[2] if len(c) > 2 else None) for c in chunks]
    end = ended if ended is not None else chunks[-1][0]
    return RequestRecord(
        request_id=1, sent_ns=round(sent * S), ended_ns=round(end * S), status=status, chunks=made,
        completion_tokens=tokens, token_source="usage" if tokens is not None else None, **more,
    )  # fmt: skip


def test_every_metric_has_a_definition():
    whole = request(11, [(12, 1, 1), (13, 1, 2)], 2, scheduled_ns=11 * S)
    measured = measure([whole], WINDOW, slo={"ttft": 1.0}, client_lag_s=[0.001])
    assert set(measured.metrics) <= set(METRICS)


def test_tokens_count_where_they_arrive_whatever_the_request():
    """Fault 8: requests that overlap warm-up counted whole, tokens of cut-off requests dropped."""
    before = request(5, [(8, 1, 10), (12, 1, 14), (13, 1, 15)], 15)  # 10 tokens in warm-up, 5 in the window
    inside = request(11, [(12, 1, 1), (14, 1, 21)], 21)
    cut = request(18, [(19, 1, 3), (20.001, 1, 4)], 4, ended=20.01, status="cut_off")  # 3 in the window
    gone = request(2, [(3, 1, 100), (9, 1, 200)], 200)
    measured = measure([before, inside, cut, gone], WINDOW)
    assert measured.metrics["output_tps"] == pytest.approx((5 + 21 + 3) / 10)
    assert measured.metrics["window_tokens_estimated"] == 0
    assert measured.counts.model_dump() == {
        "sent": 3, "completed": 2, "failed": 0, "timed_out": 0, "cancelled": 0, "cut_off": 1,
    }  # fmt: skip


def test_tokens_without_midstream_counts_are_placed_by_characters_and_the_share_is_told():
    crossing = request(5, [(8, 30), (12, 10)], 8)  # a quarter of the characters lie inside: 2 tokens
    inside = request(11, [(12, 5), (14, 15)], 6)  # inside as a whole: nothing about it is an estimate
    measured = measure([crossing, inside], WINDOW)
    assert measured.metrics["output_tps"] == pytest.approx((2 + 6) / 10)
    assert measured.metrics["window_tokens_estimated"] == pytest.approx(2 / 8)


def test_a_cut_off_request_without_any_count_is_estimated_and_counted():
    whole = request(11, [(12, 40)], 10)
    cut = request(15, [(16, 20)], None, ended=20, status="cut_off")
    measured = measure([whole, cut], WINDOW)
    assert measured.metrics["output_tps"] == pytest.approx(1.5)
    assert measured.metrics["window_tokens_estimated"] == pytest.approx(5 / 15)


def test_throughput_is_unknown_where_no_count_is_known():
    measured = measure([request(11, [(12, 4), (13, 4)])], WINDOW)
    assert measured.metrics["output_tps"] is None
    assert measured.metrics["tpot_p50"] is None and measured.metrics["ttft_p50"] == pytest.approx(1)


def test_chunk_tokens_sum_up_and_spread_between_known_counts():
    mixed = request(0, [(1, 5, 2), (2, 1), (3, 3), (4, 9, 10), (5, 2)], 12)
    placed = chunk_tokens(mixed)
    assert [tokens for _, tokens, _ in placed] == pytest.approx([2, 8 / 13, 24 / 13, 72 / 13, 2])
    assert [estimated for *_, estimated in placed] == [False, True, True, True, True]


def test_an_end_token_without_text_belongs_to_the_last_chunk():
    assert chunk_tokens(request(0, [(1, 1, 1), (2, 1, 2)], 3)) == [(S, 1, False), (2 * S, 2, False)]


def test_failures_stay_in_the_percentiles():
    """Fault 11: a server that fails every second request looked as fast as its other half."""
    good = [request(11, [(11.1, 1, 1)], 1) for _ in range(5)]
    bad = [request(11, [], ended=12, status="failed", error="HTTP 500") for _ in range(4)]
    measured = measure([*good, *bad], WINDOW)
    assert measured.metrics["ttft_p50"] == pytest.approx(0.1)
    assert measured.metrics["ttft_p90"] is None and measured.metrics["ttft_p99"] is None
    assert measured.metrics["e2e_p99"] is None
    assert measured.counts.failed == 4 and "failures" in measured.flags
    assert measured.errors == {"HTTP 500": 4}
    assert measure([*good[:1], *bad], WINDOW).metrics["ttft_p50"] is None


def test_latencies_belong_to_the_window_in_which_they_end():
    early = request(8, [(9, 1, 1), (12, 1, 4)], 4)  # first token before the window, last in it
    late = request(19, [(19.5, 1, 1), (21, 1, 9)], 9)  # first in it, still running at its end
    measured = measure([early, late], WINDOW)
    assert measured.metrics["ttft_p50"] == pytest.approx(0.5)
    assert measured.metrics["e2e_p50"] == pytest.approx(4)
    assert measured.metrics["tpot_p50"] == pytest.approx(1)
    assert (measured.counts.completed, measured.counts.cut_off) == (1, 1)


def test_goodputs_denominator_is_all_requests_sent():
    fast = request(11, [(11.1, 1, 1), (11.3, 1, 5)], 5)
    slow = request(11, [(13, 1, 1), (14, 1, 5)], 5)
    failed = request(12, [], ended=13, status="failed")
    timed_out = request(12, [], ended=13, status="timed_out")
    cut = request(18, [(19, 1, 1)], 1, ended=20, status="cut_off")
    measured = measure([fast, slow, failed, timed_out, cut], WINDOW, slo=parse_slo("ttft:500 tpot:100"))
    assert measured.metrics["goodput"] == pytest.approx(0.1)
    assert measured.metrics["attainment"] == pytest.approx(1 / 5)
    assert measured.metrics["attainment_ended"] == pytest.approx(1 / 4)


def test_waiting_for_the_client_is_in_the_scheduled_latency_and_in_goodput():
    """Fault 7: what a request waited for inside the client left out."""
    late = request(14, [(14.1, 1, 1), (14.2, 1, 2)], 2, scheduled_ns=12 * S)
    measured = measure([late], WINDOW, slo=parse_slo("ttft:500"))
    assert measured.metrics["ttft_p50"] == pytest.approx(0.1)
    assert measured.metrics["ttft_scheduled_p50"] == pytest.approx(2.1)
    assert measured.metrics["e2e_scheduled_p50"] == pytest.approx(2.2)
    assert measured.metrics["schedule_lag_p99"] == pytest.approx(2)
    assert measured.metrics["goodput"] == 0


def test_acceptance_pools_counts():
    many = request(11, [(12, 1, 1)], 1, drafted_tokens=90, accepted_tokens=90, verify_steps=45)
    few = request(11, [(12, 1, 1)], 1, drafted_tokens=10, accepted_tokens=0, verify_steps=5)
    untold = request(11, [(12, 1, 1)], 1)
    measured = measure([many, few, untold], WINDOW)
    assert measured.metrics["acceptance"] == pytest.approx(0.9)
    assert measured.metrics["tokens_per_step"] == pytest.approx(1 + 90 / 50)
    assert measure([untold], WINDOW).metrics["acceptance"] is None


def test_acceptance_from_the_servers_counters_where_requests_do_not_tell():
    names = ("num_accepted_tokens_total", "num_draft_tokens_total", "num_drafts_total")

    def sample(at: float, *values: float) -> ServerSample:
        return ServerSample(
            t_ns=round(at * S), values={f"vllm:spec_decode_{n}": v for n, v in zip(names, values, strict=True)}
        )

    samples = [sample(9, 0, 0, 0), sample(10, 100, 200, 100), sample(19.9, 160, 280, 140), sample(21, 900, 900, 900)]
    measured = measure([request(11, [(12, 1, 1)], 1)], WINDOW, samples=samples)
    assert measured.metrics["acceptance"] == pytest.approx(60 / 80)
    assert measured.metrics["tokens_per_step"] == pytest.approx(1 + 60 / 40)


def test_server_figures_are_means_of_gauges_and_differences_of_counters():
    samples = [
        ServerSample(t_ns=11 * S, values={"run": 1, "tokens_total": 5, "gone": None}),
        ServerSample(t_ns=12 * S, values={"run": 3, "tokens_total": 25, "gone": None}),
        ServerSample(t_ns=30 * S, values={"run": 99, "tokens_total": 99}),
    ]
    server = measure([], WINDOW, samples=samples).server
    assert server == {"run": 2, "tokens_total": 20, "gone": None}
    assert measure([], WINDOW, samples=samples[:1]).server["tokens_total"] is None


@pytest.mark.parametrize("width", [1, 2])
def test_a_position_that_was_first_accepted_within_the_window_counts_from_0(width: int):
    """llama.cpp lists a position only once something was accepted there; it lost what the first samples saw."""

    def page(t: float, drafts: int, *accepted: int) -> ServerSample:
        values = {
            "llamacpp:spec_decode_num_drafts_total": drafts,
            "llamacpp:spec_decode_num_draft_tokens_total": drafts * width,
            "llamacpp:spec_decode_num_accepted_tokens_total": sum(accepted),
        }
        return ServerSample(t_ns=round(t * S), values=values | {position(i): n for i, n in enumerate(accepted)})

    def position(index: int) -> str:
        return f'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="{index}"}}'

    counts = {1: [(3,), (8,)], 2: [(3,), (8, 5)]}[width]
    samples = [page(9, 0), page(11, 0), page(14, 4, *counts[0]), page(19, 10, *counts[1])]
    measured = measure([], WINDOW, samples=samples)
    assert [measured.server[position(i)] for i in range(width)] == list(counts[1])
    if width == 1:
        assert measured.server[position(0)] / 10 == measured.metrics["acceptance"]
    # One that was there is counted from where it stood; one sample and an empty page vouch for no start.
    warm = measure([], WINDOW, samples=samples[2:]).server
    assert warm[position(0)] == 5
    lost = [ServerSample(t_ns=11 * S, values={}), samples[-1]]
    assert measure([], WINDOW, samples=lost).server[position(0)] is None
    assert measure([], WINDOW, samples=samples[-1:]).server[position(0)] is None


def test_a_series_that_a_second_one_renamed_is_no_new_one():
    samples = [
        ServerSample(t_ns=11 * S, values={"s:tokens_total": 90}),
        ServerSample(t_ns=19 * S, values={'s:tokens_total{rank="0"}': 99, 's:tokens_total{rank="1"}': 9}),
    ]
    assert set(measure([], WINDOW, samples=samples).server.values()) == {None}


def test_input_throughput_leaves_cached_tokens_out():
    one = request(11, [(12, 1, 1)], 1, prompt_tokens=100, cached_tokens=60, server_prompt_s=0.5)
    two = request(11, [(13, 1, 1)], 1, prompt_tokens=60, cached_tokens=0, server_prompt_s=1.5)
    unknown = request(11, [(13, 1, 1)], 1, prompt_tokens=500)
    measured = measure([one, two, unknown], WINDOW)
    assert measured.metrics["input_tps"] == pytest.approx(100 / 2)
    assert measured.metrics["input_tps_ttft"] == pytest.approx(100 / 3)
    assert measured.metrics["cached_share"] == pytest.approx(60 / 160)
    assert measure([unknown], WINDOW).metrics["input_tps"] is None


def test_a_late_event_loop_marks_the_cell():
    assert measure([], WINDOW, client_lag_s=[0.001] * 90 + [0.02] * 10).flags == ["client-bound"]
    assert measure([], WINDOW, client_lag_s=[0.001] * 100).flags == []


def test_a_window_that_opens_before_a_clients_first_token_is_told():
    def flags(*first_tokens: tuple[int | None, float | None]) -> list[str]:
        """Of requests given as (client, first token in seconds)."""
        made = [request(0, [(t, 1)] if t else [], ended=19, client=client) for client, t in first_tokens]
        return measure(made, WINDOW).flags

    assert flags((0, 5), (0, 15), (1, 9)) == []
    assert flags((0, 5), (1, 12)) == flags((0, 5), (1, 10)) == flags((0, 5), (1, None)) == [RAMP_FLAG]
    assert flags((None, 12), (None, None)) == [], "an open loop has no clients to start"


def test_a_window_that_meets_a_wave_of_clients_in_step_is_told():
    def flags(clients: int | None, across: int, inside: int, **more) -> list[str]:
        """Requests under way when the window opens and ending in it, and others that begin and end inside."""
        spans = [(5, 8, 15)] * across + [(11, 12, 18)] * inside
        made = [
            request(sent, [(first, 1), (ended, 1)], client=None if clients is None else n % clients, **more)
            for n, (sent, first, ended) in enumerate(spans)
        ]
        early = [request(0, [(1, 1)], client=n) for n in range(clients or 0)]  # each client's start
        return measure([*early, *made], WINDOW).flags

    assert flags(64, 32, 32) == [UNSTEADY_FLAG], "32 begun and 64 ended"
    assert flags(64, 13, 118) == [], "13 of 131 is not a quarter"
    assert flags(64, 11, 20) == [] and flags(64, 12, 20) == [UNSTEADY_FLAG], "64 clients' edges explain 11 of 32"
    assert flags(8, 4, 5) == [] and flags(8, 5, 4) == [UNSTEADY_FLAG], "8 clients' edges explain 4 of 9"
    assert flags(8, 7, 0) == [] and flags(8, 8, 0) == [UNSTEADY_FLAG], "7 are too few to say"
    assert flags(1, 1, 3) == flags(None, 32, 32) == [], "an open loop has no clients that could go in step"
    assert flags(64, 32, 32, status="failed") == ["failures"], "failures are no waves"


def test_requests_in_flight_are_weighted_by_time():
    spans = [request(0, [(30, 1)], ended=30), request(12, [(14, 1)], ended=17)]
    assert measure(spans, WINDOW).metrics["in_flight_mean"] == pytest.approx(1.5)


def test_an_empty_window_is_refused():
    with pytest.raises(ValueError, match="ends before it starts"):
        measure([], (5, 5))


def test_slo_spelling():
    assert parse_slo("ttft:500 tpot:50") == parse_slo("ttft:500,tpot:50") == {"ttft": 0.5, "tpot": 0.05}
    for text in ("", "ttft", "ttft:", "ttft:-1", "ttft:nan", "latency:5", "ttft:5ms", "ttft=500"):
        with pytest.raises(KitError, match="NAME:MILLISECONDS"):
            parse_slo(text)
    with pytest.raises(KitError, match="twice"):
        parse_slo("ttft:1 ttft:2")
