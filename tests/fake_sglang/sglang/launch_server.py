"""``python -m sglang.launch_server`` for tests: SGLang's HTTP behaviour with a made-up decode loop.

What is SGLang's: the endpoints, HTTP 200 with ``[false]`` for a refusal, a width that follows at the next decode step
only, log lines, metrics names, ``flush_cache`` that refuses while busy. What decides about widths is the plugin's own
``WidthControl``. What is made up: the text (a count upwards, whatever the width), the acceptance and the step time.
"""

import argparse
import asyncio
import json
import os
import sys
import time

from aiohttp import web

from kit.draftwidth import plugin

STEP_S = float(os.environ.get("FAKE_STEP_S", "0.002"))
VERSION = "0.5.17"


class Fake:
    def __init__(self, args):
        self.args = args
        self.waiting, self.running = [], []
        self.steps = 0
        self.gpu = {}
        self.generated = self.verified = 0
        self.in_use = args.speculative_num_steps or 0
        self.mode = (args.speculative_algorithm or "none").lower()
        self.control = None
        if args.speculative_adaptive and "draft_width" in os.environ.get("SGLANG_PLUGINS", "").split(","):
            with open(args.speculative_adaptive_config) as handle:
                candidates = json.load(handle)["1"]["candidate_steps"]
            self.control = plugin.WidthControl(candidates, self.in_use)
        default = 131072 if self.mode == "none" else 116508
        self.pool = min(args.max_total_tokens or default, default)

    def log_start(self):
        say = lambda text: print(f"[2026-11-29 12:00:00] {text}", flush=True)  # noqa: E731
        if self.control is not None:
            say("Executed general plugin: draft_width")
        say("Load weight end. elapsed=3.00 s, type=Qwen3_5, avail mem=110.00 GB, mem usage=25.10 GB.")
        say("Mamba Cache is allocated. max_mamba_cache_size: 192, conv_state size: 0.20GB, ssm_state size: 9.00GB ")
        say(f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {self.pool}, K size: 2.00 GB, V size: 2.00 GB")
        if self.mode == "nextn":
            say(f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {self.pool}, K size: 0.25 GB, V size: 0.25 GB")
        say(
            f"max_total_num_tokens={self.pool}, chunked_prefill_size=8192, max_prefill_tokens=16384, "
            f"max_running_requests={self.args.max_running_requests}, context_len=32768, available_gpu_mem=40.00 GB"
        )

    async def decode(self):
        while True:
            await asyncio.sleep(STEP_S)
            while self.waiting and len(self.running) < self.args.max_running_requests:
                self.running.append(self.waiting.pop(0))
            if not self.running:
                continue
            self.steps += 1
            width = self.in_use
            if self.control is not None:
                width = self.in_use = self.control.step(len(self.running), lambda: 2)
            correct = []
            for number, request in enumerate(self.running):
                accepted = sum((self.steps + number + draft) % 4 != 0 for draft in range(width))
                accepted = max(0, min(accepted, request["left"] - 1))
                correct.append(accepted)
                request["left"] -= accepted + 1
                request["verify"] += 1
                request["accepted"] += accepted
                self.generated += accepted + 1
                request["queue"].put_nowait(accepted + 1)
            if self.control is not None:
                self.control.verified(correct)
            kind = "decode" if self.mode == "none" else "target_verify"
            self.gpu[kind] = self.gpu.get(kind, 0.0) + STEP_S
            if width and self.mode == "nextn":
                self.gpu["eagle_draft"] = self.gpu.get("eagle_draft", 0.0) + STEP_S / 10 * width
            for request in [r for r in self.running if r["left"] <= 0]:
                self.running.remove(request)
                self.verified += request["verify"]
                request["queue"].put_nowait(None)

    async def stream(self, tokens, cancelled=None):
        request = {"left": tokens, "queue": asyncio.Queue(), "verify": 0, "accepted": 0}
        self.waiting.append(request)
        sent = 0
        try:
            while (more := await request["queue"].get()) is not None:
                yield "".join(f" {sent + i}" for i in range(more)), sent + more, request
                sent += more
        finally:
            for place in (self.waiting, self.running):
                if request in place:
                    place.remove(request)

    def state(self):
        args = {k: v for k, v in vars(self.args).items() if k != "rest"}
        args["speculative_algorithm"] = {"nextn": "EAGLE", "ngram": "NGRAM"}.get(self.mode)
        state = {
            **args,
            "speculative_num_steps": self.in_use if self.mode == "nextn" else args["speculative_num_steps"],
            "memory_usage": {"token_capacity": self.pool},
            "effective_max_running_requests_per_dp": self.args.max_running_requests,
        }
        if "draft_width" in os.environ.get("SGLANG_PLUGINS", "").split(","):
            inactive = {"version": 1, "active": False, "reason": "the server runs without speculative decoding"}
            state["draft_width"] = self.control.report(self.in_use) if self.control else inactive
        return state

    def metrics(self):
        usage = sum(1 for _ in self.running) * 500 / self.pool
        lines = [
            f'sglang:num_running_reqs{{tp_rank="0"}} {len(self.running)}',
            f'sglang:num_queue_reqs{{tp_rank="0"}} {len(self.waiting)}',
            f'sglang:token_usage{{tp_rank="0"}} {usage}',
            f'sglang:max_total_num_tokens{{tp_rank="0"}} {self.pool}',
            f'sglang:generation_tokens_total{{tp_rank="0"}} {self.generated}',
            f'sglang:spec_verify_calls_total{{tp_rank="0"}} {self.verified}',
            f'sglang:spec_num_steps{{tp_rank="0"}} {self.in_use}',
            *(
                f'sglang:forward_execution_seconds_total{{category="{kind}",tp_rank="0"}} {seconds}'
                for kind, seconds in self.gpu.items()
            ),
        ]
        return "\n".join(lines) + "\n"


def application(fake):
    async def health(_):
        return web.Response()

    async def info(_):
        top = {**fake.state(), "max_total_num_tokens": fake.pool, "version": VERSION}
        top.pop("draft_width", None)
        return web.json_response({**top, "internal_states": [fake.state()]})

    async def set_state(request):
        wanted = (await request.json())["server_args"]
        taken = fake.control.request(wanted) if fake.control else False
        return web.json_response([taken])

    async def flush(request):
        end = time.monotonic() + float(request.query.get("timeout", 0))
        while fake.running or fake.waiting:
            if time.monotonic() > end:
                return web.Response(status=400, text="Flush cache failed.\n")
            await asyncio.sleep(0.005)
        return web.Response(text="Cache flushed.\n")

    async def metrics(_):
        return web.Response(text=fake.metrics())

    async def generate(request):
        body = await request.json()
        text, count, last = "", 0, None
        async for piece, count, last in fake.stream(body["sampling_params"]["max_new_tokens"]):  # noqa: B007
            text += piece
        meta = {"prompt_tokens": 4, "completion_tokens": count, "spec_verify_ct": last["verify"]}
        return web.json_response({"text": text, "meta_info": meta})

    async def models(_):
        return web.json_response({"data": [{"id": fake.args.served_model_name}]})

    async def completions(request):
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(value):
            await response.write(f"data: {json.dumps(value)}\n\n".encode())

        chat = "messages" in body
        prompt = len(str(body.get("prompt", body.get("messages")))) // 4
        last = None
        async for piece, count, last in fake.stream(body["max_tokens"]):  # noqa: B007
            usage = {"prompt_tokens": prompt, "completion_tokens": count}
            said = {"delta": {"content": piece}} if chat else {"text": piece}
            choice = {"index": 0, **said, "finish_reason": None}
            await send({"id": "x", "choices": [choice], "usage": usage})
        details = None
        if fake.mode != "none":
            details = {"spec_verify_ct": last["verify"], "spec_num_correct_drafts": last["accepted"]}
        end = {"id": "x", "choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
        await send({**end, "usage": usage, "sglext": {"spec_tokens_details": details}})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def begin(app):
        app["loop"] = asyncio.ensure_future(fake.decode())

    app = web.Application()
    app.on_startup.append(begin)
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/server_info", info),
            web.post("/set_internal_state", set_state),
            web.post("/flush_cache", flush),
            web.get("/metrics", metrics),
            web.post("/generate", generate),
            web.get("/v1/models", models),
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", completions),
        ]
    )
    return app


def main():
    parser = argparse.ArgumentParser()
    for name, kind in {
        "model-path": str, "served-model-name": str, "host": str, "port": int, "nccl-port": int,
        "mem-fraction-static": float, "max-total-tokens": int, "max-running-requests": int,
        "cuda-graph-max-bs-decode": int, "max-mamba-cache-size": int, "chunked-prefill-size": int,
        "speculative-algorithm": str, "speculative-eagle-topk": int, "speculative-num-steps": int,
        "speculative-num-draft-tokens": int, "speculative-adaptive-config": str, "load-format": str,
        "decode-log-interval": int, "attention-backend": str, "sampling-backend": str, "context-length": int,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=kind)
    for name in ("speculative-adaptive", "enable-metrics", "enable-cache-report", "skip-server-warmup"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--cuda-graph-bs-decode", nargs="+", type=int)
    args, rest = parser.parse_known_args()
    args.rest = rest
    if "--fail-at-start" in rest:
        print("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", flush=True)
        sys.exit(1)
    fake = Fake(args)
    fake.log_start()
    web.run_app(application(fake), host=args.host, port=args.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
