"""``kit load URL``: drive any OpenAI-compatible server and print a table."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kit.engines.base import Server
from kit.engines.openai import AttachSettings, attach
from kit.errors import KitError
from kit.load.cell import load_requests, run_cell
from kit.load.spec import DriverResult, LoadSpec, parse_spec
from kit.load.traces import KINDS_BY_NAME, kind_of
from kit.records.metrics import METRICS_VERSION
from kit.records.provenance import collect
from kit.records.schema import Arm, CellKey, CellRecord, Load, RunRecord, Scalar
from kit.records.store import RUN, Run

KIT_TRACE = Path(__file__).resolve().parents[2] / "data" / "traces" / "agent-sessions.jsonl.gz"
EXPERIMENT = "load"
PROFILE = "command-line"

Row = DriverResult | CellRecord
Column = tuple[str, Callable[[Row], str]]


def add_parser(verbs: Any) -> None:
    """Add the verb to the ``kit`` command's subparsers."""
    parser = verbs.add_parser(
        "load",
        help="drive any OpenAI-compatible server and print a table",
        description="Drive a server that already runs, one load point after another, and print what it gave.",
    )
    parser.add_argument("url", metavar="URL", help="base URL of the server, with or without /v1")
    point = parser.add_mutually_exclusive_group()
    point.add_argument("-c", "--clients", default=None, help="closed loop: numbers of clients, as 1,2,4 (default: 1)")
    point.add_argument("--rate", default=None, help="open loop: requests per second, as 0.5,1,2")
    parser.add_argument("--arrivals", choices=("poisson", "constant", "gamma"), default="poisson", help="open loop")
    parser.add_argument("--burstiness", type=float, default=1.0, help="gamma arrivals: below 1 comes in bursts")
    parser.add_argument("--think", type=float, default=0.0, metavar="S", help="closed loop: pause between requests")
    parser.add_argument(
        "--burn-in", type=float, default=5.0, metavar="S", help="the clients' starts are spread over it"
    )
    parser.add_argument("--warm-up", type=float, default=5.0, metavar="S")
    parser.add_argument("--window", type=float, default=30.0, metavar="S", help="what is measured (default: 30)")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request")
    parser.add_argument("--processes", type=int, default=1, help="driver processes, where one is the bottleneck")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slo", default=None, help="targets in ms, as 'ttft:500 tpot:50'; adds goodput")

    server = parser.add_argument_group("server")
    server.add_argument("--api", choices=("chat", "completions"), default="chat")
    server.add_argument("--model", default=None, help="default: the first that the server lists")
    server.add_argument("--dialect", choices=("auto", "llamacpp", "sglang", "openai"), default="auto")
    server.add_argument("--key-env", metavar="NAME", default=None, help="NAME of the variable with the API key")
    server.add_argument("--no-ignore-eos", action="store_true", help="for servers that refuse ignore_eos")
    server.add_argument("--continuous-usage", action="store_true", help="ask for token counts mid-stream (vLLM)")
    server.add_argument("--body", default=None, metavar="JSON", help="further fields of each request")

    work = parser.add_argument_group("workload")
    work.add_argument("--trace", type=Path, default=None, help="messages JSONL (.gz), ShareGPT JSON or Mooncake JSONL")
    work.add_argument("--trace-kind", choices=KINDS_BY_NAME, default=None, help="default: from the file's content")
    work.add_argument("--input-tokens", type=int, default=None, help="random words instead of a trace")
    work.add_argument("--output-tokens", type=int, default=None, help="length of every answer")
    work.add_argument("--turns", type=int, default=None, help="turns a session, with --input-tokens")
    work.add_argument("--max-prompt-chars", type=int, default=None, help="end a session before a longer prompt")
    work.add_argument("--max-output-tokens", type=int, default=None, help="cap on recorded output lengths")
    parser.add_argument("--out", type=Path, default=None, help="write records to this folder, or go on in it")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Drive the load points; returns the exit status (1 where a point completed no request)."""
    points = load_points(arguments)
    server = attach(
        AttachSettings.checked(base_url=arguments.url, model=arguments.model, api_key_env=arguments.key_env)
    )
    dialect = server.dialect if arguments.dialect == "auto" else arguments.dialect
    common = {
        "base_url": server.base_url,
        "dialect": dialect,
        "api": arguments.api,
        "model": server.model,
        "key_env": arguments.key_env,
        "workload": workload(arguments),
        "arrivals": {"process": arguments.arrivals, "burstiness": arguments.burstiness} if arguments.rate else {},
        "seed": arguments.seed,
        "burn_in_s": arguments.burn_in,
        "warm_up_s": arguments.warm_up,
        "window_s": arguments.window,
        "think_time_s": arguments.think,
        "request_timeout_s": arguments.timeout,
        "ignore_eos": not arguments.no_ignore_eos,
        "continuous_usage": arguments.continuous_usage or None,
        "extra_body": _json_object(arguments.body),
        "slo": arguments.slo,
        "metrics_urls": [server.metrics_url] if server.metrics_url else [],
        "processes": arguments.processes,
    }
    cells = [(load, repeat) for repeat in range(arguments.repeats) for load in points]
    specs = [parse_spec(json.dumps({**common, "load": p.model_dump(), "repeat": r}, default=str)) for p, r in cells]
    run = _open_run(arguments, specs) if arguments.out else None
    recorded = {c.cell.id: c for c in run.cells() if c.status == "ok"} if run else {}
    columns = columns_for(arguments.slo is not None, arguments.rate is not None)
    described = specs[0].workload
    print(f"{server.base_url} ({dialect}, {arguments.api}); workload: {described.kind} {described.path or ''}".rstrip())
    print("  ".join(title for title, _ in columns))
    empty = False
    for spec, (load, repeat) in zip(specs, cells, strict=True):
        key = CellKey(experiment=EXPERIMENT, arm="attached", load=load, repeat=repeat)
        if run is not None and key.id in recorded:
            print(f"{load.label} repeat {repeat}: recorded before, in {run.folder}", file=sys.stderr)
            print(line(recorded[key.id], columns))
            continue
        scratch = tempfile.TemporaryDirectory(prefix="kit-load-") if run is None else nullcontext(None)
        with scratch as temporary:
            folder = Path(temporary) if temporary else run.folder / "driver" / key.id  # type: ignore[union-attr]
            result = run_cell(spec, folder, Line(load.label).show)
            Line("").clear()
            if not result.complete:
                raise KitError(f"{load.label}: the driver was stopped ({result.stopped_by}); nothing is recorded of it")
            if run is not None:
                _append(run, key, spec, result, folder, server)
        empty = empty or not result.counts or not result.counts.completed
        print(line(result, columns), flush=True)
        for message, times in result.errors.items():
            print(f"    {times} × {message}")
    return 1 if empty else 0


def load_points(arguments: argparse.Namespace) -> list[Load]:
    """The load points asked for. Raises KitError for a list that holds anything but numbers above 0."""
    kind, text = ("open", arguments.rate) if arguments.rate else ("closed", arguments.clients or "1")
    option = "--rate" if kind == "open" else "-c"
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise KitError(f"{option} {text}: expected numbers like 1,2,4") from error
    if any(not 0 < v < float("inf") or (kind == "closed" and v != int(v)) for v in values):
        raise KitError(f"{option} {text}: expected {'whole ' if kind == 'closed' else ''}numbers above 0, like 1,2,4")
    return [Load(kind=kind, value=value) for value in values]


def workload(arguments: argparse.Namespace) -> dict[str, Any]:
    """The workload asked for: a trace, random words, or what the kit brings. Raises KitError on a mixture."""
    limits = {"max_prompt_chars": arguments.max_prompt_chars, "max_output_tokens": arguments.max_output_tokens}
    if arguments.input_tokens is not None:
        if arguments.trace is not None:
            raise KitError("--trace and --input-tokens exclude each other")
        return {
            "kind": "synthetic",
            "input_tokens": arguments.input_tokens,
            "output_tokens": arguments.output_tokens or 128,
            "turns": arguments.turns or 1,
            **limits,
        }
    if arguments.turns is not None:
        raise KitError("--turns goes with --input-tokens")
    trace = arguments.trace or (KIT_TRACE if KIT_TRACE.is_file() else None)
    if trace is None:
        return {"kind": "synthetic", "input_tokens": 512, "output_tokens": arguments.output_tokens or 128, **limits}
    if not trace.is_file():
        raise KitError(f"trace {trace} is not a file")
    kind = arguments.trace_kind or kind_of(trace)
    return {"kind": kind, "path": str(trace), "output_tokens": arguments.output_tokens, **limits}


def columns_for(with_slo: bool, open_loop: bool) -> list[Column]:
    """The table's columns, titles padded to their width."""

    def metric(tag: str, factor: float = 1.0, digits: int = 1) -> Callable[[Row], str]:
        return lambda result: number(result.metrics.get(tag), factor, digits)

    def count(name: str) -> Callable[[Row], str]:
        return lambda result: str(getattr(result.counts, name)) if result.counts else "–"

    columns: list[Column] = [
        (f"{'λ (1/s)' if open_loop else 'c':>7}", lambda row: f"{_load_of(row).value:g}"),
        (f"{'sent':>6}", count("sent")),
        (f"{'ok':>6}", count("completed")),
        ("failed", lambda r: str(r.counts.failed + r.counts.timed_out) if r.counts else "–"),
        ("cut off", count("cut_off")),
        (f"{'tok/s':>8}", metric("output_tps")),
        ("TTFT p50 (ms)", metric("ttft_p50", 1000)),
        ("TTFT p99 (ms)", metric("ttft_p99", 1000)),
        ("TPOT p50 (ms)", metric("tpot_p50", 1000, 2)),
        ("acceptance", metric("acceptance", 1, 3)),
        ("client lag p99 (ms)", metric("client_lag_p99", 1000, 2)),
    ]
    if with_slo:
        columns += [("goodput (1/s)", metric("goodput", 1, 2)), ("attainment", metric("attainment", 1, 3))]
    return [*columns, ("flags", lambda result: " ".join(result.flags))]


