"""Every layout's command line goes through SGLang's own argument parser, of the oldest and newest version."""

import json
import shlex

import pytest
from sglang_wheels import VERSIONS, run_script, unpacked

from kit.engines.sglang import launch_commands, parse_settings
from kit.errors import KitError

LAYOUTS = {
    "plain": {},
    "mtp": {"speculation": "mtp", "draft_width": 3},
    "widths": {"speculation": "mtp", "candidate_widths": "0,1,2,4", "mem_fraction_static": 0.85},
    "ngram": {"speculation": "ngram", "ngram_draft_tokens": 8},
    "limits": {
        "max_total_tokens": 100000,
        "max_running_requests": 32,
        "max_mamba_cache_size": 192,
        "cuda_graph_bs": "1 2 4 8 16 32",
        "chunked_prefill_size": 8192,
        "context_length": 16384,
        "load_format": "dummy",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "kv_cache_dtype": "fp8_e4m3",
        "quantization": "fp8",
        "extra_args": "--skip-server-warmup --disable-prefill-cuda-graph --grammar-backend none",
    },
    "tensor parallel": {"tp": 8, "speculation": "mtp", "candidate_widths": "0,2"},
    "pipeline": {"tp": 2, "pp": 4},
    "data parallel": {"dp": 2},
    "nodes": {"tp": 16, "nodes": 2, "dist_init_addr": "10.0.0.1:5000"},
    "disaggregated": {"disaggregated": True, "pp": 2, "decode_tp": 2, "decode_pp": 1, "transfer_backend": "nixl",
                      "ib_device": "mlx5_0", "speculation": "mtp", "draft_width": 1},
}  # fmt: skip


def commands(settings, tmp_path):
    return launch_commands(parse_settings(settings), "/weights/model", folder=tmp_path, port=31000, python="python3")


@pytest.fixture(scope="module", params=VERSIONS)
def parsed(request, tmp_path_factory):
    """``{layout: [parsed values of each server command]}`` by this version's parser."""
    folder = tmp_path_factory.mktemp("layouts")
    wheels = [unpacked("sglang", request.param), unpacked("msgspec"), unpacked("orjson")]
    made = {
        name: [c.argv[3:] for c in commands(settings, folder) if c.role != "router"]
        for name, settings in LAYOUTS.items()
    }
    lines = [words for found in made.values() for words in found]
    out = run_script("sglang_parse_args.py", "server", stdin=json.dumps(lines), paths=wheels)
    values = iter(json.loads(out.partition("PARSED")[2]))
    return {name: [next(values) for _ in found] for name, found in made.items()}


def test_every_layout_parses_and_means_what_was_asked(parsed):
    (plain,) = parsed["plain"]
    assert plain["max_running_requests"] == plain["cuda_graph_max_bs_decode"] == 64
    assert plain["speculative_algorithm"] is None and plain["host"] == "127.0.0.1" and plain["port"] == 31000
    (widths,) = parsed["widths"]
    assert (widths["speculative_num_steps"], widths["speculative_num_draft_tokens"]) == (4, 5)
    assert widths["speculative_adaptive"] and widths["speculative_adaptive_config"].endswith("widths.json")
    (limits,) = parsed["limits"]
    assert limits["cuda_graph_bs_decode"] == [1, 2, 4, 8, 16, 32] and limits["max_mamba_cache_size"] == 192
    assert limits["disable_prefill_cuda_graph"] and limits["max_total_tokens"] == 100000
    assert parsed["ngram"][0]["speculative_algorithm"] == "NGRAM"
    assert (parsed["pipeline"][0]["tp_size"], parsed["pipeline"][0]["pp_size"]) == (2, 4)
    assert parsed["data parallel"][0]["dp_size"] == 2


def test_each_node_gets_its_rank(parsed):
    assert [node["node_rank"] for node in parsed["nodes"]] == [0, 1]
    assert {node["dist_init_addr"] for node in parsed["nodes"]} == {"10.0.0.1:5000"}


def test_prefill_and_decode_get_their_own_sizes_and_gpus(parsed):
    prefill, decode = parsed["disaggregated"]
    assert (prefill["disaggregation_mode"], decode["disaggregation_mode"]) == ("prefill", "decode")
    assert (prefill["pp_size"], decode["tp_size"], decode["pp_size"]) == (2, 2, 1)
    assert (prefill["base_gpu_id"], decode["base_gpu_id"]) == (0, 2)
    assert prefill["port"] != decode["port"]


def test_the_router_command_goes_through_the_routers_parser(tmp_path):
    router = commands(LAYOUTS["disaggregated"], tmp_path)[-1]
    assert router.role == "router" and router.url == "http://127.0.0.1:31000"
    out = run_script(
        "sglang_parse_args.py", "router", stdin=json.dumps([router.argv[3:]]), paths=[unpacked("sglang-router")]
    )
    (values,) = json.loads(out.partition("PARSED")[2])
    assert values["pd_disaggregation"] and values["prefill"] == [["http://127.0.0.1:31001", "39000"]]
    assert values["decode"] == [["http://127.0.0.1:31002"]] and values["port"] == 31000


def test_settings_that_contradict_each_other_are_refused_with_the_reason():
    for settings, reason in (
        ({"draft_wdith": 1}, "unknown SGLang setting 'draft_wdith'; known: tp, pp"),
        ({"speculation": "mtp"}, "needs draft_width or candidate_widths"),
        ({"draft_width": 2}, "goes with speculation mtp"),
        ({"speculation": "mtp", "draft_width": 3, "candidate_widths": "0,1"}, "not among candidate_widths"),
        ({"speculation": "mtp", "candidate_widths": "0,x"}, "must be like 0,1,2,4"),
        ({"speculation": "mtp", "candidate_widths": "0,1", "pp": 2}, "pipeline parallelism"),
        ({"nodes": 2}, "dist_init_addr"),
        ({"decode_tp": 2}, "go with disaggregated"),
        ({"tp": 0}, "tp: "),
    ):
        with pytest.raises(KitError, match="SGLang settings: ") as error:
            parse_settings(settings)
        assert reason in str(error.value)


def test_environment_of_the_arms_that_need_one(tmp_path):
    (command,) = commands(
        {"speculation": "mtp", "candidate_widths": "0,2", "skip_zero_step_draft_extend": True, "extra_env": "A=1"},
        tmp_path,
    )
    assert command.env["SGLANG_PLUGINS"] == "draft_width" and command.env["A"] == "1"
    assert command.env["SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"] == "1"
    assert json.loads(next(iter(command.files.values()))) == {"1": {"candidate_steps": [0, 2]}}
    assert "SGLANG_PLUGINS" not in commands({}, tmp_path)[0].env
    assert shlex.split(str(command))[-1] == "36000"
