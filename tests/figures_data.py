"""Synthetic records for the tests of figures and reports. They never leave a test's temporary folder."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path

from kit.records.metrics import METRICS_VERSION
from kit.records.schema import (
    Arm,
    CellKey,
    CellRecord,
    Chunk,
    Counts,
    Load,
    Provenance,
    RequestRecord,
    RunRecord,
)
from kit.records.store import Run

LOADS = (1, 2, 4, 8)
BASE = {1: 63.0, 2: 128.0, 4: 239.0, 8: 408.0}
GAIN = {
    "baseline": {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0},
    "mtp-1": {1: 1.33, 2: 1.1, 4: 1.0, 8: 0.88},
    "mtp-2": {1: 1.58, 2: 1.28, 4: 1.0, 8: 0.8},
}
LABELS = {"baseline": "baseline", "mtp-1": "MTP, width 1", "mtp-2": "MTP, width 2"}
WIDTH = {"baseline": 0, "mtp-1": 1, "mtp-2": 2}


def wobble(arm: str, load: float, repeat: int) -> float:
    """A small deterministic factor around 1 that differs between arms and repeats."""
    return 1 + 0.01 * math.sin(7 * repeat + 3 * load + len(arm) * 5 + (11 if arm.endswith("-again") else 0))


def cell(arm: str, load: float, repeat: int, /, **changes) -> CellRecord:
    base = arm.removesuffix("-again")
    rate = BASE[int(load)] * GAIN[base][int(load)] * wobble(arm, load, repeat)
    stream = rate / load
    drafting = WIDTH[base] > 0
    fields = {
        "metrics_version": METRICS_VERSION,
        "run_id": "20260101T000000Z",
        "cell": CellKey(experiment="concurrency", arm=arm, load=Load(kind="closed", value=load), repeat=repeat),
        "arm": Arm(name=arm, label=LABELS[base] + (", again" if arm.endswith("-again") else "")),
        "asked": {"burn_in_s": 0.5, "warm_up_s": 0.5, "window_s": 3.0},
        "resolved": {"layout": "one process", "engine_build": "b1", "model_stamp": "m1", "draft_width": WIDTH[base]},
        "workload_hash": "w1",
        "seed": 1,
        "started_at": datetime(2026, 1, 1, tzinfo=UTC),
        "status": "ok",
        "counts": Counts(sent=10, completed=9, failed=0, timed_out=0, cancelled=0, cut_off=1),
        "metrics": {
            "output_tps": rate,
            "ttft_p50": 0.1 * load / GAIN[base][int(load)] * wobble(arm, load, repeat + 1),
            "ttft_p99": 0.3 * load * wobble(arm, load, repeat + 2),
            "tpot_p50": 1 / stream,
            "decode_rate_p50": stream,
            "acceptance": 0.75 if drafting else None,
            "tokens_per_step": 1 + 0.75 * WIDTH[base] if drafting else None,
            "client_lag_p99": 0.002,
            "goodput": None,
        },
        "server": {"running": min(load, 4.0), "queued": max(0.0, load - 4)},
    }
    return CellRecord(**{**fields, **changes})


def cells(
    repeats: int = 3, arms: tuple[str, ...] = ("baseline", "mtp-1", "mtp-2"), again: bool = True
) -> list[CellRecord]:
    names = [*arms, *(["baseline-again"] if again else [])]
    return [cell(arm, load, repeat) for repeat in range(repeats) for arm in names for load in LOADS]


def run_record(**changes) -> RunRecord:
    fields = {
        "run_id": "20260101T000000Z",
        "model": "synthetic",
        "title": "Synthetic numbers <for> tests",
        "stand_in": True,
        "engine": "llamacpp",
        "profile": "quick",
        "created_at": datetime(2026, 1, 1, tzinfo=UTC),
        "seed": 1,
        "card": {"experiments": {"concurrency": {"baseline": "baseline"}, "draft_width": {"baseline": "baseline"}}},
        "provenance": Provenance(
            commit="0123456789abcdef", dirty=False, versions={"kit": "0"}, cpu="test CPU", cores=2
        ),
        "notes": [],
    }
    return RunRecord(**{**fields, **changes})


def request(index: int, prompt: str, output: str) -> RequestRecord:
    return RequestRecord(
        request_id=index, sent_ns=0, ended_ns=10, status="ok", chunks=[Chunk(t_ns=5, chars=4)],
        prompt_sha256=prompt, output_sha256=output,
    )  # fmt: skip


def make_run(folder: Path, recorded: list[CellRecord] | None = None, **changes) -> Run:
    run = Run.create(folder, run_record(**changes))
    for record in recorded if recorded is not None else cells():
        same = "x" if record.cell.arm == "mtp-2" and record.cell.repeat == 0 else "same"
        run.append(record, [request(0, f"p{record.cell.load.label}{record.cell.repeat}", same)])
    return run
