"""The queue alone: order, bounds, the guard, and what a failed replay leaves."""

import pytest

from kit.deferred.queue import DeferredQueue, DropReason, FlushReason


def make(done, **options):
    return DeferredQueue(lambda group: done.extend(group), depth=options.pop("depth", 4), **options)


def test_replays_in_order_when_full():
    done = []
    queue = make(done, depth=3)
    for i in range(7):
        queue.push(i, 10)
    assert done == [0, 1, 2, 3, 4, 5]
    assert (len(queue), queue.nbytes) == (1, 10)
    queue.flush(FlushReason.PREFILL_END)
    assert done == list(range(7))
    assert queue.counters.flushes == {"depth": 2, "prefill_end": 1}
    assert queue.counters.peak_items == 3


def test_a_rolling_queue_replays_its_oldest_only():
    done = []
    queue = make(done, depth=3, rolling=True)
    for i in range(6):
        queue.push(i, 10)
    assert done == [0, 1, 2, 3]
    assert queue.counters.peak_items == 3
    queue.flush(FlushReason.PREFILL_END)
    assert done == list(range(6))


def test_a_rolling_queue_makes_just_enough_room():
    done = []
    queue = make(done, depth=None, max_bytes=30, rolling=True)
    for size in (10, 11, 12, 30, 5):
        queue.push(size, size)
        assert queue.nbytes <= 30
    assert done == [10, 11, 12, 30]


def test_without_a_depth_waits_for_a_flush():
    done = []
    queue = make(done, depth=None)
    for i in range(100):
        queue.push(i, 1)
    assert done == []
    queue.flush(FlushReason.PREFILL_END)
    assert done == list(range(100))


@pytest.mark.parametrize("sizes", [[10] * 9, [25, 1, 1, 30, 2], [100], [5, 100, 5], [30, 1]])
def test_never_holds_more_than_max_bytes(sizes):
    done, held = [], []
    queue = make(done, depth=None, max_bytes=30)
    for size in sizes:
        queue.push(size, size)
        held.append(queue.nbytes)
    assert max(held) <= 30
    queue.flush(FlushReason.PREFILL_END)
    assert done == sizes


def test_flushing_an_empty_queue_does_nothing():
    queue = make([])
    queue.flush(FlushReason.STORE)
    assert queue.counters.as_dict()["flushes"] == {}


def test_what_failed_stays_and_can_be_repeated():
    done, failures = [], ["out of memory"]

    def replay(group):
        if group == [1] and failures:
            raise MemoryError(failures.pop())
        done.extend(group)

    queue = DeferredQueue(replay, depth=None)
    for i in range(3):
        queue.push(i, 10)
    with pytest.raises(MemoryError):
        queue.flush(FlushReason.COPY_PAGE)
    assert (done, len(queue), queue.nbytes) == ([0], 2, 20)
    queue.flush(FlushReason.DEALLOCATE)
    assert done == [0, 1, 2]


def test_dropping_forgets_without_replaying():
    done = []
    queue = make(done)
    queue.push("a", 10)
    queue.push("b", 10)
    assert queue.drop(DropReason.CLOSED) == ["a", "b"]
    queue.flush(FlushReason.PREFILL_END)
    assert (done, queue.nbytes) == ([], 0)
    assert queue.counters.drops == {"closed": 1}
    assert queue.counters.dropped == 2


def test_the_guard_turns_a_flush_into_a_drop():
    done, forbidden = [], []
    queue = make(done, guard=lambda: forbidden[0] if forbidden else None)
    queue.push("a", 10)
    forbidden.append(DropReason.SUPERSEDED)
    queue.flush(FlushReason.DEALLOCATE)
    assert (done, len(queue)) == ([], 0)
    assert queue.counters.drops == {"superseded": 1}


def test_groups_share_a_replay():
    groups = []
    queue = DeferredQueue(groups.append, depth=None, group=lambda pending: 2)
    for i in range(5):
        queue.push(i, 1)
    queue.flush(FlushReason.PREFILL_END)
    assert groups == [[0, 1], [2, 3], [4]]
    assert (queue.counters.passes, queue.counters.replayed) == (3, 5)


@pytest.mark.parametrize("options", [{"depth": 0}, {"depth": -1}, {"depth": 2, "max_bytes": -1}])
def test_impossible_bounds_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        make([], **options)
