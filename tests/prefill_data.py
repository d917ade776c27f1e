"""Synthetic records of the prefill experiment, in the form that kit.deferred.runner leaves; for tests alone.

Input throughput comes from the discrete-event model with known stage times, so a test knows what a reader should learn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import figures_data as data

from kit.deferred.model import StageTimes, seconds_per_chunk
from kit.engines.exllamav3 import ArmSettings, arms_named, chunks, predicted_queue_bytes
from kit.records.metrics import METRICS_VERSION
from kit.records.schema import Arm, CellKey, CellRecord, Counts, Gpu, Load, Provenance
from kit.records.store import Run
from kit.report.prefill import schedule_of

CHUNK, HIDDEN = 3072, 5120
LENGTHS = (16384, 124928)
ONE = StageTimes((0.13,), 0.006)
TWO = StageTimes((0.07, 0.065), 0.006)
GIB = 2**30


def seconds(arm: Arm, times: StageTimes, length: int) -> float:
    """Time of a prompt: the model's for arms that it knows, else stock's or no MTP's."""
    settings = ArmSettings.of(arm)
    schedule = schedule_of(settings.model_copy(update={"draft_bits": 4, "coalesce": False, "forced_sync": False}))
    if schedule is None:
        schedule = schedule_of(ArmSettings(drafting="none"))
    n = chunks(length, CHUNK)
    return n * seconds_per_chunk(times, schedule, n)


def cell(arm: Arm, length: int, repeat: int, gpus: int, run_id: str) -> CellRecord:
    settings = ArmSettings.of(arm)
    wobble = 1 + 0.004 * math.sin(5 * repeat + length + len(arm.name) * 3)
    took = seconds(arm, TWO if gpus == 2 else ONE, length) * wobble
    predicted = predicted_queue_bytes(settings, length, CHUNK, HIDDEN)
    mtp = settings.drafting == "mtp"
    server = {
        "chunks": chunks(length, CHUNK),
        "predicted_queue_bytes": predicted,
        **{f"peak_bytes_gpu{g}": 20.0 * GIB for g in range(gpus)},
        **{f"utilisation_gpu{g}": 60.0 + 10 * g for g in range(gpus)},
    }
    if mtp and settings.depth != 1:
        server |= {
            "queue_queued": chunks(length, CHUNK), "queue_passes": chunks(length, CHUNK), "queue_dropped": 0,
            "queue_peak_items": 8, "queue_peak_bytes": predicted, "queue_flush_seconds": 0.3,
            "flushes_depth": 5, "flushes_prefill_end": 1,
        }  # fmt: skip
    if settings.forced_sync:
        server |= {"forced_sync_target_s": took * 0.95} | ({"forced_sync_mtp_s": took * 0.04} if mtp else {})
    device = predicted if settings.where == "device" else 0
    return CellRecord(
        metrics_version=METRICS_VERSION,
        run_id=run_id,
        cell=CellKey(experiment="prefill", arm=arm.name, load=Load(kind="prefill", value=length), repeat=repeat),
        arm=arm,
        asked={"output_tokens": 1024, "input_tokens": length},
        resolved={
            "engine": "exllamav3", "engine_version": "1.6.5", "gpus": gpus, "chunk": CHUNK, "cache_bits": 4,
            "layout": "layer split" if gpus > 1 else "one GPU", "split": "16,16" if gpus > 1 else None,
            "draft_tokens": 4, **settings.model_dump(),
        },
        workload_hash="w",
        seed=1,
        started_at=datetime(2026, 1, 2, tzinfo=UTC),
        status="ok",
        flags=["forced-synchronisation"] if settings.forced_sync else [],
        counts=Counts(sent=1, completed=1, failed=0, timed_out=0, cancelled=0, cut_off=0),
        metrics={
            "input_tps": (length - 1) / took, "decode_tps": (90.0 if settings.drafting != "none" else 50.0) * wobble,
            "prefill_s": took, "wall_s": took + 11, "ttft_s": took + 0.05, "cached_share": 0.0,
            "acceptance": None if settings.drafting == "none" else 0.7 * wobble,
            "peak_memory_bytes": 40.0 * GIB + device * 1.02,
        },
        server=server,
    )  # fmt: skip


def make_run(
    folder: Path, names: Sequence[str], gpus: int, *, repeats: int = 3, model: str = "standin-27b", **changes
) -> Run:
    """A run with its details and, for the first arms with MTP, timelines."""
    run_id = changes.pop("run_id", f"20260102T00000{gpus}Z")
    run = data.make_run(
        folder, [], run_id=run_id, model=model, engine="exllamav3", profile="prefill", card={"arms": []},
        title="Synthetic stand-in", created_at=datetime(2026, 1, 2, 0, 0, gpus, tzinfo=UTC),
        provenance=Provenance(commit="0123456789", dirty=False, versions={"kit": "0"}, cores=16,
                              gpus=[Gpu(name="NVIDIA Test")] * gpus),
        **changes,
    )  # fmt: skip
    with (folder / "prefill.jsonl").open("w") as details:
        for repeat in range(repeats):
            for length in LENGTHS:
                for arm in arms_named(names):
                    record = cell(arm, length, repeat, gpus, run_id)
                    same = data.request(0, f"p{length}{repeat}", "same")
                    run.append(record, [same])
                    settings = ArmSettings.of(arm)
                    mtp = settings.drafting == "mtp"
                    digest = f"{length}/{repeat}/{settings.draft_bits}" + ("/coalesced" if settings.coalesce else "")
                    line = {
                        "cell": record.cell.id, "arm": arm.name, "length": length, "repeat": repeat,
                        "draft_bits": settings.draft_bits if mtp else None, "stock": settings.stock,
                        "draft_cache_sha256": digest if mtp else None, "output_sha256": f"{length}/{repeat}",
                    }  # fmt: skip
                    details.write(json.dumps(line) + "\n")
    for name in [n for n in ("stock", "unblock-8") if n in {a.name for a in arms_named(names)}]:
        timeline(folder, name, gpus)
    return run


def timeline(folder: Path, name: str, gpus: int) -> None:
    """Three chunks: every GPU works 60 ms of each 140, the last one's MTP pass after it."""
    step = 140_000 if name == "stock" else 75_000
    spans = [[[c * step + g * 62_000, c * step + g * 62_000 + 60_000, "target"] for c in range(3)] for g in range(gpus)]
    for c in range(3):
        spans[0].append([c * step + gpus * 62_000 - 1500, c * step + gpus * 62_000 + 4000, "mtp"])
    [arm] = arms_named([name])
    text = {
        "arm": name, "label": arm.label, "chunk": CHUNK, "chunks": 3,
        "gpus": [{"device": g, "busy": 0.5, "spans": sorted(s)} for g, s in enumerate(spans)],
        "host": [[0, 3000, "target"], [3000, 4000, "mtp"]],
    }  # fmt: skip
    (folder / f"timeline-{name}.json").write_text(json.dumps(text))
