"""Measure arms that are HTTP servers, one server an arm: llama.cpp started here, or a server attached to.

For each block of the plan (an arm in a repeat) the server is started, or attached to, and driven through the block's
load points by the load driver in its own process. A cell's prompts depend on seed, load and repeat and never on the
arm. Between the cells of one server its prefix cache is emptied where the server can do that.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from kit.cards import ROOT, Experiment, ModelCard, Profile
from kit.engines import llamacpp, openai
from kit.engines.base import Server
from kit.engines.process import EngineError
from kit.errors import KitError
from kit.load import DriverResult, LoadSpec, load_requests, run_cell
from kit.load.traces import WorkloadSpec, kind_of
from kit.measure import plan
from kit.records.metrics import METRICS_VERSION
from kit.records.schema import Arm, CellKey, CellRecord, Scalar
from kit.records.store import Run


def open_server(experiment: Experiment, arm: Arm, weights: Path | None, log_dir: Path) -> Server:
    """Start (or attach to) the server of an arm. Raises EngineError."""
    if experiment.engine == "openai":
        return openai.attach(openai.AttachSettings.checked(**arm.settings))
    settings = llamacpp.LlamaCppSettings.checked(model=weights, **arm.settings)
    return llamacpp.start(settings, log_dir)


def workload_spec(card: ModelCard) -> WorkloadSpec:
    """The card's workload for the load driver. Raises KitError if the trace is missing or of no known format."""
    path = ROOT / card.workload.trace
    return WorkloadSpec(
        kind=kind_of(path),
        path=path,
        max_output_tokens=card.workload.max_output_tokens,
        max_prompt_chars=card.workload.max_prompt_chars,
    )


def measure(
    run: Run, card: ModelCard, name: str, experiment: Experiment, profile: Profile, weights: Path | None
) -> None:
    """Measure the cells an experiment still lacks, appending each to the run as it ends.

    A server that does not start fails its block's cells, with the reason in their records, and the rest goes on; but
    if the first block fails, nothing else is likely to work and its EngineError is raised.
    """
    todo = plan.blocks(name, experiment, profile, done=run.done())
    workload = workload_spec(card)
    total = sum(len(block.cells) for block in todo)
    failures: list[str] = []
    with tqdm(total=total, desc=name, unit="cell", file=sys.stderr, dynamic_ncols=True, mininterval=0.5) as bar:
        for number, block in enumerate(todo):
            arm = experiment.arm(block.arm)
            log_dir = run.folder / "server" / f"{name}.{block.arm}.r{block.repeat}"
            try:
                with open_server(experiment, arm, weights, log_dir) as server:
                    for position, cell in enumerate(block.cells):
                        bar.set_postfix_str(cell.id, refresh=True)
                        if position:
                            _flush(server)
                        _measure_cell(run, server, experiment.engine, arm, cell, workload, card, profile)
                        bar.update()
            except EngineError as error:
                if number == 0:
                    raise
                left = [cell for cell in block.cells if cell.id not in run.done()]
                for cell in left:
                    run.append(plan.failed_cell(run, arm, cell, str(error)))
                bar.update(len(left))
                failures.append(f"{block.arm}, repeat {block.repeat}: {error}")
    if failures:
        print(f"{name}: {len(failures)} servers failed; the cells are recorded as failed:", file=sys.stderr)
        print("\n".join(f"  {failure}" for failure in failures), file=sys.stderr)


def _measure_cell(
    run: Run,
    server: Server,
    engine: str,
    arm: Arm,
    cell: CellKey,
    workload: WorkloadSpec,
    card: ModelCard,
    profile: Profile,
) -> None:
    spec = LoadSpec(
        base_url=server.base_url,
        dialect=server.dialect,
        api=card.workload.api,
        model=server.model,
        key_env=server.api_key_env,
        workload=workload,
        load=cell.load,
        seed=run.record.seed,
        repeat=cell.repeat,
        burn_in_s=profile.burn_in_s,
        warm_up_s=profile.warm_up_s,
        window_s=profile.window_s,
        think_time_s=card.workload.think_time_s,
        # Attached servers may refuse a field they don't know; the engines started here know it.
        ignore_eos=engine != "openai" or server.dialect != "openai",
        slots=_slots(server),
        slo=card.workload.slo,
        metrics_urls=[server.metrics_url] if server.metrics_url else [],
        metrics_names=sorted(server.sampled.values()),
        metrics_interval_s=max(0.25, min(1.0, profile.window_s / 8)),
    )
    folder = Path(tempfile.mkdtemp(prefix="kit-cell-"))
    try:
        result = run_cell(spec, folder)
        if not result.complete:
            raise KeyboardInterrupt
        run.append(_record(run, server, engine, arm, cell, result, spec), load_requests(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _record(
    run: Run,
    server: Server,
    engine: str,
    arm: Arm,
    cell: CellKey,
    result: DriverResult,
    spec: LoadSpec,
) -> CellRecord:
    reason = None
    if result.counts is not None and result.counts.completed == 0:
        errors = "; ".join(f"{text} ({n}×)" for text, n in result.errors.items())
        reason = f"no request ended in the window of {spec.window_s:g} s: it is too short for this load on this machine"
        reason += f" ({errors})" if errors else ""
    asked: dict[str, Scalar] = {
        "burn_in_s": spec.burn_in_s,
        "warm_up_s": spec.warm_up_s,
        "window_s": spec.window_s,
        "think_time_s": spec.think_time_s,
        "api": spec.api,
        "slo": spec.slo,
        "output_lengths": result.lengths,
    }
    return CellRecord(
        metrics_version=METRICS_VERSION,
        run_id=run.record.run_id,
        cell=cell,
        arm=arm,
        asked=asked,
        resolved={"engine": engine, **server.resolved},
        workload_hash=result.workload_hash,
        seed=spec.seed,
        started_at=result.started_at,
        window_ns=result.window_ns,
        status="invalid" if reason else "ok",
        reason=reason,
        flags=sorted({*server.flags, *result.flags}),
        counts=result.counts,
        metrics=result.metrics,
        server=result.server,
    )


def _slots(server: Server) -> int | None:
    slots = server.resolved.get("slots")
    return slots if server.dialect == "llamacpp" and isinstance(slots, int) else None


def _flush(server: Server) -> None:
    """Empty the prefix cache between cells where the server can; prompts are unique per cell in any case."""
    if server.flush_with is None:
        return
    try:
        server.flush()
    except KitError as error:
        # A request cut off by the last window may still be winding down; it holds no prompt of the next cell.
        print(f"the prefix cache was not emptied: {error}", file=sys.stderr)
