"""Which cells a run needs, in which order, and which run they belong to.

The order is what makes small differences believable: all arms of a repeat are measured before the next repeat
begins, and the arms' order and the loads' order within an arm are shuffled anew for every repeat (seeded), so
that a drift of the machine does not fall on one arm.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kit.cards import ROOT, EngineName, Experiment, ModelCard, Profile
from kit.errors import KitError
from kit.records.metrics import METRICS_VERSION
from kit.records.provenance import workload_hash
from kit.records.schema import Arm, CellKey, CellRecord, Load
from kit.records.store import Run, find_runs

LOCAL = Path(os.environ.get("KIT_LOCAL") or ROOT / "data" / "local")
"""Runs made on this machine (not in git); the environment variable KIT_LOCAL puts them elsewhere."""

RECORDED = ROOT / "data" / "runs"
"""Recorded runs: kept in git, immutable."""

SEED = 20261129
"""Default seed of a run; prompts, arrivals and the order of cells are spawned from it."""


@dataclass(frozen=True)
class Block:
    """Cells measured on one started server: one arm in one repeat, over its load points."""

    arm: str
    repeat: int
    cells: list[CellKey]


def loads_of(experiment: Experiment, profile: Profile) -> list[Load]:
    """The experiment's own load points, else the profile's."""
    values = experiment.loads if experiment.loads is not None else profile.loads
    return [Load(kind=experiment.load_kind, value=value) for value in values]


def blocks(
    name: str, experiment: Experiment, profile: Profile, seed: int = SEED, done: Iterable[str] = ()
) -> list[Block]:
    """The blocks still to be measured, arms interleaved over repeats; cells whose id is in ``done`` are left out."""
    finished = set(done)
    planned = []
    for repeat in range(profile.repeats):
        order = random.Random(f"{seed}/{name}/{repeat}")
        arms = experiment.arm_names()
        order.shuffle(arms)
        for arm in arms:
            loads = loads_of(experiment, profile)
            if arm not in experiment.arms and experiment.noise_loads is not None:
                loads = [load for load in loads if load.value in experiment.noise_loads]
            order.shuffle(loads)
            cells = [CellKey(experiment=name, arm=arm, load=load, repeat=repeat) for load in loads]
            left = [cell for cell in cells if cell.id not in finished]
            if left:
                planned.append(Block(arm, repeat, left))
    return planned


def is_complete(run: Run, name: str, experiment: Experiment, profile: Profile) -> bool:
    """Whether a run holds every cell the plan asks for on the run's machine."""
    return not blocks(name, experiment.on(len(run.record.provenance.gpus)), profile, done=run.done())


def matching_local_run(
    card: ModelCard, profile: Profile, engine: EngineName, stamp: str | None, root: Path | None = None
) -> Run | None:
    """The newest local run of this card, profile, engine and these weights: to read, or to resume."""
    wanted = card.model_dump(mode="json")
    for run in find_runs([root or LOCAL], card.name):
        record = run.record
        same = record.profile == profile.name and record.engine == engine and record.card == wanted
        if same and record.provenance.model_stamp == stamp:
            return run
    return None


def recorded_runs(model: str, experiment: str, root: Path | None = None) -> list[Run]:
    """Recorded runs of a model that hold cells of an experiment, newest first."""
    return find_runs([root or RECORDED], model, experiment)


def new_run_id(now: datetime | None = None) -> str:
    """A run's id: its UTC start, to the second."""
    return (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")


def experiment_cells(runs: Iterable[Run], name: str) -> list[CellRecord]:
    """All cells of an experiment in these runs."""
    return [cell for run in runs for cell in run.cells() if cell.cell.experiment == name]


def experiment_of(card: ModelCard, name: str) -> Experiment:
    """The experiment of a card by name. Raises KitError listing the card's experiments."""
    if name not in card.experiments:
        raise KitError(
            f"{card.name} has no experiment {name!r}; its experiments are: {', '.join(card.experiments)} "
            f"(data/models/{card.name}.yaml)"
        )
    return card.experiments[name]


def failed_cell(run: Run, arm: Arm, cell: CellKey, reason: str) -> CellRecord:
    """The record of a cell that could not be driven."""
    return CellRecord(
        metrics_version=METRICS_VERSION,
        run_id=run.record.run_id,
        cell=cell,
        arm=arm,
        workload_hash=workload_hash({"not": "driven"}),
        seed=run.record.seed,
        started_at=datetime.now(UTC),
        status="failed",
        reason=reason[:2000],
    )
