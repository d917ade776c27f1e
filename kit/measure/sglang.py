"""Measure SGLang's arms: widths switched on a running server, deployments side by side, or one after the other.

Between two cells of one server, always in this order: wait until it is idle and empty its prefix cache, set the width,
read back that it is in use, then drive (burn-in, warm-up, window), then read back once more. GPU seconds by kind of
forward pass, and the plugin's counters by width, are taken around the whole drive.

:func:`measure` is what ``kit measure`` calls: one deployment at a time, all of a repeat before the next.
``python -m kit.measure.sglang`` is for a GPU that is there for minutes: deployments run *side by side* on it (each with
a declared pool, only one driven at a time), cells come in order of importance, and when the time is up what is
finished stays; the same command goes on with the same run later. It also measures the width policy under a load that
rises and falls, and proves that widths change under traffic with nothing lost.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from kit.cards import ROOT, Experiment, ModelCard, Profile, load_card
from kit.draftwidth import client
from kit.draftwidth.cli import sweep_points
from kit.draftwidth.experiment import (
    EQUAL,
    Shape,
    Shared,
    budget_bytes,
    deployments,
    in_order,
    peak_rate,
    server_settings,
    shape_of,
    unequal,
)
from kit.draftwidth.policy import WidthPolicy, derive_policy
from kit.engines import sglang
from kit.engines.base import Server, request_json
from kit.engines.process import EngineError
from kit.errors import KitError
from kit.load import DriverResult, LoadSpec, load_requests, load_samples, run_cell
from kit.load.arrivals import Arrivals
from kit.load.traces import WorkloadSpec, kind_of
from kit.measure import plan
from kit.records.metrics import METRICS_VERSION, ratio
from kit.records.provenance import collect, model_stamp, workload_hash
from kit.records.schema import Arm, CellKey, CellRecord, Counts, Load, RequestRecord, RunRecord, Scalar
from kit.records.store import Run

SHARED_POOL = "mtp"
SWITCH_EVERY_S = 0.15
OVERHEAD_S = 4.0
"""What a cell may cost beside its own phases (the driver's start, flush, width, read-back), until it is known."""
WARM_REQUESTS, MOST_WARM_REQUESTS, WARM_TOKENS, WARM_WORDS = 4, 128, 48, 250
"""A new server's first requests, not measured: kernels for new shapes are compiled then. As many at once as the largest
load has clients: the first cell at 64 clients was up to a quarter slower than its repeats when only four were sent."""


class Bench:
    """Servers that are up, and what is needed to measure cells on them."""

    def __init__(self, run: Run, card: ModelCard, profile: Profile, weights: Path) -> None:
        self.run = run
        self.card = card
        self.profile = profile
        self.weights = weights
        self.shape = read_shape(weights)
        self.stamp = model_stamp(weights)
        self.servers: dict[str, Server] = {}
        """By arm."""
        self.logs: dict[str, sglang.ServerLog] = {}
        """What each arm's server logged while it started."""
        self.overhead_s = OVERHEAD_S
        self.policy: WidthPolicy | None = None

    @contextmanager
    def up(self, groups: Sequence[Shared], port: int = sglang.DEFAULT_PORT) -> Iterator[dict[str, str]]:
        """Start deployments (the next once the last has its pools, so that none mistakes another's memory for free).

        Gives the reasons of those that did not start, by name. All are stopped at the end.
        """
        begun: list[tuple[Shared, sglang.Starting]] = []
        failed: dict[str, str] = {}
        try:
            for number, group in enumerate(groups):
                settings = sglang.parse_settings(group.settings)
                folder = self.run.folder / "server" / f"{group.name}-{len(list(self.run.folder.glob('server/*')))}"
                starting = sglang.begin(settings, self.weights, folder, name=group.name, port=port + 10 * number)
                begun.append((group, starting))
                if number + 1 < len(groups):
                    _wait_for_pools(starting)
            for group, starting in begun:
                try:
                    server = sglang.finish(starting)
                except EngineError as error:
                    failed[group.name] = str(error)
                    continue
                _say(f"{group.name} is up: {server.resolved.get('max_total_num_tokens')} tokens of KV pool")
                self.servers.update(dict.fromkeys(group.arms, server))
                self.logs.update(dict.fromkeys(group.arms, sglang.parse_log(server.process.log_text())))
            for server in {id(server): server for server in self.servers.values()}.values():
                _long_requests(server, _warm_prompts(self._most_clients()), WARM_TOKENS)
            yield failed
        finally:
            self.servers.clear()
            self.logs.clear()
            for _, starting in begun:
                starting.deployment.stop()

    def _most_clients(self) -> int:
        """Clients of the largest closed load that may be asked for."""
        sweeps = [e for e in self.card.experiments.values() if e.engine == "sglang" and e.load_kind == "closed"]
        return int(max([*self.profile.loads, *(load for e in sweeps for load in e.loads or ())], default=1))

    def prepare(self, arm: Arm) -> None:
        """Idle, empty, and at the arm's width. Raises KitError if that cannot be had."""
        server = self.servers[arm.name]
        server.flush()
        if "candidate_widths" not in arm.settings:
            return
        mode = arm.settings.get("width_mode")
        if mode == "auto":
            if self.policy is None:
                raise KitError("there is no width policy yet: measure the isolation sweep first")
            client.set_width(server.base_url, client.AUTO, policy=self.policy)
        else:
            wish = client.SGLANG if mode == "sglang" else int(arm.settings["draft_width"])
            client.set_width(server.base_url, wish)

    def measure(self, arm: Arm, cell: CellKey, arrivals: Arrivals | None = None) -> CellRecord:
        """Measure one cell and append its record. A cell that cannot be measured is recorded as failed."""
        server = self.servers[arm.name]
        folder = Path(tempfile.mkdtemp(prefix="kit-cell-"))
        begun = time.monotonic()
        try:
            self.prepare(arm)
            before = observe(server)
            spec = self.spec(server, arm, cell, arrivals)
            result = run_cell(spec, folder)
            if not result.complete:
                raise KeyboardInterrupt
            after = observe(server)
            record = self.record(server, arm, cell, result, spec, gains(before, after))
            stored = self.run.append(record, load_requests(folder))
            self.run.keep_samples(cell, load_samples(folder))  # the timeline of a policy is drawn from them
            self.overhead_s = max(self.overhead_s, time.monotonic() - begun - _phases_s(self.profile))
            return stored
        except KitError as error:
            return self.run.append(plan.failed_cell(self.run, arm, cell, str(error)))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def spec(self, server: Server, arm: Arm, cell: CellKey, arrivals: Arrivals | None) -> LoadSpec:
        """What the load driver is told."""
        width = arm.settings.get("draft_width") if "width_mode" not in arm.settings else None
        return LoadSpec(
            base_url=server.base_url,
            dialect="sglang",
            api=self.card.workload.api,
            model=server.model,
            workload=workload_of(self.card, arm),
            load=cell.load,
            arrivals=arrivals or Arrivals(),
            seed=self.run.record.seed,
            repeat=cell.repeat,
            burn_in_s=self.profile.burn_in_s,
            warm_up_s=self.profile.warm_up_s,
            window_s=self.profile.window_s,
            think_time_s=self.card.workload.think_time_s,
            slo=self.card.workload.slo,
            draft_width=None if width is None else int(width),
            metrics_urls=[server.metrics_url],
            metrics_interval_s=max(0.25, min(1.0, self.profile.window_s / 16)),
        )

    def record(
        self,
        server: Server,
        arm: Arm,
        cell: CellKey,
        result: DriverResult,
        spec: LoadSpec,
        gained: Mapping[str, float | None],
    ) -> CellRecord:
        """The cell's record, with what the server resolved after it was driven."""
        log = self.logs[arm.name]
        resolved = sglang.resolved_settings(sglang.server_info(server.base_url), log)
        resolved |= {"layout": server.resolved["layout"], "model_stamp": self.stamp}
        reasons = self._broken(arm, resolved)
        if result.counts is not None and result.counts.completed == 0 and not result.metrics.get("output_tps"):
            told = "; ".join(f"{text} ({n}×)" for text, n in result.errors.items())
            reasons.append(f"no request gave a token in the window{': ' + told if told else ''}")
        if arm.settings.get("width_mode"):
            resolved["draft_width"] = None  # it varies
        if arm.settings.get("skip_zero_step_draft_extend") and resolved["draft_width"] == 0:
            resolved["draft_extend_at_width_0"] = "skipped"  # no server reports it; at other widths it changes nothing
        asked: dict[str, Scalar] = {
            "burn_in_s": spec.burn_in_s,
            "warm_up_s": spec.warm_up_s,
            "window_s": spec.window_s,
            "api": spec.api,
            "slo": spec.slo,
            "output_lengths": result.lengths,
            "policy": self.policy.to_json() if arm.settings.get("width_mode") == "auto" and self.policy else None,
            "arrivals": spec.arrivals.model_dump_json() if cell.load.kind == "trace" else None,
        }
        return CellRecord(
            metrics_version=METRICS_VERSION,
            run_id=self.run.record.run_id,
            cell=cell,
            arm=arm,
            asked=asked,
            resolved=resolved,
            workload_hash=result.workload_hash,
            seed=spec.seed,
            started_at=result.started_at,
            window_ns=result.window_ns,
            status="invalid" if reasons else "ok",
            reason="; ".join(reasons) or None,
            flags=sorted({*server.flags, *result.flags}),
            counts=result.counts,
            metrics=result.metrics,
            server={**result.server, **log.numbers(), **gained},
        )

    def _broken(self, arm: Arm, resolved: Mapping[str, Scalar]) -> list[str]:
        """Rules of comparability that the server broke."""
        wanted = arm.settings.get("draft_width")
        broken = []
        if wanted is not None and "width_mode" not in arm.settings and resolved.get("draft_width") != wanted:
            broken.append(f"the width in use after the window is {resolved.get('draft_width')}, not {wanted}")
        if "candidate_widths" in arm.settings and not resolved.get("candidate_widths"):
            broken.append("the server cannot switch widths")
        if arm.settings.get("pool") == SHARED_POOL:
            told = resolved.get("max_total_num_tokens")
            if told != arm.settings.get("mtp_pool_tokens"):
                broken.append(f"the pool is {told} tokens, not the {arm.settings.get('mtp_pool_tokens')} asked for")
        return broken

    def comparable(self, experiment: Experiment) -> list[str]:
        """What differs among the servers that are up and must not, a line each."""
        up = {name: server for name, server in self.servers.items() if name in experiment.arms}
        pooled = {n: s.resolved for n, s in up.items() if experiment.arm(n).settings.get("pool") == SHARED_POOL}
        return unequal(pooled, EQUAL["pool"]) + unequal({n: s.resolved for n, s in up.items()}, EQUAL["limits"])


def observe(server: Server) -> dict[str, Any]:
    """Counters of a server: its metrics, and the plugin's by width where it runs."""
    counts: dict[int, dict[str, int]] = {}
    with suppress(KitError):
        counts = client.get_width(server.base_url).counts()
    return {"metrics": sglang.metrics(server), "counts": counts}


def gains(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float | None]:
    """What the counters gained over a whole drive (burn-in, warm-up and window), by name.

    ``drive.steps``: decode steps; ``drive.batch``: requests a step; ``drive.accepted_per_verify``: accepted drafts a
    request and step; ``drive.acceptance``: accepted ÷ drafted at the widths in use; ``drive.mean_width``.
    """
    found = {f"drive.{name}": value for name, value in after["metrics"].since(before["metrics"]).items()}
    if not after["counts"]:
        return found
    total = dict.fromkeys(("steps", "requests", "verified", "accepted", "drafted", "width_steps"), 0)
    for width, counts in after["counts"].items():
        earlier = before["counts"].get(width, {})
        gained = {name: value - earlier.get(name, 0) for name, value in counts.items()}
        for name, value in gained.items():
            total[name] += value
        total["drafted"] += width * gained["verified"]
        total["width_steps"] += width * gained["steps"]
        if gained["steps"]:
            found[f"drive.steps_at_width.{width}"] = gained["steps"]
    return found | {
        "drive.steps": total["steps"],
        "drive.batch": ratio(total["requests"], total["steps"]),
        "drive.accepted_per_verify": ratio(total["accepted"], total["verified"]),
        "drive.acceptance": ratio(total["accepted"], total["drafted"]),
        "drive.mean_width": ratio(total["width_steps"], total["steps"]),
    }


def workload_of(card: ModelCard, arm: Arm) -> WorkloadSpec:
    """The card's workload, with the arm's answer length if it has one. Raises KitError if the trace is missing."""
    path = ROOT / card.workload.trace
    length = arm.settings.get("output_tokens")
    return WorkloadSpec(
        kind=kind_of(path),
        path=path,
        output_tokens=None if length is None else int(length),
        max_output_tokens=card.workload.max_output_tokens,
        max_prompt_chars=card.workload.max_prompt_chars,
    )


def read_shape(weights: Path) -> Shape:
    """Pool-relevant sizes of a checkpoint. Raises KitError if it has no readable ``config.json``."""
    path = weights / "config.json"
    try:
        return shape_of(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise KitError(f"{path} cannot be read: {error}") from error


def _wait_for_pools(starting: sglang.Starting, deadline_s: float = 600.0) -> None:
    """Until the deployment has logged its KV pools (two with MTP), or has ended."""
    wanted = 2 if starting.settings.speculation == "mtp" else 1
    end = time.monotonic() + deadline_s
    while time.monotonic() < end and starting.deployment.poll() is None:
        log = sglang.parse_log(starting.deployment.log_text())
        if (log.draft if wanted == 2 else log.target) is not None:
            return
        time.sleep(0.5)


def _phases_s(profile: Profile) -> float:
    return profile.burn_in_s + profile.warm_up_s + profile.window_s


def _say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


def _useful_tokens(experiment: Experiment) -> int | None:
    """Tokens no pool of the experiment needs to exceed: every request running, each as long as the context allows."""
    limits = [a.settings.get("max_running_requests") for a in map(experiment.arm, experiment.arms)]
    tokens = [a.settings.get("context_length") for a in map(experiment.arm, experiment.arms)]
    known = [int(r) * int(t) for r, t in zip(limits, tokens, strict=True) if r and t]
    return max(known) if known else None


def open_server(experiment: Experiment, arm: Arm, weights: Path, log_dir: Path) -> Server:
    """Start the server of one arm, at the arm's width. Raises EngineError if it does not start, else KitError."""
    settings = server_settings(arm, read_shape(weights), useful_tokens=_useful_tokens(experiment))
    server = sglang.start(sglang.parse_settings(settings), weights, log_dir, name=arm.name)
    try:
        if "candidate_widths" in arm.settings and "width_mode" not in arm.settings:
            client.set_width(server.base_url, int(arm.settings["draft_width"]))
    except BaseException:
        server.close()
        raise
    return server


# kit measure


def measure(
    run: Run, card: ModelCard, name: str, experiment: Experiment, profile: Profile, weights: Path | None
) -> None:
    """Measure the cells an experiment still lacks, one deployment at a time, all of a repeat before the next.

    A deployment that does not start fails its cells of that repeat, with the reason in their records; if the very
    first does not start, its EngineError is raised. Raises KitError without weights.
    """
    if weights is None:
        raise KitError(f"{name} needs weights for SGLang: give WEIGHTS=")
    bench = Bench(run, card, profile, weights)
    arms = {arm: experiment.arm(arm) for arm in experiment.arm_names()}
    groups = deployments(list(arms.values()), bench.shape, useful_tokens=_useful_tokens(experiment))
    cells = in_order(name, list(arms), plan.loads_of(experiment, profile), profile.repeats, run.record.seed)
    todo = [cell for cell in cells if cell.id not in run.done()]
    measured = 0
    rounds = [None] if len(groups) == 1 else range(profile.repeats)
    for repeat in rounds:
        for group in random.Random(f"{run.record.seed}/{name}/{repeat}").sample(groups, len(groups)):
            mine = [c for c in todo if c.arm in group.arms and (repeat is None or c.repeat == repeat)]
            if not mine:
                continue
            with bench.up([group]) as not_up:
                if not_up and not measured:
                    raise EngineError(next(iter(not_up.values())))
                for cell in mine:
                    if not_up:
                        run.append(plan.failed_cell(run, arms[cell.arm], cell, not_up[group.name]))
                        continue
                    arrivals = None
                    if cell.load.kind == "trace":
                        arrivals = rise_and_fall(profile.window_s)
                        bench.policy = bench.policy or tuned(run)
                    record = bench.measure(arms[cell.arm], cell, arrivals)
                    _say(f"{cell.id}: {record.status} {_headline(record)}")
                    measured += 1


def rise_and_fall(window_s: float) -> Arrivals:
    """A load that rises to its peak at half the window and falls again; the valley is a tenth of the peak."""
    points = [(0.0, 0.1), (window_s / 2, 1.0), (window_s, 0.1)]
    return Arrivals(process="piecewise", points=points)


PEAK_OVER_MEAN = 1.0 / 0.55
"""Of :func:`rise_and_fall`."""


def tuned(run: Run, experiment: str = "draft_width") -> WidthPolicy | None:
    """The policy that the run's own isolation sweep gives; None while it is not complete."""
    swept = [cell for cell in run.cells() if cell.arm.settings.get("candidate_widths")]
    try:
        return derive_policy(sweep_points(complete_loads(swept, experiment), experiment))
    except KitError:
        return None


def complete_loads(cells: Sequence[CellRecord], experiment: str) -> list[CellRecord]:
    """The cells at loads where every width that the sweep has was measured: the rest may come later."""
    usable = [
        c
        for c in cells
        if c.cell.experiment == experiment
        and c.status == "ok"
        and not c.arm.settings.get("skip_zero_step_draft_extend")
        and not c.arm.settings.get("width_mode")
    ]
    widths = {c.resolved.get("draft_width") for c in usable}
    loads = {c.cell.load.value for c in usable}
    whole = {v for v in loads if {c.resolved.get("draft_width") for c in usable if c.cell.load.value == v} == widths}
    return [c for c in usable if c.cell.load.value in whole]


def _headline(record: CellRecord) -> str:
    tps = record.metrics.get("output_tps")
    return record.reason or (f"{tps:.1f} tok/s" if tps is not None else "")


# Widths changed under traffic


SWITCHING = {
    "plain": "Plain decoding",
    "plain-again": "Plain decoding, again",
    "switched": "Width changed all the while",
}
"""Arms of the proof, with their labels."""


def prove_switching(
    run: Run,
    plain: Server,
    switched: Server,
    arm: Arm,
    *,
    experiment: str = "switching",
    requests: int = 8,
    tokens: int = 900,
    repeat: int = 0,
) -> list[CellRecord]:
    """Long requests on a server whose width is changed all the while, against plain decoding of the same prompts.

    Three cells: ``plain``, ``plain-again`` (how far greedy decoding of this model repeats itself at all: bf16 sums
    depend on the batch) and ``switched``. Each record's ``server`` field has ``requests``, ``complete`` (answers of
    the full length), ``identical`` (to ``plain``) and, for ``switched``, ``switches`` that the server confirmed.
    """
    load = Load(kind="closed", value=requests)
    texts: dict[str, list[str | None]] = {}
    stored = []
    for name, server in zip(SWITCHING, (plain, plain, switched), strict=True):
        server.flush()
        stop = threading.Event()
        seen: list[int] = []
        turning = threading.Thread(target=_turn, args=(server, arm, stop, seen), daemon=True)
        started = datetime.now(UTC)
        begin_ns = time.perf_counter_ns()
        if name == "switched":
            turning.start()
        try:
            answers = _long_requests(server, _prompts(requests), tokens)
        finally:
            stop.set()
        if turning.is_alive():
            turning.join(30)
        texts[name] = [text for _, text in answers]
        records = [record for record, _ in answers]
        complete = sum(r.status == "ok" and r.completion_tokens == tokens for r in records)
        identical = sum(a is not None and a == b for a, b in zip(texts[name], texts["plain"], strict=True))
        failures = sum(r.status != "ok" for r in records)
        figures: dict[str, float | None] = {"requests": requests, "complete": complete, "identical": identical}
        figures |= {"switches": len(seen)} if name == "switched" else {}
        bad = f"{failures} of {requests} requests failed" if failures else None
        if name == "switched" and not bad and len(set(seen)) < 2:
            bad = f"the width changed {len(seen)} times while the requests ran: too few to show anything"
        stored.append(
            run.append(
                CellRecord(
                    metrics_version=METRICS_VERSION,
                    run_id=run.record.run_id,
                    cell=CellKey(experiment=experiment, arm=name, load=load, repeat=repeat),
                    arm=Arm(name=name, label=SWITCHING[name], settings=arm.settings if name == "switched" else {}),
                    asked={"tokens": tokens, "temperature": 0.0, "ignore_eos": True},
                    resolved={**server.resolved, "draft_width": None if name == "switched" else 0},
                    workload_hash=workload_hash({"prompts": _prompts(requests), "tokens": tokens}),
                    seed=run.record.seed,
                    started_at=started,
                    window_ns=(begin_ns, time.perf_counter_ns()),
                    status="invalid" if bad else "ok",
                    reason=bad,
                    flags=sorted(server.flags),
                    counts=Counts(sent=requests, completed=requests - failures, failed=failures, timed_out=0,
                                  cancelled=0, cut_off=0),
                    server=figures,
                ),
                records,
            )
        )  # fmt: skip
        _say(f"{name}: {figures}")
    return stored


def _turn(server: Server, arm: Arm, stop: threading.Event, seen: list[int]) -> None:
    """Change the width again and again; note each width that the server confirmed to be in use."""
    widths = sglang.parse_settings({k: arm.settings[k] for k in ("speculation", "candidate_widths")}).widths
    order = [w for pair in zip(widths, reversed(widths), strict=True) for w in pair]
    while not stop.is_set():
        for width in order:
            if stop.is_set():
                return
            with suppress(KitError):
                state = client.set_width(server.base_url, width, nudge=False, timeout_s=5.0)
                if not state.pending and state.in_use == width and (not seen or seen[-1] != width):
                    seen.append(width)
            time.sleep(SWITCH_EVERY_S)


def _prompts(requests: int) -> list[str]:
    return [f"# session {number}\nuser: Go on counting from {number * 10}.\n\nassistant:" for number in range(requests)]


def _warm_prompts(clients: int) -> list[str]:
    count = min(MOST_WARM_REQUESTS, max(WARM_REQUESTS, clients))
    return [f"# warm-up {number}\n" + "the state of the file " * (WARM_WORDS // 5) for number in range(count)]


def _long_requests(server: Server, prompts: Sequence[str], tokens: int) -> list[tuple[RequestRecord, str | None]]:
    """Send them at once and wait for all; each answer whole, not streamed."""
    found: list[tuple[RequestRecord, str | None]] = [None] * len(prompts)  # type: ignore[list-item]

    def send(number: int, prompt: str) -> None:
        body = {"text": prompt, "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}
        sent = time.perf_counter_ns()
        text, error, meta = None, None, {}
        try:
            answer = request_json("POST", f"{server.base_url}/generate", body=body, timeout_s=300.0)
            text, meta = answer["text"], answer.get("meta_info") or {}
        except (KitError, KeyError, TypeError) as problem:
            error = str(problem)[:200]
        record = RequestRecord(
            request_id=number,
            client=number,
            sent_ns=sent,
            ended_ns=time.perf_counter_ns(),
            status="failed" if error else "ok",
            error=error,
            requested_tokens=tokens,
            prompt_tokens=meta.get("prompt_tokens"),
            completion_tokens=meta.get("completion_tokens"),
            token_source="usage" if meta.get("completion_tokens") is not None else None,
            verify_steps=meta.get("spec_verify_ct"),
            accepted_tokens=meta.get("spec_num_correct_drafts"),
            output_sha256=None if text is None else hashlib.sha256(text.encode()).hexdigest(),
            prompt_sha256=hashlib.sha256(prompt.encode()).hexdigest(),
        )
        found[number] = (record, text)

    threads = [threading.Thread(target=send, args=pair) for pair in enumerate(prompts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


# A GPU that is there for minutes


STEPS = ("switching", "core", "policy", "rest")
"""Of a phase: the proof that nothing is lost; the loads of the tiers; the policies; the other loads."""


def session(
    folder: Path,
    card: ModelCard,
    weights: Path,
    *,
    phases: Sequence[Sequence[str]],
    profile: Profile,
    tiers: Sequence[Sequence[float]],
    budget_s: float,
    steps: Sequence[str] = STEPS,
    policy_window_s: float = 24.0,
    policy_repeats: int = 3,
    port: int = sglang.DEFAULT_PORT,
    argv: Sequence[str] = (),
) -> Run:
    """Measure as much as ``budget_s`` allows, in order of importance; go on with the run in ``folder`` if there is one.

    ``phases``: arms of ``draft_width`` whose deployments fit on the GPU side by side, a list for each time the servers
    are changed. ``steps``: of each phase, in order. A cell is begun only if it can end in time. ``port``: the first
    server's; sessions beside one another on one machine need ports of their own.
    """
    deadline = time.monotonic() + budget_s
    run = _open_run(folder, card, weights, profile, argv)
    bench = Bench(run, card, profile, weights)
    experiment = plan.experiment_of(card, "draft_width")
    every = [experiment.arm(name) for name in experiment.arms]
    policies = card.experiments.get("policy")
    every += [policies.arm(name) for name in policies.arms] if policies else []
    groups = deployments(every, bench.shape, useful_tokens=_useful_tokens(experiment))
    loads = [Load(kind=experiment.load_kind, value=value) for value in profile.loads]
    important = {value for tier in tiers for value in tier}
    for phase in phases:
        if time.monotonic() > deadline - 60:
            _say(f"no time left for the phase {', '.join(phase)}")
            break
        needed = [group for group in groups if set(phase) & set(group.arms)]
        needed.sort(key=lambda group: group.settings.get("speculation") != "mtp")  # they take longest to start
        with bench.up(needed, port) as not_up:
            for line in bench.comparable(experiment):
                _say(f"not comparable: {line}")
            cells = in_order("draft_width", phase, loads, profile.repeats, run.record.seed, tiers)
            _not_started(bench, experiment, [c for c in cells if c.load.value in important], needed, not_up)
            for step in steps:
                if step == "switching":
                    _switching(bench, experiment, deadline)
                elif step == "policy" and policies is not None:
                    _policies(bench, policies, policy_window_s, policy_repeats, deadline)
                elif step in ("core", "rest"):
                    chosen = [cell for cell in cells if (cell.load.value in important) == (step == "core")]
                    _cells(bench, experiment, chosen, deadline, lambda cell: None)
    return run


def _cells(
    bench: Bench,
    experiment: Experiment,
    cells: Sequence[CellKey],
    deadline: float,
    arrivals: Callable[[CellKey], Arrivals | None],
) -> None:
    done = bench.run.done()
    for cell in cells:
        if cell.id in done or cell.arm not in bench.servers:
            continue
        if time.monotonic() + _phases_s(bench.profile) + bench.overhead_s > deadline:
            _say(f"out of time before {cell.id}")
            return
        record = bench.measure(experiment.arm(cell.arm), cell, arrivals(cell))
        _say(f"{cell.id}: {record.status} {_headline(record)}")


def _not_started(
    bench: Bench,
    experiment: Experiment,
    cells: Sequence[CellKey],
    groups: Sequence[Shared],
    reasons: Mapping[str, str],
) -> None:
    """Record the first repeat of arms whose server did not start as failed, with what its log says."""
    for group in groups:
        if group.name not in reasons:
            continue
        _say(f"{group.name} did not start: {reasons[group.name]}")
        recorded = {cell.cell.id for cell in bench.run.cells()}
        for cell in cells:
            if cell.arm in group.arms and cell.repeat == 0 and cell.id not in recorded:
                bench.run.append(plan.failed_cell(bench.run, experiment.arm(cell.arm), cell, reasons[group.name]))


def _switching(bench: Bench, experiment: Experiment, deadline: float) -> None:
    plain = next((s for s in bench.servers.values() if not s.resolved.get("speculative_algorithm")), None)
    arm = next(
        (a for n in bench.servers if n in experiment.arms and "candidate_widths" in (a := experiment.arm(n)).settings),
        None,
    )
    done = {cell.cell.experiment for cell in bench.run.cells() if cell.status == "ok"}
    if plain is None or arm is None or "switching" in done or time.monotonic() + 60 > deadline:
        return
    repeat = sum(cell.cell.arm == "switched" for cell in bench.run.cells())
    prove_switching(bench.run, plain, bench.servers[arm.name], arm, repeat=repeat)


def _policies(bench: Bench, policies: Experiment, window_s: float, repeats: int, deadline: float) -> None:
    run = bench.run
    bench.policy = bench.policy or tuned(run)
    earlier = [cell.cell.load.value for cell in run.cells() if cell.cell.experiment == "policy"]
    peak = peak_rate([cell for cell in run.cells() if cell.cell.experiment == "draft_width"])
    if bench.policy is None or (peak is None and not earlier):
        _say("the policy waits for an isolation sweep with every width at some load")
        return
    (run.folder / "policy.json").write_text(bench.policy.to_json())
    mean = earlier[0] if earlier else round(peak / PEAK_OVER_MEAN, 2)
    load = Load(kind="trace", value=mean)
    cells = in_order("policy", list(policies.arms), [load], repeats, run.record.seed)
    usual = bench.profile
    bench.profile = usual.model_copy(update={"window_s": window_s})
    try:
        _cells(bench, policies, cells, deadline, lambda cell: rise_and_fall(window_s))
    finally:
        bench.profile = usual


def _open_run(folder: Path, card: ModelCard, weights: Path, profile: Profile, argv: Sequence[str]) -> Run:
    if (folder / "run.json").is_file():
        run = Run.open(folder)
        if run.record.provenance.model_stamp != model_stamp(weights):
            raise KitError(f"{folder} holds a run of other weights; choose another folder")
        return run
    experiment = plan.experiment_of(card, "draft_width")
    record = RunRecord(
        run_id=plan.new_run_id(),
        model=card.name,
        title=card.title,
        stand_in=card.stand_in,
        engine="sglang",
        profile=profile.name,
        created_at=datetime.now(UTC),
        anchor=(datetime.now(UTC), time.perf_counter_ns()),
        seed=plan.SEED,
        card=card.model_dump(mode="json"),
        provenance=collect(argv, versions=_versions(), model=weights),
        notes=_notes(experiment, read_shape(weights)),
    )
    return Run.create(folder, record)


def _notes(experiment: Experiment, shape: Shape) -> list[str]:
    settings = experiment.arm(next(iter(experiment.arms))).settings
    notes = ["Deployments ran side by side on one GPU, one driven at a time."]
    tokens, draft = settings.get("mtp_pool_tokens"), settings.get("mtp_draft_tokens")
    if isinstance(tokens, int) and isinstance(draft, int):
        requests = int(settings.get("max_running_requests") or 64)
        budget = budget_bytes(shape, tokens=tokens, requests=requests, draft_tokens=draft)
        notes.append(
            f"Pools are of one declared memory budget, {budget / 2**30:.2f} GiB: it holds the MTP deployment's "
            f"{tokens} tokens, the states of {requests} requests with {draft} draft tokens, and the MTP head."
        )
    return notes


def _versions() -> dict[str, str]:
    found = {}
    for name in ("sglang", "sglang-kernel", "torch", "triton", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m kit.measure.sglang``: see the module's description."""
    parser = argparse.ArgumentParser(prog="python -m kit.measure.sglang", description=__doc__.split("\n")[0])
    parser.add_argument("card", type=Path, help="a model card with the experiment draft_width")
    parser.add_argument("--weights", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder (gone on with if it is there)")
    parser.add_argument("--budget", type=float, default=540.0, metavar="S", help="seconds until no cell is begun")
    parser.add_argument("--phase", action="append", metavar="ARM,ARM…", help="arms to have up side by side")
    parser.add_argument("--step", action="append", choices=STEPS)
    parser.add_argument("--loads", default="1,8,32,4,16,2", help="load points (clients)")
    parser.add_argument("--tiers", default="1,8,32", help="loads to finish first, tiers parted by ;")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--burn-in", type=float, default=1.0, metavar="S")
    parser.add_argument("--warm-up", type=float, default=1.5, metavar="S")
    parser.add_argument("--window", type=float, default=6.0, metavar="S")
    parser.add_argument("--policy-window", type=float, default=24.0, metavar="S")
    parser.add_argument("--policy-repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=sglang.DEFAULT_PORT, help="of the first server; the next has +10")
    arguments = parser.parse_args(argv)
    try:
        card = load_card(arguments.card.stem, arguments.card.parent)
        experiment = plan.experiment_of(card, "draft_width")
        profile = Profile(
            name="timed",
            burn_in_s=arguments.burn_in,
            warm_up_s=arguments.warm_up,
            window_s=arguments.window,
            repeats=arguments.repeats,
            loads=[float(word) for word in arguments.loads.split(",")],
        )
        phases = [phase.split(",") for phase in arguments.phase or [",".join(experiment.arms)]]
        unknown = {arm for phase in phases for arm in phase} - set(experiment.arms)
        if unknown:
            raise KitError(f"no arm is called {', '.join(sorted(unknown))}; the arms are: {', '.join(experiment.arms)}")
        run = session(
            arguments.run,
            card,
            arguments.weights,
            phases=phases,
            profile=profile,
            tiers=[[float(word) for word in tier.split(",")] for tier in arguments.tiers.split(";") if tier],
            budget_s=arguments.budget,
            steps=arguments.step or STEPS,
            policy_window_s=arguments.policy_window,
            policy_repeats=arguments.policy_repeats,
            port=arguments.port,
            argv=sys.argv if argv is None else ["kit.measure.sglang", *argv],
        )
    except KitError as error:
        print(f"kit.measure.sglang: {error}", file=sys.stderr)
        return 2
    cells = run.cells()
    print(f"{len(cells)} cells, {sum(cell.status != 'ok' for cell in cells)} not ok, in {run.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
