"""The streaming client against a real local server: what a delta, a token, a success and a failure are."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from load_server import Answer, serving, spec

from kit.errors import KitError
from kit.load.client import Job, SseDecoder, connect
from kit.load.window import tpot_s, ttft_s
from kit.records.schema import RequestRecord


async def ask(
    script, *, tokens: int = 50, server_options: dict | None = None, **changes
) -> tuple[RequestRecord, object]:
    """One request to a scripted server; its record and the server."""
    async with serving(script, **(server_options or {})) as server, connect(spec(server.url, **changes)) as client:
        stream = await client.send(Job(1, [{"role": "user", "content": "hi"}], tokens), lambda _: None)
        return stream.record(client.spec.draft_width), server


async def test_role_only_and_empty_deltas_do_not_set_ttft():
    """Fault 1: a role-only delta taken for the first token."""

    async def script(answer: Answer, _: dict) -> None:
        await answer.delta(role="assistant", content=None)
        await answer.delta(text="")
        await asyncio.sleep(0.05)
        await answer.delta("x")
        await answer.end(1)

    record, server = await ask(script)
    assert [chunk.chars for chunk in record.chunks] == [1]
    assert record.chunks[0].t_ns >= server.answers[0].written_ns[2], "stamped before the token was written"
    assert ttft_s(record) >= 0.05


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_reasoning_counts_as_generated(field):
    """Fault 2: reasoning deltas ignored, TTFT late or missing."""

    async def script(answer: Answer, _: dict) -> None:
        await answer.delta(role="assistant")
        await answer.delta(**{field: "thinking"})
        await asyncio.sleep(0.3)
        await answer.delta("so")
        await answer.end(2)

    record, server = await ask(script)
    assert [chunk.kind for chunk in record.chunks] == ["reasoning", "text"]
    assert record.chunks[0].t_ns < server.answers[0].written_ns[2], "TTFT waited for the answer's text"


async def test_only_reasoning_still_has_a_ttft():
    async def script(answer: Answer, _: dict) -> None:
        await answer.delta(reasoning="thinking")
        await answer.end(1)

    record, _ = await ask(script)
    assert record.status == "ok" and len(record.chunks) == 1


@pytest.mark.parametrize("choices", [[], [{"index": 0, "delta": {"content": ""}}], [{"index": 0, "delta": {}}]])
async def test_usage_is_read_from_a_chunk_without_text(choices):
    """Fault 3: usage in a chunk with empty text or choices skipped, output length stuck at max_tokens."""

    async def script(answer: Answer, _: dict) -> None:
        for _ in range(5):
            await answer.delta("word ")
        await answer.end()

    async def with_usage(answer: Answer, body: dict) -> None:
        for _ in range(5):
            await answer.delta("word ")
        usage = {"prompt_tokens": 9, "completion_tokens": 37, "prompt_tokens_details": {"cached_tokens": 4}}
        await answer.event({"choices": choices, "usage": usage})
        await answer.raw(b"data: [DONE]\n\n")

    record, server = await ask(with_usage, tokens=50)
    assert (record.completion_tokens, record.token_source) == (37, "usage")
    assert (record.prompt_tokens, record.cached_tokens) == (9, 4)
    assert server.bodies[0]["stream_options"]["include_usage"] is True
    unknown, _ = await ask(script, tokens=50)
    assert unknown.completion_tokens is None and unknown.token_source is None, "a count was invented"


async def test_the_first_chunks_tokens_are_not_in_the_decode_rate():
    """Fault 6: twenty tokens in the first chunk, counted as if decoded in the time after it."""

    async def script(answer: Answer, _: dict) -> None:
        await answer.delta("x" * 40, usage=20)
        for n in range(21, 31):
            await asyncio.sleep(0.01)
            await answer.delta("xx", usage=n)
        await answer.end(30)

    record, _ = await ask(script, continuous_usage=True)
    span = (record.chunks[-1].t_ns - record.chunks[0].t_ns) / 1e9
    assert tpot_s(record) == pytest.approx(span / 10)


async def test_an_error_inside_a_200_stream_is_a_failure():
    """Fault 12: an error object in the stream counted as success."""

    async def script(answer: Answer, _: dict) -> None:
        await answer.delta("some")
        await answer.event({"error": {"message": "KV cache is full", "code": 500}})
        await answer.raw(b"data: [DONE]\n\n")

    record, _ = await ask(script)
    assert (record.status, record.http_status) == ("failed", 200)
    assert "KV cache is full" in record.error


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (b"", "without finish_reason or [DONE]"),
        (b'data: {"object": "error", "message": "out of memory"}\n\n', "out of memory"),
        (b'data: {"choices": [{"delta": {}, "finish_reason": "abort"}]}\n\n', "abort"),
        (b"data: {not json}\n\n", "not JSON"),
        (b"data: [1, 2]\n\n", "not a completion chunk"),
        (b'data: {"choices": [{"delta": {"content": "x', "not JSON"),
    ],
)
async def test_a_stream_that_does_not_end_as_it_should_is_a_failure(last, error):
    async def script(answer: Answer, _: dict) -> None:
        await answer.delta("some")
        await answer.raw(last)

    record, _ = await ask(script)
    assert record.status == "failed" and error in record.error


async def test_a_cut_connection_is_a_failure_and_keeps_what_came():
    async def script(answer: Answer, _: dict) -> None:
        await answer.delta("some", usage=3)
        await asyncio.sleep(0.1)
        answer.response._req.transport.abort()
        await asyncio.sleep(0.1)

    record, _ = await ask(script)
    assert record.status == "failed" and "connection" in record.error
    assert record.completion_tokens == 3


async def test_http_errors_keep_a_short_text_of_the_body():
    async def script(answer: Answer, _: dict) -> None:
        await answer.end(1)

    record, _ = await ask(script, server_options={"status": lambda n: 400})
    assert (record.status, record.http_status) == ("failed", 400)
    assert record.error == "HTTP 400: no room"


async def test_a_time_out_is_told_apart():
    async def script(answer: Answer, _: dict) -> None:
        await answer.delta("some")
        await asyncio.sleep(5)

    record, _ = await ask(script, request_timeout_s=0.3)
    assert record.status == "timed_out" and "0.3 s" in record.error


async def test_an_answer_that_is_not_streamed_is_refused():
    async def script(answer: Answer, _: dict) -> None:
        await answer.raw(json.dumps({"choices": [{"message": {"content": "all at once"}}]}).encode())

    record, _ = await ask(script)
    assert record.status == "failed" and "did not stream" in record.error


async def test_tool_calls_are_generated_text():
    async def script(answer: Answer, _: dict) -> None:
        await answer.delta(tool_calls=[{"index": 0, "function": {"name": "ls", "arguments": ""}}])
        await answer.delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a":1}'}}])
        await answer.end(6)

    record, _ = await ask(script)
    assert [chunk.chars for chunk in record.chunks] == [2, 7]


async def test_llamacpp_timings_give_counts_and_drafts():
    async def script(answer: Answer, body: dict) -> None:
        assert body["timings_per_token"] and body["ignore_eos"]
        for n in (1, 2, 3):
            value = {"choices": [{"index": 0, "delta": {"content": "ab"}}], "timings": {"predicted_n": n}}
            await answer.event(value)
        await answer.end()

    async def whole(answer: Answer, body: dict) -> None:
        await answer.event({"choices": [{"index": 0, "delta": {"content": "ab"}}], "timings": {"predicted_n": 2}})
        await answer.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        timings = {"cache_n": 30, "prompt_n": 12, "prompt_ms": 40.0, "predicted_n": 3, "predicted_ms": 30.0}
        await answer.event({"choices": [], "timings": {**timings, "draft_n": 8, "draft_n_accepted": 6}})
        await answer.raw(b"data: [DONE]\n\n")

    record, _ = await ask(script, dialect="llamacpp")
    assert [chunk.tokens_so_far for chunk in record.chunks] == [1, 2, 3]
    record, _ = await ask(whole, dialect="llamacpp")
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (42, 30, 3)
    assert (record.drafted_tokens, record.accepted_tokens, record.token_source) == (8, 6, "timings")
    assert (record.server_prompt_s, record.server_decode_s) == (0.04, 0.03)


async def test_sglang_drafts_use_the_width_that_was_set():
    details = {
        "spec_num_correct_drafts": 14,
        "spec_num_proposed_drafts": 40,
        "spec_verify_ct": 10,
        "spec_correct_drafts_histogram": [2, 2, 6],
    }

    async def script(answer: Answer, body: dict) -> None:
        assert body["return_spec_tokens_details"] and body["stream_options"]["continuous_usage_stats"]
        await answer.delta("ab", usage=1)
        await answer.event({"choices": [], "sglext": {"spec_tokens_details": details}})
        await answer.end(25)

    record, _ = await ask(script, dialect="sglang", draft_width=2)
    assert (record.drafted_tokens, record.accepted_tokens, record.verify_steps) == (20, 14, 10)
    assert record.accepted_per_position == [8, 6], "steps that accepted at least so many"
    record, _ = await ask(script, dialect="sglang")
    assert record.drafted_tokens == 40


async def test_completions_stream_text_and_get_a_prompt():
    async def script(answer: Answer, body: dict) -> None:
        assert isinstance(body["prompt"], str) and "messages" not in body
        await answer.event({"choices": [{"index": 0, "text": "ab"}]})
        await answer.event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        await answer.raw(b"data: [DONE]\n\n")

    record, _ = await ask(script, api="completions")
    assert record.status == "ok" and len(record.chunks) == 1


async def test_plain_openai_gets_no_fields_of_other_engines():
    async def script(answer: Answer, body: dict) -> None:
        await answer.delta("x")
        await answer.end(1)

    _, server = await ask(script, ignore_eos=False)
    assert set(server.bodies[0]) == {"model", "max_tokens", "temperature", "stream", "stream_options", "messages"}
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


async def test_a_server_that_is_not_there_is_a_clear_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(KitError, match="does not answer"):
        async with connect(spec(url)):
            pass


EVENTS = (
    b": comment\r\n\r\n"
    b'event: message\r\nid: 7\r\ndata: {"a":\r\ndata: 1}\r\n\r\n'
    b"data:no space\n\ndata: one\rdata: two\r\rdata: \xc3\xa4\n\n"
)
WANTED = ['{"a":\n1}', "no space", "one\ntwo", "ä"]


def test_events_are_the_same_however_the_bytes_are_split():
    whole = SseDecoder()
    assert whole.feed(EVENTS) + whole.flush() == WANTED
    for size in range(1, len(EVENTS)):
        decoder, found = SseDecoder(), []
        for start in range(0, len(EVENTS), size):
            found += decoder.feed(EVENTS[start : start + size])
        assert found + decoder.flush() == WANTED, f"split every {size} bytes"


def test_a_last_event_without_its_blank_line_is_not_lost():
    decoder = SseDecoder()
    assert decoder.feed(b"data: [DONE]\n") == []
    assert decoder.flush() == ["[DONE]"]
