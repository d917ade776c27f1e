"""The measured record: what one cell, one request and one run are, field by field.

A *cell* is one arm at one load point in one repeat. Its :class:`CellRecord` is one line of ``results.jsonl``;
the :class:`RequestRecord` lines behind it lie in ``raw/<cell id>.jsonl.gz`` with every chunk's arrival time, so
that every derived number can be computed again. A :class:`RunRecord` (``run.json``) says where and with what
the run was made.

All models are strict: an unknown field is an error, not a silent loss. An unknown value is ``None``, never 0.
Times are ``perf_counter_ns`` of the driver's process unless a name says otherwise; one wall-clock anchor per
run (:attr:`RunRecord.anchor`) ties them to the calendar.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
"""Raise on any change that an older reader would misread; say what changed here.

1: first version.
"""

Scalar = str | int | float | bool | None


class Strict(BaseModel):
    """Base of every record: unknown fields are errors, and a record is not changed once made."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")


class Load(Strict):
    """A load point.

    ``closed``: value = c clients, each sending its next request when the last has ended.
    ``open``: value = λ, requests per second, whether or not earlier ones have ended.
    ``prefill``: value = input tokens of a single request (the prefill experiment).
    ``trace``: value = mean λ of a recorded or shaped arrival sequence (rising and falling load).
    """

    kind: Literal["closed", "open", "prefill", "trace"]
    value: float = Field(gt=0)

    @property
    def label(self) -> str:
        """Short form for charts and ids: c8, λ2.5 (as r2.5), in16384."""
        prefix = {"closed": "c", "open": "r", "prefill": "in", "trace": "t"}[self.kind]
        return f"{prefix}{self.value:g}" if self.value < 1e6 else f"{prefix}{self.value:.0f}"


class Arm(Strict):
    """One configuration under comparison: what was asked for, by name and settings."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.+-]*$")
    label: str
    settings: dict[str, Scalar] = {}


class CellKey(Strict):
    """What makes a cell the same cell in a later, resumed run."""

    experiment: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    arm: str
    load: Load
    repeat: int = Field(ge=0)

    @property
    def id(self) -> str:
        """A file-name-safe identifier, unique within a run."""
        return re.sub(r"[^A-Za-z0-9._+-]", "-", f"{self.experiment}.{self.arm}.{self.load.label}.r{self.repeat}")


class Chunk(Strict):
    """One non-empty delta of a streamed response."""

    t_ns: int
    chars: int = Field(ge=0)
    kind: Literal["text", "reasoning"] = "text"
    tokens_so_far: int | None = None
    """Generated tokens up to and with this chunk, where the server says so mid-stream; else unknown."""


class RequestRecord(Strict):
    """One request as the client saw it, with what the server said of it."""

    request_id: int
    client: int | None = None
    session: str | None = None
    turn: int | None = None
    scheduled_ns: int | None = None
    """When the arrival process wanted it sent (open loop)."""
    sent_ns: int
    ended_ns: int
    status: Literal["ok", "failed", "timed_out", "cancelled", "cut_off"]
    """cut_off: still running when the cell ended; cancelled: aborted by the driver on purpose."""
    error: str | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    chunks: list[Chunk] = []
    requested_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    token_source: Literal["usage", "timings", "tokenizer"] | None = None
    """Where the counts come from. A count is never the requested length nor the number of chunks."""
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    verify_steps: int | None = None
    accepted_per_position: list[int] | None = None
    server_prompt_s: float | None = None
    server_decode_s: float | None = None
    output_sha256: str | None = None
    """Of the whole generated text: equal outputs between arms can be counted without keeping the text."""
    prompt_sha256: str | None = None


class ServerSample(Strict):
    """The server's own figures at one moment, sampled through the window."""

    t_ns: int
    values: dict[str, float | None]


class Counts(Strict):
    """Requests by what became of them. ``sent`` is goodput's denominator."""

    sent: int
    completed: int
    failed: int
    timed_out: int
    cancelled: int
    cut_off: int


class CellRecord(Strict):
    """One line of ``results.jsonl``: one arm at one load point in one repeat."""

    schema_version: int = SCHEMA_VERSION
    metrics_version: int
    run_id: str
    cell: CellKey
    arm: Arm
    asked: dict[str, Scalar] = {}
    """Settings of the measurement itself: burn-in, warm-up, window (s), output tokens, …"""
    resolved: dict[str, Scalar] = {}
    """What the server reports of itself: these, not ``asked``, are compared between arms."""
    workload_hash: str
    """Of the workload's definition (trace, lengths, sampling), not of the cell's own prompts."""
    seed: int
    started_at: datetime
    window_ns: tuple[int, int] | None = None
    status: Literal["ok", "invalid", "failed"]
    """invalid: measured, but a rule was broken (see ``reason``): kept, not drawn as a result."""
    reason: str | None = None
    flags: list[str] = []
    """Labels that must follow the number wherever it is shown: client-bound, forced-acceptance, simulated, …"""
    counts: Counts | None = None
    metrics: dict[str, float | None] = {}
    """By tag of ``kit.records.metrics``."""
    server: dict[str, float | None] = {}
    """The server's own figures over the window (means of samples, differences of counters)."""
    raw: str | None = None
    """Path of the raw request lines, relative to the run's folder."""


class Gpu(Strict):
    """One GPU as the driver describes it."""

    name: str
    memory_mib: int | None = None
    driver: str | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle_reasons: str | None = None


class Provenance(Strict):
    """Where a run's numbers come from. Never a key, a token or a home directory."""

    commit: str | None = None
    dirty: bool | None = None
    versions: dict[str, str] = {}
    """kit, python, the engine, torch, cuda, … whatever took part."""
    machine: str | None = None
    cpu: str | None = None
    cores: int | None = None
    memory_gib: float | None = None
    gpus: list[Gpu] = []
    model_stamp: str | None = None
    """Hash of the model's config and weight index (see ``provenance.model_stamp``)."""
    argv: list[str] = []


class RunRecord(Strict):
    """``run.json``: one run of one or more experiments on one model and machine."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    model: str
    """The MODEL= name of the card."""
    title: str
    stand_in: bool
    """The weights are a stand-in of a real model's shape, not a product model."""
    engine: str
    profile: str
    created_at: datetime
    anchor: tuple[datetime, int] | None = None
    """(wall clock, perf_counter_ns) taken together."""
    seed: int
    card: dict
    provenance: Provenance
    notes: list[str] = []
    """Labels for the whole run: forced split, simulated, …"""
