"""SGLang: its command lines, its start and stop, and what it says of itself.

SGLang stays in its own environment (``KIT_SGLANG_PYTHON`` names its Python; default: this one) and is spoken to over
HTTP. Option names and log lines are those of 0.5.17 to 0.5.23; the tests hold the command lines against the argument
parsers of both.

Three places tell what a server resolved, and only together they tell all: ``/server_info`` (arguments, pool, limits,
the draft width of the last step), the log (how large the target's and the draft's KV pools are; whether SGLang
quietly gave up adaptive widths), and the metrics (requests, token usage, GPU seconds by kind of forward pass).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kit.engines.base import HttpError, Server, api_headers, request, request_json
from kit.engines.process import EngineError, ServerProcess, inherited_environment
from kit.errors import KitError
from kit.records.schema import Scalar

PYTHON = "KIT_SGLANG_PYTHON"
"""Environment variable: the Python that has SGLang."""

EXTRA_ARGS = "KIT_SGLANG_EXTRA_ARGS"
"""Environment variable: options that this machine needs whatever the card (kernels it lacks, …)."""

PLUGIN = "draft_width"
DEFAULT_PORT = 30000
DEADLINE_S = 900.0
BOOTSTRAP_OFFSET = 8000
NCCL_OFFSET = 5000
"""Ports beside a server's own: where prefill and decode meet, and where ranks do."""

SAMPLED = {"running": "sglang:num_running_reqs", "queued": "sglang:num_queue_reqs"}


