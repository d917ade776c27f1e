"""The load driver's own process: ``python -m kit.load.driver FOLDER`` with a JSON spec on stdin.

It drives one cell and writes to FOLDER

``requests.jsonl.gz``  every request with every chunk's arrival time, those of burn-in and warm-up too
``samples.jsonl``      the server's own metrics through the window
``result.json``        :class:`~kit.load.spec.DriverResult`: counts, metrics, flags, what was driven

and reports progress as JSON lines on stdout. Measuring runs in a process of its own so that nothing else shares
its event loop; how late that loop ran is sampled through the window and recorded.

Phases: burn-in (closed loop: the clients' starts are spread over it, so that there is no burst), warm-up at full
load, then the window. Load flows across both edges of the window: nothing is drained before it, and what is under
way at its end is cut off and recorded as such.

A closed loop's clients begin in the middle (:func:`midway`): each at a random turn of its first session, and of that
turn's answer it asks for a random part. So from the start they are spread over the phases of an answer, where equal
answers begun together would keep prefilling and decoding in waves, and over the lengths of prompt that a session goes
through, so that a faster arm does not get to longer prompts. (With less than :data:`HISTORY_S` before the window,
sessions begin at their first turn.) Both are drawn from seed, load, repeat and client: the same for all arms. The
first answers so shortened usually end before the window. One that ends in it is a request like any other, with its
own ``requested_tokens``, and is in every metric: TTFT and TPOT do not depend on how much was asked for, and its
end-to-end latency is that of the answer it asked for.

SIGINT or SIGTERM ends the cell early: what was under way is recorded as cancelled and the result is marked
incomplete. The same happens if the process that started the driver goes away.

With ``processes`` above 1 this process starts that many workers and merges what they saw. Clients are dealt out
by number; an open loop's workers each draw the whole arrival sequence and send every n-th. They share one clock:
``perf_counter_ns`` is the machine's monotonic clock, not a process's own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from time import perf_counter_ns

import aiohttp
import numpy as np
from pydantic import TypeAdapter

from kit.errors import KitError
from kit.load import samples as metrics_page
from kit.load import traces
from kit.load.arrivals import generate, share
from kit.load.client import Client, Job, Stream, connect
from kit.load.files import RESULT, WORKER, read_requests, read_samples, write_requests, write_samples
from kit.load.spec import Connections, DriverResult, LoadSpec, parse_spec
from kit.load.window import measure, parse_slo
from kit.records.schema import RequestRecord, ServerSample

LAG_INTERVAL_S = 0.01
PROGRESS_INTERVAL_S = 0.5
START_DELAY_S = 0.2
"""Between the driver being ready and the start of the load."""
OPEN_SESSIONS = 8
"""Open loop: sessions that are under way side by side; their turns are sent in order, in rotation."""
WARM_OPEN = 64
"""Open loop: connections opened beforehand."""
RE_WARM_S = 3.0
"""A client that has paused longer opens a connection again before its next request."""
HISTORY_S = 2.0
"""Closed loop: burn-in and warm-up together from which on sessions begin at a random turn. The server then has whole
histories to read before the window, of which it has none in its cache; in less time a slow one would still be at it."""
BACK_OFF_S = (0.1, 2.0)
"""Closed loop: shortest and longest pause after failed requests, so that a refusing server is not hammered."""
TOKENIZE_AT_MOST = 2000
"""Recorded answers to count by the server's tokenizer before the load starts."""


@dataclass(frozen=True)
class Timing:
    """The cell's edges in ``perf_counter_ns``."""

    start_ns: int
    window_ns: tuple[int, int]

    @classmethod
    def plan(cls, spec: LoadSpec, start_ns: int) -> Timing:
        """The edges of a cell whose load starts at ``start_ns``."""
        opens = start_ns + round((spec.burn_in_s + spec.warm_up_s) * 1e9)
        return cls(start_ns, (opens, opens + round(spec.window_s * 1e9)))


