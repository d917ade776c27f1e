"""Starting, watching and stopping SGLang, against a stand-in that answers as it does; reading its log and metrics."""

import os
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from draftwidth_servers import WIDTHS, free_port, serve  # noqa: F401

from kit.engines import sglang
from kit.engines.process import EngineError


def test_a_started_server_says_what_it_resolved(serve):  # noqa: F811
    server = serve(**WIDTHS, max_running_requests=16, mem_fraction_static=0.5)
    assert server.model == "model" and server.dialect == "sglang"
    resolved = server.resolved
    assert resolved["engine_build"] == "0.5.17" and resolved["layout"] == "tp1"
    assert (resolved["draft_width"], resolved["candidate_widths"]) == (4, "0,1,2,4")
    assert resolved["running_limit"] == 16 and resolved["max_total_num_tokens"] == 116508
    assert resolved["speculative_algorithm"] == "EAGLE" and resolved["draft_kv_bytes"] == 2**29
    plain = serve(max_total_tokens=100000)
    assert plain.resolved["draft_width"] == 0 and plain.resolved["max_total_num_tokens"] == 100000
    assert "draft_kv_bytes" not in plain.resolved


def test_stopping_leaves_no_process(serve):  # noqa: F811
    server = serve()
    pid = server.process.pid
    server.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{server.base_url}/health", timeout=2)


def test_a_server_that_fails_quotes_its_log(serve):  # noqa: F811
    with pytest.raises(EngineError, match="Not enough memory"):
        serve(extra_args="--fail-at-start")


def test_several_deployments_start_side_by_side(tmp_path, serve):  # noqa: F811
    begun = [
        sglang.begin(sglang.parse_settings(settings), Path("/w/m"), tmp_path / name, name=name, port=free_port())
        for name, settings in (("a", {}), ("b", WIDTHS))
    ]
    servers = [sglang.finish(each, deadline_s=60) for each in begun]
    try:
        assert [server.resolved["speculative_algorithm"] for server in servers] == [None, "EAGLE"]
    finally:
        for server in servers:
            server.close()


def test_a_layout_over_machines_gives_the_commands_instead(tmp_path):
    settings = sglang.parse_settings({"tp": 16, "nodes": 2, "dist_init_addr": "10.0.0.1:5000"})
    with pytest.raises(EngineError, match=r"(?s)spans machines.*--node-rank 0.*--node-rank 1"):
        sglang.start(settings, Path("/w/m"), tmp_path)


def test_flush_waits_for_an_idle_server_and_fails_on_a_busy_one(serve):  # noqa: F811
    server = serve(**WIDTHS)
    body = b'{"input_ids": [0], "sampling_params": {"max_new_tokens": 3000}}'
    busy = threading.Thread(target=lambda: urllib.request.urlopen(f"{server.base_url}/generate", body, timeout=60))
    busy.start()
    while not sglang.metrics(server).running:
        time.sleep(0.01)
    with pytest.raises(EngineError, match="did not become idle within"):
        sglang.flush_cache(server, timeout_s=0.05)
    busy.join()
    server.flush()


def test_metrics_gain_over_a_window(serve):  # noqa: F811
    server = serve(**WIDTHS)
    before = sglang.metrics(server)
    body = b'{"input_ids": [0], "sampling_params": {"max_new_tokens": 50}}'
    urllib.request.urlopen(f"{server.base_url}/generate", body, timeout=60).read()
    gained = sglang.metrics(server).since(before)
    assert gained["generation_tokens"] == 50 and gained["verify_calls"] > 0
    assert gained["gpu_s.target_verify"] > 0 and gained["gpu_s.eagle_draft"] > 0
    assert gained["retracted"] is None, "not reported is unknown, not 0"


def test_attaching_to_a_running_server(serve):  # noqa: F811
    started = serve(**WIDTHS)
    attached = sglang.attach(started.base_url + "/v1")
    assert attached.base_url == started.base_url and attached.resolved["draft_width"] == 4
    attached.close()
    assert sglang.healthy(started.base_url), "closing an attached server must not stop it"
    with pytest.raises(EngineError):
        sglang.attach("http://127.0.0.1:9")


def test_reading_a_log_takes_rank_0_and_tells_target_from_draft():
    log = sglang.parse_log(
        "[2026-11-29 12:00:00 TP0] Load weight end. elapsed=9.1 s, avail mem=80.1 GB, mem usage=27.31 GB.\n"
        "[2026-11-29 12:00:00 TP1] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 9, K size: 9.00 GB, V size: "
        "9.00 GB\n"
        "[2026-11-29 12:00:00 TP0] Mamba Cache is allocated. max_mamba_cache_size: 192, conv_state size: 0.51GB, "
        "ssm_state size: 9.00GB intermediate_ssm_state_cache size: 1.25GB intermediate_conv_window size: 0.05GB \n"
        "[2026-11-29 12:00:00 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 131072, K size: 2.00 GB, "
        "V size: 2.00 GB\n"
        "[2026-11-29 12:00:01 TP0] Load weight end. elapsed=1.0 s, avail mem=60 GB, mem usage=0.91 GB.\n"
        "[2026-11-29 12:00:01 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 131072, K size: 0.25 GB, "
        "V size: 0.25 GB\n"
        "[2026-11-29 12:00:02 TP0] max_total_num_tokens=131072, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        "max_running_requests=32, context_len=32768, available_gpu_mem=11.20 GB\n"
        "[2026-11-29 12:00:02] speculative_adaptive disabled: speculative_eagle_topk=4 (only topk=1 is supported). "
        "Falling back to static speculative params.\n"
    )
    assert log.target == sglang.Pool("", 131072, 4.0) and log.draft == sglang.Pool("", 131072, 0.5)
    assert log.max_running_requests == 32 and log.available_gib == 11.2
    assert log.weights_gib == [27.31, 0.91]
    assert log.mamba["mamba_intermediate_ssm_state_cache_gib"] == 1.25 and log.mamba["max_mamba_cache_size"] == 192
    assert log.adaptive_disabled.startswith("speculative_eagle_topk=4")
    assert log.numbers()["log.draft_kv_gib"] == 0.5
    empty = sglang.parse_log("")
    assert empty.target is None and empty.numbers()["log.kv_gib"] is None


def test_the_log_lines_read_are_those_that_sglang_writes():
    from sglang_wheels import VERSIONS, unpacked

    for version in VERSIONS:
        source = unpacked("sglang", version) / "sglang" / "srt"
        pools = (source / "mem_cache" / "memory_pool.py").read_text()
        assert "is allocated" in pools and 'f"#tokens: {num_tokens}, K size: {k_size_GB:.2f} GB, "' in pools
        assert 'f"max_mamba_cache_size: {size}, "' in pools
        scheduler = (source / "managers" / "scheduler.py").read_text()
        assert 'f"max_total_num_tokens={self.max_total_num_tokens}, "' in scheduler
        assert "mem usage={" in (source / "model_executor" / "model_runner.py").read_text()
        assert 'f"speculative_adaptive disabled: {reason}. "' in (source / "arg_groups/speculative_hook.py").read_text()
        metrics = (source / "observability" / "metrics_collector.py").read_text()
        for name in ("num_running_reqs", "num_queue_reqs", "forward_execution_seconds_total", "spec_num_steps"):
            assert f'name="sglang:{name}"' in metrics
