"""Records by what they are: found if they exist, measured if they do not.

Whoever needs records asks for a model, an experiment and a profile. :func:`ensure_all` (the command line) measures in
this process; :func:`ensure` (a notebook) measures in a subprocess, never in the kernel's event loop. Finished cells
are kept whatever happens, and the same request goes on where the last one stopped.

With ``measure="auto"`` the order is: a complete local run; measuring here, if the engine and the weights are here;
a recorded run. ``never`` reads only; ``always`` starts a new run.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from kit import cards
from kit.cards import EngineName, Experiment, ModelCard, Profile
from kit.engines.base import Server
from kit.engines.process import EngineError, ServerProcess, inherited_environment
from kit.errors import KitError
from kit.measure import attach, plan
from kit.measure.weights import missing_for, obstacles, resolve
from kit.records.provenance import collect, model_stamp
from kit.records.schema import Arm, RunRecord
from kit.records.store import Run, find_runs


@dataclass(frozen=True)
class Request:
    """What is asked for: a MODEL= name, a PROFILE=, MEASURE=, WEIGHTS= and BASE_URL=."""

    model: str
    profile: str = "quick"
    measure: str = "auto"
    weights: str | None = None
    base_url: str | None = None

    def card(self) -> ModelCard:
        """The model's card, with attached servers as its arms where BASE_URL= is given."""
        card = cards.load_card(self.model)
        return attach.attached_card(card, self.base_url) if self.base_url else card


@dataclass(frozen=True)
class Found:
    """What a request came to: runs per experiment, and why an experiment has none."""

    runs: dict[str, list[Run]]
    missing: dict[str, str]


def ensure_all(request: Request, names: Sequence[str] | None = None) -> Found:
    """Records of the named experiments (default: all of the card), measured in this process where needed.

    An experiment that cannot be had is told in ``missing``. Raises KitError if none can be had, with every reason.
    """
    card, profile = request.card(), cards.profile(request.profile)
    found: dict[str, list[Run]] = {}
    missing: dict[str, str] = {}
    fresh: dict[EngineName, Run] = {}
    for name in names or list(card.experiments):
        check_settings(card, name)  # a misspelt setting stops everything, before anything is measured
    for name in names or list(card.experiments):
        experiment = plan.experiment_of(card, name)
        try:
            found[name] = [_ensure_one(request, card, profile, name, experiment, fresh)]
        except KitError as error:
            if names:
                raise
            missing[name] = str(error)
    if not found:
        raise KitError(_nothing(request, card, missing))
    return Found(found, missing)


def ensure(
    model: str,
    experiment: str,
    profile: str = "quick",
    measure: str = "auto",
    weights: str | None = None,
    base_url: str | None = None,
) -> list[Run]:
    """Records for a notebook: read here, measured (if need be) by ``kit measure`` in a subprocess. Raises KitError."""
    request = Request(model, profile, measure, weights, base_url)
    if measure != "always":
        try:
            return [_read(request, experiment)]
        except KitError:
            if measure == "never":
                raise
    _measure_in_subprocess(request, experiment)
    return [_read(replace(request, measure="never"), experiment)]


def serve(model: str, experiment_name: str, arm: str | None, weights: str | None) -> None:
    """Start the server of one arm and keep it until Ctrl-C. Raises KitError listing the arms for an unknown one."""
    card = cards.load_card(model)
    experiment = plan.experiment_of(card, experiment_name)
    name = arm or experiment.baseline
    if name not in experiment.arms:
        raise KitError(f"{model} / {experiment_name} has no arm {name!r}; the arms are: {', '.join(experiment.arms)}")
    lacking = missing_for(experiment.engine)
    if lacking:
        raise KitError(f"{name} cannot be served here: {lacking}")
    path = resolve(card, experiment.engine, weights)
    with _open_server(experiment, experiment.arm(name), path, plan.LOCAL / model / f"serve-{os.getpid()}") as server:
        print(f"{experiment.arm(name).label}: {server.base_url}/v1 (model {server.model}); Ctrl-C stops it", flush=True)
        try:
            while server.process is None or server.process.poll() is None:
                time.sleep(0.5)
        except KeyboardInterrupt:
            return
        raise EngineError(f"the server ended by itself{server.process.log_quote()}")


def _open_server(experiment: Experiment, arm: Arm, weights: Path | None, log_dir: Path) -> Server:
    if experiment.engine == "exllamav3":
        raise KitError("ExLlamaV3 is a library, not a server: `kit measure` runs its arms in a process of their own")
    if experiment.engine == "sglang":
        from kit.measure import sglang

        return sglang.open_server(experiment, arm, weights, log_dir)
    from kit.measure import served

    return served.open_server(experiment, arm, weights, log_dir)


def _ensure_one(
    request: Request,
    card: ModelCard,
    profile: Profile,
    name: str,
    experiment: Experiment,
    fresh: dict[EngineName, Run],
) -> Run:
    if request.measure == "never":
        return _read(request, name)
    obstacle = "; ".join(obstacles(card, experiment.engine, request.weights)) or None
    weights: Path | None = None
    if experiment.engine == "openai" and "base_url" not in experiment.arm(experiment.baseline).settings:
        obstacle = card.weights.hint  # nothing to attach to
    if obstacle is None:
        try:
            weights = resolve(card, experiment.engine, request.weights)
        except KitError as error:
            obstacle = str(error)
    if obstacle is not None:
        recorded = plan.recorded_runs(card.name, name)
        if recorded and not request.weights:
            return recorded[0]
        raise KitError(f"{name} cannot be measured here: {obstacle}")
    stamp = model_stamp(weights) if weights else None
    run = fresh.get(experiment.engine)
    if run is None and request.measure == "auto":
        run = plan.matching_local_run(card, profile, experiment.engine, stamp)
    if run is None:
        run = _new_run(card, profile, experiment.engine, weights, stand_in=request.weights == "standin")
    fresh[experiment.engine] = run
    if not plan.is_complete(run, name, experiment, profile):
        try:
            _runner(experiment.engine)(run, card, name, experiment, profile, weights)
        except KitError:
            if not run.cells():  # nothing was measured: leave nothing behind that looks like a run
                shutil.rmtree(run.folder, ignore_errors=True)
                fresh.pop(experiment.engine, None)
            raise
    return run