class SGLangSettings(BaseModel):
    """One deployment's settings, all scalars, as a model card gives them. An unknown one is an error.

    None leaves a setting to SGLang's default. Sizes are in tokens and requests.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Layout
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    dp: int = Field(default=1, ge=1)
    nodes: int = Field(default=1, ge=1)
    """Machines a server spans; tp × pp × dp is spread over them."""
    dist_init_addr: str | None = None
    """HOST:PORT of the first node, needed with several."""
    disaggregated: bool = False
    """Prefill and decode are two servers behind a router; tp and pp are then prefill's."""
    decode_tp: int | None = Field(default=None, ge=1)
    decode_pp: int | None = Field(default=None, ge=1)
    prefill_host: str = "127.0.0.1"
    decode_host: str = "127.0.0.1"
    transfer_backend: str | None = None
    ib_device: str | None = None

    # Speculation
    speculation: Literal["off", "mtp", "ngram"] = "off"
    draft_width: int | None = Field(default=None, ge=0)
    """mtp: draft tokens a step. With ``candidate_widths`` it can be changed later."""
    candidate_widths: str | None = None
    """mtp: widths a running server can be switched between, like ``0,1,2,4``. It starts at the widest."""
    ngram_draft_tokens: int | None = Field(default=None, ge=1)
    skip_zero_step_draft_extend: bool = False
    """At width 0, leave out draft-extend too (SGLang calls this experimental)."""
    simulate_acc_len: float | None = Field(default=None, gt=0)
    """Force the number of tokens a verification yields. Nothing measured so is a real acceptance."""

    # Memory and limits
    mem_fraction_static: float | None = Field(default=None, gt=0, lt=1)
    max_total_tokens: int | None = Field(default=None, ge=1)
    max_running_requests: int = Field(default=64, ge=1)
    """Always given: with speculation SGLang's default would be 48, without it hundreds."""
    cuda_graph_bs: str | None = None
    """Batch sizes with a decode graph, like ``1 2 4 8``."""
    max_mamba_cache_size: int | None = Field(default=None, ge=1)
    chunked_prefill_size: int | None = None
    context_length: int | None = Field(default=None, ge=1)
    kv_cache_dtype: str | None = None

    # The rest
    load_format: str | None = None
    attention_backend: str | None = None
    sampling_backend: str | None = None
    quantization: str | None = None
    decode_log_interval: int = Field(default=8, ge=1)
    """Decode steps between log lines, and between updates of the gauges."""
    device_timers: bool = True
    """GPU seconds by kind of forward pass, in the metrics."""
    extra_args: str = ""
    """Further words of the command line, quoted as in a shell."""
    extra_env: str = ""
    """Further variables, like ``A=1 B=2``."""

    @model_validator(mode="after")
    def _fits(self) -> SGLangSettings:
        mtp = self.speculation == "mtp"
        if mtp and self.draft_width is None and self.candidate_widths is None:
            raise ValueError("speculation mtp needs draft_width or candidate_widths")
        for name in ("draft_width", "candidate_widths", "skip_zero_step_draft_extend"):
            if not mtp and getattr(self, name) not in (None, False):
                raise ValueError(f"{name} goes with speculation mtp, not {self.speculation}")
        if self.ngram_draft_tokens is not None and self.speculation != "ngram":
            raise ValueError(f"ngram_draft_tokens goes with speculation ngram, not {self.speculation}")
        if self.candidate_widths is None and self.draft_width == 0:
            raise ValueError("draft_width 0 needs candidate_widths with a 0 in it; speculation off is plain decoding")
        if self.candidate_widths is not None:
            widths = self.widths
            if self.draft_width is not None and self.draft_width not in widths:
                raise ValueError(f"draft_width {self.draft_width} is not among candidate_widths {widths}")
            if not any(widths):
                raise ValueError(f"candidate_widths {widths} has no width above 0")
            if self.pp > 1 or (self.decode_pp or 1) > 1:
                raise ValueError("candidate_widths does not go with pipeline parallelism (SGLang changes one stage)")
        if self.nodes > 1 and not self.dist_init_addr:
            raise ValueError("several nodes need dist_init_addr, the first node's HOST:PORT")
        if self.nodes > 1 and self.disaggregated:
            raise ValueError(
                "disaggregated with several nodes for each side is started side by side: use two cards without "
                "disaggregated, then a router"
            )
        if not self.disaggregated and (self.decode_tp or self.decode_pp or self.transfer_backend or self.ib_device):
            raise ValueError("decode_tp, decode_pp, transfer_backend and ib_device go with disaggregated")
        return self

    @property
    def widths(self) -> list[int]:
        """``candidate_widths`` as numbers, rising; empty if there are none."""
        if self.candidate_widths is None:
            return []
        words = self.candidate_widths.replace(",", " ").split()
        if not words or not all(word.isdigit() for word in words):
            raise ValueError(f"candidate_widths must be like 0,1,2,4, not {self.candidate_widths!r}")
        return sorted({int(word) for word in words})

    @property
    def layout(self) -> str:
        """The layout in a few letters, for records: ``tp2``, ``tp2pp4``, ``pd:tp8+tp4``, ``tp16/2nodes``."""
        side = _side(self.tp, self.pp, self.dp)
        if self.disaggregated:
            return f"pd:{side}+{_side(self.decode_tp or self.tp, self.decode_pp or self.pp, self.dp)}"
        return f"{side}/{self.nodes}nodes" if self.nodes > 1 else side

    @property
    def flags(self) -> list[str]:
        """Labels that must follow every number measured with these settings."""
        forced = ["forced-acceptance"] if self.simulate_acc_len is not None else []
        return [*forced, *(["random-weights"] if self.load_format == "dummy" else [])]


def _side(tp: int, pp: int, dp: int) -> str:
    return f"tp{tp}" + (f"pp{pp}" if pp > 1 else "") + (f"dp{dp}" if dp > 1 else "")


def parse_settings(settings: Mapping[str, Scalar]) -> SGLangSettings:
    """Validate settings of a card. Raises KitError naming the wrong one and the known ones."""
    try:
        return SGLangSettings(**settings)
    except ValidationError as error:
        told = []
        for each in error.errors():
            where = ".".join(str(part) for part in each["loc"])
            if each["type"] == "extra_forbidden":
                told.append(f"unknown SGLang setting {where!r}; known: {', '.join(SGLangSettings.model_fields)}")
            else:
                told.append(f"{where + ': ' if where else ''}{each['msg'].removeprefix('Value error, ')}")
        raise KitError("SGLang settings: " + "; ".join(told)) from error