@dataclass
class Driven:
    """What one process saw of a cell."""

    model: str
    timing: Timing
    lengths: str
    workload_hash: str
    window_ns: tuple[int, int] | None
    stopped_by: str | None = None
    requests: list[RequestRecord] = field(default_factory=list)
    samples: list[ServerSample] = field(default_factory=list)
    client_lag_s: list[float] = field(default_factory=list)
    warmed: int = 0
    resent: int = 0
    connects_s: list[float] = field(default_factory=list)
    sample_errors: int = 0


Report = Callable[[dict[str, object]], None]
Begin = Callable[[], Awaitable[int]]
"""Gives the ``perf_counter_ns`` at which the load starts."""


class Cell:
    """One process's part (``index`` of ``of``) of driving a cell."""

    def __init__(
        self, spec: LoadSpec, workload: traces.Workload, client: Client, timing: Timing, index: int, of: int
    ) -> None:
        self.spec = spec
        self.workload = workload
        self.client = client
        self.timing = timing
        self.index = index
        self.of = of
        self.streams: list[Stream] = []
        self.samples: list[ServerSample] = []
        self.client_lag_s: list[float] = []
        self.sample_errors = 0
        self.in_flight = 0
        self.tallies = {"sent": 0, "ok": 0, "failed": 0, "timed_out": 0}
        # Streams of randomness that do not touch each other, from what the cell is: never from the arm.
        identity = [spec.seed, spec.repeat, int(spec.load.value * 1e6), *spec.load.kind.encode()]
        self.arrival_seed, order_seed, self.client_seed = np.random.SeedSequence(identity).spawn(3)
        self.order = np.random.default_rng(order_seed).permutation(len(workload.sessions))

    async def run(self, stop: asyncio.Event, report: Report) -> str | None:
        """Drive the cell to its end, or until ``stop`` is set. Returns why it stopped early, if it did."""
        closes = self.timing.window_ns[1]
        tasks = [asyncio.create_task(self._load(), name="load")]
        watchers = [
            asyncio.create_task(self._watch_lag(), name="lag"),
            asyncio.create_task(self._progress(report), name="progress"),
        ]
        if self.index == 0 and self.spec.metrics_urls:
            watchers.append(asyncio.create_task(self._sample(), name="samples"))
        stopped = asyncio.create_task(stop.wait())
        try:
            waiting: set[asyncio.Task] = {stopped, *tasks, *watchers}
            while (left := (closes - perf_counter_ns()) / 1e9) > 0 and not stop.is_set():
                done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stopped}:
                    task.result()  # a fault of the driver must not pass for an idle server
                if not waiting:
                    break
        finally:
            early = stop.is_set()
            self.client.stop_status = "cancelled" if early else "cut_off"
            everything = [*tasks, *watchers, stopped]
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)
        return "signal" if early else None

    # --- load -------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        if self.spec.load.kind == "closed":
            clients = range(self.index, int(self.spec.load.value), self.of)
            async with asyncio.TaskGroup() as group:
                for number in clients:
                    group.create_task(self._closed(number))
        else:
            await self._open()

    async def _closed(self, number: int) -> None:
        """One client: request after request, from its own sequence of sessions."""
        total = int(self.spec.load.value)
        await self._until(self.timing.start_ns + round(number / total * self.spec.burn_in_s * 1e9))
        failures = 0
        idle_since: int | None = None
        for job in self._client_jobs(number, total):
            if idle_since is not None and self.spec.think_time_s:
                await asyncio.sleep(self.spec.think_time_s)
            paused = idle_since is not None and perf_counter_ns() - idle_since > RE_WARM_S * 1e9
            if paused or (self.client.closes_streams and idle_since is not None):
                await self._warm()
            stream = await self._send(job)
            idle_since = perf_counter_ns()
            failures = 0 if stream.status == "ok" else failures + 1
            if failures:
                await asyncio.sleep(min(BACK_OFF_S[0] * 2 ** (failures - 1), BACK_OFF_S[1]))

    async def _warm(self) -> None:
        with suppress(KitError):
            await self.client.warm()

    def _client_jobs(self, number: int, total: int) -> Iterator[Job]:
        """A client's requests without end: its share of the shuffled sessions, over and over, all unique.

        It begins in the middle: at a random turn of its first session, with a random part of the answer there.
        """
        passed, part = midway(self.client_seed, number)
        if self.spec.burn_in_s + self.spec.warm_up_s < HISTORY_S:
            passed = 0.0
        for round_ in count():
            place = number + round_ * total
            session = self.workload.sessions[self.order[place % len(self.order)]]
            begin = int(passed * len(session.turns)) if round_ == 0 else 0
            for turn_number, turn in enumerate(session.turns[begin:], begin):
                job = self._job(session, turn_number, turn, place, client=number)
                first = round_ == 0 and turn_number == begin
                yield replace(job, output_tokens=1 + int(part * job.output_tokens)) if first else job

    async def _open(self) -> None:
        """Send at the arrival times, whether or not earlier requests have ended."""
        spec = self.spec
        arrivals = generate(
            spec.arrivals,
            spec.load.value,
            self.arrival_seed,
            window_start_s=spec.burn_in_s + spec.warm_up_s,
            trace_s=self.workload.timestamps,
        )
        jobs = self._open_jobs()
        taken = -1
        async with asyncio.TaskGroup() as group:
            for number, at_s in share(arrivals, self.index, self.of):
                while taken < number:  # the other workers' requests are drawn too, and not sent
                    job = next(jobs)
                    taken += 1
                at_ns = self.timing.start_ns + round(at_s * 1e9)
                await self._until(at_ns)
                group.create_task(self._send_open(replace(job, scheduled_ns=at_ns)))

    async def _send_open(self, job: Job) -> None:
        await self._send(job)
        if self.client.closes_streams:
            with suppress(KitError):
                await self.client.warm()  # one connection was used up: open one for a request to come

    def _open_jobs(self) -> Iterator[Job]:
        """Requests in the order in which arrivals take them.

        A trace with arrival times or shared blocks is replayed in its own order. Other workloads keep several
        sessions under way at a time, so that turns of one come apart in time and yet find their prefix.
        """
        sessions = self.workload.sessions
        if sessions[0].shares_prefix:
            ordered = range(len(sessions))
            if self.spec.arrivals.process == "trace":
                ordered = sorted(ordered, key=lambda i: sessions[i].at_s or 0.0)  # type: ignore[assignment]
            for place in count():
                session = sessions[ordered[place % len(sessions)]]
                yield self._job(session, 0, session.turns[0], place)
        places = count()

        def turns(place: int) -> Iterator[Job]:
            session = sessions[self.order[place % len(self.order)]]
            for turn_number, turn in enumerate(session.turns):
                yield self._job(session, turn_number, turn, place)

        lanes = [turns(next(places)) for _ in range(OPEN_SESSIONS)]
        while True:
            for lane in range(OPEN_SESSIONS):
                job = next(lanes[lane], None)
                while job is None:
                    lanes[lane] = turns(next(places))
                    job = next(lanes[lane], None)
                yield job

    def _job(
        self, session: traces.Session, number: int, turn: traces.Turn, place: int, client: int | None = None
    ) -> Job:
        spec = self.spec
        # Sessions that share blocks with each other share the cell's preamble; it changes when the trace is
        # through, so that a second pass does not find the first one's cache.
        own = place // len(self.workload.sessions) if session.shares_prefix else place
        opening = traces.preamble(spec.seed, spec.load.kind, spec.load.value, spec.repeat, own)
        return Job(
            request_id=-1,
            messages=traces.with_preamble(session.history(turn), opening),
            output_tokens=traces.capped(turn.output_tokens or asked_length(turn), spec.workload),
            client=client,
            session=f"{session.id}.{place}",
            turn=number,
        )

    async def _send(self, job: Job) -> Stream:
        self.in_flight += 1
        self.tallies["sent"] += 1
        try:
            return await self.client.send(replace(job, request_id=self.tallies["sent"]), self._ended)
        finally:
            self.in_flight -= 1

    def _ended(self, stream: Stream) -> None:
        self.streams.append(stream)
        if stream.status in self.tallies:
            self.tallies[stream.status] += 1

    # --- what is watched beside it ----------------------------------------------------------------------------

    async def _watch_lag(self) -> None:
        """How late the event loop wakes, through the window: what a stamp taken by it may be late by."""
        await self._until(self.timing.window_ns[0])
        while True:
            due = perf_counter_ns() + round(LAG_INTERVAL_S * 1e9)
            await asyncio.sleep(LAG_INTERVAL_S)
            self.client_lag_s.append(round(max(perf_counter_ns() - due, 0) / 1e9, 6))

    async def _sample(self) -> None:
        """Poll the server's metrics at both edges of the window and in between."""
        opens, closes = self.timing.window_ns
        names = self.spec.metrics_names or metrics_page.KNOWN_NAMES[self.spec.dialect]
        interval = round(self.spec.metrics_interval_s * 1e9)
        # The last poll is a little before the end: it must be answered within the window.
        margin = min(interval // 2, 100_000_000)
        times = [*range(opens, closes - margin, interval), closes - margin]
        for at_ns in times:
            await self._until(at_ns)
            await self._poll(names)

    async def _poll(self, names: list[str]) -> None:
        values: dict[str, float | None] = {}
        for url in self.spec.metrics_urls:
            try:
                async with asyncio.timeout(5):
                    status, text = await self.client.get(url)
                if status == 200:
                    values.update(metrics_page.parse(text, names))
                else:
                    self.sample_errors += 1
            except (TimeoutError, aiohttp.ClientError, OSError, UnicodeDecodeError):
                self.sample_errors += 1
        if values:
            self.samples.append(ServerSample(t_ns=perf_counter_ns(), values=values))

    async def _progress(self, report: Report) -> None:
        opens, closes = self.timing.window_ns
        burnt = self.timing.start_ns + round(self.spec.burn_in_s * 1e9)
        while True:
            now = perf_counter_ns()
            phase = "burn-in" if now < burnt else "warm-up" if now < opens else "window"
            report(
                {
                    "event": "progress",
                    "phase": phase,
                    "elapsed_s": round(max(now - self.timing.start_ns, 0) / 1e9, 3),
                    "total_s": round((closes - self.timing.start_ns) / 1e9, 3),
                    "in_flight": self.in_flight,
                    **self.tallies,
                }
            )
            await asyncio.sleep(PROGRESS_INTERVAL_S)

    async def _until(self, at_ns: int) -> None:
        while (left := at_ns - perf_counter_ns()) > 0:
            await asyncio.sleep(left / 1e9)


def midway(seed: np.random.SeedSequence, client: int) -> tuple[float, float]:
    """Where a client begins, uniform in [0, 1): the share of its session's turns that it has passed, and the part of
    the next answer that it asks for.

    Of each client's own, and without state: however many processes deal the clients out, each begins at the same place.
    """
    own = np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, client))
    passed, part = np.random.default_rng(own).random(2)
    return float(passed), float(part)


