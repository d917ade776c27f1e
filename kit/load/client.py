"""One streamed request: what was sent, when each piece came, and what the server said of it.

Stamps are ``perf_counter_ns``, taken as soon as bytes are read and before anything is parsed. A *chunk* is a
non-empty generated delta: answer text, reasoning or tool-call arguments. A role-only or empty delta is none, so it
neither sets TTFT nor counts. Token counts are the server's own (usage, llama.cpp timings); a chunk carries its
cumulative count where the server tells it mid-stream and None elsewhere.

A request is ``ok`` only if the stream ended the way the protocol says, with a finish reason or ``[DONE]``. An
error object in a 200 stream, a cut connection, an HTTP error and a time-out are what they are; none is a success.

Connections: one session for all requests, without a cap on connections, kept alive. :meth:`Client.warm` opens
connections by plain GETs before they are needed, so that a request finds one open and connect time is not in its
TTFT. Requests that had to open one all the same are counted. Nothing waits for a local semaphore: ``sent_ns`` is
taken before the request is handed to the HTTP client, so any local wait would be in the latency.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from kit.errors import KitError
from kit.load.spec import LoadSpec
from kit.load.traces import as_text
from kit.records.schema import Chunk, RequestRecord

ERROR_CHARS = 200
"""Length to which an error message is kept."""

KEEPALIVE_S = 4.0
"""Idle connections are dropped after this: servers commonly close theirs after 5 s (uvicorn, cpp-httplib), and a
request on a connection that is just being closed would fail."""

STALE_AT_MOST = 10
"""Kept connections that may turn out to be closed before a request is given up."""

DRAIN_S = 1.0
"""How long to wait for the end of a response after ``[DONE]``, to reuse its connection."""


class SseDecoder:
    """Server-sent events from bytes as they come, split anywhere.

    Handles CR, LF and CRLF line ends, several ``data`` lines an event, comments and other fields, as the HTML
    standard's section on server-sent events defines them.
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8-sig")(errors="replace").decode
        self._rest = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[str]:
        """The data of the events that these bytes complete."""
        return self._lines(self._decode(data))

    def flush(self) -> list[str]:
        """At the end of the stream: the last event, if its blank line is missing but its data is whole."""
        events = self._lines("\n\n")
        return [event for event in events if event]

    def _lines(self, text: str) -> list[str]:
        text = self._rest + text
        # A CR at the very end may be half of a CRLF: keep it until the next bytes tell.
        held = "\r" if text.endswith("\r") else ""
        if held:
            text = text[:-1]
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        *lines, rest = text.split("\n")
        self._rest = rest + held
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append("\n".join(self._data))
                    self._data = []
                continue
            name, _, value = line.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
        return events


@dataclass(frozen=True)
class Job:
    """A request to be sent: its body's prompt and where it stands in the load."""

    request_id: int
    messages: list[dict[str, Any]]
    output_tokens: int
    client: int | None = None
    session: str | None = None
    turn: int | None = None
    scheduled_ns: int | None = None


