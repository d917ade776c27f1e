"""llama.cpp's server on the CPU, from the ``xllamacpp`` package, in a child process.

The embedded default: continuous batching, streaming, Prometheus metrics and speculation by the model's own MTP block,
an n-gram lookup, or both. One server per arm, since the draft width of a request has no effect in this build.

What was found out about this server (xllamacpp 2026.10.11549), and holds for whoever drives it:

* **Threads.** Compute threads spin at a barrier; with one per core, a client that takes a core for a moment stalls
  them all. The default leaves a core to the client.
* **Events.** Even where a verify step gives several tokens, each token is an event of its own; those of a step arrive
  together. The counts (``usage`` and ``timings``) come with the last event if ``stream_options.include_usage`` is set:
  for ``/v1/completions`` in the event that carries ``finish_reason``, for ``/v1/chat/completions`` in one with empty
  ``choices``. ``timings_per_token`` adds ``timings`` to each event, ``predicted_n`` among them.
* **Per request** the server tells tokens drafted and accepted (absent from ``timings`` if nothing was drafted), not
  the number of verify steps. That is in ``/metrics`` only, for the whole server.
* **Prefix cache.** A slot keeps its last sequence. This architecture's recurrent state cannot be cut at any position,
  so reuse ends at a checkpoint: the server takes one 4 tokens and one ``4 + ubatch`` tokens before a prompt's end. So a
  session whose history is what the client recorded (not what was generated) gets its earlier turn's prompt, less 4
  tokens, from the cache. That needs ``id_slot`` in the request: without it the free slot with the longest common prefix
  is taken (above a tenth of the prompt), so sessions that share a system prompt evict each other's, even beside an
  empty slot. A request for a busy slot waits for it.
* **N-gram lookup.** Of llama.cpp's several, ``ngram-simple`` looks into the request's own context only. ``ngram-mod``
  and ``ngram-cache`` remember other requests, which no flush empties: later cells would profit from earlier ones.
  A draft longer than the MTP width makes the server save the recurrent state, and decode the accepted part once more
  if more is refused than that width: long lookups are dear on this architecture.
* **Ends.** Prompts over a slot's context are refused with HTTP 400; a context that fills up ends with
  ``finish_reason`` "length" and fewer tokens than asked for.
* **Lossless.** Greedy output of all arms, alone and four at once, was equal to the last byte with float32 and Q8_0
  weights, also random ones without margins. With bf16 weights it follows the batch: some outputs differ between one
  request and four at once even without speculation, and so between arms.
* **Connections.** The server says it keeps connections alive, but closes one right after each streamed answer, without
  announcing it. A client needs a connection per streamed request. Closing it early cancels the request.
* **Host prompt cache.** By default the server also copies idle slots' states to a cache in RAM, on the thread that
  decodes. Off here (:attr:`LlamaCppSettings.prompt_cache_mib`), since it takes time from the arms by chance.
* A speculation that cannot be set up is only logged, and the server serves without it: :func:`start` reads back
  whether it is on.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kit.engines.base import HttpError, Server, request, request_json
from kit.engines.process import EngineError, ServerProcess, inherited_environment
from kit.records.provenance import model_stamp
from kit.records.schema import Scalar

READY_DEADLINE_S = 120.0

SAMPLED = {
    "running": "llamacpp:requests_processing",
    "queued": "llamacpp:requests_deferred",
    "drafted": "llamacpp:spec_decode_num_draft_tokens_total",
    "accepted": "llamacpp:spec_decode_num_accepted_tokens_total",
    "drafts": "llamacpp:spec_decode_num_drafts_total",
    "accepted_per_position": "llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
}
"""Prometheus names by role (``kit.engines.base.SAMPLED_ROLES``). The last is labelled ``position`` from 0, and is
absent until something was accepted. ``drafts`` counts verify steps; a step without a draft is not one."""

ANNOUNCEMENT = "kit-llamacpp-ready "
"""Starts the line by which the child says where it listens and with what it runs; JSON follows."""


def default_threads() -> int:
    """Cores this process may use, less one for the client; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 1)


