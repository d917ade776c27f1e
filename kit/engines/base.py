"""What every engine hands out: a :class:`Server`, whoever started it and whatever it is.

Also the few HTTP calls the engines need to ask a server about itself. They are small and rare (start-up, flush),
so the standard library does; the load goes through :mod:`kit.load`.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from kit.engines.process import EngineError, ServerProcess
from kit.records.schema import Scalar

Dialect = Literal["llamacpp", "sglang", "openai"]

SAMPLED_ROLES = ("running", "queued", "drafted", "accepted", "drafts", "accepted_per_position")
"""Roles a sampled Prometheus metric can have. ``running`` and ``queued`` are gauges (requests); ``drafted`` and
``accepted`` (tokens) and ``drafts`` (verify steps) are counters; ``accepted_per_position`` is a counter labelled by
position."""


@dataclass
class Server:
    """A running server. A context manager: leaving it stops a server the kit started, and lets an attached one be.

    ``base_url`` has neither a trailing slash nor ``/v1``. ``model`` is the name requests must give. ``resolved`` is
    what the server reports of itself. ``sampled`` maps roles (:data:`SAMPLED_ROLES`) to Prometheus names at
    ``metrics_url``. ``api_key_env`` *names* an environment variable; the key itself is kept nowhere.
    """

    base_url: str
    dialect: Dialect
    model: str
    resolved: dict[str, Scalar] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    """Labels that must follow every number measured here (``forced-acceptance``, …)."""
    log_path: Path | None = None
    metrics_url: str | None = None
    sampled: dict[str, str] = field(default_factory=dict)
    api_key_env: str | None = None
    process: ServerProcess | None = field(default=None, repr=False)
    flush_with: Callable[[Server], None] | None = field(default=None, repr=False)

    def flush(self) -> None:
        """Empty the server's prefix cache. Raises EngineError if the server refuses or knows no way to."""
        if self.flush_with is None:
            raise EngineError(f"the server at {self.base_url} offers no way to empty its prefix cache")
        self.flush_with(self)

    def headers(self) -> dict[str, str]:
        """Headers of every request, with the key if one is named. Raises EngineError if the variable is not set."""
        return api_headers(self.api_key_env)

    def close(self) -> None:
        """Stop the server if the kit started it."""
        if self.process is not None:
            self.process.stop()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def api_headers(api_key_env: str | None) -> dict[str, str]:
    """``Authorization`` from the named environment variable; no header if none is named.

    Raises EngineError if the variable is not set or empty.
    """
    if api_key_env is None:
        return {}
    value = os.environ.get(api_key_env, "").strip()
    if not value:
        raise EngineError(f"the API key's environment variable {api_key_env} is not set")
    return {"Authorization": f"Bearer {value}"}


class HttpError(EngineError):
    """A request did not give a usable answer. ``status`` is None if there was no answer at all."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer like any other: following one would carry the API key to another host."""

    def redirect_request(self, *_args: Any) -> None:
        return None


def request(
    method: Literal["GET", "POST"],
    url: str,
    *,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 5.0,
) -> str:
    """One HTTP request; the answer's text. ``body`` is sent as JSON. Raises HttpError for anything but 2xx.

    Proxies of the environment are used for other hosts, never for this one.
    """
    local = urllib.parse.urlsplit(url).hostname in {"127.0.0.1", "::1", "localhost"}
    handlers = [_NoRedirect(), *([urllib.request.ProxyHandler({})] if local else [])]
    sent = {"Accept": "application/json, text/plain", **(headers or {})}
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        sent["Content-Type"] = "application/json"
    elif method == "POST":
        data = b""
    try:
        ask = urllib.request.Request(url, data=data, headers=sent, method=method)
        with urllib.request.build_opener(*handlers).open(ask, timeout=timeout_s) as answer:
            return answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            said = _without_key(error.read(2000).decode(errors="replace").strip(), sent)
        raise HttpError(f"{method} {url}: HTTP {error.code}{': ' + said[:300] if said else ''}", error.code) from error
    except urllib.error.URLError as error:
        raise HttpError(f"{method} {url}: {error.reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise HttpError(f"{method} {url}: {error or type(error).__name__}") from error


def _without_key(text: str, headers: Mapping[str, str]) -> str:
    """A server's words without the key: some repeat it when they refuse it."""
    key = headers.get("Authorization", "").removeprefix("Bearer ")
    return text.replace(key, "***") if key else text


def request_json(
    method: Literal["GET", "POST"],
    url: str,
    *,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 5.0,
) -> Any:
    """Like :func:`request`, with the answer parsed. Raises HttpError if it is not JSON."""
    text = request(method, url, body=body, headers=headers, timeout_s=timeout_s)
    try:
        return json.loads(text)
    except ValueError as error:
        raise HttpError(f"{method} {url}: the answer is not JSON: {text[:100]!r}") from error
