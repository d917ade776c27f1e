"""A bounded first-in-first-out queue of postponed work.

The queue knows nothing of models: it holds payloads with a size, replays them in order when something asks for it, and
drops them when replaying would be wrong. Everything that decides *when* lives with the caller; everything that must
hold *whenever* lives here, once:

* order: payloads are replayed in the order they came, and one leaves the queue only after its replay returned, so a
  replay that raises can be repeated (what it writes, it writes again);
* bounds: at most ``depth`` payloads and ``max_bytes`` bytes wait, so memory does not grow with the prompt. A full queue
  is replayed whole, or, ``rolling``, only from its head until there is room for one more;
* the guard: before any replay the caller's guard is asked whether writing is still allowed. If it isn't, the payloads
  are dropped and nothing is written;
* counters: what was queued, what was flushed and why, the peak, and the time spent.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

P = TypeVar("P")


class FlushReason(StrEnum):
    """Why a queue was emptied by replaying it."""

    DEPTH = "depth"
    BYTES = "bytes"
    PREFILL_END = "prefill_end"
    DRAFT_FORWARD = "draft_forward"
    DRAFT_PREFILL = "draft_prefill"
    COPY_PAGE = "copy_page"
    STORE = "store"
    HASH_SWAP = "hash_swap"
    DEALLOCATE = "deallocate"
    UNINSTALL = "uninstall"


class DropReason(StrEnum):
    """Why a queue was emptied without replaying it."""

    SUPERSEDED = "superseded"
    UNLOADED = "unloaded"
    CLOSED = "closed"
    FLUSH_FAILED = "flush_failed"
    ITERATE_FAILED = "iterate_failed"


@dataclass
class QueueCounters:
    """Totals since the queue was made. ``flush_seconds`` is time on the host; replayed work may still run on a
    device."""

    queued: int = 0
    replayed: int = 0
    passes: int = 0
    dropped: int = 0
    flushes: Counter[str] = field(default_factory=Counter)
    drops: Counter[str] = field(default_factory=Counter)
    peak_items: int = 0
    peak_bytes: int = 0
    flush_seconds: float = 0.0

    def as_dict(self) -> dict[str, int | float | dict[str, int]]:
        """The counters as plain data, for a record."""
        return {
            "queued": self.queued,
            "replayed": self.replayed,
            "passes": self.passes,
            "dropped": self.dropped,
            "flushes": dict(self.flushes),
            "drops": dict(self.drops),
            "peak_items": self.peak_items,
            "peak_bytes": self.peak_bytes,
            "flush_seconds": self.flush_seconds,
        }


def one_at_a_time(pending: Sequence[object]) -> int:
    """The default grouping: every payload is replayed on its own, as it was given."""
    return 1


def may_always_write() -> None:
    """The default guard: nothing forbids a replay."""


class DeferredQueue(Generic[P]):
    """Postponed payloads of one owner.

    Args:
        replay: Runs a group of payloads. The queue keeps the group until this returns.
        depth: Replay everything once this many payloads wait; None waits for a flush.
        max_bytes: Replay rather than hold more than this many bytes; None sets no limit.
        rolling: A full queue replays its oldest payloads only, until it is below its bound again.
        group: How many payloads from the head of the queue go into one call of ``replay`` (at least 1).
        guard: Returns a reason to drop instead of replaying, or None when writing is allowed.
    """

    def __init__(
        self,
        replay: Callable[[list[P]], None],
        *,
        depth: int | None,
        max_bytes: int | None = None,
        rolling: bool = False,
        group: Callable[[Sequence[P]], int] = one_at_a_time,
        guard: Callable[[], DropReason | None] = may_always_write,
    ) -> None:
        if depth is not None and depth < 1:
            raise ValueError(f"depth is {depth}; it must be 1 or more, or None for no limit")
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; it must be 0 or more, or None for no limit")
        self._replay = replay
        self._depth = depth
        self._max_bytes = max_bytes
        self._rolling = rolling
        self._group = group
        self._guard = guard
        self._items: deque[tuple[P, int]] = deque()
        self._bytes = 0
        self.counters = QueueCounters()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._bytes

    def push(self, payload: P, nbytes: int) -> None:
        """Add a payload of ``nbytes`` bytes, replaying first or after where a bound asks for it."""
        limit = self._max_bytes
        if limit is not None and self._bytes + nbytes > limit:
            self._make_room(FlushReason.BYTES, lambda: self._bytes + nbytes > limit)
        self._items.append((payload, nbytes))
        self._bytes += nbytes
        counters = self.counters
        counters.queued += 1
        counters.peak_items = max(counters.peak_items, len(self._items))
        counters.peak_bytes = max(counters.peak_bytes, self._bytes)
        depth = self._depth
        if depth is not None and len(self._items) >= depth:
            self._make_room(FlushReason.DEPTH, lambda: len(self._items) >= depth)
        elif limit is not None and self._bytes > limit:
            # One payload is larger than the bound: it cannot wait at all.
            self.flush(FlushReason.BYTES)

    def flush(self, reason: FlushReason) -> None:
        """Replay everything in order. Payloads not yet replayed stay queued if a replay raises."""
        self._replay_while(reason, lambda: True)

    def _make_room(self, reason: FlushReason, full: Callable[[], bool]) -> None:
        self._replay_while(reason, full if self._rolling else lambda: True)

    def _replay_while(self, reason: FlushReason, more: Callable[[], bool]) -> None:
        if not self._items:
            return
        forbidden = self._guard()
        if forbidden is not None:
            self.drop(forbidden)
            return
        counters = self.counters
        counters.flushes[str(reason)] += 1
        began = time.perf_counter()
        try:
            while self._items and more():
                payloads = [payload for payload, _ in self._items]
                size = max(1, min(self._group(payloads), len(payloads)))
                self._replay(payloads[:size])
                # The list would keep what was replayed alive until the next round.
                del payloads
                for _ in range(size):
                    _, nbytes = self._items.popleft()
                    self._bytes -= nbytes
                counters.passes += 1
                counters.replayed += size
        finally:
            counters.flush_seconds += time.perf_counter() - began

    def drop(self, reason: DropReason) -> list[P]:
        """Forget everything without replaying it; returns what was forgotten."""
        if not self._items:
            return []
        dropped = [payload for payload, _ in self._items]
        self._items.clear()
        self._bytes = 0
        self.counters.dropped += len(dropped)
        self.counters.drops[str(reason)] += 1
        return dropped