def line(row: Row, columns: list[Column]) -> str:
    """A line of the table: of a cell just driven, or of one recorded before."""
    return "  ".join(f"{show(row):>{len(title)}}" for title, show in columns)


def _load_of(row: Row) -> Load:
    return row.cell.load if isinstance(row, CellRecord) else row.spec.load


def number(value: float | None, factor: float = 1.0, digits: int = 1) -> str:
    """A figure for the table; an unknown one is a dash."""
    return "–" if value is None else f"{value * factor:.{digits}f}"


class Line:
    """One line of progress on a terminal's stderr; nothing where stderr is none."""

    def __init__(self, label: str) -> None:
        self.label = label

    def show(self, event: Mapping[str, Any]) -> None:
        """Draw a progress event of the driver."""
        if sys.stderr.isatty() and event.get("event") == "progress":
            done = f"{event['phase']} {event['elapsed_s']:.0f}/{event['total_s']:.0f} s"
            said = f"{event['in_flight']} in flight, {event['ok']} ok, {event['failed']} failed"
            print(f"\r\x1b[K{self.label}: {done}, {said}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def settings(spec: LoadSpec) -> dict[str, Scalar]:
    """All that is asked for beside load point and repeat: cells of one folder share it. Times in seconds.

    Left out are what has no meaning for the kind of load (think time, arrivals), the key's name and the metrics page.
    """
    apart = {"load", "repeat", "key_env", "metrics_urls", "metrics_names", "metrics_interval_s", "workload", "arrivals"}
    told = spec.model_dump(mode="json", exclude=apart)
    told["extra_body"] = json.dumps(spec.extra_body, sort_keys=True)
    work = spec.workload.model_dump(mode="json", exclude={"path"})
    if path := spec.workload.path:
        work |= {"path": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    told |= {f"workload.{name}": value for name, value in work.items()}
    if spec.load.kind != "closed":
        del told["think_time_s"]
        told |= {"arrivals": spec.arrivals.process, "burstiness": spec.arrivals.burstiness}
    return told


def _open_run(arguments: argparse.Namespace, specs: list[LoadSpec]) -> Run:
    """The run in ``--out``, made if there is none. Raises KitError if it holds cells of other settings than asked."""
    if (arguments.out / RUN).is_file():
        run = Run.open(arguments.out)
        if run.record.profile != PROFILE:
            raise KitError(
                f"{run.folder} holds a run of {run.record.model} ({run.record.title}) that `kit load` did not make; "
                "choose another folder for --out"
            )
        asked = settings(specs[0])
        for cell in run.cells():
            other = [name for name in asked if name in cell.asked and asked[name] != cell.asked[name]]
            if cell.status == "ok" and other:
                raise KitError(
                    f"{run.folder} holds cells of other settings ("
                    + "; ".join(f"{name}: {cell.asked[name]} there, {asked[name]} asked for" for name in other)
                    + "); choose another folder for --out, or ask for the settings it holds to go on in it"
                )
        return run
    now = datetime.now(UTC)
    return Run.create(
        arguments.out,
        RunRecord(
            run_id=now.strftime("%Y%m%dT%H%M%SZ"),
            model="attached",
            title=f"Load on {arguments.url}",
            stand_in=False,
            engine="openai",
            profile=PROFILE,
            created_at=now,
            seed=specs[0].seed,
            card={},
            provenance=collect(sys.argv),
        ),
    )


def _append(run: Run, key: CellKey, asked: LoadSpec, result: DriverResult, folder: Path, server: Server) -> None:
    spec = result.spec
    if any(cell.workload_hash != result.workload_hash for cell in run.cells() if cell.status == "ok"):
        raise KitError(f"{run.folder} holds cells of another workload; choose another folder for --out")
    completed = bool(result.counts and result.counts.completed)
    run.append(
        CellRecord(
            metrics_version=METRICS_VERSION,
            run_id=run.record.run_id,
            cell=key,
            arm=Arm(name=key.arm, label=spec.base_url, settings={"base_url": spec.base_url}),
            asked=settings(asked),
            resolved={**server.resolved, "dialect": spec.dialect, "api": spec.api},
            workload_hash=result.workload_hash,
            seed=spec.seed,
            started_at=result.started_at,
            window_ns=result.window_ns,
            status="ok" if completed else "failed",
            reason=None if completed else "no request was completed: " + "; ".join(result.errors)[:300],
            flags=result.flags,
            counts=result.counts,
            metrics=result.metrics,
            server=result.server,
        ),
        load_requests(folder),
    )


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise KitError(f"--body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise KitError('--body must be a JSON object, like {"top_k": 1}')
    return value
