"""The plan of cells, and how records are found or refused."""

import pytest

from kit import cards, measure
from kit.cards import ArmCard, Experiment
from kit.errors import KitError
from kit.measure import attach, plan, weights

EXPERIMENT = Experiment(
    engine="llamacpp",
    baseline="base",
    noise_arm="base",
    arms={"base": ArmCard(label="Base"), "mtp": ArmCard(label="MTP", settings={"draft_width": 1})},
)
PROFILE = cards.Profile(name="p", burn_in_s=0, warm_up_s=0, window_s=1, repeats=3, loads=[1, 8])


def test_every_arm_of_a_repeat_comes_before_the_next_repeat_and_the_order_varies():
    blocks = plan.blocks("concurrency", EXPERIMENT, PROFILE)
    assert [b.repeat for b in blocks] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    orders = [tuple(b.arm for b in blocks if b.repeat == r) for r in range(3)]
    assert all(sorted(order) == ["base", "base-again", "mtp"] for order in orders)
    assert len({*orders, *(tuple(c.load.value for c in b.cells) for b in blocks)}) > 2
    assert blocks == plan.blocks("concurrency", EXPERIMENT, PROFILE)


def test_finished_cells_are_not_planned_again():
    every = [cell.id for block in plan.blocks("x", EXPERIMENT, PROFILE) for cell in block.cells]
    assert len(set(every)) == 3 * 3 * 2
    left = plan.blocks("x", EXPERIMENT, PROFILE, done=every[:-1])
    assert [cell.id for block in left for cell in block.cells] == every[-1:]
    assert plan.blocks("x", EXPERIMENT, PROFILE, done=every) == []


@pytest.mark.parametrize(
    ("text", "arms"),
    [
        ("http://h:1", {"attached": "http://h:1"}),
        ("base=http://h:1,mtp=http://h:2/v1", {"base": "http://h:1", "mtp": "http://h:2/v1"}),
    ],
)
def test_base_url_names_arms(text, arms):
    assert attach.parse_base_url(text) == arms


@pytest.mark.parametrize("text", ["h:1", "http://a,http://b", "Base=http://h:1", "base=ftp://h"])
def test_a_bad_base_url_says_the_form(text):
    with pytest.raises(KitError, match="BASE_URL"):
        attach.parse_base_url(text)


def test_weights_that_are_not_there_or_of_another_engine_are_refused_with_what_would_be_right(tmp_path):
    card = cards.load_card("tiny-mtp")
    with pytest.raises(KitError, match="nothing at that path"):
        weights.resolve(card, "llamacpp", str(tmp_path / "none.gguf"))
    (tmp_path / "x.gguf").write_bytes(b"not it")
    with pytest.raises(KitError, match="not GGUF"):
        weights.resolve(card, "llamacpp", str(tmp_path / "x.gguf"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF....")
    with pytest.raises(KitError, match="is gguf; sglang loads hf"):
        weights.resolve(card, "sglang", str(tmp_path / "x.gguf"))


def test_a_model_that_can_neither_be_measured_nor_read_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(plan, "LOCAL", tmp_path)
    monkeypatch.setattr(plan, "RECORDED", tmp_path)
    with pytest.raises(KitError, match="unknown MODEL 'qwen9'"):
        measure.ensure_all(measure.Request("qwen9"))
    with pytest.raises(KitError, match=r"BASE_URL=http"):
        measure.ensure_all(measure.Request("attached", weights=None))


def test_never_measures_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(plan, "LOCAL", tmp_path)
    monkeypatch.setattr(plan, "RECORDED", tmp_path)
    with pytest.raises(KitError, match="nothing is recorded"):
        measure.ensure("tiny-mtp", "concurrency", measure="never")
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_setting_of_an_arm_stops_before_anything_is_measured():
    card = cards.load_card("tiny-mtp")
    bad = {"mtp": ArmCard(label="x", settings={"draft_widht": 2})}
    experiment = card.experiments["concurrency"].model_copy(update={"arms": bad, "baseline": "mtp", "noise_arm": None})
    card = card.model_copy(update={"experiments": {**card.experiments, "concurrency": experiment}})
    with pytest.raises(KitError, match=r"tiny-mtp\.yaml: concurrency, arm mtp: .*draft_widht"):
        measure.check_settings(card, "concurrency")