@dataclass(slots=True)
class Stream:
    """What has come of one request so far. Plain fields, since this is filled while others are timed."""

    job: Job
    prompt_sha256: str
    sent_ns: int = 0
    ended_ns: int = 0
    status: str = "failed"
    error: str | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    done: bool = False
    pieces: list[str] = field(default_factory=list)
    chunks: list[tuple[int, int, str, int | None]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    spec: dict[str, Any] | None = None
    connect_ns: int | None = None
    tokenized: int | None = None
    """Tokens of the text by the server's tokenizer, asked for after the run where no count came."""

    def event(self, data: str, now_ns: int) -> None:
        """Take one event of the stream. Raises :class:`StreamError` if it tells of an error."""
        if data.strip() == "[DONE]":
            self.done = True
            self.ended_ns = now_ns
            return
        try:
            value = json.loads(data)
        except ValueError as error:
            raise StreamError(f"event is not JSON: {data}") from error
        try:
            self._take(value, now_ns)
        except (AttributeError, TypeError, LookupError) as error:
            raise StreamError(f"event is not a completion chunk: {data}") from error

    def _take(self, value: dict[str, Any], now_ns: int) -> None:
        if value.get("error"):
            raise StreamError(f"error in stream: {_message(value['error'])}")
        if value.get("object") == "error":
            raise StreamError(f"error in stream: {_message(value)}")
        self.ended_ns = now_ns
        usage, timings = value.get("usage"), value.get("timings")
        if isinstance(usage, dict):
            self.usage = usage
        if isinstance(timings, dict):
            self.timings = timings
        details = (value.get("sglext") or {}).get("spec_tokens_details")
        if details:
            self.spec = details[0] if isinstance(details, list) else details
        texts: list[tuple[str, str]] = []
        for choice in value.get("choices") or ():
            texts.extend(_generated(choice))
            if choice.get("finish_reason"):
                self.finish_reason = str(choice["finish_reason"])
        count = _count((usage or {}).get("completion_tokens"), (timings or {}).get("predicted_n"))
        for number, (kind, text) in enumerate(texts, 1):
            self.pieces.append(text)
            # One count for several deltas of an event belongs to the last of them.
            self.chunks.append((now_ns, len(text), kind, count if number == len(texts) else None))

    def record(self, draft_width: int | None = None) -> RequestRecord:
        """The request as a record. ``draft_width``: see :attr:`~kit.load.spec.LoadSpec.draft_width`."""
        usage, timings, spec = self.usage or {}, self.timings or {}, self.spec or {}
        details = usage.get("prompt_tokens_details") or {}
        told = [c[3] for c in self.chunks if c[3] is not None]
        completion, source = usage.get("completion_tokens"), "usage"
        if completion is None:
            completion, source = timings.get("predicted_n"), "timings"
        if completion is None and told:
            completion, source = told[-1], "usage"
        if completion is None and self.tokenized is not None:
            completion, source = self.tokenized, "tokenizer"
        prompt, cached = usage.get("prompt_tokens"), _count(details.get("cached_tokens"), timings.get("cache_n"))
        if prompt is None and timings.get("prompt_n") is not None and cached is not None:
            prompt = timings["prompt_n"] + cached
        steps = spec.get("spec_verify_ct")
        accepted, drafted = timings.get("draft_n_accepted"), timings.get("draft_n")
        if spec:
            accepted = spec.get("spec_num_correct_drafts")
            drafted = spec.get("spec_num_proposed_drafts")
            if draft_width is not None and steps is not None:
                drafted = steps * draft_width
        histogram = spec.get("spec_correct_drafts_histogram") or None
        return RequestRecord(
            request_id=self.job.request_id,
            client=self.job.client,
            session=self.job.session,
            turn=self.job.turn,
            scheduled_ns=self.job.scheduled_ns,
            sent_ns=self.sent_ns,
            ended_ns=self.ended_ns,
            status=self.status,  # type: ignore[arg-type]
            error=self.error,
            http_status=self.http_status,
            finish_reason=self.finish_reason,
            chunks=[Chunk(t_ns=t, chars=n, kind=k, tokens_so_far=c) for t, n, k, c in self.chunks],  # type: ignore[arg-type]
            requested_tokens=self.job.output_tokens,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
            token_source=source if completion is not None else None,  # type: ignore[arg-type]
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            verify_steps=steps,
            accepted_per_position=_per_position(histogram),
            server_prompt_s=_seconds(timings.get("prompt_ms")),
            server_decode_s=_seconds(timings.get("predicted_ms")),
            output_sha256=_sha256("".join(self.pieces)) if self.pieces else None,
            prompt_sha256=self.prompt_sha256,
        )


class StreamError(Exception):
    """The stream told of an error, or broke the protocol."""


class Client:
    """Sends requests to one server. Make with :func:`connect`."""

    def __init__(self, session: aiohttp.ClientSession, spec: LoadSpec, model: str, key: str | None) -> None:
        self.session = session
        self.spec = spec
        self.model = model
        self.stop_status = "cut_off"
        """Status of a request that is cancelled while under way."""
        self.warmed = 0
        self.resent = 0
        self.closes_streams = spec.dialect == "llamacpp"
        """The server closes a connection after a streamed answer, though it promised to keep it (llama.cpp does; of
        others it is learnt). Such a connection must not be used again: a request has to be given a new one."""
        self._key = key
        self._auth = {"Authorization": f"Bearer {key}"} if key else {}
        self._path = "/v1/chat/completions" if spec.api == "chat" else "/v1/completions"

    def body(self, job: Job) -> dict[str, Any]:
        """The JSON body of a request."""
        spec = self.spec
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": job.output_tokens,
            "temperature": spec.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if spec.api == "chat":
            body["messages"] = job.messages
        else:
            body["prompt"] = as_text(job.messages)
        if spec.ignore_eos:
            body["ignore_eos"] = True
        if spec.dialect == "llamacpp":
            body["timings_per_token"] = True
        if spec.dialect == "sglang":
            body["return_spec_tokens_details"] = True
        if spec.continuous_usage or (spec.continuous_usage is None and spec.dialect == "sglang"):
            body["stream_options"]["continuous_usage_stats"] = True
        if spec.slots and job.client is not None:
            body["id_slot"] = job.client % spec.slots
        body.update(spec.extra_body)
        return body

    async def send(self, job: Job, sink: Callable[[Stream], None]) -> Stream:
        """Send one request and read its answer; hand what came of it to ``sink``, also when cancelled.

        Never raises for what the server or the network does: that is in the status and the error.
        """
        body = self.body(job)
        data = json.dumps(body).encode()
        prompt = json.dumps(body.get("messages", body.get("prompt")), sort_keys=True)
        stream = Stream(job, _sha256(prompt))
        stream.sent_ns = perf_counter_ns()
        try:
            async with asyncio.timeout(self.spec.request_timeout_s):
                await self._exchange(stream, data)
            self._judge(stream)
        except TimeoutError:
            self._end(stream, "timed_out", f"no end within {self.spec.request_timeout_s:g} s")
        except asyncio.CancelledError:
            self._end(stream, self.stop_status, None)
            raise
        except StreamError as error:
            self._end(stream, "failed", str(error))
        except (aiohttp.ClientError, OSError) as error:
            self._end(stream, "failed", f"connection failed: {error or type(error).__name__}")
        finally:
            sink(stream)
        return stream

    async def _exchange(self, stream: Stream, data: bytes) -> None:
        """Send and read; again where a kept connection turned out to be closed, as any HTTP client would.

        The server then never took the request, and what the first attempt cost stays in the latency.
        """
        for _ in range(STALE_AT_MOST):
            try:
                return await self._read(stream, data)
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, ConnectionResetError):
                if stream.http_status is not None or stream.connect_ns is not None:
                    raise
                self.closes_streams = True
                self.resent += 1
        return await self._read(stream, data)

    async def _read(self, stream: Stream, data: bytes) -> None:
        trace = SimpleNamespace(stream=stream)
        async with self.session.post(
            self.spec.base_url + self._path,
            data=data,
            headers={"Content-Type": "application/json", "Accept": "text/event-stream", **self._auth},
            allow_redirects=False,
            trace_request_ctx=trace,
        ) as response:
            stream.http_status = response.status
            if response.status != 200:
                text = (await response.content.read(4096)).decode(errors="replace")
                raise StreamError(f"HTTP {response.status}: {_error_text(text)}")
            decoder = SseDecoder()
            try:
                while not stream.done:
                    piece = await response.content.readany()
                    now = perf_counter_ns()
                    events = decoder.feed(piece) if piece else decoder.flush()
                    for event in events:
                        stream.event(event, now)
                    if not piece:
                        return
            except aiohttp.ClientPayloadError as error:
                raise StreamError(f"connection cut: {error}") from error
            try:
                async with asyncio.timeout(DRAIN_S):
                    while await response.content.readany():
                        pass
            except (TimeoutError, aiohttp.ClientError):
                response.close()
            if self.closes_streams:
                response.close()

    def _judge(self, stream: Stream) -> None:
        """ok, or why not, of a stream that ended without an error."""
        if stream.finish_reason in ("abort", "error"):
            self._end(stream, "failed", f"finish_reason {stream.finish_reason}")
        elif stream.done or stream.finish_reason:
            stream.status = "ok"
        elif not stream.ended_ns:
            self._end(stream, "failed", "answer holds no events: the server did not stream")
        else:
            self._end(stream, "failed", "connection cut: the stream ended without finish_reason or [DONE]")

    def _end(self, stream: Stream, status: str, error: str | None) -> None:
        stream.status = status
        stream.ended_ns = perf_counter_ns()
        stream.error = None if error is None else self.redact(error)[:ERROR_CHARS]

    def redact(self, text: str) -> str:
        """One line of text without the key: servers like to repeat it in their errors."""
        text = " ".join(text.split())
        return text.replace(self._key, "***") if self._key else text

    async def warm(self, connections: int = 1) -> None:
        """Open this many connections by GETs at the same time, and leave them open for requests.

        Raises KitError if the server does not answer at all.
        """

        async def one() -> None:
            await self.get(self.spec.base_url + self._warm_path())

        try:
            async with asyncio.timeout(30):
                await asyncio.gather(*(one() for _ in range(connections)))
        except (aiohttp.ClientError, OSError) as error:
            reason = self.redact(str(error) or type(error).__name__)
            raise KitError(f"{self.spec.base_url} does not answer: {reason}") from error
        self.warmed += connections

    def _warm_path(self) -> str:
        # Of SGLang's pages not /health: it looks after the scheduler first and answers after a second.
        return "/health" if self.spec.dialect == "llamacpp" else "/v1/models"

    async def get(self, url: str) -> tuple[int, str]:
        """(status, text) of a page. The key goes to the spec's own server only, and no redirect is followed."""
        own = url.startswith(self.spec.base_url + "/")
        async with self.session.get(url, headers=self._auth if own else {}, allow_redirects=False) as response:
            return response.status, await response.text()

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of a text by the server's tokenizer endpoint; None where it has none."""
        body = {"content": text, "prompt": text, "model": self.model, "add_special_tokens": False}
        try:
            async with (
                asyncio.timeout(30),
                self.session.post(
                    self.spec.base_url + "/tokenize", json=body, headers=self._auth, allow_redirects=False
                ) as response,
            ):
                if response.status != 200:
                    return None
                value = await response.json(content_type=None)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None
        tokens = value.get("tokens") if isinstance(value, dict) else None
        return len(tokens) if isinstance(tokens, list) else None