def asked_length(turn: traces.Turn) -> int:
    """Output tokens to ask for where none are recorded: by characters. Only ever asked for, never reported."""
    return max(1, round(len(turn.answer) / traces.CHARS_PER_TOKEN))


async def with_lengths(workload: traces.Workload, client: Client) -> traces.Workload:
    """The workload with unrecorded output lengths filled in by the server's tokenizer, as far as it has one."""
    if workload.lengths != "characters":
        return workload
    answers = list(
        dict.fromkeys(t.answer for s in workload.sessions for t in s.turns if t.output_tokens is None and t.answer)
    )
    if not answers or await client.count_tokens(answers[0]) is None:
        return workload
    gate = asyncio.Semaphore(8)

    async def length(answer: str) -> int | None:
        async with gate:
            return await client.count_tokens(answer)

    chosen = answers[:TOKENIZE_AT_MOST]
    lengths = dict(zip(chosen, await asyncio.gather(*map(length, chosen)), strict=True))
    sessions = tuple(
        replace(
            s,
            turns=tuple(replace(t, output_tokens=t.output_tokens or lengths.get(t.answer) or None) for t in s.turns),
        )
        for s in workload.sessions
    )
    whole = all(t.output_tokens for s in sessions for t in s.turns)
    return replace(workload, sessions=sessions, lengths="tokenizer" if whole else "mixed")


