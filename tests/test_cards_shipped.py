"""The shipped cards say what their engines know: names, settings and weights that exist."""

from pathlib import Path

import pytest

from kit import cards
from kit.draftwidth.experiment import Shape, server_settings
from kit.engines.exllamav3 import ARMS, ONE_GPU, TWO_GPUS
from kit.engines.sglang import SGLangSettings
from kit.standin.grow import LIKE_27B, GrowSpec

ROOT = Path(cards.__file__).resolve().parents[1]
CARDS = {name: cards.load_card(name) for name in cards.known_models()}
SHAPE = Shape(kv_layers=8, draft_layers=1, kv_bytes_per_layer=4096, state_bytes=10**6, mtp_weight_bytes=10**8)


def experiments(engine):
    return [(f"{c.name}/{name}", e) for c in CARDS.values() for name, e in c.experiments.items() if e.engine == engine]


def test_related_cards_exist_and_are_not_the_card_itself():
    assert CARDS["tiny-mtp"].related == ["standin-27b"]
    for card in CARDS.values():
        assert set(card.related) <= set(CARDS) - {card.name}


@pytest.mark.parametrize(("where", "experiment"), experiments("exllamav3"))
def test_prefill_arms_are_the_engines_own(where, experiment):
    for name, arm in experiment.arms.items():
        assert (arm.label, arm.settings) == (ARMS[name].label, ARMS[name].settings), name
        assert arm.gpus == (2 if name in TWO_GPUS and name not in ONE_GPU else 1), name
    assert experiment.baseline == "no-mtp" and experiment.load_kind == "prefill"


def test_the_stand_ins_prefill_holds_all_arms_that_both_machines_measure():
    experiment = CARDS["standin-27b"].experiments["prefill"]
    assert {*ONE_GPU, *TWO_GPUS} <= set(experiment.arms)
    assert set(ONE_GPU) <= set(experiment.on(1).arms) and not set(experiment.on(1).arms) & {"stock-last"}


@pytest.mark.parametrize(("where", "experiment"), experiments("sglang"))
def test_sglang_arms_are_settings_that_sglang_takes(where, experiment):
    for name in experiment.arm_names():
        settings = server_settings(experiment.arm(name), SHAPE)
        assert SGLangSettings(**settings), name


def test_weights_are_there_and_the_27b_shape_is_reached():
    for card in CARDS.values():
        if card.weights.checkpoint is not None:
            assert (ROOT / card.weights.checkpoint / "config.json").is_file()
            GrowSpec(**card.weights.grow)
    assert GrowSpec(**CARDS["qwen3.8-27b"].weights.grow) == LIKE_27B
    assert all((ROOT / card.workload.trace).is_file() for card in CARDS.values())


def test_every_experiment_has_a_notebook():
    for card in CARDS.values():
        for name, experiment in card.experiments.items():
            assert (ROOT / "notebooks" / f"{experiment.notebook or name}.ipynb").is_file(), (card.name, name)
