"""Measure prompt throughput arm by arm on one loaded checkpoint. Runs in a process of its own, on the GPU host.

::

    python -m kit.deferred.runner --checkpoint CK --out RUN --split 12,12 --arms two-gpus --lengths 16384,124928

The checkpoint is loaded once. Every cell then gets a generator of its own on the same caches, with what its arm
interposes installed before and taken out after. Each cell is appended to the run as it ends (`kit.records`), and its
details (digests of the draft cache and of the output, queue counters, peaks and utilisation by GPU) to
``prefill.jsonl`` beside it. When the time budget is over (``--budget-s``, or ``KIT_BUDGET_S`` for a plan without one)
no further cell is begun.

Input throughput is (prompt − cached) ÷ the engine's own ``time_prefill``, which ends when every GPU has finished the
prompt, deferred passes included.

With ``forced_sync`` every target pass and every MTP pass is followed by a synchronisation of all GPUs and timed. That
says what each costs by itself; the throughput of such a cell is not one a service would see, and it is labelled so.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kit.engines.exllamav3 import (
    ArmSettings,
    Layout,
    PrefillPlan,
    arms_named,
    chunks,
    predicted_queue_bytes,
)
from kit.errors import KitError
from kit.records import metrics, provenance
from kit.records.schema import Arm, CellKey, CellRecord, Counts, RequestRecord, RunRecord
from kit.records.store import Run

from .request import Loaded, Outcome, load, run_request
from .timeline import write_timeline

DETAILS = "prefill.jsonl"
SYNC_FLAG = "forced-synchronisation"
TIMELINE_S = 25.0
"""Seconds of the budget kept for each timeline; they come last, because a profiler may slow down what follows it."""


def session_texts(trace: Path) -> list[str]:
    """The sessions of a trace as chat text. Raises KitError if it holds none."""
    texts = []
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as lines:
        for line in lines:
            turns = json.loads(line)["messages"]
            texts.append("".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in turns))
    if not texts:
        raise KitError(f"{trace} holds no sessions to make prompts of")
    return texts


def make_prompt(encode: Callable[[str], list[int]], texts: Sequence[str], length: int, seed: str) -> list[int]:
    """``length`` tokens of session text in an order of its own, ending where the assistant is about to speak.

    The end is that of a real prompt, so drafts are accepted as often as they are in one; sessions before it fill up the
    length (again from the start, in another order, where the trace is too short).
    """
    rng = random.Random(seed)
    order: list[str] = []
    last = rng.choice(texts)
    marker = "<|im_start|>assistant\n"
    cut = last.find(marker, len(last) // 2)
    tail = encode(last[: cut + len(marker)] if cut >= 0 else last)
    ids: list[int] = []
    while len(ids) + len(tail) < length:
        if not order:
            order = rng.sample(list(texts), len(texts))
        ids += encode(order.pop())
    return (ids + tail)[-length:]


def encoder(checkpoint: Path) -> Callable[[str], list[int]]:
    """The checkpoint's tokenizer. Raises KitError if it has none."""
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        raise KitError(f"{checkpoint} has no tokenizer.json")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def run_plan(plan: PrefillPlan, loaded: Loaded, run: Run, began: float, say: Callable[[str], None] = print) -> int:
    """Measure the cells a run still lacks; returns how many were measured.

    Args:
        began: ``time.monotonic()`` when the process began; the budget counts from there.
    """
    encode = encoder(plan.layout.checkpoint)
    texts = session_texts(plan.trace)
    workload = provenance.workload_hash(plan.workload())
    seconds: dict[tuple[str, int], float] = {}
    slowest: dict[int, float] = {}
    measured = 0

    def left() -> float:
        return float("inf") if plan.budget_s is None else plan.budget_s - (time.monotonic() - began)

    todo = list(plan.cells(run.done()))
    if todo:
        _warm_up(plan, loaded, encode, texts, say)
    for cell, arm in todo:
        length = int(cell.load.value)
        expected = seconds.get((arm.name, length), slowest.get(length, 0.0))
        if left() - TIMELINE_S * len(plan.timeline) < expected:
            say(f"{cell.id}: left out, {left():.0f} s remain and it takes about {expected:.0f} s")
            continue
        settings = ArmSettings.of(arm)
        ids = make_prompt(encode, texts, length, f"{plan.seed}/{length}/{cell.repeat}")
        cell_began = time.monotonic()
        started = datetime.now(UTC)
        try:
            outcome = run_request(loaded, settings, plan.layout, ids, plan.output_tokens)
        except Exception as error:  # the cell failed; the run goes on
            say(f"{cell.id}: failed: {type(error).__name__}: {error}")
            run.append(_record(plan, loaded, run, cell, arm, workload, started, None, error=error))
            continue
        digests = {"draft": outcome.draft_sha256, "output": _sha256(outcome.token_ids)}
        record = _record(plan, loaded, run, cell, arm, workload, started, outcome, ids=ids)
        run.append(record, [_request(outcome, ids)])
        _append_detail(run, cell, settings, outcome, digests, predicted=record.server.get("predicted_queue_bytes"))
        measured += 1
        took = time.monotonic() - cell_began
        seconds[arm.name, length] = took
        slowest[length] = max(slowest.get(length, 0.0), took)
        rate = record.metrics["input_tps"] or float("nan")
        say(f"{cell.id}: {rate:.0f} t/s in, {record.metrics['decode_tps'] or float('nan'):.1f} t/s out, {took:.1f} s")
    _write_identity(run)
    for name in plan.timeline:
        if left() < TIMELINE_S:
            say(f"timeline of {name}: left out, {left():.0f} s remain")
            continue
        arm = next((arm for arm in plan.arms if arm.name == name), None) or arms_named([name])[0]
        try:
            write_timeline(
                run.folder, plan, loaded, arm, lambda n: make_prompt(encode, texts, n, f"{plan.seed}/timeline")
            )
            say(f"timeline of {name}: written")
        except Exception as error:
            say(f"timeline of {name}: failed: {type(error).__name__}: {error}")
    return measured