async def soon() -> int:
    """When to start a load that waits for nobody else."""
    return perf_counter_ns() + round(START_DELAY_S * 1e9)


async def drive(spec: LoadSpec, index: int, of: int, begin: Begin, stop: asyncio.Event, report: Report) -> Driven:
    """One process's part of a cell, from when ``begin`` says (asked once all is ready).

    Raises KitError if the server does not answer or the workload is bad.
    """
    workload = traces.read(spec.workload)
    async with connect(spec) as client:
        await client.warm()
        workload = await with_lengths(workload, client)
        # All connections the load begins with, before the start is agreed: a slow answer must not eat the burn-in.
        closed = spec.load.kind == "closed"
        await client.warm(len(range(index, int(spec.load.value), of)) if closed else WARM_OPEN)
        gc.collect()
        gc.freeze()  # what is loaded by now need not be walked again while stamps are taken
        timing = Timing.plan(spec, await begin())
        cell = Cell(spec, workload, client, timing, index, of)
        early = await cell.run(stop, report)
        now = perf_counter_ns()
        for stream in cell.streams:
            if not early and _uncounted(stream):
                stream.tokenized = await client.count_tokens("".join(stream.pieces))
    opens, closes = timing.window_ns
    window = (opens, closes) if not early else (opens, min(now, closes)) if now > opens else None
    in_window = [s.connect_ns / 1e9 for s in cell.streams if s.connect_ns is not None and opens <= s.sent_ns < closes]
    return Driven(
        model=client.model,
        timing=timing,
        lengths=workload.lengths,
        workload_hash=workload.workload_hash({**spec.sampling, "lengths": workload.lengths}),
        window_ns=window,
        stopped_by=early,
        requests=[s.record(spec.draft_width) for s in sorted(cell.streams, key=lambda s: s.sent_ns)],
        samples=cell.samples,
        client_lag_s=cell.client_lag_s,
        warmed=client.warmed,
        resent=client.resent,
        connects_s=in_window,
        sample_errors=cell.sample_errors,
    )


