"""A model of prompt throughput under an MTP head: what stalls, what deferring wins, and how deep is deep enough.

Everything here is a *model*. Its numbers are predictions from stage times, and are labelled so wherever they are shown.

**Events.** A layer split over k GPUs is a pipeline. The host issues work in program order; each GPU has one stream that
runs what it was given in order; three kinds of dependency tie them together:

* a *move* of hidden states from one GPU to another occupies both streams: it starts when both have reached it;
* a *blocking upload* (pageable memory: tables, embedding rows) makes the host wait until that GPU's stream has reached
  it;
* an *unblocked upload* (pinned memory) is only issued.

One chunk is an upload to the first GPU, the stages in order with moves between them, and the MTP pass: hidden states to
the MTP head's GPU (a move, if they are elsewhere), an upload, the pass. Stock issues the pass right after its chunk, so
with the head on the first GPU that GPU meets a move which waits for the last GPU: the pipeline drains once per chunk.
Deferring issues N chunks, then N passes, and drains once per N chunks. Rows held in pinned memory leave the last GPU
right after their chunk, so their passes do not wait for newer chunks; replayed one at a time (rolling) they do not wait
at all.

**The line.** For two GPUs with rows held on their device, per chunk

    t(N) = a + b / N      a = max(stages) + mtp      b = sum(stages) − max(stages)

so two measured depths, or a fit to more, give the limit ``a`` of an infinite queue and the drain ``b``. With the time
of a run without MTP, max(stages), they give the stage times back.

Published points (two GPUs, 124,928 tokens, chunks of 3072): 530, 711, 738 and 758 t/s at depths 1, 4, 6 and 8, and
about 1000 t/s without MTP. From the two numbers fitted to them the simulation comes within 3 % of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np


@dataclass(frozen=True)
class StageTimes:
    """Seconds per chunk.

    Attributes:
        stages: The target's time on each GPU, first to last.
        mtp: One MTP pass over a chunk.
        move: Hidden states of a chunk from one GPU to another.
        upload: Host inputs of one pass to one GPU.
        spill: Hidden states of a chunk to pinned host memory; and back.
    """

    stages: tuple[float, ...]
    mtp: float
    move: float = 0.0
    upload: float = 0.0
    spill: float = 0.0

    def __post_init__(self) -> None:
        if not self.stages or min(self.stages) < 0 or min(self.mtp, self.move, self.upload, self.spill) < 0:
            raise ValueError(f"{self}: give at least one stage, and no negative time")


@dataclass(frozen=True)
class Schedule:
    """How MTP passes are scheduled.

    Attributes:
        mtp: The MTP head's GPU, or None to run without MTP.
        depth: Chunks deferred: 1 is stock, None the whole prompt.
        pinned: Rows wait in pinned host memory instead of on their GPU.
        rolling: A full queue replays its oldest pass only.
        unblocked: Uploads do not block the host.
    """

    mtp: Literal["first", "last"] | None = "first"
    depth: int | None = 1
    pinned: bool = False
    rolling: bool = False
    unblocked: bool = False


class Simulated(NamedTuple):
    """A predicted prompt.

    Attributes:
        seconds: Until every GPU has finished.
        busy: Busy seconds of each GPU.
    """

    seconds: float
    busy: tuple[float, ...]


class _Machine:
    """The host's clock and each GPU's stream."""

    def __init__(self, gpus: int, unblocked: bool) -> None:
        self.host = 0.0
        self.free = [0.0] * gpus
        self.busy = [0.0] * gpus
        self.unblocked = unblocked

    def run(self, gpu: int, seconds: float, ready: float = 0.0) -> float:
        """Work on one stream; returns when it ends."""
        begin = max(self.host, self.free[gpu], ready)
        self.free[gpu] = begin + seconds
        self.busy[gpu] += seconds
        return self.free[gpu]

    def upload(self, gpu: int, seconds: float) -> None:
        end = self.run(gpu, seconds)
        if not self.unblocked:
            self.host = end

    def move(self, source: int, target: int, seconds: float) -> None:
        if source == target:
            return
        end = max(self.host, self.free[source], self.free[target]) + seconds
        self.free[source] = self.free[target] = end


def simulate(times: StageTimes, schedule: Schedule, chunks: int) -> Simulated:
    """Predict the time of a prompt of ``chunks`` chunks.

    Raises:
        ValueError: For fewer than one chunk or a depth below 1.
    """
    if chunks < 1 or (schedule.depth is not None and schedule.depth < 1):
        raise ValueError(f"{chunks} chunks at depth {schedule.depth}: both must be 1 or more")
    gpus = len(times.stages)
    last = gpus - 1
    head = 0 if schedule.mtp == "first" else last
    machine = _Machine(gpus, schedule.unblocked)
    queue: list[float] = []  # when each waiting chunk's rows are in host memory; 0 if they wait on their GPU

    def replay_oldest() -> None:
        ready = queue.pop(0)
        if schedule.pinned:
            machine.run(head, times.spill, ready)
        else:
            machine.move(last, head, times.move)
        machine.upload(head, times.upload)
        machine.run(head, times.mtp)

    for _ in range(chunks):
        for gpu, seconds in enumerate(times.stages):
            if gpu:
                machine.move(gpu - 1, gpu, times.move)
            machine.upload(gpu, times.upload)
            machine.run(gpu, seconds)
        if schedule.mtp is None:
            continue
        queue.append(machine.run(last, times.spill) if schedule.pinned else 0.0)
        if schedule.depth is not None and len(queue) >= schedule.depth:
            replay_oldest()
            while queue and not schedule.rolling:
                replay_oldest()
    while queue:
        replay_oldest()
    return Simulated(max(machine.free), tuple(machine.busy))


def seconds_per_chunk(times: StageTimes, schedule: Schedule, chunks: int) -> float:
    """Predicted seconds per chunk of a prompt of ``chunks`` chunks, fill and drain of the pipeline included."""
    return simulate(times, schedule, chunks).seconds / chunks


# ------------------------------------------------------------------------------------------------------------ the line


class Line(NamedTuple):
    """t(N) = a + b / N, in seconds per chunk.

    Attributes:
        a: The limit of an infinite queue.
        b: What one drain of the pipeline costs.
    """

    a: float
    b: float

    def at(self, depth: float) -> float:
        """Seconds per chunk at a depth; ``math.inf`` gives the limit."""
        return self.a + self.b / depth

    def depth_for(self, fraction: float) -> float:
        """The depth at which throughput reaches ``fraction`` of the limit's, not rounded; inf if no depth does."""
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction {fraction}: a part of the limit lies above 0 and at most at 1")
        spare = self.a * (1 / fraction - 1)
        if self.b <= 0:
            return 1.0
        return self.b / spare if spare > 0 else math.inf


