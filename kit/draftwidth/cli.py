"""``kit width``: get, set, watch and tune the draft width of a running SGLang server."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from kit.draftwidth import client
from kit.draftwidth.policy import SweepPoint, derive_policy, load_policy
from kit.errors import KitError
from kit.records.schema import CellRecord
from kit.records.store import Run

WORDS = {"auto": client.AUTO, "sglang": client.SGLANG, "off": 0}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the verb ``width`` with its own four verbs."""
    parser = subparsers.add_parser(
        "width", help="get, set or watch the draft width of a running SGLang server; tune a width policy"
    )
    verbs = parser.add_subparsers(dest="width_verb", required=True, metavar="get|set|watch|tune")

    get = verbs.add_parser("get", help="what is asked for and what is in use")
    _server(get)
    get.set_defaults(handler=_get)

    put = verbs.add_parser("set", help="set the width and wait until the server reports it in use")
    _server(put)
    put.add_argument("width", type=_width, help="draft tokens a step (0 or off = no drafting), auto or sglang")
    put.add_argument("--policy", type=Path, default=None, help="with auto: a width policy (made by kit width tune)")
    put.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds to wait (default: 30)")
    put.add_argument(
        "--no-nudge", action="store_true", help="send an idle server nothing; the width then stays pending"
    )
    put.set_defaults(handler=_set)

    watch = verbs.add_parser("watch", help="print the width whenever it changes; Ctrl-C ends")
    _server(watch)
    watch.add_argument("--interval", type=float, default=1.0, metavar="S")
    watch.set_defaults(handler=_watch)

    tune = verbs.add_parser("tune", help="derive a width policy from the recorded cells of an isolation sweep")
    tune.add_argument("run", type=Path, help="a run's folder (with run.json)")
    tune.add_argument("--experiment", default="isolation", help="the sweep's experiment (default: isolation)")
    tune.add_argument("--min-gain", type=float, default=0.02, metavar="SHARE",
                      help="what a wider width must gain to be chosen (default: 0.02)")  # fmt: skip
    tune.add_argument("--margin", type=int, default=0, help="requests past a boundary before switching (default: 0)")
    tune.add_argument("--dwell", type=int, default=8, metavar="STEPS", help="steps before switching (default: 8)")
    tune.add_argument("--out", type=Path, default=None, help="write the policy here (default: print it)")
    tune.add_argument("--set", dest="url", default=None, metavar="URL", help="have this server follow it")
    tune.add_argument("--api-key-env", default=None, metavar="NAME", help="environment variable with --set's key")
    tune.set_defaults(handler=_tune)


def _server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="the server, like http://127.0.0.1:30000 (not a router)")
    parser.add_argument("--api-key-env", default=None, metavar="NAME", help="environment variable that holds the key")


def _width(text: str) -> int:
    if text in WORDS:
        return WORDS[text]
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a width: a whole number from 0, off, auto or sglang")
    return int(text)


def _get(arguments: argparse.Namespace) -> int:
    state = client.get_width(arguments.url, api_key_env=arguments.api_key_env)
    print(state)
    for width, counts in state.counts().items():
        drafted = width * counts["verified"]
        rate = f", acceptance {counts['accepted'] / drafted:.3f}" if drafted else ""
        print(f"  width {width}: {counts['steps']} decode steps, {counts['requests']} request-steps{rate}")
    return 0


def _set(arguments: argparse.Namespace) -> int:
    if arguments.policy is not None and arguments.width != client.AUTO:
        raise KitError("--policy goes with the width auto")
    state = client.set_width(
        arguments.url,
        arguments.width,
        policy=None if arguments.policy is None else load_policy(arguments.policy),
        nudge=not arguments.no_nudge,
        timeout_s=arguments.timeout,
        api_key_env=arguments.api_key_env,
    )
    print(state)
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    for state in client.watch(arguments.url, interval_s=arguments.interval, api_key_env=arguments.api_key_env):
        print(f"{time.strftime('%H:%M:%S')} {state}", flush=True)
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    run = Run.open(arguments.run)
    policy = derive_policy(
        sweep_points(run.cells(), arguments.experiment),
        min_gain=arguments.min_gain,
        margin=arguments.margin,
        dwell_steps=arguments.dwell,
    )
    if arguments.out is None:
        print(policy.to_json(), end="")
    else:
        arguments.out.write_text(policy.to_json())
        print(f"wrote {arguments.out}")
    if arguments.url is not None:
        print(client.set_width(arguments.url, client.AUTO, policy=policy, api_key_env=arguments.api_key_env))
    return 0


def sweep_points(cells: list[CellRecord], experiment: str) -> list[SweepPoint]:
    """The usable cells of an isolation sweep: closed load, a width in ``resolved``, and a throughput.

    Raises KitError if there are none, naming the experiments that the run has.
    """
    points = [
        SweepPoint(cell.cell.load.value, int(width), tps)
        for cell in cells
        if cell.cell.experiment == experiment
        and cell.status == "ok"
        and cell.cell.load.kind == "closed"
        and (width := cell.resolved.get("draft_width")) is not None
        and (tps := cell.metrics.get("output_tps")) is not None
    ]
    if not points:
        named = ", ".join(sorted({cell.cell.experiment for cell in cells})) or "none"
        raise KitError(
            f"no cell of {experiment!r} has status ok, a closed load, draft_width in its resolved settings and an "
            f"output_tps; the run's experiments are: {named}"
        )
    return points