def _warm_up(
    plan: PrefillPlan, loaded: Loaded, encode: Callable[[str], list[int]], texts: Sequence[str], say: Callable
) -> None:
    """Load every MTP head that an arm needs and compile the kernels; nothing of this is recorded."""
    began = time.monotonic()
    ids = make_prompt(encode, texts, plan.warm_up_tokens, f"{plan.seed}/warm-up")
    longest = make_prompt(encode, texts, max(plan.lengths), f"{plan.seed}/warm-up")
    seen = set()
    for number, arm in enumerate(plan.arms):
        settings = ArmSettings.of(arm)
        kind = (settings.drafting, settings.mtp_gpu, settings.draft_bits, settings.coalesce)
        if kind not in seen:
            seen.add(kind)
            run_request(loaded, settings, plan.layout, ids, min(32, plan.output_tokens))
        # Attention picks other kernels for long prompts, and the clocks should be up before the first cell. Coalesced
        # passes have shapes, and pinned rows allocations, that only a prompt of the full length brings about.
        if number == 0 or settings.coalesce or settings.where == "pinned":
            run_request(loaded, settings, plan.layout, longest, 1)
    say(f"warm-up: {time.monotonic() - began:.1f} s")


def _sha256(tokens: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()


def _request(outcome: Outcome, ids: Sequence[int]) -> RequestRecord:
    final = outcome.final
    accepted, rejected = final.get("accepted_draft_tokens"), final.get("rejected_draft_tokens")
    return RequestRecord(
        request_id=0,
        sent_ns=outcome.sent_ns,
        ended_ns=outcome.ended_ns,
        status="ok",
        finish_reason=final.get("eos_reason"),
        chunks=outcome.chunks,
        prompt_tokens=final["prompt_tokens"],
        cached_tokens=final["cached_tokens"],
        completion_tokens=final["new_tokens"],
        token_source="usage",
        drafted_tokens=None if accepted is None else accepted + rejected,
        accepted_tokens=accepted,
        server_prompt_s=final["time_prefill"],
        server_decode_s=final["time_generate"],
        output_sha256=_sha256(outcome.token_ids),
        prompt_sha256=_sha256(ids),
    )


def _record(
    plan: PrefillPlan,
    loaded: Loaded,
    run: Run,
    cell: CellKey,
    arm: Arm,
    workload: str,
    started: datetime,
    outcome: Outcome | None,
    *,
    ids: Sequence[int] = (),
    error: Exception | None = None,
) -> CellRecord:
    settings = ArmSettings.of(arm)
    common: dict[str, Any] = {
        "metrics_version": metrics.METRICS_VERSION,
        "run_id": run.record.run_id,
        "cell": cell,
        "arm": arm,
        "asked": {"output_tokens": plan.output_tokens, "input_tokens": int(cell.load.value)},
        "resolved": {**loaded.resolved, **settings.model_dump()},
        "workload_hash": workload,
        "seed": plan.seed,
        "started_at": started,
        "flags": [SYNC_FLAG] if settings.forced_sync else [],
    }
    if outcome is None:
        return CellRecord(**common, status="failed", reason=f"{type(error).__name__}: {error}"[:500])
    final = outcome.final
    accepted, rejected = final.get("accepted_draft_tokens"), final.get("rejected_draft_tokens")
    drafted = None if accepted is None else accepted + rejected
    values: dict[str, float | None] = {
        "input_tps": metrics.ratio(final["prompt_tokens"] - final["cached_tokens"], final["time_prefill"]),
        "decode_tps": metrics.ratio(final["new_tokens"], final["time_generate"]),
        "prefill_s": final["time_prefill"],
        "wall_s": (outcome.ended_ns - outcome.sent_ns) / 1e9,
        "ttft_s": (outcome.first_ns - outcome.sent_ns) / 1e9,
        "acceptance": metrics.acceptance([(accepted, drafted)]),
        "cached_share": metrics.ratio(final["cached_tokens"], final["prompt_tokens"]),
        "peak_memory_bytes": float(sum(outcome.peaks)) if outcome.peaks else None,
    }
    server: dict[str, float | None] = {
        "accepted": accepted,
        "drafted": drafted,
        "chunks": chunks(len(ids), plan.layout.chunk),
        "predicted_queue_bytes": predicted_queue_bytes(settings, len(ids), plan.layout.chunk, loaded.hidden_size),
        **{f"peak_bytes_gpu{gpu}": peak for gpu, peak in zip(loaded.gpus, outcome.peaks, strict=False)},
        **{f"utilisation_gpu{gpu}": mean for gpu, mean in zip(loaded.gpus, outcome.utilisation, strict=False)},
        **{f"forced_sync_{name}": value for name, value in outcome.passes.items()},
    }
    if outcome.queue is not None:
        for name in ("queued", "passes", "dropped", "peak_items", "peak_bytes", "flush_seconds"):
            server[f"queue_{name}"] = outcome.queue[name]
        server |= {f"flushes_{reason}": count for reason, count in outcome.queue["flushes"].items()}
    return CellRecord(
        **common,
        status="ok",
        counts=Counts(sent=1, completed=1, failed=0, timed_out=0, cancelled=0, cut_off=0),
        metrics=values,
        server=server,
    )


def _append_detail(
    run: Run, cell: CellKey, settings: ArmSettings, outcome: Outcome, digests: dict[str, str | None], predicted: Any
) -> None:
    line = {
        "cell": cell.id,
        "arm": cell.arm,
        "length": int(cell.load.value),
        "repeat": cell.repeat,
        "draft_bits": settings.draft_bits if settings.drafting == "mtp" else None,
        "stock": settings.stock,
        "coalesced": settings.coalesce,
        "draft_cache_sha256": digests["draft"],
        "output_sha256": digests["output"],
        "output_tokens": outcome.token_ids,
        "peak_bytes": outcome.peaks,
        "utilisation_percent": outcome.utilisation,
        "predicted_queue_bytes": predicted,
        "queue": outcome.queue,
        "forced_sync": outcome.passes or None,
    }
    with (run.folder / DETAILS).open("a") as handle:
        handle.write(json.dumps(line) + "\n")
        handle.flush()
        os.fsync(handle.fileno())


def identity(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Which cells left the draft cache and the output that stock left for the same prompt.

    Args:
        lines: The details of a run's cells.

    Returns:
        One row per cell that has a stock cell to compare with: arm, length, repeat, ``draft_cache_equal`` (None
        without an MTP head) and ``output_equal``.
    """
    stock: dict[tuple[int, int, int], dict[str, Any]] = {}
    for line in lines:
        if line["stock"]:
            stock.setdefault((line["length"], line["repeat"], line["draft_bits"]), line)
    rows = []
    for line in lines:
        bits = line["draft_bits"]
        same_prompt = stock.get((line["length"], line["repeat"], bits if bits is not None else 4))
        if same_prompt is None:
            continue
        rows.append(
            {
                "cell": line["cell"],
                "arm": line["arm"],
                "length": line["length"],
                "repeat": line["repeat"],
                "draft_cache_equal": None
                if bits is None
                else line["draft_cache_sha256"] == same_prompt["draft_cache_sha256"],
                "output_equal": line["output_sha256"] == same_prompt["output_sha256"],
            }
        )
    return rows


def _write_identity(run: Run) -> None:
    path = run.folder / DETAILS
    if path.is_file():
        rows = identity([json.loads(line) for line in path.read_text().splitlines()])
        (run.folder / "identity.json").write_text(json.dumps(rows, indent=1))


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers separated by commas") from None


def _only(text: str) -> tuple[int, list[str]]:
    length, equals, names = text.partition("=")
    if not equals or not length.strip().isdecimal():
        raise KitError(f"--only {text}: give LENGTH=ARM,ARM…, as in 124928=no-mtp,stock")
    return int(length), [arm.name for arm in arms_named(names.split(","))]


def parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    p = argparse.ArgumentParser(
        prog="python -m kit.deferred.runner",
        description="Measure prompt throughput of ExLlamaV3 under the arms of the prefill experiment.",
    )
    p.add_argument("--plan", help="a plan as JSON: a file, or - for stdin; everything else is then in it")
    p.add_argument("--checkpoint", type=Path, help="folder of the checkpoint")
    p.add_argument("--out", type=Path, help="the run's folder; a run that is there is resumed")
    p.add_argument("--split", type=_integers, default=[], metavar="N,N,…", help="layers on each GPU (default: one GPU)")
    p.add_argument("--arms", default="one-gpu", help="names separated by commas; one-gpu and two-gpus are sets")
    p.add_argument("--only", action="append", default=[], metavar="LENGTH=ARM,ARM…", help="arms measured at a length")
    p.add_argument("--lengths", type=_integers, default=[16384, 124928], help="prompt tokens (default 16384,124928)")
    p.add_argument("--output", type=int, default=1024, help="output tokens (default 1024)")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--chunk", type=int, default=3072, help="tokens per prompt chunk (default 3072)")
    p.add_argument("--draft-tokens", type=int, default=4)
    p.add_argument("--scan", type=int, default=0, help="tokens per pass of the linear-attention scan (0: engine's)")
    p.add_argument("--cache-bits", type=int, default=4, choices=[4, 8, 16])
    p.add_argument("--seed", type=int, default=20261129)
    p.add_argument("--budget-s", type=float, help="begin no cell after this many seconds")
    p.add_argument("--trace", type=Path, default=Path("data/traces/agent-sessions.jsonl.gz"))
    p.add_argument("--timeline", default="", help="arms whose timeline of three chunks is recorded")
    p.add_argument("--timeline-from", type=int, default=0, metavar="TOKEN", help="where in the prompt those chunks lie")
    p.add_argument("--model", default="stand-in", help="name of the model card the run belongs to")
    p.add_argument("--title", default="", help="what the checkpoint is")
    p.add_argument("--product", action="store_true", help="the weights are a product model's, not a stand-in's")
    p.add_argument("--note", action="append", default=[], help="a label for the whole run")
    return p


def plan_from(a: argparse.Namespace) -> PrefillPlan:
    """The plan that command-line options ask for. Raises KitError if one is missing."""
    for name in ("checkpoint", "out"):
        if getattr(a, name) is None:
            raise KitError(f"--{name} is missing (or give --plan)")
    return PrefillPlan(
        folder=a.out,
        layout=Layout(
            checkpoint=a.checkpoint,
            split=tuple(a.split),
            chunk=a.chunk,
            cache_bits=a.cache_bits,
            draft_tokens=a.draft_tokens,
            scan_tokens=a.scan,
        ),
        arms=arms_named([name for name in a.arms.split(",") if name]),
        lengths=a.lengths,
        output_tokens=a.output,
        repeats=a.repeats,
        seed=a.seed,
        budget_s=a.budget_s,
        trace=a.trace,
        only=dict(_only(text) for text in a.only),
        timeline=[name for name in a.timeline.split(",") if name],
        timeline_from=a.timeline_from,
    )


def new_run(plan: PrefillPlan, a: argparse.Namespace, versions: dict[str, str]) -> Run:
    """Make the run's folder with its ``run.json``, or open it to resume."""
    if (plan.folder / "run.json").exists():
        return Run.open(plan.folder)
    now = datetime.now(UTC)
    record = RunRecord(
        run_id=f"{now:%Y%m%dT%H%M%SZ}-exllamav3",
        model=a.model,
        title=a.title or plan.layout.checkpoint.name,
        stand_in=not a.product,
        engine="exllamav3",
        profile="prefill",
        created_at=now,
        anchor=(now, time.perf_counter_ns()),
        seed=plan.seed,
        card=json.loads(plan.model_dump_json(exclude={"folder"})),
        provenance=provenance.collect(sys.argv, versions, plan.layout.checkpoint),
        notes=a.note,
    )
    return Run.create(plan.folder, record)


def main(argv: Sequence[str] | None = None) -> int:
    """Load, measure, and leave a run behind."""
    began = time.monotonic()
    a = parser().parse_args(argv)
    try:
        if a.plan:
            text = sys.stdin.read() if a.plan == "-" else Path(a.plan).read_text()
            plan = PrefillPlan.model_validate_json(text)
        else:
            plan = plan_from(a)
        budget = os.environ.get("KIT_BUDGET_S")
        if plan.budget_s is None and budget:
            plan = plan.model_copy(update={"budget_s": float(budget)})
        encoder(plan.layout.checkpoint)
        for arm in plan.arms:
            ArmSettings.of(arm)
        loaded = load(plan)
        print(f"loaded in {time.monotonic() - began:.1f} s: {loaded.resolved}", flush=True)
        run = new_run(plan, a, loaded.versions)
        run_plan(plan, loaded, run, began, say=lambda line: print(line, flush=True))
    except KitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