def _uncounted(stream: Stream) -> bool:
    """Text came, and no count of it: cut off before usage, or a server that gives none."""
    return bool(stream.pieces) and stream.record().completion_tokens is None


def summarise(spec: LoadSpec, driven: Driven, started_at: datetime, anchor: tuple[datetime, int]) -> DriverResult:
    """The cell's result from what was seen of it."""
    measured = None
    if driven.window_ns is not None and driven.window_ns[1] > driven.window_ns[0]:
        measured = measure(
            driven.requests,
            driven.window_ns,
            slo=parse_slo(spec.slo) if spec.slo else None,
            client_lag_s=driven.client_lag_s,
            samples=driven.samples,
        )
    flags = list(measured.flags) if measured else []
    if driven.stopped_by:
        flags.append("incomplete")
    # A recorded spec names the trace without the folders of this machine; its content is in the workload hash.
    path = spec.workload.path
    if path is not None and path.is_absolute():
        spec = spec.model_copy(update={"workload": spec.workload.model_copy(update={"path": Path(path.name)})})
    return DriverResult(
        spec=spec,
        model=driven.model,
        workload_hash=driven.workload_hash,
        lengths=driven.lengths,
        complete=driven.stopped_by is None,
        stopped_by=driven.stopped_by,
        started_at=started_at,
        anchor=anchor,
        window_ns=driven.window_ns,
        counts=measured.counts if measured else None,
        metrics=measured.metrics if measured else {},
        server=measured.server if measured else {},
        flags=flags,
        errors=measured.errors if measured else {},
        client_lag_s=driven.client_lag_s,
        connections=Connections(
            warmed=driven.warmed,
            resent=driven.resent,
            opened_by_requests=len(driven.connects_s),
            connect_max_s=max(driven.connects_s, default=None),
        ),
        sample_errors=driven.sample_errors,
    )