def fit_line(points: Mapping[int, float] | Iterable[tuple[int, float]]) -> Line:
    """Least squares of *relative* errors, so that a slow point weighs as much as a fast one.

    Args:
        points: Depth → measured seconds per chunk; pairs where a depth was measured more than once.

    Raises:
        ValueError: With fewer than two different depths, or a time that is not positive.
    """
    pairs = list(points.items()) if isinstance(points, Mapping) else list(points)
    depths = np.array([depth for depth, _ in pairs], dtype=float)
    seconds = np.array([value for _, value in pairs], dtype=float)
    if len(set(depths.tolist())) < 2:
        raise ValueError(f"depths {sorted(set(depths.tolist()))}: the line needs two different ones")
    if not (seconds > 0).all():
        raise ValueError("a time per chunk is not positive")
    columns = np.stack([1 / seconds, 1 / (depths * seconds)], axis=1)
    (a, b), *_ = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)
    return Line(float(a), float(b))


def two_gpu_times(line: Line, no_mtp: float) -> StageTimes:
    """Stage times of two GPUs (MTP head on the first) that give this line and this time per chunk without MTP.

    Args:
        line: Fitted to measured depths, rows held on their device.
        no_mtp: Measured seconds per chunk without MTP: the slower stage.

    Raises:
        ValueError: If the limit is below the time without MTP, which no pass time can explain.
    """
    if line.a < no_mtp or line.b < 0:
        raise ValueError(
            f"limit {line.a:.3f} s and drain {line.b:.3f} s per chunk do not fit {no_mtp:.3f} s per chunk without MTP"
        )
    # Which GPU is the slower one cannot be told from these; the line is the same either way.
    return StageTimes((min(line.b, no_mtp), no_mtp), line.a - no_mtp)


# ------------------------------------------------------------------------------------------------------------ advice


class Advice(NamedTuple):
    """A predicted choice of depth.

    Attributes:
        depth: Chunks to defer; 1 is stock.
        seconds: Predicted seconds per chunk there.
        of_limit: Predicted throughput there, as a part of the whole-prompt queue's.
        queue_bytes: Memory that the queue takes.
        reached: Whether the wanted part of the limit is reached within the budget.
    """

    depth: int
    seconds: float
    of_limit: float
    queue_bytes: int
    reached: bool


def chunk_bytes(tokens: int, hidden_size: int, streams: int = 1) -> int:
    """Bytes that one queued chunk takes: fp16 rows, ``streams`` of them per token (hyper-connections)."""
    return tokens * hidden_size * streams * 2


def advise(
    times: StageTimes,
    *,
    chunks: int,
    bytes_per_chunk: int,
    budget: int,
    schedule: Schedule | None = None,
    fraction: float = 0.95,
) -> Advice:
    """The smallest depth that the model says reaches ``fraction`` of the limit within ``budget`` bytes.

    If none does, the best depth within the budget. The limit is the same schedule with the whole prompt deferred.

    Raises:
        ValueError: If a chunk has no size, the budget is negative or the fraction is not in (0, 1].
    """
    if bytes_per_chunk <= 0 or budget < 0 or not 0 < fraction <= 1:
        raise ValueError(f"{bytes_per_chunk} bytes a chunk, budget {budget}, fraction {fraction}: out of range")
    schedule = schedule or Schedule()
    limit = seconds_per_chunk(times, replace(schedule, depth=None, rolling=False), chunks)
    affordable = max(1, min(chunks, budget // bytes_per_chunk))
    best: Advice | None = None
    for depth in range(1, affordable + 1):
        seconds = seconds_per_chunk(times, replace(schedule, depth=depth), chunks)
        of_limit = limit / seconds
        held = 0 if depth == 1 else depth * bytes_per_chunk
        found = Advice(depth, seconds, of_limit, held, of_limit >= fraction)
        if best is None or seconds < best.seconds:
            best = found
        if found.reached:
            return found
    assert best is not None
    return best


def throughput(seconds: Sequence[float] | float, chunk_tokens: int) -> np.ndarray | float:
    """Tokens per second from seconds per chunk."""
    return chunk_tokens / np.asarray(seconds) if isinstance(seconds, Sequence) else chunk_tokens / seconds