@asynccontextmanager
async def connect(spec: LoadSpec) -> AsyncIterator[Client]:
    """A client for a spec's server, with its model name found out.

    Raises KitError if the key's variable is not set, or the server does not answer.
    """
    key = read_key(spec.key_env)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        headers={"Accept-Encoding": "identity"},
        trace_configs=[_connect_trace()],
        # Proxies of the environment are for other hosts; a server on this one is asked directly.
        trust_env=urlsplit(spec.base_url).hostname not in ("127.0.0.1", "::1", "localhost"),
    ) as session:
        client = Client(session, spec, spec.model or "", key)
        if spec.model is None:
            client.model = await _first_model(client)
        yield client


def read_key(name: str | None) -> str | None:
    """The value of the key's variable. Raises KitError if it is named and not set."""
    if name is None:
        return None
    value = os.environ.get(name, "").strip()
    if not value:
        raise KitError(f"environment variable {name}, named as the API key's, is not set")
    return value


async def _first_model(client: Client) -> str:
    url = client.spec.base_url + "/v1/models"
    try:
        async with asyncio.timeout(30):
            status, text = await client.get(url)
        if status != 200:
            raise KitError(f"{url} answers HTTP {status}: {client.redact(_error_text(text))[:ERROR_CHARS]}")
        return str(json.loads(text)["data"][0]["id"])
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        reason = client.redact(str(error) or type(error).__name__)
        raise KitError(f"{client.spec.base_url} does not answer: {reason}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise KitError(f"{url} lists no model; name one with model") from error


def _connect_trace() -> aiohttp.TraceConfig:
    """Stamp how long a request waited for a new connection, if it had to open one."""
    trace = aiohttp.TraceConfig()

    async def start(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.connect_start = perf_counter_ns()

    async def end(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.stream.connect_ns = perf_counter_ns() - context.connect_start

    trace.on_connection_create_start.append(start)
    trace.on_connection_create_end.append(end)
    return trace


def _generated(choice: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """(kind, text) of the non-empty generated parts of a choice, in order."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        if choice.get("text"):
            yield "text", choice["text"]
        return
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    if isinstance(reasoning, str):
        yield "reasoning", reasoning
    content = delta.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    if content:
        yield "text", content
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        text = (function.get("name") or "") + (function.get("arguments") or "")
        if text:
            yield "text", text


def _sha256(text: str) -> str:
    # A server may send half of a surrogate pair as JSON; that is no reason to lose the request.
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _count(*values: object) -> int | None:
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _per_position(histogram: list[int] | None) -> list[int] | None:
    """Accepted tokens at each draft position from "steps that accepted exactly k": Σ of those with k ≥ position."""
    if histogram is None:
        return None
    return [sum(histogram[position:]) for position in range(1, len(histogram))]


def _message(error: object) -> str:
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error)


def _error_text(body: str) -> str:
    """The message in an HTTP error's body, or the body."""
    try:
        value = json.loads(body)
    except ValueError:
        return body.strip() or "empty answer"
    if isinstance(value, dict):
        return _message(value.get("error") or value.get("message") or value.get("detail") or value)
    return str(value)