@dataclass(frozen=True)
class Command:
    """One process of a deployment. ``env``: variables on top of the environment. ``url``: None for a worker node."""

    role: Literal["server", "prefill", "decode", "router"]
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    url: str | None = None
    node: int = 0
    files: dict[Path, str] = field(default_factory=dict)
    """Files to write before it starts."""

    def __str__(self) -> str:
        shown = [*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()), shlex.join(self.argv)]
        return " ".join(shown)


def launch_commands(
    settings: SGLangSettings, model: Path | str, *, folder: Path, port: int = DEFAULT_PORT, python: str | None = None
) -> list[Command]:
    """Every command of the deployment, in the order to start them; the last one with a URL is what clients talk to.

    One server: one command a node. Disaggregated: prefill, decode, router; both sides on one host share it by GPU
    number. ``folder``: where files go that an option names. Starts nothing and writes nothing.
    """
    python = python or os.environ.get(PYTHON) or sys.executable
    base = _common(settings, model, folder)
    env = _environment(settings)
    files = _files(settings, folder)
    if not settings.disaggregated:
        layout = _layout(settings.tp, settings.pp, settings.dp)
        commands = []
        for node in range(settings.nodes):
            several = ["--nnodes", str(settings.nodes), "--node-rank", str(node)]
            several += ["--dist-init-addr", settings.dist_init_addr or ""]
            words = [*base, *layout, *(several if settings.nodes > 1 else []), *_address("127.0.0.1", port)]
            url = f"http://127.0.0.1:{port}" if node == 0 else None
            commands.append(Command("server", _words(python, words, settings), env, url, node, files))
        return commands
    one_host = settings.prefill_host == settings.decode_host
    sides: list[Command] = []
    for role, host, tp, pp, first_gpu in (
        ("prefill", settings.prefill_host, settings.tp, settings.pp, 0),
        (
            "decode",
            settings.decode_host,
            settings.decode_tp or settings.tp,
            settings.decode_pp or settings.pp,
            settings.tp * settings.pp * settings.dp if one_host else 0,
        ),
    ):
        side_port = port + 1 + len(sides)
        words = [*base, *_layout(tp, pp, settings.dp), "--disaggregation-mode", role]
        words += _option("--disaggregation-transfer-backend", settings.transfer_backend)
        words += _option("--disaggregation-ib-device", settings.ib_device)
        if role == "prefill":
            words += ["--disaggregation-bootstrap-port", str(port + BOOTSTRAP_OFFSET)]
        if first_gpu:
            words += ["--base-gpu-id", str(first_gpu)]
        words += _address(host, side_port)
        sides.append(Command(role, _words(python, words, settings), env, f"http://{host}:{side_port}", 0, files))
    router = [python, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    router += ["--prefill", sides[0].url, str(port + BOOTSTRAP_OFFSET), "--decode", sides[1].url]
    router += ["--host", "127.0.0.1", "--port", str(port)]
    return [*sides, Command("router", router, {}, f"http://127.0.0.1:{port}")]


def _words(python: str, words: list[str], settings: SGLangSettings) -> list[str]:
    here = shlex.split(os.environ.get(EXTRA_ARGS, ""))
    return [python, "-m", "sglang.launch_server", *words, *shlex.split(settings.extra_args), *here]


def _address(host: str, port: int) -> list[str]:
    return ["--host", host, "--port", str(port), "--nccl-port", str(port + NCCL_OFFSET)]


def _layout(tp: int, pp: int, dp: int) -> list[str]:
    sizes = {"--tp-size": tp, "--pp-size": pp, "--dp-size": dp}
    return [word for name, size in sizes.items() if size > 1 for word in (name, str(size))]


def _option(name: str, value: Any) -> list[str]:
    return [] if value is None else [name, str(value)]


def _common(settings: SGLangSettings, model: Path | str, folder: Path) -> list[str]:
    """Options every server of the deployment has."""
    words = ["--model-path", str(model), "--served-model-name", served_name(model)]
    words += _option("--mem-fraction-static", settings.mem_fraction_static)
    words += _option("--max-total-tokens", settings.max_total_tokens)
    words += ["--max-running-requests", str(settings.max_running_requests)]
    if settings.cuda_graph_bs is None:
        words += ["--cuda-graph-max-bs-decode", str(settings.max_running_requests)]
    else:
        words += ["--cuda-graph-bs-decode", *settings.cuda_graph_bs.replace(",", " ").split()]
    words += _option("--max-mamba-cache-size", settings.max_mamba_cache_size)
    words += _option("--chunked-prefill-size", settings.chunked_prefill_size)
    words += _option("--context-length", settings.context_length)
    words += _option("--kv-cache-dtype", settings.kv_cache_dtype)
    words += _option("--load-format", settings.load_format)
    words += _option("--attention-backend", settings.attention_backend)
    words += _option("--sampling-backend", settings.sampling_backend)
    words += _option("--quantization", settings.quantization)
    words += ["--enable-metrics", "--enable-cache-report"]
    words += ["--decode-log-interval", str(settings.decode_log_interval)]
    if settings.speculation == "mtp":
        # The widest first: hybrid models size their per-draft-token state by the start-up width.
        width = max(settings.widths) if settings.widths else settings.draft_width
        words += ["--speculative-algorithm", "NEXTN", "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-steps", str(width), "--speculative-num-draft-tokens", str(width + 1)]
        if settings.widths:
            words += ["--speculative-adaptive", "--speculative-adaptive-config", str(folder / "widths.json")]
    elif settings.speculation == "ngram":
        words += ["--speculative-algorithm", "NGRAM"]
        words += _option("--speculative-num-draft-tokens", settings.ngram_draft_tokens)
    return words


def _files(settings: SGLangSettings, folder: Path) -> dict[Path, str]:
    if not settings.widths:
        return {}
    return {folder / "widths.json": json.dumps({"1": {"candidate_steps": settings.widths}}) + "\n"}


def _environment(settings: SGLangSettings) -> dict[str, str]:
    env = {}
    if settings.widths:
        inherited = [name for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name and name != PLUGIN]
        env["SGLANG_PLUGINS"] = ",".join([*inherited, PLUGIN])
    if settings.device_timers:
        env["SGLANG_ENABLE_METRICS_DEVICE_TIMER"] = "1"
    if settings.skip_zero_step_draft_extend:
        env["SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"] = "1"
    if settings.simulate_acc_len is not None:
        env["SGLANG_SIMULATE_ACC_LEN"] = str(settings.simulate_acc_len)
    for pair in shlex.split(settings.extra_env):
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise KitError(f"extra_env: {pair!r} is not NAME=VALUE")
        env[name] = value
    return env


def served_name(model: Path | str) -> str:
    """What requests call the model: the checkpoint folder's name, not its path."""
    return Path(str(model).rstrip("/")).name or "model"


class Deployment:
    """The processes of one deployment, stopped together; stands where a server has its one process."""

    def __init__(self, processes: list[ServerProcess]) -> None:
        self.processes = processes

    @property
    def pid(self) -> int | None:
        """The process id of the one that clients talk to."""
        return self.processes[-1].pid

    def poll(self) -> int | None:
        """The exit status of the first that has ended, or None while all run."""
        return next((status for process in self.processes if (status := process.poll()) is not None), None)

    def log_text(self) -> str:
        """All logs, one after the other."""
        return "".join(process.log_text() for process in self.processes)

    def log_quote(self) -> str:
        """The last lines of each log, as the end of an error message."""
        return "".join(process.log_quote() for process in self.processes)

    def stop(self) -> None:
        """Stop all, the one clients talk to first."""
        for process in reversed(self.processes):
            process.stop()


def start(
    settings: SGLangSettings,
    model: Path,
    folder: Path,
    *,
    name: str = "sglang",
    port: int = DEFAULT_PORT,
    deadline_s: float = DEADLINE_S,
) -> Server:
    """Start the deployment on this machine and wait until it answers; logs go to ``folder``.

    Raises EngineError, quoting the logs and leaving nothing running, if a process ends or is not ready within
    ``deadline_s``; or if the layout spans machines, with the commands to run on each (attach to it then).
    """
    running = begin(settings, model, folder, name=name, port=port)
    return finish(running, deadline_s=deadline_s)


@dataclass
class Starting:
    """A deployment that has been started and may not be ready yet."""

    settings: SGLangSettings
    commands: list[Command]
    deployment: Deployment
    model: str
    begun: float


def begin(
    settings: SGLangSettings, model: Path, folder: Path, *, name: str = "sglang", port: int = DEFAULT_PORT
) -> Starting:
    """Start the processes without waiting, so that several deployments can load at once. Raises as :func:`start`."""
    commands = launch_commands(settings, model, folder=folder, port=port)
    hosts = {settings.prefill_host, settings.decode_host} if settings.disaggregated else set()
    if settings.nodes > 1 or hosts - {"127.0.0.1", "localhost"}:
        listed = "\n".join(f"  [{command.role} {command.node}] {command}" for command in commands)
        raise EngineError(f"the layout {settings.layout} spans machines: run these there, then attach\n{listed}")
    folder.mkdir(parents=True, exist_ok=True)
    processes: list[ServerProcess] = []
    try:
        for command in commands:
            for path, text in command.files.items():
                path.write_text(text)
            processes.append(
                ServerProcess(
                    command.argv,
                    name=f"{name} ({command.role})",
                    log_path=folder / f"{name}.{command.role}.log",
                    env=inherited_environment(command.env),
                    grace_s=20.0,
                )
            )
    except BaseException:
        Deployment(processes).stop()
        raise
    return Starting(settings, commands, Deployment(processes), served_name(model), time.monotonic())


def finish(starting: Starting, *, deadline_s: float = DEADLINE_S) -> Server:
    """Wait until a begun deployment answers (``deadline_s`` counts from its begin). Raises as :func:`start`."""
    deployment = starting.deployment
    try:
        for command, process in zip(starting.commands, deployment.processes, strict=True):
            left = max(1.0, deadline_s - (time.monotonic() - starting.begun))
            process.wait_ready(lambda url=command.url: healthy(url), left, interval_s=0.5)
        url = starting.commands[-1].url
        # Behind a router the server that decodes is the one that knows its state.
        inner = next((c.url for c in starting.commands if c.role == "decode"), url)
        info = server_info(inner)
        resolved = resolved_settings(info, parse_log(deployment.log_text()))
    except BaseException:
        deployment.stop()
        raise
    return Server(
        base_url=url,
        dialect="sglang",
        model=starting.model,
        resolved={**resolved, "layout": starting.settings.layout},
        flags=starting.settings.flags,
        log_path=deployment.processes[-1].log_path,
        metrics_url=f"{inner}/metrics",
        sampled=dict(SAMPLED),
        process=deployment,
        flush_with=flush_cache,
    )


def attach(url: str, *, api_key_env: str | None = None) -> Server:
    """A server that already runs. Raises EngineError if it does not answer as SGLang does."""
    url = url.rstrip("/").removesuffix("/v1")
    info = server_info(url, api_key_env=api_key_env)
    return Server(
        base_url=url,
        dialect="sglang",
        model=str(info.get("served_model_name") or info.get("model_path")),
        resolved=resolved_settings(info, ServerLog()),
        metrics_url=f"{url}/metrics",
        sampled=dict(SAMPLED),
        api_key_env=api_key_env,
        flush_with=flush_cache,
    )


def healthy(url: str, timeout_s: float = 10.0) -> bool:
    """Whether the server takes requests (SGLang makes a token to find out)."""
    try:
        request("GET", f"{url}/health", timeout_s=timeout_s)
    except HttpError:
        return False
    return True


def server_info(url: str, *, api_key_env: str | None = None) -> dict[str, Any]:
    """``/server_info``. Raises EngineError if the server does not answer with it."""
    info = request_json("GET", f"{url}/server_info", headers=api_headers(api_key_env), timeout_s=30.0)
    if not isinstance(info, dict) or "internal_states" not in info:
        raise EngineError(f"{url}/server_info is not SGLang's: it has no internal_states")
    return info


def flush_cache(server: Server, timeout_s: float = 60.0) -> None:
    """Wait until nothing runs or waits, then empty the prefix cache. Raises EngineError if it stays busy."""
    url = f"{server.base_url}/flush_cache?timeout={timeout_s:g}"
    try:
        request("POST", url, headers=server.headers(), timeout_s=timeout_s + 10)
    except HttpError as error:
        raise EngineError(f"the server did not become idle within {timeout_s:g} s: {error}") from error


# What the server says of itself


@dataclass(frozen=True)
class Pool:
    """A KV pool as its log line gives it: tokens, and GiB (K and V together)."""

    label: str
    tokens: int
    gib: float


@dataclass(frozen=True)
class ServerLog:
    """What only the log tells. Unknown is None."""

    target: Pool | None = None
    draft: Pool | None = None
    mamba: dict[str, float] = field(default_factory=dict)
    """The gated-delta-net state pool: ``max_mamba_cache_size`` and its parts in GiB."""
    weights_gib: list[float] = field(default_factory=list)
    """Of each model loaded, the draft's after the target's."""
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    context_len: int | None = None
    available_gib: float | None = None
    """GPU memory left after all pools and graphs."""
    adaptive_disabled: str | None = None
    """Why SGLang fell back to one width."""
    plugins: list[str] = field(default_factory=list)

    def numbers(self) -> dict[str, float | None]:
        """The sizes, by name, for a record's ``server`` field."""
        return {
            "log.kv_tokens": self.target.tokens if self.target else None,
            "log.kv_gib": self.target.gib if self.target else None,
            "log.draft_kv_tokens": self.draft.tokens if self.draft else None,
            "log.draft_kv_gib": self.draft.gib if self.draft else None,
            "log.weights_gib": self.weights_gib[0] if self.weights_gib else None,
            "log.draft_weights_gib": self.weights_gib[1] if len(self.weights_gib) > 1 else None,
            "log.available_gib": self.available_gib,
            **{f"log.{name}": value for name, value in self.mamba.items()},
        }


_POOL = re.compile(
    r"(?P<label>[\w ]*?)KV Cache is allocated\. dtype: \S+, #tokens: (?P<tokens>\d+), "
    r"(?:K size: (?P<k>[\d.]+) GB, V size: (?P<v>[\d.]+) GB|KV size: (?P<kv>[\d.]+) GB)"
)
_MAMBA = re.compile(r"Mamba Cache is allocated\. max_mamba_cache_size: (?P<size>\d+), (?P<parts>.*)")
_MAMBA_PART = re.compile(r"(\w+) size: ([\d.]+)\s?GB")
_WEIGHTS = re.compile(r"Load weight end\..*mem usage=(-?[\d.]+) GB")
_LIMITS = re.compile(r"max_total_num_tokens=\d+, .*")
_LIMIT = re.compile(r"(\w+)=(-?[\d.]+)")
_RANK = re.compile(r"^\[[^\]]*?\b(?:DP(?P<dp>\d+) )?TP(?P<tp>\d+)")


def parse_log(text: str) -> ServerLog:
    """Read a server's log: rank 0's lines. (SGLang logs the target's KV pool first, then the draft's.)"""
    pools: list[Pool] = []
    found: dict[str, Any] = {"weights_gib": [], "plugins": [], "mamba": {}}
    for line in text.splitlines():
        rank = _RANK.match(line)
        if rank and (rank["tp"] != "0" or (rank["dp"] or "0") != "0"):
            continue
        if match := _POOL.search(line):
            size = float(match["kv"]) if match["kv"] else float(match["k"]) + float(match["v"])
            pools.append(Pool(match["label"].strip(), int(match["tokens"]), round(size, 2)))
        elif match := _MAMBA.search(line):
            parts = {f"mamba_{name}_gib": float(gib) for name, gib in _MAMBA_PART.findall(match["parts"])}
            found["mamba"] = {"max_mamba_cache_size": int(match["size"]), **parts}
        elif match := _WEIGHTS.search(line):
            found["weights_gib"].append(float(match[1]))
        elif match := _LIMITS.search(line):
            limits = dict(_LIMIT.findall(match[0]))
            for name in ("max_total_num_tokens", "max_running_requests", "chunked_prefill_size", "context_len"):
                if name in limits:
                    found[name] = int(limits[name])
            found["available_gib"] = float(limits["available_gpu_mem"]) if "available_gpu_mem" in limits else None
        elif "speculative_adaptive disabled:" in line:
            found["adaptive_disabled"] = line.partition("speculative_adaptive disabled:")[2].strip()
        elif "Executed general plugin:" in line:
            name = line.partition("Executed general plugin:")[2].strip()
            if name not in found["plugins"]:
                found["plugins"].append(name)
    named = [pool for pool in pools if "draft" in pool.label.lower()]
    target = next((pool for pool in pools if pool not in named), None)
    draft = named[0] if named else next((pool for pool in pools if pool is not target), None)
    return ServerLog(target=target, draft=draft, **found)


COMPARED = (
    "mem_fraction_static",
    "max_running_requests",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "context_length",
    "max_mamba_cache_size",
    "attention_backend",
    "sampling_backend",
    "kv_cache_dtype",
    "dtype",
    "quantization",
    "disable_radix_cache",
    "disable_overlap_schedule",
    "schedule_policy",
    "page_size",
    "load_format",
    "speculative_algorithm",
    "speculative_eagle_topk",
    "speculative_adaptive",
    "disaggregation_mode",
)
"""Resolved arguments that a record keeps: those that can make two deployments differ."""


def resolved_settings(info: Mapping[str, Any], log: ServerLog) -> dict[str, Scalar]:
    """What the server resolved, from ``/server_info`` and its log, as a record keeps it. Unknown is None.

    ``draft_width`` is the width of the last step, or 0 without speculation: at the top of ``/server_info`` the
    start-up value never changes, so it is read from the scheduler's state.
    """
    states = info.get("internal_states") or [{}]
    state = states[0]
    resolved: dict[str, Scalar] = {"engine": "sglang", "engine_build": _scalar(info.get("version"))}
    for name in COMPARED:
        resolved[name] = _scalar(state.get(name, info.get(name)))
    memory = state.get("memory_usage") or {}
    resolved["max_total_num_tokens"] = _scalar(
        info.get("max_total_num_tokens") or memory.get("token_capacity") or log.max_total_num_tokens
    )
    resolved["running_limit"] = _scalar(state.get("effective_max_running_requests_per_dp") or log.max_running_requests)
    resolved["layout"] = _layout_of(state, info)
    speculative = bool(resolved["speculative_algorithm"])
    resolved["draft_width"] = _scalar(state.get("speculative_num_steps")) if speculative else 0
    plugin = state.get(PLUGIN)
    if isinstance(plugin, dict) and plugin.get("active"):
        resolved["draft_width"] = _scalar(plugin.get("in_use"))
        resolved["width_mode"] = _scalar(plugin.get("mode"))
        resolved["candidate_widths"] = ",".join(str(width) for width in plugin.get("candidates", []))
    if str(resolved["speculative_algorithm"]).upper() == "NGRAM":
        resolved["draft_width"] = None
        resolved["ngram_draft_tokens"] = _scalar(state.get("speculative_num_draft_tokens"))
    if log.draft is not None:
        resolved["draft_kv_bytes"] = round(log.draft.gib * 2**30)
    return resolved


def _layout_of(state: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    sizes = [int(state.get(name) or info.get(name) or 1) for name in ("tp_size", "pp_size", "dp_size")]
    return _side(*sizes)


def _scalar(value: Any) -> Scalar:
    return value if value is None or isinstance(value, str | int | float | bool) else json.dumps(value)


# Metrics

_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Metrics:
    """The server's own figures at one moment. Unknown is None; counters are totals since its start."""

    running: float | None
    queued: float | None
    token_usage: float | None
    accept_length: float | None
    """SGLang's own: tokens a verification, with the one from prefill counted in."""
    draft_width: float | None
    max_total_num_tokens: float | None
    retracted: float | None
    """Requests put back for want of KV room."""
    generation_tokens: float | None
    verify_calls: float | None
    """Of finished requests."""
    gpu_seconds: dict[str, float]
    """By kind of forward pass: eagle_draft, target_verify, eagle_draft_extend, extend, decode."""

    def since(self, before: Metrics) -> dict[str, float | None]:
        """What the counters gained since ``before``, by name."""
        gained: dict[str, float | None] = {}
        for name in ("retracted", "generation_tokens", "verify_calls"):
            now, then = getattr(self, name), getattr(before, name)
            gained[name] = None if now is None else now - (then or 0.0)
        for kind, seconds in sorted(self.gpu_seconds.items()):
            gained[f"gpu_s.{kind}"] = round(seconds - before.gpu_seconds.get(kind, 0.0), 6)
        return gained


def parse_metrics(text: str) -> Metrics:
    """Read a Prometheus page. Gauges are summed over data-parallel replicas (usage and lengths: averaged)."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line.strip())
        if match:
            labels = dict(_LABEL.findall(match["labels"] or ""))
            samples.setdefault(match["name"], []).append((labels, float(match["value"])))

    def values(name: str) -> list[float]:
        # Every rank of a tensor-parallel group may report; they say the same.
        return [value for labels, value in samples.get(f"sglang:{name}", []) if labels.get("tp_rank", "0") == "0"]

    def total(name: str) -> float | None:
        return sum(found) if (found := values(name)) else None

    def average(name: str) -> float | None:
        return sum(found) / len(found) if (found := values(name)) else None

    seconds: dict[str, float] = {}
    for labels, value in samples.get("sglang:forward_execution_seconds_total", []):
        if labels.get("tp_rank", "0") == "0" and "category" in labels:
            seconds[labels["category"]] = seconds.get(labels["category"], 0.0) + value
    return Metrics(
        running=total("num_running_reqs"),
        queued=total("num_queue_reqs"),
        token_usage=average("token_usage"),
        accept_length=average("spec_accept_length"),
        draft_width=average("spec_num_steps"),
        max_total_num_tokens=total("max_total_num_tokens"),
        retracted=total("num_retracted_requests_total"),
        generation_tokens=total("generation_tokens_total"),
        verify_calls=total("spec_verify_calls_total"),
        gpu_seconds=seconds,
    )


def metrics(server: Server) -> Metrics:
    """The server's metrics now. Raises EngineError if it has none (start it with ``--enable-metrics``)."""
    try:
        return parse_metrics(request("GET", server.metrics_url, headers=server.headers(), timeout_s=10.0))
    except HttpError as error:
        raise EngineError(f"no metrics (is the server started with --enable-metrics?): {error}") from error
