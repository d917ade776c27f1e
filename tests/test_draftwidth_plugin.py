"""The plugin in SGLang's own code (0.5.17 and 0.5.23, on the CPU), and the places it hooks, in the source of both."""

import ast

import pytest
from sglang_wheels import VERSIONS, run_script, unpacked

from kit.draftwidth import plugin
from kit.draftwidth.policy import Row, WidthPolicy

CONFIG = '{"1": {"candidate_steps": [0, 1, 2, 4], "warmup_batches": 2, "update_interval": 2}}'


@pytest.fixture(scope="module", params=VERSIONS)
def wheel(request):
    return unpacked("sglang", request.param)


@pytest.fixture
def site(tmp_path):
    """A folder that makes the entry point known, as an installed kit does."""
    info = tmp_path / "site" / "kit_plugin_for_tests-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kit-plugin-for-tests\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\ndraft_width = kit.draftwidth.plugin:register\n")
    return info.parent


@pytest.mark.parametrize(
    "scenario", ["switching", "refusing", "inactive", "policy", "own_algorithm", "draft_extend_graph"]
)
def test_in_sglangs_code(wheel, site, tmp_path, scenario):
    config = tmp_path / "widths.json"
    config.write_text(CONFIG)
    out = run_script(
        "draftwidth_in_sglang.py",
        str(wheel),
        scenario,
        str(config),
        paths=[site],
        env={"SGLANG_PLUGINS": "draft_width"},
    )
    assert out.strip().endswith("ok")


def test_a_policy_file_is_followed_from_the_start(wheel, site, tmp_path):
    (tmp_path / "widths.json").write_text(CONFIG)
    (tmp_path / "policy.json").write_text(WidthPolicy((Row(1, 2),), dwell_steps=1).to_json())
    env = {"SGLANG_PLUGINS": "draft_width", plugin.POLICY_FILE: str(tmp_path / "policy.json")}
    config = str(tmp_path / "widths.json")
    run_script("draftwidth_in_sglang.py", str(wheel), "policy_file", config, paths=[site], env=env)


def test_without_being_named_it_changes_nothing(wheel, site, tmp_path):
    (tmp_path / "widths.json").write_text(CONFIG)
    run_script("draftwidth_in_sglang.py", str(wheel), "unnamed", str(tmp_path / "widths.json"), paths=[site])


def parameters(wheel, dotted):
    """Parameter names of a function or method of the wheel, found in its source."""
    parts = dotted.split(".")
    cut = next(i for i in range(len(parts), 0, -1) if (wheel / "/".join(parts[:i])).with_suffix(".py").is_file())
    node = ast.parse((wheel / "/".join(parts[:cut])).with_suffix(".py").read_text())
    for name in parts[cut:]:
        node = next((n for n in node.body if getattr(n, "name", None) == name), None)
        assert node is not None, f"{dotted}: no {name}"
    return [argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]]


def test_every_hook_target_has_the_signature_the_plugin_relies_on(wheel):
    assert parameters(wheel, f"{plugin.PARAMS}.__init__") == ["self", "initial_steps", "cfg_path"]
    assert parameters(wheel, f"{plugin.PARAMS}.get_steps_for_batch") == ["self", "batch_size"]
    verify = ["self", "num_correct_drafts_per_req", "batch_size"]
    assert parameters(wheel, f"{plugin.PARAMS}.on_verify_complete") == verify
    assert parameters(wheel, f"{plugin.PARAMS}.set_cuda_graph_bs") == ["self", "cuda_graph_bs"]
    assert parameters(wheel, f"{plugin.PARAMS}.cuda_graph_bs_for_step") == ["self", "step"]
    assert parameters(wheel, plugin.SET_STATE) == parameters(wheel, plugin.GET_STATE) == ["self", "recv_req"]
    assert "phase" in parameters(wheel, plugin.TOKENS_PER_REQ)


def test_sglang_asks_for_the_width_at_the_head_of_a_decode_step(wheel):
    source = (wheel / "sglang/srt/speculative/eagle_worker_v2.py").read_text()
    step = source.index("self.activate_step_by_batch(batch.seq_lens.shape[0])")
    assert step < source.index("verify_input: EagleVerifyInput = self.draft_worker.draft(")
    scheduler = (wheel / "sglang/srt/managers/scheduler.py").read_text()
    assert "self.draft_worker = " in scheduler and "(SetInternalStateReq, self.set_internal_state)" in scheduler
