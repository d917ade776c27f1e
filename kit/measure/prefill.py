"""Measure the arms of a card's prefill experiment with ExLlamaV3, in the engine's own process.

The card's settings of the experiment say how the checkpoint is loaded and what is asked (:data:`COMMON`); what is left
of an arm's settings is its own (``kit.engines.exllamav3.ArmSettings``). The cells are those of ``kit.measure.plan``:
arm × prompt length × repeat, so a run that was cut short goes on where it stopped.

Layers are spread evenly over the GPUs this process may use, at most ``most_gpus`` of them; arms that need more GPUs
than there are, are left out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pydantic import ValidationError

from kit.cards import ROOT, Experiment, ModelCard, Profile
from kit.engines import exllamav3
from kit.engines.exllamav3 import ArmSettings, Layout, PrefillPlan
from kit.errors import KitError
from kit.measure import plan
from kit.records.schema import Arm, Scalar
from kit.records.store import Run

LAYOUT = ("chunk", "cache_tokens", "cache_bits", "draft_tokens", "ngram_min", "scan_tokens")
"""Settings of the experiment that say how the checkpoint is loaded."""

COMMON = (*LAYOUT, "output_tokens", "most_gpus", "timeline")
"""All settings that are the experiment's and not an arm's. ``timeline``: arms, parted by commas, whose timeline of
three chunks is recorded (the default: :data:`TIMELINES`, where they are measured)."""

TIMELINES = ("stock", "unblock", "no-mtp-unblocked")
"""What stalls, what does not, and what the latter is to be compared with."""

PATIENCE_S = (900.0, 600.0)
"""Longest time until the first cell, and per cell, after which the engine is given up."""


def usable_gpus(run: Run) -> int:
    """GPUs of the run's machine that this process may use (``CUDA_VISIBLE_DEVICES``)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len(run.record.provenance.gpus)
    return there if visible is None else min(there, sum(bool(word.strip()) for word in visible.split(",")))


def even_split(layers: int, gpus: int) -> tuple[int, ...]:
    """Layers on each GPU, as even as can be; empty for one GPU. The last GPU also has the head, so it takes fewer."""
    if gpus < 2:
        return ()
    return tuple(layers // gpus + (gpu < layers % gpus) for gpu in range(gpus))


def layers_of(weights: Path) -> int:
    """Layers of a checkpoint. Raises KitError if its ``config.json`` does not say."""
    config = json.loads((weights / "config.json").read_text())
    layers = config.get("text_config", config).get("num_hidden_layers")
    if not isinstance(layers, int):
        raise KitError(f"{weights / 'config.json'} has no num_hidden_layers, so its layers cannot be split over GPUs")
    return layers


def plan_of(
    run: Run, card: ModelCard, name: str, experiment: Experiment, profile: Profile, weights: Path
) -> PrefillPlan:
    """What the engine's process is to measure. Raises KitError for a setting that is neither the experiment's nor an
    arm's, or out of range."""
    gpus = min(usable_gpus(run), int(experiment.settings.get("most_gpus") or 1))
    there = experiment.on(gpus)
    arms = [_own(experiment.arm(arm)) for arm in there.arm_names()]
    for arm in arms:
        ArmSettings.of(arm)
    common: dict[str, Scalar] = {key: value for key, value in experiment.settings.items() if key in COMMON}
    timeline = common.get("timeline")
    try:
        return PrefillPlan(
            folder=run.folder,
            layout=Layout(
                checkpoint=weights,
                split=even_split(layers_of(weights), gpus) if gpus > 1 else (),
                **{key: value for key, value in common.items() if key in LAYOUT},
            ),
            arms=arms,
            lengths=[int(load.value) for load in plan.loads_of(there, profile)],
            repeats=profile.repeats,
            seed=run.record.seed,
            trace=ROOT / card.workload.trace,
            timeline=[
                arm
                for arm in (str(timeline).split(",") if timeline else TIMELINES)
                if arm in there.arms and not (run.folder / f"timeline-{arm}.json").exists()
            ],
            experiment=name,
            **{key: value for key, value in common.items() if key == "output_tokens"},
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise KitError(f"data/models/{card.name}.yaml: experiments.{name}.settings: {where}: {first['msg']}") from error


def measure(
    run: Run, card: ModelCard, name: str, experiment: Experiment, profile: Profile, weights: Path | None
) -> None:
    """Measure the cells an experiment still lacks; each is in the run as soon as it ends.

    Raises KitError without weights, EngineError if the engine's process fails or hangs; finished cells are kept.
    """
    if weights is None:
        raise KitError(f"{name} needs weights for ExLlamaV3: give WEIGHTS=")
    wanted = plan_of(run, card, name, experiment, profile, weights)
    left = sum(1 for _ in wanted.cells(run.done()))
    if not left:
        return
    log = run.folder / "exllamav3.log"
    print(f"{name}: {left} cells in ExLlamaV3's own process; its log: {log}", file=sys.stderr, flush=True)
    first, each = PATIENCE_S
    exllamav3.measure(wanted, deadline_s=first + each * left)


def own_settings(arm: Arm) -> ArmSettings:
    """What is left of an arm's settings without the experiment's. Raises KitError naming the bad one and the valid."""
    return ArmSettings.of(_own(arm))


def _own(arm: Arm) -> Arm:
    """The arm with its own settings only."""
    return arm.model_copy(update={"settings": {k: v for k, v in arm.settings.items() if k not in COMMON}})