class LlamaCppSettings(BaseModel):
    """Settings of one server: the weights, the arm, and what the arms of an experiment have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Path
    """A GGUF file."""
    speculation: Literal["none", "mtp", "ngram", "mtp+ngram"] = "none"
    """Who drafts. With both, the n-gram lookup is asked first, and the MTP block where it finds nothing."""
    draft_width: int | None = Field(default=None, ge=1, le=16)
    """Draft tokens per step of the MTP block: required with it, meaningless without."""
    load_mtp: bool | None = None
    """Keep the MTP block in memory even if unused; None: where it drafts."""
    slots: int = Field(default=8, ge=1, le=256)
    """Requests decoded at once."""
    tokens_per_slot: int = Field(default=2048, ge=16)
    """Context of a slot, prompt and output."""
    threads: int | None = Field(default=None, ge=1)
    """Compute threads; None: :func:`default_threads`."""
    batch_tokens: int = Field(default=2048, ge=1)
    """Tokens of all slots taken up in one scheduling step (prompt tokens are split to fit)."""
    ubatch_tokens: int = Field(default=512, ge=1)
    """Tokens computed at once."""
    prompt_cache_mib: int = Field(default=0, ge=0)
    """Host memory for states of slots that were given to other sessions."""
    ngram_match: int = Field(default=8, ge=1, le=256)
    """Tokens at the end of the context that must have occurred in it before for the n-gram lookup to draft."""
    ngram_max: int = Field(default=8, ge=1, le=256)
    """The lookup drafts at most so many tokens, namely those that followed last time; and at least ``ngram_match``."""
    forced_acceptance: tuple[float, ...] | None = None
    """Benchmarking only: the share of drafts accepted up to each position, whatever the model says; one number per
    position, never rising. The text is then not the model's. May be given as a string, ``0.75,0.6``."""

    @field_validator("forced_acceptance", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(","))
        return (value,) if isinstance(value, int | float) else value

    @model_validator(mode="after")
    def _consistent(self) -> LlamaCppSettings:
        if self.mtp_drafts and self.draft_width is None:
            raise ValueError(f"speculation {self.speculation!r} needs draft_width (1 to 16)")
        if not self.mtp_drafts and self.draft_width is not None:
            raise ValueError(f"draft_width is the MTP block's, and speculation {self.speculation!r} does not use it")
        if self.mtp_drafts and self.load_mtp is False:
            raise ValueError(f"speculation {self.speculation!r} needs the MTP block, but load_mtp is false")
        if self.ngram_match > self.ngram_max:
            raise ValueError(f"with ngram_match {self.ngram_match} above ngram_max {self.ngram_max} nothing is drafted")
        if self.ubatch_tokens > self.batch_tokens:
            raise ValueError(f"ubatch_tokens {self.ubatch_tokens} is above batch_tokens {self.batch_tokens}")
        rates = self.forced_acceptance
        if rates is not None:
            if self.speculation == "none":
                raise ValueError("forced_acceptance needs a speculation")
            if len(rates) != self.most_drafts:
                raise ValueError(
                    f"forced_acceptance needs {self.most_drafts} numbers, one per position; got {len(rates)}"
                )
            falling = all(a >= b for a, b in itertools.pairwise(rates))
            if not falling or not all(math.isfinite(r) and 0 <= r <= 1 for r in rates):
                raise ValueError("forced_acceptance must hold shares from 0 to 1 that never rise")
        return self

    @property
    def mtp_drafts(self) -> bool:
        """The MTP block drafts."""
        return self.speculation in ("mtp", "mtp+ngram")

    @property
    def ngram_drafts(self) -> bool:
        """The n-gram lookup drafts."""
        return self.speculation in ("ngram", "mtp+ngram")

    @property
    def most_drafts(self) -> int:
        """The most tokens a step can draft."""
        return max(self.draft_width or 0 if self.mtp_drafts else 0, self.ngram_max if self.ngram_drafts else 0)

    @classmethod
    def checked(cls, **settings: Any) -> LlamaCppSettings:
        """The settings; raises EngineError that names the bad field and, for an unknown one, the valid ones."""
        try:
            return cls(**settings)
        except ValidationError as error:
            raise EngineError("llama.cpp settings: " + "; ".join(_explain(e) for e in error.errors())) from error