# --- processes ------------------------------------------------------------------------------------------------


_DRIVEN: TypeAdapter[Driven] = TypeAdapter(Driven)


def write_worker(folder: Path, driven: Driven) -> None:
    """Leave a worker's part for the driver to merge."""
    write_requests(folder, driven.requests)
    write_samples(folder, driven.samples)
    (folder / WORKER).write_bytes(_DRIVEN.dump_json(replace(driven, requests=[], samples=[])))


def read_worker(folder: Path) -> Driven:
    """A worker's part."""
    driven = _DRIVEN.validate_json((folder / WORKER).read_bytes())
    return replace(driven, requests=list(read_requests(folder)), samples=read_samples(folder))


def merge(parts: list[Driven]) -> Driven:
    """The parts of one cell as one: requests by time sent and numbered anew, lags pooled."""
    requests = sorted((r for part in parts for r in part.requests), key=lambda r: r.sent_ns)
    windows = [part.window_ns for part in parts if part.window_ns is not None]
    return replace(
        parts[0],
        requests=[r.model_copy(update={"request_id": n}) for n, r in enumerate(requests, 1)],
        # All workers saw the same window, unless a signal ended it for each at its own moment.
        window_ns=(windows[0][0], min(w[1] for w in windows)) if windows else None,
        stopped_by=next((part.stopped_by for part in parts if part.stopped_by), None),
        samples=[s for part in parts for s in part.samples],
        client_lag_s=[lag for part in parts for lag in part.client_lag_s],
        warmed=sum(part.warmed for part in parts),
        resent=sum(part.resent for part in parts),
        connects_s=[c for part in parts for c in part.connects_s],
        sample_errors=sum(part.sample_errors for part in parts),
    )


async def drive_in_workers(spec: LoadSpec, folder: Path, stop: asyncio.Event, report: Report) -> Driven:
    """Drive a cell with ``spec.processes`` workers and merge their parts. Raises KitError if one fails.

    A worker says when it is ready, and all are told the same moment to start at.
    """
    workers: list[asyncio.subprocess.Process] = []
    ready = [asyncio.Event() for _ in range(spec.processes)]
    latest: dict[int, dict[str, object]] = {}

    async def follow(index: int, worker: asyncio.subprocess.Process) -> str | None:
        """Pass on a worker's progress; returns its error, if it told of one."""
        error = None
        async for event in events(worker.stdout):
            if event.get("event") == "error":
                error = str(event.get("message"))
                stop.set()  # the others' part would be of no use
            elif event.get("event") == "ready":
                ready[index].set()
            elif event.get("event") == "progress":
                latest[index] = event
                if index == 0:
                    total = {k: sum(int(e.get(k, 0)) for e in latest.values()) for k in _SUMMED}  # type: ignore[call-overload]
                    report({**event, **total})
        ready[index].set()  # one that has ended must not keep the others waiting
        return error

    async def start() -> None:
        await asyncio.gather(*(one.wait() for one in ready))
        start_ns = await soon()
        for worker in workers:
            pipe_of(worker.stdin).write(f"{start_ns}\n".encode())

    async def forward() -> None:
        await stop.wait()
        for worker in workers:
            if worker.returncode is None:
                worker.send_signal(signal.SIGTERM)

    try:
        for index in range(spec.processes):
            part = folder / f"worker-{index}"
            part.mkdir(exist_ok=True)
            worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kit.load.driver", str(part), "--share", f"{index}/{spec.processes}"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C reaches them through this process only
            )
            workers.append(worker)
            pipe_of(worker.stdin).write(spec.model_dump_json().encode() + b"\n")
        helpers = [asyncio.create_task(start()), asyncio.create_task(forward())]
        errors = await asyncio.gather(*(follow(i, w) for i, w in enumerate(workers)))
        codes = [await worker.wait() for worker in workers]
        for helper in helpers:
            helper.cancel()
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
    if told := next((error for error in errors if error), None):
        raise KitError(told)
    if bad := [code for code in codes if code]:
        raise KitError(f"a load worker ended with status {bad[0]}; its messages are above")
    return merge([read_worker(folder / f"worker-{index}") for index in range(spec.processes)])


