"""The ``kit`` command: one verb for each thing a person does.

Whatever a user can put right ends in one message and status 2; Ctrl-C ends with status 130 and says how to go on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from kit.errors import KitError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; return the exit status (0 done, 2 something to put right, 130 interrupted)."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        return arguments.handler(arguments) or 0
    except KitError as error:
        print(f"kit {arguments.verb}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone (kit models | head)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        what = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        print(f"kit {arguments.verb}: {what}. Put that right; the same command goes on.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"kit {arguments.verb}: interrupted; finished cells are kept. The same command goes on.", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser with every verb."""
    from kit.draftwidth import cli as width_cli
    from kit.load import cli as load_cli

    parser = argparse.ArgumentParser(
        prog="kit", description="Measure whether multi-token prediction (MTP) helps a language-model service, and why."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    report = verbs.add_parser("report", help="measure what is not yet measured, then write the note (HTML, PDF)")
    _measuring_options(report)
    report.add_argument("--pdf", choices=("auto", "yes", "no"), default="auto", help="auto: if Chromium is found")
    report.add_argument("--out", type=Path, default=None, help="folder of the report (default: reports/MODEL)")
    report.set_defaults(handler=_report)

    measure = verbs.add_parser("measure", help="measure only; records go to data/local/MODEL/")
    _measuring_options(measure)
    measure.add_argument("--experiment", default=None, help="one experiment of the card (default: all)")
    measure.set_defaults(handler=_measure)

    render = verbs.add_parser("render", help="write the note again from records; measures nothing")
    render.add_argument("model", nargs="?", default="tiny-mtp")
    render.add_argument("--profile", default="quick")
    render.add_argument("--pdf", choices=("auto", "yes", "no"), default="no")
    render.add_argument("--out", type=Path, default=None)
    render.set_defaults(handler=_report, measure="never", weights=None, base_url=None)

    load_cli.add_parser(verbs)
    width_cli.add_parser(verbs)

    serve = verbs.add_parser("serve", help="start the server of one arm and keep it until Ctrl-C")
    serve.add_argument("model", nargs="?", default="tiny-mtp")
    serve.add_argument("--experiment", default="concurrency")
    serve.add_argument("--arm", default=None, help="an arm of the experiment (default: its baseline)")
    serve.add_argument("--weights", type=_empty_is_none, default=None)
    serve.set_defaults(handler=_serve)

    models = verbs.add_parser("models", help="list the models (data/models/*.yaml)")
    models.set_defaults(handler=_models)

    doctor = verbs.add_parser("doctor", help="say what this machine can measure, and what is missing for the rest")
    doctor.add_argument("model", nargs="?", default=None)
    doctor.set_defaults(handler=_doctor)
    return parser


def _empty_is_none(text: str) -> str | None:
    """Make passes unset variables as empty strings."""
    return text or None


def _measuring_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="tiny-mtp", help="a card's name (see: kit models)")
    parser.add_argument("--profile", default="quick", help="smoke, quick or full")
    parser.add_argument("--measure", choices=("auto", "always", "never"), default="auto",
                        help="auto: what is not yet recorded; always: anew; never: read records only")  # fmt: skip
    parser.add_argument("--weights", type=_empty_is_none, default=None, help="a checkpoint folder, a GGUF, or standin")
    parser.add_argument("--base-url", type=_empty_is_none, default=None,
                        help="attach: URL, or NAME=URL[,NAME=URL…] to compare deployments")  # fmt: skip


def _request(arguments: argparse.Namespace) -> "Request":  # noqa: F821, UP037
    from kit.measure import Request

    return Request(
        model=arguments.model,
        profile=arguments.profile,
        measure=arguments.measure,
        weights=arguments.weights,
        base_url=arguments.base_url,
    )


def _measure(arguments: argparse.Namespace) -> int:
    from kit import measure

    request = _request(arguments)
    names = [arguments.experiment] if arguments.experiment else None
    found = measure.ensure_all(request, names)
    for name, runs in found.runs.items():
        for run in runs:
            cells = [cell for cell in run.cells() if cell.cell.experiment == name]
            bad = [cell for cell in cells if cell.status != "ok"]
            print(f"{name}: {len(cells)} cells{f', {len(bad)} not ok' if bad else ''} in {run.folder}")
    for name, reason in found.missing.items():
        print(f"{name}: not measured: {reason}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from kit import report

    page = report.make(_request(arguments), out=arguments.out, pdf=arguments.pdf)
    print(page)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from kit import measure

    measure.serve(arguments.model, arguments.experiment, arguments.arm, arguments.weights)
    return 0


def _models(_: argparse.Namespace) -> int:
    from kit.cards import known_models, load_card

    for name in known_models():
        card = load_card(name)
        stand_in = " [stand-in weights]" if card.stand_in else ""
        print(f"{name}: {card.title}{stand_in}")
        for experiment, settings in card.experiments.items():
            print(f"    {experiment} ({settings.engine}): {', '.join(settings.arm_names())}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from kit.cards import known_models, load_card
    from kit.measure.weights import missing_for
    from kit.records.provenance import collect
    from kit.report import pdf

    here = collect([])
    print(f"machine: {here.cpu or 'unknown CPU'}, {here.cores} cores, {here.memory_gib} GiB")
    for gpu in here.gpus:
        print(f"GPU: {gpu.name}, {gpu.memory_mib} MiB, driver {gpu.driver}")
    print("versions: " + ", ".join(f"{name} {version}" for name, version in here.versions.items()))
    print(f"PDF: {pdf.find_browser() or pdf.HOW_TO_GET}")
    print(f"disk free: {shutil.disk_usage(Path.cwd()).free / 2**30:.0f} GiB")
    for name in [arguments.model] if arguments.model else known_models():
        for experiment, settings in load_card(name).experiments.items():
            lacking = missing_for(settings.engine)
            print(f"{name} / {experiment} ({settings.engine}): {lacking or 'can be measured here'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
