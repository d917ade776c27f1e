"""The transcribed notes: numbers equal what is printed, and every stated ratio follows within its printed digits."""

from __future__ import annotations

import pytest

from kit.errors import KitError
from kit.figures.core_result import core_result
from kit.figures.prefill_depth import prefill_depth
from kit.figures.ratio import ratio
from kit.report import published


@pytest.fixture(params=["kvtop", "exllamav3-note"])
def note(request: pytest.FixtureRequest) -> published.Published:
    return published.load(request.param)


def test_every_value_equals_its_printed_text(note: published.Published) -> None:
    for value in note.values.values():
        if value.printed != "FP16":  # the one that is known without being printed: two bytes
            assert published.printed_value(value.printed) == pytest.approx(value.value), value
        assert value.line > 0 and value.where and value.unit


def test_every_stated_ratio_follows_from_the_stated_numbers(note: published.Published) -> None:
    claims = published.recompute(note)
    assert len(claims) >= 9
    assert [c.name for c in claims if not c.agrees] == []


def test_a_wrong_transcription_would_be_found() -> None:
    note = published.load("kvtop")
    wrong = {**note.values, "core.c1.on": note.values["core.c1.on"].__class__(
        **{**note.values["core.c1.on"].__dict__, "value": 64.7, "printed": "64.7 tok/s"})}  # fmt: skip
    failing = [
        c.name
        for c in published.recompute(published.Published(note.name, note.title, wrong, note.meta))
        if not c.agrees
    ]
    assert failing == ["drafting on at c = 1", "drafting on at c = 1 (text)"]


def test_what_cannot_be_recomputed_is_listed_with_a_reason(note: published.Published) -> None:
    table = published.unchecked_table(note)
    assert len(table) >= 2 and table["why"].str.len().gt(20).all()
    listed = {i for entry in note.meta["not_recomputable"] for i in entry["ids"]}
    assert listed <= set(note.values)
    # Together with the claims, every stated change is accounted for.
    accounted = listed | {c["stated"] for c in note.meta["claims"]} | {i for c in note.meta["claims"] for i in c["of"]}
    changes = {v.id for v in note.values.values() if "change" in v.quantity}
    assert changes <= accounted


def test_rounding_is_that_of_the_last_printed_digit() -> None:
    assert published.half_digit("52.7 tok/s") == pytest.approx(0.05)
    assert published.half_digit("~125K prompt") == 500
    assert published.half_digit("4:40.9") == pytest.approx(0.05)
    with pytest.raises(KitError):
        published.half_digit("many")


def test_drawn_like_measured_ones_but_labelled() -> None:
    kvtop, exl3 = published.load("kvtop"), published.load("exllamav3-note")
    drawn = ratio(published.kvtop_sweep(kvtop))
    assert "published numbers" in drawn.flags[0] and "n = 1" in drawn.headline
    assert dict(zip(drawn.table["arm"] + drawn.table["c"], drawn.table["ratio"], strict=True))["MTP1"] == 1.33
    core = core_result(published.kvtop_isolation(kvtop))
    assert "20.9" in core.headline and "10.8" in core.headline
    depth = prefill_depth(published.depth_series(exl3), sources=[exl3.source("note")])
    assert "Depth 8" in depth.headline and "n = 1" in depth.headline


def test_wall_times_belong_with_the_rates() -> None:
    table = published.runs_table(published.load("exllamav3-note"))
    left = table.groupby("input tokens")["left (s)"]
    assert (left.max() - left.min()).max() < 0.5


def test_unknown_note_lists_the_known() -> None:
    with pytest.raises(KitError, match="exllamav3-note, kvtop"):
        published.load("other")
