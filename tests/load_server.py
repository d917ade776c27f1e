"""A scripted OpenAI-compatible server for the load driver's tests: real HTTP, every event as the test says.

A script is an async function ``(answer, body)`` that writes one streamed answer. The server keeps what it saw: request
bodies, headers, connections, and ``perf_counter_ns`` when it wrote what (the same clock as the driver's).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from time import perf_counter_ns

from aiohttp import web
from aiohttp.test_utils import TestServer

from kit.load.spec import LoadSpec


class Answer:
    """One streamed answer under way."""

    def __init__(self, response: web.StreamResponse):
        self.response = response
        self.written_ns: list[int] = []

    async def raw(self, data: bytes) -> None:
        self.written_ns.append(perf_counter_ns())
        await self.response.write(data)

    async def event(self, value: object) -> None:
        await self.raw(b"data: " + json.dumps(value).encode() + b"\n\n")

    async def delta(self, text: str | None = None, usage: int | None = None, **delta: object) -> None:
        """A chat delta; ``usage`` adds the tokens so far, as servers do mid-stream."""
        if text is not None:
            delta["content"] = text
        value: dict = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        if usage is not None:
            value["usage"] = {"prompt_tokens": 5, "completion_tokens": usage}
        await self.event(value)

    async def end(self, tokens: int | None = None, prompt: int = 5, cached: int | None = None, **more: object) -> None:
        await self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if tokens is not None:
            usage: dict = {"prompt_tokens": prompt, "completion_tokens": tokens}
            if cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            await self.event({"choices": [], "usage": usage, **more})
        await self.raw(b"data: [DONE]\n\n")


Script = Callable[[Answer, dict], Awaitable[None]]


class ScriptedServer:
    """The server; ``url`` is its base URL."""

    def __init__(
        self,
        script: Script,
        metrics: str | None = None,
        status: Callable[[int], int] = lambda n: 200,
        drops: bool = False,
        page_s: float = 0.0,
    ):
        self.script = script
        self.metrics = metrics
        self.status = status
        self.drops = drops
        self.page_s = page_s
        self.error_body = '{"error": {"message": "no room"}}'
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.metrics_headers: list[dict] = []
        self.answers: list[Answer] = []
        self.connections: set[int] = set()
        self.active = 0
        self.most_active = 0
        self.url = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            self.bodies.append(await request.json())
            self.headers.append(dict(request.headers))
            # The port of the client's end names the connection.
            self.connections.add(request.transport.get_extra_info("peername")[1])
            status = self.status(len(self.bodies))
            if status != 200:
                return web.Response(status=status, text=self.error_body, content_type="application/json")
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            answer = Answer(response)
            self.answers.append(answer)
            with suppress(ConnectionError):  # cut off by the driver, as it should at the window's end
                await self.script(answer, self.bodies[-1])
                if self.drops:  # promised to keep the connection, and closes it: as llama.cpp does
                    await response.write_eof()
                    request.transport.close()
            return response
        finally:
            self.active -= 1

    async def serve_metrics(self, request: web.Request) -> web.Response:
        self.metrics_headers.append(dict(request.headers))
        if self.metrics is None:
            return web.Response(status=404)
        return web.Response(text=self.metrics.replace("COUNT", str(10 * len(self.metrics_headers))))

    async def models(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.page_s)
        return web.json_response({"data": [{"id": "scripted"}]})


@asynccontextmanager
async def serving(script: Script, **options: object):
    """A scripted server on a free local port."""
    scripted = ScriptedServer(script, **options)
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", scripted.complete)
    app.router.add_post("/v1/completions", scripted.complete)
    app.router.add_get("/metrics", scripted.serve_metrics)
    app.router.add_get("/v1/models", scripted.models)
    app.router.add_get("/health", scripted.models)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server(shutdown_timeout=0.1)
    scripted.url = str(server.make_url("")).rstrip("/")
    try:
        yield scripted
    finally:
        await server.close()


def spec(url: str, **changes: object) -> LoadSpec:
    """A short closed-loop spec against a server."""
    base: dict = {
        "base_url": url,
        "workload": {"kind": "synthetic", "input_tokens": 8, "output_tokens": 10, "turns": 2},
        "load": {"kind": "closed", "value": 2},
        "burn_in_s": 0.2,
        "warm_up_s": 0.1,
        "window_s": 0.8,
    }
    return LoadSpec.model_validate({**base, **changes})


def steady(tokens: int = 10, chunk: int = 1, gap_s: float = 0.01) -> Script:
    """An answer of ``tokens`` tokens, ``chunk`` of them in each event of equal length, counted at the end."""

    async def script(answer: Answer, body: dict) -> None:
        await answer.delta(role="assistant", content=None)
        for _ in range(tokens // chunk):
            await asyncio.sleep(gap_s)
            await answer.delta("abcd")
        await answer.end(tokens)

    return script