def check_settings(card: ModelCard, name: str) -> None:
    """Check every arm's settings against its engine's. Raises KitError naming arm, setting and the valid ones."""
    experiment = plan.experiment_of(card, name)
    for arm in map(experiment.arm, experiment.arm_names()):
        try:
            if experiment.engine == "llamacpp":
                from kit.engines.llamacpp import LlamaCppSettings

                LlamaCppSettings.checked(model=Path("model.gguf"), **arm.settings)
            elif experiment.engine == "exllamav3":
                from kit.measure import prefill

                prefill.own_settings(arm)
            elif experiment.engine == "sglang":
                from kit.draftwidth.experiment import RUNNER_SETTINGS
                from kit.engines.sglang import parse_settings

                parse_settings({k: v for k, v in arm.settings.items() if k not in RUNNER_SETTINGS})
        except KitError as error:
            raise KitError(f"data/models/{card.name}.yaml: {name}, arm {arm.name}: {error}") from error


def _runner(engine: EngineName) -> Callable[..., None]:
    """The module that measures on an engine; loaded when needed."""
    if engine == "exllamav3":
        from kit.measure import prefill

        return prefill.measure
    if engine == "sglang":
        from kit.measure import sglang

        return sglang.measure
    from kit.measure import served

    return served.measure


def _read(request: Request, name: str) -> Run:
    """A run that holds the experiment: local and complete first, then any local, then recorded. Raises KitError."""
    card, profile = request.card(), cards.profile(request.profile)
    experiment = plan.experiment_of(card, name)
    local = find_runs([plan.LOCAL], card.name, name)
    same = [run for run in local if run.record.profile == profile.name]
    complete = [run for run in same if plan.is_complete(run, name, experiment, profile)]
    if request.measure == "never":
        complete += same + local
    choices = complete + plan.recorded_runs(card.name, name)
    if request.measure == "auto" and not complete and missing_for(experiment.engine) is None:
        choices = []  # it can be measured here: a recorded run is no substitute
    if not choices:
        raise KitError(f"nothing is recorded for MODEL={card.name}, experiment {name}, profile {profile.name}")
    return choices[0]


def _new_run(
    card: ModelCard, profile: Profile, engine: EngineName, weights: Path | None, stand_in: bool = False
) -> Run:
    run_id = plan.new_run_id()
    folder = plan.LOCAL / card.name / f"{run_id}-{engine}"
    record = RunRecord(
        run_id=run_id,
        model=card.name,
        title=card.title,
        stand_in=card.stand_in or stand_in,
        engine=engine,
        profile=profile.name,
        created_at=datetime.now(UTC),
        anchor=(datetime.now(UTC), time.perf_counter_ns()),
        seed=plan.SEED,
        card=card.model_dump(mode="json"),
        provenance=collect(sys.argv, model=weights),
    )
    return Run.create(folder, record)


def _measure_in_subprocess(request: Request, experiment: str) -> None:
    """Run ``kit measure`` for one experiment, showing its progress; it cannot outlive this process."""
    words = [request.model, "--experiment", experiment, "--profile", request.profile, "--measure", request.measure]
    words += ["--weights", request.weights or "", "--base-url", request.base_url or ""]
    log = plan.LOCAL / request.model / "measure.log"
    command = [sys.executable, "-m", "kit", "measure", *words]
    keys = {name: os.environ[name] for name in _key_variables(request.card()) if os.environ.get(name)}
    with ServerProcess(command, name="kit measure", log_path=log, env=inherited_environment(), secrets=keys) as child:
        shown = 0
        while True:
            status = child.poll()
            text = child.log_text()
            print(text[shown:], end="", flush=True)
            shown = len(text)
            if status is not None:
                break
            time.sleep(0.3)
    if status != 0:
        raise KitError(f"measuring {request.model} / {experiment} failed{child.log_quote()}")


def _key_variables(card: ModelCard) -> set[str]:
    """Names of the environment variables in which the card's arms look for an API key."""
    arms = (e.arm(name) for e in card.experiments.values() for name in e.arm_names())
    return {str(name) for arm in arms if (name := arm.settings.get("api_key_env"))}


def _nothing(request: Request, card: ModelCard, missing: dict[str, str]) -> str:
    """Every reason once, with the experiments that it keeps from being measured."""
    kept: dict[str, list[str]] = {}
    for name, text in missing.items():
        here = obstacles(card, card.experiments[name].engine, request.weights) if request.measure != "never" else []
        for reason in here or [text]:
            kept.setdefault(reason, []).append(name)
    reasons = "\n".join(f"  {', '.join(names)}: {reason}" for reason, names in kept.items())
    return (
        f"MODEL={request.model} can neither be measured here nor read from recorded runs.\n{reasons}\n"
        "`kit doctor` says what this machine can measure; `make report` with nothing else needs no GPU."
    )
