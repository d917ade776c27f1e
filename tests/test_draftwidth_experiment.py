"""The draft-width experiment: its plan, and the whole of it against a stand-in for SGLang (figures are made up)."""

import json

import pytest
import yaml
from draftwidth_servers import serve  # noqa: F401

from kit.cards import Profile, load_card
from kit.draftwidth import client
from kit.draftwidth.experiment import Shape, budget_bytes, deployments, in_order, pool_tokens, shape_of, unequal
from kit.errors import KitError
from kit.load.window import RAMP_FLAG
from kit.measure import sglang as runner
from kit.records.schema import Arm, Load
from kit.records.store import Run

CONFIG = {
    "text_config": {
        "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24, "num_key_value_heads": 2,
        "head_dim": 256, "num_hidden_layers": 4, "mtp_num_hidden_layers": 1,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
}  # fmt: skip
COMMON = {"max_running_requests": 4, "output_tokens": 12, "mtp_pool_tokens": 4096, "mtp_draft_tokens": 5,
          "context_length": 8192}  # fmt: skip
MTP = {"speculation": "mtp", "candidate_widths": "0,1,2,4", "pool": "mtp"}
CARD = {
    "title": "A stand-in for SGLang", "about": "for tests", "stand_in": True,
    "weights": {"kind": "path"},
    "workload": {"trace": "trace.jsonl", "api": "completions"},
    "experiments": {
        "draft_width": {
            "engine": "sglang", "baseline": "b0", "settings": COMMON,
            "arms": {
                "a": {"label": "A", "settings": {"pool": "budget"}},
                "a-capped": {"label": "A'", "settings": {"pool": "mtp"}},
                "b0": {"label": "B0", "settings": {**MTP, "draft_width": 0}},
                "b0s": {"label": "B0s", "settings": {**MTP, "draft_width": 0, "skip_zero_step_draft_extend": True}},
                "b2": {"label": "B2", "settings": {**MTP, "draft_width": 2}},
                "broken": {"label": "X", "settings": {"extra_args": "--fail-at-start"}},
                "ngram": {"label": "N", "settings": {"speculation": "ngram", "ngram_draft_tokens": 5, "pool": "mtp"}},
            },
        },
        "policy": {
            "engine": "sglang", "baseline": "off", "load_kind": "trace", "loads": [5],
            "settings": {**COMMON, **MTP},
            "arms": {
                "off": {"label": "off", "settings": {"draft_width": 0}},
                "auto": {"label": "auto", "settings": {"draft_width": 4, "width_mode": "auto"}},
                "sglang": {"label": "own", "settings": {"draft_width": 4, "width_mode": "sglang"}},
            },
        },
    },
}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch, serve):  # noqa: F811 (serve sets the stand-in's path up)
    """A card, weights and a trace in a folder of their own; windows of tenths of a second."""
    trace = tmp_path / "trace.jsonl"
    talk = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "1 2 3", "output_tokens": 12}]
    trace.write_text("".join(json.dumps({"id": str(n), "messages": talk}) + "\n" for n in range(8)))
    card = json.loads(json.dumps(CARD))
    card["workload"]["trace"] = str(trace)
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "stand-in.yaml").write_text(yaml.safe_dump(card))
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text(json.dumps(CONFIG))
    (weights / "model.safetensors").write_bytes(b"")
    monkeypatch.setenv("FAKE_STEP_S", "0.002")
    return tmp_path


def run_session(place, *words):
    argv = [str(place / "cards" / "stand-in.yaml"), "--weights", str(place / "weights"), "--run", str(place / "run")]
    short = ["--burn-in", "0.1", "--warm-up", "0.1", "--window", "0.4", "--policy-window", "1.5"]
    assert runner.main([*argv, *short, *words]) == 0
    return Run.open(place / "run")


