"""The sessions, the split and the committed tokenizer and trace: what training and the load driver rely on."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest

from kit.errors import KitError
from kit.standin import corpus

ROOT = Path(__file__).resolve().parents[1]
TRACE = ROOT / "data/traces/agent-sessions.jsonl.gz"
TOKENIZER = ROOT / "data/tiny-mtp/tokenizer.json"

SOURCE = '''import os


def total(values, start=0):
    """Sum of values."""
    result = start
    for value in values:
        result += value
    return result


def listing(folder):
    names = os.listdir(folder)
    names.sort()
    return names
'''


def written() -> list[corpus.Session]:
    file = corpus.parse("demo/sums.py", SOURCE)
    assert file is not None
    return list(corpus.sessions([file], 30))


def test_same_seed_gives_the_same_sessions_and_another_seed_does_not():
    file = corpus.parse("demo/sums.py", SOURCE)
    assert [s.text() for s in corpus.sessions([file], 3)] == [s.text() for s in corpus.sessions([file], 3)]
    assert [s.text() for s in corpus.sessions([file], 3)] != [s.text() for s in corpus.sessions([file], 3, seed=1)]


def test_a_session_reads_the_file_before_anything_else_and_answers_every_instruction():
    for session in written():
        roles = [m.role for m in session.messages if m.role != "system"]
        assert roles[:3] == ["user", "assistant", "tool"]
        assert session.messages[-1].role == "assistant"
        assert "def " in next(m.content for m in session.messages if m.role == "tool")
        for before, after in itertools.pairwise(roles):
            assert (before, after) not in {("user", "user"), ("user", "tool"), ("assistant", "assistant")}


def test_an_edit_changes_what_it_says_and_the_old_text_is_in_context():
    seen = 0
    for session in written():
        for history, said in session.turns():
            if "\nold:\n" in said:
                old = said.split("\nold:\n")[1].split("\nnew:\n")[0]
                new = said.split("\nnew:\n")[1].split("\n</tool_call>")[0]
                assert old != new
                context = "\n".join(m.content for m in history)
                assert all(line in context for line in old.split("\n"))
                seen += 1
    assert seen > 5


def test_a_rename_leaves_no_old_name_behind():
    seen = 0
    for session in written():
        for history, said in session.turns():
            ask = next(m.content for m in reversed(history) if m.role == "user")
            if ask.startswith("In `") and "rename `" in ask and "\nwrite " in said:
                old = ask.split("rename `")[1].split("`")[0]
                body = said.split("\nwrite ")[1].split("\n", 1)[1]
                assert old not in body.replace("(", " ").replace(")", " ").split()
                seen += 1
    assert seen > 0


def test_held_out_files_are_a_small_fixed_share():
    names = [f"pkg/module_{i}.py" for i in range(4000)]
    assert 60 < sum(map(corpus.is_held_out, names)) < 140


def test_an_unknown_source_package_is_refused_by_name():
    with pytest.raises(KitError, match="no_such_package_here"):
        list(corpus.source_files(["no_such_package_here"]))


def test_text_without_functions_or_with_markers_is_not_used():
    assert corpus.parse("a/b.py", "x = 1\n") is None
    assert corpus.parse("a/b.py", "def f(:\n") is None
    assert corpus.parse("a/b.py", SOURCE.replace("Sum", "<|im_end|>")) is None


def test_the_committed_trace_is_replayable_and_held_out():
    with gzip.open(TRACE, "rt") as f:
        rows = [json.loads(line) for line in f]
    assert len(rows) == 200
    assert len({r["id"] for r in rows}) == 200
    for row in rows:
        assert corpus.is_held_out(row["source"])
        assert sum(m["role"] == "assistant" for m in row["messages"]) >= 3
        assert {m["role"] for m in row["messages"]} <= {"system", "user", "assistant", "tool"}
        assert all(m["content"] for m in row["messages"])


def test_the_committed_tokenizer_is_lossless_and_its_markers_are_single_tokens():
    tokenizers = pytest.importorskip("tokenizers")
    t = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    assert t.get_vocab_size() == corpus.VOCAB_SIZE
    assert [t.token_to_id(x) for x in corpus.SPECIAL_TOKENS] == list(range(len(corpus.SPECIAL_TOKENS)))
    text = written()[0].text() + "naïve café ☃ 12345\t  x"
    ids = t.encode(text).ids
    assert t.decode(ids, skip_special_tokens=False) == text
    assert ids[0] in (1,)
