"""What the driver is told (:class:`LoadSpec`) and what it gives back (:class:`DriverResult`).

One spec is one cell: one load point, one repeat, against one server. The arm is not in it: prompts and arrival
times follow from seed, load and repeat alone, so that all arms do the same work.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from kit.errors import KitError
from kit.load.arrivals import Arrivals
from kit.load.traces import WorkloadSpec
from kit.load.window import parse_slo
from kit.records.schema import Counts, Load, Strict

Dialect = Literal["llamacpp", "sglang", "openai"]


class LoadSpec(Strict):
    """One cell for the driver. Seconds unless the name says otherwise."""

    base_url: str
    """With or without ``/v1``."""
    dialect: Dialect = "openai"
    api: Literal["chat", "completions"] = "chat"
    model: str | None = None
    """None: the first that ``/v1/models`` lists."""
    key_env: str | None = None
    """NAME of the environment variable that holds the API key. The value is never written anywhere."""

    workload: WorkloadSpec
    load: Load
    """closed (c clients), open (λ) or trace (mean λ of a shaped or recorded sequence)."""
    arrivals: Arrivals = Arrivals()
    seed: int = Field(default=0, ge=0)
    repeat: int = Field(default=0, ge=0)

    burn_in_s: float = Field(default=5.0, ge=0)
    """Closed loop: the clients' first requests, which begin in the middle of a session and an answer, are spread over
    it."""
    warm_up_s: float = Field(default=5.0, ge=0)
    window_s: float = Field(default=30.0, gt=0)
    think_time_s: float = Field(default=0.0, ge=0)
    """Closed loop: pause of a client between an answer and its next request."""
    request_timeout_s: float = Field(default=600.0, gt=0)

    temperature: float = Field(default=0.0, ge=0)
    ignore_eos: bool = True
    """Send ``ignore_eos``, so that every answer has the length asked for. Not a field of OpenAI's own API."""
    continuous_usage: bool | None = None
    """Ask for token counts mid-stream (``stream_options.continuous_usage_stats``). None: where the dialect
    is known to have it (sglang); llama.cpp tells them in its timings."""
    extra_body: dict[str, JsonValue] = {}
    """Further fields of the request body."""
    slots: int | None = Field(default=None, ge=1)
    """llama.cpp: the server's slots. Client i keeps to slot i mod slots, so that a session's prefix stays in its slot;
    left to choose, the server lets sessions with a common beginning evict each other."""
    draft_width: int | None = Field(default=None, ge=0)
    """SGLang: the width that was set. Its own proposed count is wrong after a change of width, so with this
    the drafted tokens are verify steps × width."""

    slo: str | None = None
    """Targets in ms: ``ttft:500 tpot:50``."""
    metrics_urls: list[str] = []
    """Prometheus text or JSON pages to sample through the window."""
    metrics_names: list[str] = []
    """Names to keep, with ``*``; empty: those known for the dialect."""
    metrics_interval_s: float = Field(default=1.0, gt=0)
    processes: int = Field(default=1, ge=1, le=64)

    @field_validator("base_url")
    @classmethod
    def _root(cls, url: str) -> str:
        return check_url(url).removesuffix("/v1")

    @field_validator("metrics_urls")
    @classmethod
    def _metrics(cls, urls: list[str]) -> list[str]:
        return [check_url(url) for url in urls]

    @field_validator("slo")
    @classmethod
    def _slo(cls, text: str | None) -> str | None:
        if text is not None:
            parse_slo(text)
        return text

    @model_validator(mode="after")
    def _fits(self) -> LoadSpec:
        if self.load.kind == "prefill":
            raise ValueError("the driver has no prefill load; use closed with value 1 and a synthetic workload")
        if self.load.kind == "closed":
            if self.load.value != int(self.load.value):
                raise ValueError(f"a closed load has a whole number of clients, not {self.load.value:g}")
            if self.load.value > 1 and self.burn_in_s == 0:
                raise ValueError("burn_in_s must be above 0 with several clients: their starts are spread over it")
            if self.processes > self.load.value:
                raise ValueError(f"{self.processes} processes for {self.load.value:g} clients: use fewer")
        elif self.think_time_s:
            raise ValueError("think_time_s goes with a closed load")
        shaped = self.arrivals.process in ("piecewise", "trace")
        if self.load.kind == "trace" and not shaped:
            raise ValueError("a trace load needs arrivals.process piecewise or trace")
        if self.load.kind == "open" and shaped:
            raise ValueError(f"arrivals.process {self.arrivals.process} goes with load kind trace")
        if self.arrivals.process == "trace" and self.workload.kind != "mooncake":
            raise ValueError("arrivals.process trace needs a workload with timestamps: mooncake")
        return self

    @property
    def sampling(self) -> dict[str, Any]:
        """What besides the prompts decides the outputs: part of the workload hash."""
        return {
            "api": self.api,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "extra_body": self.extra_body,
        }


class Connections(Strict):
    """How many TCP connections were opened, and whether any of that could be in a latency."""

    warmed: int
    """Opened by a plain GET before the clients' first requests."""
    resent: int
    """Sent again, since the server had closed the connection that it had promised to keep."""
    opened_by_requests: int
    """Opened by a measured request in the window (its TTFT then holds the connect time)."""
    connect_max_s: float | None
    """The longest of those."""


class DriverResult(Strict):
    """``result.json`` of one driven cell; the raw lines lie beside it."""

    spec: LoadSpec
    model: str
    workload_hash: str
    lengths: str
    """Where the asked-for output lengths come from: recorded, fixed, tokenizer, characters."""
    complete: bool
    """False: stopped by a signal; the window is what there was of it."""
    stopped_by: str | None = None
    started_at: datetime
    anchor: tuple[datetime, int]
    """(wall clock, perf_counter_ns) taken together."""
    window_ns: tuple[int, int] | None
    counts: Counts | None
    metrics: dict[str, float | None]
    server: dict[str, float | None]
    flags: list[str]
    errors: dict[str, int] = {}
    """Messages of failed requests in the window, with how often (ten at most)."""
    client_lag_s: list[float] = []
    """The driver's event-loop delays through the window."""
    connections: Connections | None = None
    sample_errors: int = 0
    """Polls of the server's metrics that gave nothing."""


def parse_spec(text: str | bytes) -> LoadSpec:
    """A spec from JSON. Raises KitError that names the field and what is wrong with it."""
    try:
        return LoadSpec.model_validate_json(text)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, e['loc'])) or 'spec'}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        raise KitError("load spec: " + "; ".join(problems)) from error


def check_url(url: str) -> str:
    """The URL without trailing slash. Raises ValueError if it is none, or holds credentials."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not a URL like http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise ValueError("the URL holds credentials; put the key in an environment variable and name it in key_env")
    return url.rstrip("/")