async def when_told() -> int:
    """A worker's start: say that it is ready, and wait for the moment that all are told."""
    emit({"event": "ready"})
    line = await asyncio.to_thread(sys.stdin.buffer.readline)
    return int(line) if line.strip() else await soon()


async def watch_parent(stop: asyncio.Event) -> None:
    """Stop when the process that started this one is gone: nobody is left who wants the result."""
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(PROGRESS_INTERVAL_S)
    stop.set()


_SUMMED = ("in_flight", "sent", "ok", "failed", "timed_out")


async def events(stream: asyncio.StreamReader | None) -> AsyncIterator[dict[str, object]]:
    """The JSON lines of a process's output; other lines are left out."""
    while stream is not None and (line := await stream.readline()):
        with suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


def pipe_of(pipe: asyncio.StreamWriter | None) -> asyncio.StreamWriter:
    """The pipe that was asked for."""
    if pipe is None:
        raise RuntimeError("the process was started without a pipe")
    return pipe


def emit(event: dict[str, object]) -> None:
    """One progress line on stdout; a reader that has gone is no reason to lose the measurement."""
    with suppress(BrokenPipeError):
        print(json.dumps(event), flush=True)


async def run(spec: LoadSpec, folder: Path, index: int | None, of: int) -> DriverResult | None:
    """Drive a cell and write its files; a worker (``index`` given) writes its part only."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    watcher = asyncio.create_task(watch_parent(stop))
    anchor = (datetime.now(UTC), perf_counter_ns())
    folder.mkdir(parents=True, exist_ok=True)
    if index is not None:
        write_worker(folder, await drive(spec, index, of, when_told, stop, emit))
        return None
    if spec.processes > 1:
        driven = await drive_in_workers(spec, folder, stop, emit)
    else:
        driven = await drive(spec, 0, 1, soon, stop, emit)
    watcher.cancel()
    result = summarise(spec, driven, anchor[0], anchor)
    write_requests(folder, driven.requests)
    write_samples(folder, driven.samples)
    (folder / RESULT).write_text(result.model_dump_json(indent=1))
    return result


def main(argv: list[str] | None = None) -> int:
    """Run as a process. Status 2 and an error line for what a user can put right; 3 if stopped early."""
    parser = argparse.ArgumentParser(prog="python -m kit.load.driver", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the result files go")
    parser.add_argument("--share", metavar="K/N", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    index, of = map(int, arguments.share.split("/")) if arguments.share else (None, 1)
    # Each connection is a file: with a thousand clients the usual soft limit is too low.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        # A worker's input stays open: after the spec comes when to start.
        spec = parse_spec(sys.stdin.buffer.read() if index is None else sys.stdin.buffer.readline())
        result = asyncio.run(run(spec, arguments.folder, index, of))
    except KitError as error:
        emit({"event": "error", "message": str(error)})
        print(f"kit.load.driver: {error}", file=sys.stderr)
        return 2
    if result is not None:
        emit({"event": "done", "complete": result.complete, "counts": result.counts and result.counts.model_dump()})
        return 0 if result.complete else 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
