"""The pipeline model: it meets the published points, and behaves as the pipeline it describes."""

import math

import pytest

from kit.deferred.model import (
    Schedule,
    StageTimes,
    advise,
    chunk_bytes,
    fit_line,
    seconds_per_chunk,
    simulate,
    two_gpu_times,
)

CHUNK = 3072
LONG, SHORT = 124928, 16384
# The deferred-prefill note: "stock: ~530 t/s", "depth 4: 711", "depth 6: 738", "depth 8: 758"; about 1000 without.
PUBLISHED = {1: 530, 4: 711, 6: 738, 8: 758}
NO_MTP = 1000
# Its short prompt: stock 831; depth 4 twice, 1077 and 1049.
PUBLISHED_SHORT = [(1, 831), (4, 1077), (4, 1049)]


def chunks(tokens):
    return math.ceil(tokens / CHUNK)


def test_two_fitted_numbers_reproduce_the_published_points():
    line = fit_line({depth: CHUNK / rate for depth, rate in PUBLISHED.items()})
    times = two_gpu_times(line, CHUNK / NO_MTP)
    for depth, rate in PUBLISHED.items():
        assert CHUNK / line.at(depth) == pytest.approx(rate, rel=0.03)
        predicted = CHUNK / seconds_per_chunk(times, Schedule(depth=depth), chunks(LONG))
        assert predicted == pytest.approx(rate, rel=0.03), depth
    assert CHUNK / seconds_per_chunk(times, Schedule(mtp=None), chunks(LONG)) == pytest.approx(NO_MTP, rel=0.03)


def test_points_left_out_of_the_fit_are_predicted():
    line = fit_line({4: CHUNK / 711, 8: CHUNK / 758})
    assert CHUNK / line.at(6) == pytest.approx(738, rel=0.03)
    assert CHUNK / line.at(1) == pytest.approx(530, rel=0.03)
    assert 758 < CHUNK / line.at(math.inf) < NO_MTP


def test_a_depth_measured_twice_is_fitted_once():
    line = fit_line([(depth, CHUNK / rate) for depth, rate in PUBLISHED_SHORT])
    assert CHUNK / line.at(1) == pytest.approx(831)
    assert 1049 < CHUNK / line.at(4) < 1077


@pytest.mark.parametrize("points", [{4: 1.0}, [(4, 1.0), (4, 1.1)], {1: 1.0, 4: 0.0}])
def test_a_line_needs_two_depths_and_positive_times(points):
    with pytest.raises(ValueError, match=r"depth|positive"):
        fit_line(points)


def test_times_that_no_pass_explains_are_refused():
    with pytest.raises(ValueError, match="without MTP"):
        two_gpu_times(fit_line({1: 2.0, 2: 1.5}), no_mtp=1.2)


def test_one_gpu_has_nothing_to_win():
    times = StageTimes((3.0,), 0.5)
    stock = seconds_per_chunk(times, Schedule(), 20)
    assert stock == pytest.approx(3.5)
    for depth in (2, 8, None):
        assert seconds_per_chunk(times, Schedule(depth=depth), 20) == pytest.approx(stock)


@pytest.mark.parametrize("stages", [(1.0, 1.0), (1.0, 2.0), (2.0, 1.0)])
def test_two_gpus(stages):
    """Stock drains every chunk; without MTP, and with enough deferring, the slower GPU sets the pace."""
    times, n = StageTimes(stages, 0.25), 400
    assert seconds_per_chunk(times, Schedule(), n) == pytest.approx(sum(stages) + 0.25, rel=0.01)
    assert seconds_per_chunk(times, Schedule(mtp=None), n) == pytest.approx(max(stages), rel=0.01)
    assert seconds_per_chunk(times, Schedule(depth=None), n) == pytest.approx(max(stages) + 0.25, rel=0.02)


@pytest.mark.parametrize("stages", [(1.0, 1.0), (2.0, 1.0), (1.0, 1.0, 1.0), (0.5, 1.0, 1.5, 1.0)])
def test_unblocked_inputs_fill_any_number_of_gpus(stages):
    times, n = StageTimes(stages, 0.25), 400
    without = seconds_per_chunk(times, Schedule(mtp=None, unblocked=True), n)
    assert without == pytest.approx(max(stages), rel=0.02)
    last = seconds_per_chunk(times, Schedule(mtp="last", unblocked=True), n)
    assert last == pytest.approx(max(*stages[:-1], stages[-1] + 0.25), rel=0.02)
    rolling = Schedule(depth=len(stages), pinned=True, rolling=True, unblocked=True)
    assert seconds_per_chunk(times, rolling, n) == pytest.approx(max(stages[0] + 0.25, *stages[1:]), rel=0.02)


def test_blocking_uploads_fill_two_gpus_and_no_more():
    """The host waits for the third GPU to reach its upload, so the first one's next chunk comes late."""
    times = StageTimes((1.0, 1.0, 1.0), 0.25)
    assert seconds_per_chunk(times, Schedule(mtp=None), 400) == pytest.approx(2.0, rel=0.01)


def test_deeper_is_never_slower_at_whole_groups():
    times = StageTimes((1.0, 1.5), 0.3)
    rates = [seconds_per_chunk(times, Schedule(depth=depth), 48) for depth in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)]
    assert rates == sorted(rates, reverse=True)


def test_unblocking_alone_does_not_help_a_head_on_the_first_gpu():
    times = StageTimes((1.0, 1.0), 0.2)
    assert simulate(times, Schedule(unblocked=True), 30).seconds == pytest.approx(
        simulate(times, Schedule(), 30).seconds
    )


def test_busy_time_is_the_work_and_not_the_waiting():
    times = StageTimes((1.0, 2.0), 0.5)
    for schedule in (Schedule(), Schedule(depth=4), Schedule(mtp="last", unblocked=True)):
        busy = simulate(times, schedule, 10).busy
        assert sum(busy) == pytest.approx(35.0)


def test_advice_is_the_smallest_sufficient_depth_within_the_budget():
    times = two_gpu_times(fit_line({d: CHUNK / r for d, r in PUBLISHED.items()}), CHUNK / NO_MTP)
    size = chunk_bytes(CHUNK, 5120)
    assert size == 30 * 1024**2
    found = advise(times, chunks=chunks(LONG), bytes_per_chunk=size, budget=1024**3)
    assert found.reached
    assert found.of_limit >= 0.95
    assert found.queue_bytes == found.depth * size <= 1024**3
    shallower = advise(times, chunks=chunks(LONG), bytes_per_chunk=size, budget=(found.depth - 1) * size)
    assert not shallower.reached
    assert shallower.depth < found.depth
    nothing = advise(times, chunks=chunks(LONG), bytes_per_chunk=size, budget=0)
    assert (nothing.depth, nothing.queue_bytes) == (1, 0)


def test_advice_for_rolling_rows_needs_two_chunks():
    times = StageTimes((1.0, 1.5), 0.3)
    schedule = Schedule(pinned=True, rolling=True)
    found = advise(times, chunks=40, bytes_per_chunk=30 * 1024**2, budget=1024**3, schedule=schedule)
    assert (found.depth, found.reached) == (2, True)


@pytest.mark.parametrize(("chunk_count", "depth"), [(0, 1), (3, 0)])
def test_impossible_prompts_are_refused(chunk_count, depth):
    with pytest.raises(ValueError, match="1 or more"):
        simulate(StageTimes((1.0,), 0.1), Schedule(depth=depth), chunk_count)