def test_a_session_measures_the_ladder_the_switching_and_the_policy(place):
    run = run_session(
        place, "--phase", "b0,b2,a,a-capped", "--loads", "3", "--tiers", "3", "--repeats", "1",
        "--policy-repeats", "1", "--budget", "120",
    )  # fmt: skip
    cells = {cell.cell.id: cell for cell in run.cells()}
    assert {c.status for c in cells.values()} == {"ok"}, {i: c.reason for i, c in cells.items() if c.reason}
    b0, b2 = cells["draft_width.b0.c3.r0"], cells["draft_width.b2.c3.r0"]
    assert (b0.resolved["draft_width"], b2.resolved["draft_width"]) == (0, 2)
    assert {k for k in b0.resolved if b0.resolved[k] != b2.resolved[k]} == {"draft_width"}, "one switch differs"
    assert b2.server["drive.mean_width"] == 2 and 0 < b2.server["drive.acceptance"] < 1
    assert b2.server["drive.gpu_s.eagle_draft"] > 0 and b2.server["log.draft_kv_gib"] == 0.5
    assert b2.metrics["tokens_per_step"] > 1 and b0.metrics["tokens_per_step"] == 1
    a, capped = cells["draft_width.a.c3.r0"], cells["draft_width.a-capped.c3.r0"]
    assert capped.resolved["max_total_num_tokens"] == b0.resolved["max_total_num_tokens"] == 4096
    assert a.resolved["max_total_num_tokens"] == 4 * 8192, "its own pool, no larger than could be of use"
    assert b0.metrics["output_tps"] > 0 and b0.workload_hash == a.workload_hash

    switched = next(c for c in cells.values() if c.cell.arm == "switched")
    assert switched.server["complete"] == switched.server["identical"] == 8 and switched.server["switches"] >= 2
    assert switched.counts.failed == 0 and len(list(run.requests(switched))) == 8

    policy = {c.cell.arm: c for c in cells.values() if c.cell.experiment == "policy"}
    assert set(policy) == {"off", "auto", "sglang"}
    assert policy["auto"].resolved["width_mode"] == "auto" and policy["auto"].resolved["draft_width"] is None
    assert json.loads(policy["auto"].asked["policy"])["rows"][0]["running"] == 1
    assert (run.folder / "raw" / f"{policy['auto'].cell.id}.samples.jsonl.gz").is_file()
    assert "GiB" in " ".join(run.record.notes) and run.record.provenance.argv

    again = run_session(
        place, "--phase", "a,b0s,ngram,broken", "--loads", "3", "--repeats", "1", "--step", "core", "--tiers", "3"
    )
    arms = [c.cell.arm for c in again.cells() if c.cell.experiment == "draft_width"]
    assert arms.count("a") == 1, "what is recorded is not measured again"
    assert {"b0s", "ngram"} <= set(arms)
    b0s = next(c for c in again.cells() if c.cell.arm == "b0s")
    assert {k for k in b0s.resolved if b0s.resolved[k] != b0.resolved.get(k)} == {"draft_extend_at_width_0"}
    broken = next(c for c in again.cells() if c.cell.arm == "broken")
    assert broken.status == "failed" and "Not enough memory" in broken.reason, "told with the log's lines"


def test_without_time_nothing_is_begun_and_other_weights_are_refused(place, capsys):
    run = run_session(place, "--phase", "b0", "--budget", "5")
    assert run.cells() == [] and "no time left for the phase b0" in capsys.readouterr().err
    (place / "weights" / "config.json").write_text(json.dumps({**CONFIG, "x": 1}))
    with pytest.raises(KitError, match="other weights"):
        runner._open_run(place / "run", load_card("stand-in", place / "cards"), place / "weights", PROFILE, [])


PROFILE = Profile(name="t", burn_in_s=0.1, warm_up_s=0.1, window_s=0.3, repeats=2, loads=[2.0])


def test_kit_measure_runs_the_arms_one_deployment_at_a_time(place):
    card = load_card("stand-in", place / "cards")
    arms = card.experiments["draft_width"].arms
    few = card.experiments["draft_width"].model_copy(update={"arms": {k: arms[k] for k in ("b0", "a")}})
    run = runner._open_run(place / "run", card, place / "weights", PROFILE, [])
    runner.measure(run, card, "draft_width", few, PROFILE, place / "weights")
    cells = run.cells()
    assert len(cells) == 4 and {cell.status for cell in cells} == {"ok"}
    assert [cell.cell.repeat for cell in cells] == [0, 0, 1, 1], "all of a repeat before the next"


def test_a_new_server_is_warmed_with_as_many_requests_as_the_largest_load_has_clients(place):
    card = load_card("stand-in", place / "cards")
    run = runner._open_run(place / "run", card, place / "weights", PROFILE, [])
    sent = []
    for loads in ([2.0], [2.0, 24.0], [900.0]):
        own = card.experiments["draft_width"].model_copy(update={"loads": None})
        card = card.model_copy(update={"experiments": {"draft_width": own}})
        bench = runner.Bench(run, card, PROFILE.model_copy(update={"loads": loads}), place / "weights")
        sent.append(len(runner._warm_prompts(bench._most_clients())))
    assert sent == [4, 24, 128]


