"""Workloads from the formats people have, and errors that say which line is wrong and how."""

from __future__ import annotations

import gzip
import json

import pytest

from kit.errors import KitError
from kit.load import traces
from kit.load.traces import WorkloadSpec, kind_of, preamble, read, with_preamble

TALK = [
    {"role": "system", "content": "You edit code."},
    {"role": "user", "content": "Fix it."},
    {"role": "assistant", "content": "Reading.", "output_tokens": 3},
    {"role": "tool", "content": "def f(): pass"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "edit"}}], "output_tokens": 7},
]


def write(path, *values):
    path.write_text("".join(json.dumps(v) + "\n" for v in values))
    return path


def messages(path, **more):
    return read(WorkloadSpec(kind="messages", path=path, **more))


def test_each_answer_is_a_turn_with_the_history_before_it(tmp_path):
    workload = messages(write(tmp_path / "t.jsonl", {"messages": TALK}))
    first, second = workload.sessions[0].turns
    assert (first.output_tokens, second.output_tokens, workload.lengths) == (3, 7, "recorded")
    history = workload.sessions[0].history(second)
    assert [m["role"] for m in history] == ["system", "user", "assistant", "tool"]
    assert not any("output_tokens" in m for m in history), "the kit's own field sent to the server"
    assert history[: first.upto] == workload.sessions[0].history(first), "turns share their prefix"


def test_lengths_may_lie_beside_the_messages_and_the_file_may_be_packed(tmp_path):
    plain = [{k: v for k, v in m.items() if k != "output_tokens"} for m in TALK]
    line = json.dumps({"id": "a", "messages": plain, "output_tokens": [3, 7]}) + "\n"
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (tmp_path / "t.jsonl").write_text(line)
    packed, unpacked = messages(tmp_path / "t.jsonl.gz"), messages(tmp_path / "t.jsonl")
    assert [t.output_tokens for t in packed.sessions[0].turns] == [3, 7]
    assert packed.workload_hash({}) == unpacked.workload_hash({})


@pytest.mark.parametrize("version", ["PREAMBLE_VERSION", "START_VERSION"])
def test_cells_that_another_kit_drove_otherwise_are_of_another_workload(tmp_path, monkeypatch, version):
    path = write(tmp_path / "t.jsonl", {"messages": TALK})
    before = messages(path).workload_hash({})
    monkeypatch.setattr(traces, version, 99)
    assert messages(path).workload_hash({}) != before


def test_limits_end_sessions_and_change_the_workloads_hash(tmp_path):
    path = write(tmp_path / "t.jsonl", {"messages": TALK}, {"messages": TALK})
    assert len(messages(path, max_sessions=1).sessions) == 1
    assert len(messages(path, max_turns=1).sessions[0].turns) == 1
    assert len(messages(path, max_prompt_chars=25).sessions[0].turns) == 1
    assert messages(path, output_tokens=9).sessions[0].turns[0].output_tokens == 9
    hashes = {messages(path, **m).workload_hash({"t": 0}) for m in ({}, {"max_turns": 1}, {"output_tokens": 9})}
    hashes |= {messages(path).workload_hash({"t": 1})}
    assert len(hashes) == 4
    assert messages(path).workload_hash({"t": 0}) in hashes
    with pytest.raises(KitError, match="max_prompt_chars=5"):
        messages(path, max_prompt_chars=5)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{oops", "t.jsonl:2: not JSON"),
        ("[]", "t.jsonl:2: expected a JSON object, found a list"),
        ('{"message": []}', 't.jsonl:2: needs "messages"'),
        ('{"messages": [{"role": "robot", "content": ""}]}', r"t.jsonl:2: messages\[0\]: role must be one of"),
        ('{"messages": [{"role": "user", "content": 5}]}', r"t.jsonl:2: messages\[0\]: content must be text"),
        (
            '{"messages": [{"role": "user", "content": "a"},'
            ' {"role": "assistant", "content": "b", "output_tokens": 0}]}',
            r"t.jsonl:2: messages\[1\] output_tokens must be a whole number above 0, not 0",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}], "output_tokens": [1]}',
            r"t.jsonl:2: output_tokens must be a list with one number per assistant message \(0\)",
        ),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, says):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n" + line + "\n")
    with pytest.raises(KitError, match=says):
        messages(path)


