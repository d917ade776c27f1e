"""Attach to any server that speaks OpenAI's API and already runs: nothing is started, stopped or changed.

The server is asked who it is: llama.cpp answers ``/props``, SGLang ``/server_info``, vLLM ``/version``. What it tells
of itself becomes the resolved settings; what it does not tell stays unknown. An API key is read from the environment
variable that the settings name, sent to that server alone, and written nowhere.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kit.engines import llamacpp, sglang
from kit.engines.base import HttpError, Server, api_headers, request, request_json
from kit.engines.process import EngineError
from kit.records.schema import Scalar

SAMPLED_VLLM = {
    "running": "vllm:num_requests_running",
    "queued": "vllm:num_requests_waiting",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "accepted_per_position": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
}
"""Prometheus names by role, from vLLM's documentation of its metrics."""

_ENDPOINTS = ("/chat/completions", "/completions", "/models")


class AttachSettings(BaseModel):
    """Which server to attach to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    """With or without ``/v1``; kept without."""
    model: str | None = None
    """The served name; may be left out where only one is served."""
    api_key_env: str | None = None
    """NAME of the environment variable that holds the key."""
    metrics_url: str | None = None
    """The Prometheus page; None: ``/metrics`` of the same server, if it answers."""
    timeout_s: float = Field(default=10.0, gt=0)
    """For each question asked while attaching."""

    @field_validator("base_url")
    @classmethod
    def _normal(cls, url: str) -> str:
        return normal_url(url)

    @field_validator("metrics_url")
    @classmethod
    def _whole(cls, url: str | None) -> str | None:
        return None if url is None else _checked_url(url)

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not name.isidentifier():
            # The value is not repeated: whoever errs here has most likely given the key itself.
            raise ValueError("must be the NAME of an environment variable, not the key itself")
        return name

    @classmethod
    def checked(cls, **settings: Any) -> AttachSettings:
        """The settings; raises EngineError that names the bad field and, for an unknown one, the valid ones."""
        try:
            return cls(**settings)
        except ValidationError as error:
            # "from None": pydantic's own text repeats the input, which may be a key.
            raise EngineError("attach settings: " + "; ".join(_explain(e) for e in error.errors())) from None


def _explain(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown setting {name!r}; the settings are: {', '.join(AttachSettings.model_fields)}"
    return f"{name}: {error['msg'].removeprefix('Value error, ')}"


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url.strip())
        port_fits = parts.port is None or parts.port > 0
    except ValueError:
        port_fits = False
    if not port_fits or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not a URL like http://HOST:PORT or https://HOST/v1")
    if parts.username is not None or parts.password is not None:
        raise ValueError("the URL holds credentials; put the key into an environment variable and name it")
    if parts.query or parts.fragment:
        raise ValueError("the URL must end before any ? or #")
    return url.strip().rstrip("/")


def normal_url(url: str) -> str:
    """The URL without trailing slash, ``/v1`` or an endpoint below it. Raises ValueError if it is none to attach to."""
    plain = _checked_url(url)
    for endpoint in _ENDPOINTS:
        if plain.endswith(f"/v1{endpoint}"):
            plain = plain.removesuffix(endpoint)
    return plain.removesuffix("/v1").rstrip("/")


def attach(settings: AttachSettings) -> Server:
    """The running server. Closing what is returned leaves the server running.

    Raises EngineError if it is not reachable, wants a key or refuses it, is no such server, serves nothing, or does
    not serve the named model (the message lists what it serves).
    """
    base_url, headers = settings.base_url, api_headers(settings.api_key_env)
    served = _served_models(settings, headers)
    model = _choose(served, settings)

    def ask(path: str) -> Any:
        try:
            return request_json("GET", f"{base_url}{path}", headers=headers, timeout_s=settings.timeout_s)
        except HttpError:
            return None

    server = _identify(base_url, ask, model) or Server(base_url, "openai", model, {"engine": None})
    server.model = model
    server.api_key_env = settings.api_key_env
    server.resolved = {"layout": None, "engine_build": None, "model_stamp": None, "model": model} | server.resolved
    server.metrics_url = settings.metrics_url or _metrics_url(settings, headers)
    return server


def _served_models(settings: AttachSettings, headers: dict[str, str]) -> list[str]:
    url = f"{settings.base_url}/v1/models"
    try:
        answer = request_json("GET", url, headers=headers, timeout_s=settings.timeout_s)
    except HttpError as error:
        raise EngineError(_why_not(settings, error)) from error
    entries = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        raise EngineError(f"{url} answers, but not with a list of models: is {settings.base_url} an OpenAI-style API?")
    names = [str(entry["id"]) for entry in entries if isinstance(entry, dict) and entry.get("id")]
    if not names:
        raise EngineError(f"the server at {settings.base_url} serves no model ({url} lists none); load one first")
    return names


def _why_not(settings: AttachSettings, error: HttpError) -> str:
    base_url, name = settings.base_url, settings.api_key_env
    if error.status is None:
        return f"no server answers at {base_url} ({error}); check host and port, and that the server is up"
    if error.status in (401, 403):
        if name is None:
            return (
                f"the server at {base_url} wants an API key (HTTP {error.status}): put it into an environment variable "
                "and give that variable's name as api_key_env"
            )
        return f"the server at {base_url} refuses the API key in {name} (HTTP {error.status})"
    if error.status == 404:
        return f"{base_url}/v1/models is not there (HTTP 404): {base_url} is not the base URL of an OpenAI-style API"
    if 300 <= error.status < 400:
        return f"{base_url} redirects elsewhere (HTTP {error.status}); give the final URL (https, perhaps)"
    if error.status == 503:
        return f"the server at {base_url} is still loading or overloaded (HTTP 503); try again when it is ready"
    return f"the server at {base_url} cannot be asked for its models: {error}"


def _choose(served: list[str], settings: AttachSettings) -> str:
    listed = ", ".join(served[:20]) + (f" and {len(served) - 20} more" if len(served) > 20 else "")
    if settings.model is None:
        if len(served) > 1:
            raise EngineError(
                f"the server at {settings.base_url} serves several models; choose one by model=: {listed}"
            )
        return served[0]
    if settings.model not in served:
        raise EngineError(f"the server at {settings.base_url} does not serve {settings.model!r}; it serves: {listed}")
    return settings.model


def _identify(base_url: str, ask: Any, model: str) -> Server | None:
    """A server of a known kind, with what it tells; None if it is of no known kind."""
    props = ask("/props")
    if isinstance(props, dict) and "total_slots" in props:
        return Server(
            base_url, "llamacpp", model, _llamacpp(props, ask("/slots")),
            sampled=dict(llamacpp.SAMPLED), flush_with=llamacpp.flush,
        )  # fmt: skip
    for path in ("/server_info", "/get_server_info"):  # the second: SGLang's older name
        info = ask(path)
        if isinstance(info, dict) and "internal_states" in info:
            return Server(
                base_url, "sglang", model, sglang.resolved_settings(info, sglang.ServerLog()),
                sampled=dict(sglang.SAMPLED), flush_with=sglang.flush_cache,
            )  # fmt: skip
    version = ask("/version")
    if isinstance(version, dict) and isinstance(version.get("version"), str):
        resolved: dict[str, Scalar] = {"engine": "vllm", "engine_build": f"vllm {version['version']}"}
        return Server(base_url, "openai", model, resolved, sampled=dict(SAMPLED_VLLM))
    return None


def _llamacpp(props: dict[str, Any], slots: Any) -> dict[str, Scalar]:
    """Of a llama.cpp server the kit did not start, threads and draft width are told nowhere, so they stay unknown."""
    on = {slot.get("speculative") for slot in slots if isinstance(slot, dict)} if isinstance(slots, list) else set()
    path = props.get("model_path")
    return {
        "engine": "llamacpp",
        "engine_build": f"llama.cpp {props['build_info']}" if props.get("build_info") else None,
        # Only the last part: the rest of the path is the server's owner's own.
        "model_file": PurePath(str(path)).name if path else None,
        "model_type": props.get("model_ftype"),
        "slots": props.get("total_slots"),
        "tokens_per_slot": (props.get("default_generation_settings") or {}).get("n_ctx"),
        "speculative": on.pop() if len(on) == 1 else None,
    }


def _metrics_url(settings: AttachSettings, headers: dict[str, str]) -> str | None:
    url = f"{settings.base_url}/metrics"
    try:
        text = request("GET", url, headers=headers, timeout_s=settings.timeout_s)
    except HttpError:
        return None
    # A front end may answer anything with a page of its own.
    return url if "# TYPE " in text else None