def test_a_cell_whose_window_opens_before_a_clients_first_token_says_so(place, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_S", "0.05")  # two of six clients wait for twelve steps of the four that run
    card = load_card("stand-in", place / "cards")
    one = card.experiments["draft_width"].model_copy(update={"arms": {"a": card.experiments["draft_width"].arms["a"]}})
    profile = PROFILE.model_copy(update={"loads": [6.0], "repeats": 1})
    run = runner._open_run(place / "run", card, place / "weights", profile, [])
    runner.measure(run, card, "draft_width", one, profile, place / "weights")
    (cell,) = run.cells()
    assert cell.status == "ok" and RAMP_FLAG in cell.flags


def test_the_server_of_one_arm_stands_at_its_width(place):
    experiment = load_card("stand-in", place / "cards").experiments["draft_width"]
    with runner.open_server(experiment, experiment.arm("b2"), place / "weights", place / "serve") as server:
        assert client.get_width(server.base_url).in_use == 2


def test_a_pool_that_is_not_the_one_asked_for_makes_a_cell_invalid(place):
    card = load_card("stand-in", place / "cards")
    experiment = card.experiments["draft_width"]
    settings = {**experiment.settings, "mtp_pool_tokens": 200000}  # more than the stand-in has
    wrong = experiment.model_copy(update={"settings": settings, "arms": {"b0": experiment.arms["b0"]}})
    run = runner._open_run(place / "run", card, place / "weights", PROFILE, [])
    runner.measure(run, card, "draft_width", wrong, PROFILE, place / "weights")
    assert {cell.status for cell in run.cells()} == {"invalid"}
    assert "the pool is 116508 tokens, not the 200000 asked for" in run.cells()[0].reason


SHAPE = Shape(kv_layers=8, draft_layers=1, kv_bytes_per_layer=2048, state_bytes=75_000_000, mtp_weight_bytes=10**9)


def test_the_shape_of_a_checkpoint():
    shape = shape_of(CONFIG)
    assert (shape.kv_layers, shape.draft_layers, shape.kv_bytes_per_layer) == (1, 1, 2 * 2 * 256 * 2)
    assert shape.mtp_cell == 2 * shape.cell
    matrix, convolution = 48 * 128 * 128 * 4, (2 * 16 * 128 + 48 * 128) * 3 * 2
    assert shape.state_bytes == 3 * (matrix + convolution)
    plain = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
             "num_hidden_layers": 6}  # fmt: skip
    assert shape_of(plain) == Shape(6, 0, 2 * 2 * 16 * 2, 0, 0)
    with pytest.raises(KitError, match="num_attention_heads"):
        shape_of({"hidden_size": 1})


def test_the_same_memory_gives_a_larger_pool_without_a_draft():
    budget = budget_bytes(SHAPE, tokens=10_000, requests=32, draft_tokens=5)
    own = pool_tokens(SHAPE, budget, requests=32)
    spared = 33 * 75_000_000 * 5 + 10**9 + 10_000 * 2048
    assert own == 10_000 + spared // SHAPE.cell
    with pytest.raises(KitError, match="holds no pool"):
        pool_tokens(SHAPE, 10**6, requests=32)


def test_arms_that_differ_in_width_alone_share_a_deployment():
    def arm(name, **settings):
        return Arm(name=name, label=name, settings={**COMMON, **settings})

    groups = deployments(
        [arm("a", pool="mtp"), arm("b0", **MTP, draft_width=0), arm("b2", **MTP, draft_width=2),
         arm("b0s", **MTP, draft_width=0, skip_zero_step_draft_extend=True),
         arm("auto", **MTP, draft_width=4, width_mode="auto")],
        SHAPE,
    )  # fmt: skip
    assert [group.arms for group in groups] == [("a",), ("b0", "b2", "auto"), ("b0s",)]
    assert groups[0].settings["max_total_tokens"] == 4096 and "pool" not in groups[0].settings
    with pytest.raises(KitError, match="goes without max_total_tokens"):
        deployments([arm("x", pool="mtp", max_total_tokens=5)], SHAPE)


def test_important_loads_come_first_and_repeats_are_interleaved():
    loads = [Load(kind="closed", value=v) for v in (1, 2, 8)]
    order = in_order("e", ["x", "y"], loads, 3, seed=1, tiers=[[1, 8]])
    assert len(order) == len({cell.id for cell in order}) == 18
    assert {cell.load.value for cell in order[:12]} == {1, 8} and {c.load.value for c in order[12:]} == {2}
    assert [cell.repeat for cell in order[:12]] == [0] * 4 + [1] * 4 + [2] * 4
    first, second = ([(c.arm, c.load.value) for c in order[i : i + 4]] for i in (0, 4))
    assert sorted(first) == sorted(second)


def test_what_differs_is_named():
    assert unequal({"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}, ("x", "y")) == ["y differs (a: 2, b: 3)"]