def test_files_that_are_none_of_it(tmp_path):
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 1000)[:-20])
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    (tmp_path / "none").write_text(json.dumps({"messages": [{"role": "user", "content": "only a question"}]}))
    for name, says in (("cut.gz", "gzip"), ("latin", "UTF-8"), ("none", "no session"), ("gone", "not a file")):
        with pytest.raises(KitError, match=says):
            messages(tmp_path / name)


def test_sharegpt(tmp_path):
    talk = [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello there"},
        {"from": "human", "value": "Bye"},
    ]
    path = tmp_path / "s.json"
    path.write_text(json.dumps([{"id": "x", "conversations": talk}]))
    workload = read(WorkloadSpec(kind="sharegpt", path=path))
    assert workload.lengths == "characters" and workload.sessions[0].turns[0].answer == "Hello there"
    path.write_text(json.dumps([{"conversations": [{"from": "cat", "value": "?"}]}]))
    with pytest.raises(KitError, match=r"item 0: conversations\[0\] needs"):
        read(WorkloadSpec(kind="sharegpt", path=path))


def mooncake(length, ids, at=0):
    return {"timestamp": at, "input_length": length, "output_length": 5, "hash_ids": ids}


def test_mooncake_requests_share_the_prefixes_their_hash_ids_share(tmp_path):
    path = write(tmp_path / "m.jsonl", mooncake(1100, [1, 2, 3]), mooncake(1030, [1, 2, 4], 2500), mooncake(512, [9]))
    one, two, three = read(WorkloadSpec(kind="mooncake", path=path)).sessions
    text = [s.history(s.turns[0])[0]["content"] for s in (one, two, three)]
    assert [len(t.split()) for t in text] == [1100, 1030, 512]
    shared = " ".join(text[0].split()[:1024])
    assert text[1].startswith(shared) and not text[1].startswith(" ".join(text[0].split()[:1030]))
    assert text[2].split()[:40] != text[0].split()[:40]
    assert two.at_s == 2.5
    again = read(WorkloadSpec(kind="mooncake", path=path)).sessions[0]
    assert again.history(again.turns[0])[0]["content"] == text[0]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"timestamp": 1, "input_length": 5}, "m.jsonl:1: a Mooncake line needs output_length, hash_ids"),
        (mooncake(600, [1]), "input_length 600 needs 2 hash_ids of 512 tokens, found 1"),
        (mooncake(5, ["a"]), "hash_ids must be a list of whole numbers"),
        (mooncake(-5, []), "input_length must be a whole number above 0"),
    ],
)
def test_malformed_mooncake_lines(tmp_path, value, says):
    with pytest.raises(KitError, match=says):
        read(WorkloadSpec(kind="mooncake", path=write(tmp_path / "m.jsonl", value)))


def test_the_format_is_found_from_the_content(tmp_path):
    assert kind_of(write(tmp_path / "a", {"messages": TALK})) == "messages"
    assert kind_of(write(tmp_path / "b", mooncake(5, [1]))) == "mooncake"
    (tmp_path / "c").write_text("[]")
    assert kind_of(tmp_path / "c") == "sharegpt"
    with pytest.raises(KitError, match="format is not clear"):
        kind_of(write(tmp_path / "d", {"prompt": "x"}))


def test_the_preamble_comes_first_in_every_shape_of_prompt():
    line = preamble(0, "closed", 2, 0, 7)
    assert line != preamble(0, "closed", 2, 1, 7) and line == preamble(0, "closed", 2, 0, 7)
    assert with_preamble(TALK, line)[0]["content"].startswith(line)
    parts = with_preamble([{"role": "user", "content": [{"type": "text", "text": "x"}]}], line)
    assert parts[0]["content"][0] == {"type": "text", "text": line}
    assert traces.as_text(with_preamble(TALK, line)).startswith(line)
    assert TALK[0]["content"] == "You edit code.", "the recorded session was changed"