def _explain(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown setting {name!r}; the settings are: {', '.join(LlamaCppSettings.model_fields)}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{name}: {message}" if name else message


def start(settings: LlamaCppSettings, log_dir: Path, ready_deadline_s: float = READY_DEADLINE_S) -> Server:
    """Start a server and wait until it answers; leaving the returned context manager stops it.

    Raises EngineError if the model is not there or not a GGUF file, if the server ends or hangs while loading (the
    message quotes its log), or if it does not run what was asked for.
    """
    _check_model(settings.model)
    log_path = log_dir / "server.log"
    order = settings.model_copy(update={"model": settings.model.absolute(), "threads": _threads(settings)})
    process = ServerProcess(
        [sys.executable, "-m", "kit.engines.llamacpp_server"],
        name="the llama.cpp server",
        log_path=log_path,
        env=inherited_environment(),
        stdin=order.model_dump_json(),
    )
    announced = process.wait_ready(lambda: _announced(process.log_text()), ready_deadline_s)
    base_url = announced["address"]
    try:
        process.wait_ready(lambda: _healthy(base_url), ready_deadline_s)
        slots = request_json("GET", f"{base_url}/slots")
        speculative = all(slot.get("speculative") for slot in slots)
        if speculative != (settings.speculation != "none"):
            raise EngineError(
                f"the llama.cpp server was asked for speculation {settings.speculation!r} but reports it "
                f"{'on' if speculative else 'off'}{process.log_quote()}"
            )
        return Server(
            base_url=base_url,
            dialect="llamacpp",
            model=announced["model"],
            resolved=_resolved(base_url, slots, announced) | {"model_stamp": model_stamp(settings.model)},
            flags=[] if settings.forced_acceptance is None else ["forced-acceptance"],
            log_path=log_path,
            metrics_url=f"{base_url}/metrics",
            sampled=dict(SAMPLED),
            process=process,
            flush_with=flush,
        )
    except BaseException:
        process.stop()
        raise


def flush(server: Server, wait_s: float = 10.0) -> None:
    """Empty every slot's prefix cache, waiting for requests that are being cancelled to end.

    Raises EngineError if a slot still serves a request after ``wait_s`` seconds, or if the server empties no slots
    (it must have been started with a folder for saved slots).
    """
    url, headers = f"{server.base_url}/slots", server.headers()
    deadline = time.monotonic() + wait_s
    while any(slot["is_processing"] for slot in request_json("GET", url, headers=headers)):
        if time.monotonic() > deadline:
            raise EngineError(f"the server at {server.base_url} still serves a request; its cache was not emptied")
        time.sleep(0.05)
    for slot in request_json("GET", url, headers=headers):
        request("POST", f"{url}/{slot['id']}?action=erase", headers=headers, timeout_s=30)


def _threads(settings: LlamaCppSettings) -> int:
    return settings.threads or default_threads()


def _check_model(path: Path) -> None:
    if not path.is_file():
        raise EngineError(f"the model {path} is not there; a GGUF file is needed")
    with path.open("rb") as handle:
        if handle.read(4) != b"GGUF":
            raise EngineError(f"the model {path} is not a GGUF file (it does not begin with GGUF)")


def _announced(log: str) -> dict[str, Any] | None:
    found = re.search(rf"^{ANNOUNCEMENT}(.+)\n", log, re.MULTILINE)
    return json.loads(found.group(1)) if found else None


def _healthy(base_url: str) -> bool:
    try:
        request("GET", f"{base_url}/health", timeout_s=2)
    except HttpError:
        return False
    return True


def _resolved(base_url: str, slots: list[dict[str, Any]], announced: dict[str, Any]) -> dict[str, Scalar]:
    """What the server says of itself: over HTTP where it does, else read back in its process after loading."""
    props = request_json("GET", f"{base_url}/props")
    [model] = request_json("GET", f"{base_url}/v1/models")["data"]
    ran = announced["resolved"]
    return {
        **ran,
        "engine": "llamacpp",
        "engine_build": f"xllamacpp {ran['xllamacpp']} ({props['build_info']})",
        "layout": f"cpu, {ran['threads']} thread{'' if ran['threads'] == 1 else 's'}",
        "model_file": Path(props["model_path"]).name,
        "model_parameters": model["meta"]["n_params"],
        "model_bytes": model["meta"]["size"],
        "model_type": props["model_ftype"],
        "slots": len(slots),
        "tokens_per_slot": min(slot["n_ctx"] for slot in slots),
    }
