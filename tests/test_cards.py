"""Cards fail with what would be valid."""

import pytest

from kit import cards
from kit.errors import KitError

GOOD = """
title: T
about: A
stand_in: true
weights: {kind: path, hint: give WEIGHTS=}
workload: {trace: data/traces/x.jsonl}
experiments:
  concurrency:
    engine: llamacpp
    baseline: base
    arms:
      base: {label: Base, settings: {width: 0}}
"""


def write(folder, text, name="m"):
    (folder / f"{name}.yaml").write_text(text)
    return cards.load_card(name, folder)


def test_a_good_card_loads_and_merges_settings(tmp_path):
    card = write(
        tmp_path, GOOD.replace("baseline: base", "baseline: base\n    noise_arm: base\n    settings: {slots: 8}")
    )
    experiment = card.experiments["concurrency"]
    assert experiment.arm("base").settings == {"slots": 8, "width": 0}
    assert experiment.arm_names() == ["base", "base-again"]
    assert experiment.arm("base-again").settings == experiment.arm("base").settings


def test_an_unknown_model_lists_the_known(tmp_path):
    write(tmp_path, GOOD)
    with pytest.raises(KitError, match=r"unknown MODEL 'x'; the models are: m"):
        cards.load_card("x", tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title: T", "titel: T", r"unknown key 'titel'; valid keys there: .*title"),
        ("{kind: path,", "{kind: path, grwo: {},", r"unknown key 'weights\.grwo'; valid keys there: .*grow"),
        ("{label: Base,", "{lable: x, label: Base,", r"arms\.base\.lable'; valid keys there: label, settings"),
        ("engine: llamacpp", "engine: llama", r"experiments\.concurrency\.engine"),
        ("baseline: base", "baseline: bass", r"no arm is called 'bass'; the arms are: base"),
        ("title: T", "title: [", "not valid YAML"),
    ],
)
def test_a_bad_card_says_what_is_wrong_and_where(tmp_path, old, new, message):
    with pytest.raises(KitError, match=message):
        write(tmp_path, GOOD.replace(old, new))


def test_the_path_like_name_of_no_card_is_refused(tmp_path):
    with pytest.raises(KitError, match="unknown MODEL"):
        cards.load_card("../m", tmp_path)


@pytest.mark.parametrize("name", cards.known_models())
def test_every_shipped_card_is_valid(name):
    assert cards.load_card(name).name == name


def test_an_unknown_profile_lists_the_known():
    with pytest.raises(KitError, match="smoke, quick, full"):
        cards.profile("fast")
