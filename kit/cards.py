"""Model cards and experiment settings: strict YAML, validated, with errors that name what would be valid.

A card (``data/models/<name>.yaml``) says everything a MODEL= name stands for: which weights, which experiments
on which engine, with which arms. A *profile* says how long and how often to measure, and is the same for all
models. Cards hold no logic; an unknown key is an error, so that a misspelt setting never silently means the default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kit.errors import KitError
from kit.records.schema import Arm, Scalar

ROOT = Path(__file__).resolve().parents[1]
"""The checkout: cards, data and reports lie beside the package."""

MODELS = ROOT / "data" / "models"

EngineName = Literal["llamacpp", "sglang", "exllamav3", "openai"]


class Card(BaseModel):
    """Base of all cards: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Weights(Card):
    """Where the weights come from."""

    kind: Literal["standin", "path"]
    """standin: grown from a small trained checkpoint of this repository; path: given as WEIGHTS=."""
    checkpoint: str | None = None
    """standin: folder of the small checkpoint, relative to the repository."""
    grow: dict[str, int] = {}
    """standin: integer factors for kit.standin.grow (hidden, intermediate, heads, …)."""
    quant: Literal["bf16", "q8_0"] = "bf16"
    hint: str = ""
    """path: told to whoever runs without WEIGHTS=."""


class WorkloadCard(Card):
    """What the clients send."""

    trace: str
    """A workload file, relative to the repository or absolute."""
    api: Literal["chat", "completions"] = "chat"
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Cap on a request's output (the recorded length otherwise)."""
    max_prompt_chars: int | None = Field(default=None, ge=1)
    """A session ends before the turn whose prompt would be longer: for servers with a short context."""
    think_time_s: float = Field(default=0.0, ge=0)
    slo: str | None = None
    """Latency targets for goodput, in ms: ``ttft:500 tpot:50``."""


class ArmCard(Card):
    """One arm: its label in figures and its settings on top of the experiment's."""

    label: str
    settings: dict[str, Scalar] = {}
    gpus: int = Field(default=1, ge=1)
    """GPUs that the arm needs to mean anything; on a machine with fewer it is not measured."""


class Experiment(Card):
    """One experiment: an engine, common settings, arms and load points."""

    engine: EngineName
    notebook: str | None = None
    """The notebook (notebooks/<name>.ipynb) that draws it; None: the one called as the experiment."""
    arms: dict[str, ArmCard] = Field(min_length=1)
    load_kind: Literal["closed", "open", "prefill", "trace"] = "closed"
    loads: list[float] | None = None
    """Load points; None takes the profile's."""
    settings: dict[str, Scalar] = {}
    baseline: str
    """The arm the others are compared with."""
    noise_arm: str | None = None
    """An arm measured twice (as <name>-again): the A/A pair that gives the noise floor."""
    noise_loads: list[float] | None = None
    """Load points of the A/A twin; None: all."""

    @model_validator(mode="after")
    def _names_exist(self) -> Experiment:
        for field in ("baseline", "noise_arm"):
            name = getattr(self, field)
            if name is not None and name not in self.arms:
                raise ValueError(f"{field}: no arm is called {name!r}; the arms are: {', '.join(self.arms)}")
            if name is not None and self.arms[name].gpus > 1:
                raise ValueError(f"{field}: {name!r} needs {self.arms[name].gpus} GPUs; choose an arm that needs one")
        return self

    def arm(self, name: str) -> Arm:
        """The arm with the experiment's common settings merged in; knows the A/A twin ``<noise_arm>-again``."""
        again = self.noise_arm is not None and name == f"{self.noise_arm}-again"
        card = self.arms[self.noise_arm if again else name]
        label = f"{card.label}, again" if again else card.label
        return Arm(name=name, label=label, settings={**self.settings, **card.settings})

    def arm_names(self) -> list[str]:
        """All arms, the A/A twin last."""
        return [*self.arms, *([f"{self.noise_arm}-again"] if self.noise_arm else [])]

    def on(self, gpus: int) -> Experiment:
        """The experiment with the arms that a machine with so many GPUs can measure."""
        arms = {name: arm for name, arm in self.arms.items() if arm.gpus <= max(1, gpus)}
        return self if len(arms) == len(self.arms) else self.model_copy(update={"arms": arms})


class ModelCard(Card):
    """Everything a MODEL= name stands for."""

    name: str
    title: str
    about: str
    stand_in: bool
    weights: Weights
    workload: WorkloadCard
    experiments: dict[str, Experiment] = Field(min_length=1)
    related: list[str] = []
    """Cards whose recorded experiments belong on this model's page."""


class Profile(Card):
    """How long and how often to measure. Seconds."""

    name: str
    burn_in_s: float
    warm_up_s: float
    window_s: float
    repeats: int
    loads: list[float]


PROFILES = {
    p.name: p
    for p in (
        Profile(name="smoke", burn_in_s=0.5, warm_up_s=0.5, window_s=2.0, repeats=1, loads=[1, 2]),
        Profile(name="quick", burn_in_s=0.6, warm_up_s=1.0, window_s=2.2, repeats=3, loads=[1, 2, 4, 8]),
        Profile(
            name="full", burn_in_s=40, warm_up_s=60, window_s=300, repeats=3, loads=[1, 2, 4, 8, 16, 32]
        ),  # KVTop's timing, with repeats
    )
}


def profile(name: str) -> Profile:
    """A profile by name. Raises KitError listing the known ones."""
    if name not in PROFILES:
        raise KitError(f"unknown PROFILE {name!r}; the profiles are: {', '.join(PROFILES)}")
    return PROFILES[name]


def known_models(folder: Path = MODELS) -> list[str]:
    """Names of all cards."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load_card(name: str, folder: Path = MODELS) -> ModelCard:
    """The card of a MODEL= name.

    Raises KitError for an unknown name (listing the known), bad YAML, or an unknown key (listing the valid).
    """
    path = folder / f"{name}.yaml"
    if name not in known_models(folder):
        raise KitError(
            f"unknown MODEL {name!r}; the models are: {', '.join(known_models(folder)) or 'none'} ({folder})"
        )
    try:
        raw = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise KitError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise KitError(f"{path} must hold a mapping with the keys {', '.join(ModelCard.model_fields)}")
    try:
        card = ModelCard.model_validate({"name": name, **raw})
    except ValidationError as error:
        raise KitError("\n".join(_explain(path, raw, e) for e in error.errors())) from error
    if card.name != name:
        raise KitError(f"{path}: name is {card.name!r}, but the file is called {name!r}; make them equal")
    return card


def _explain(path: Path, raw: dict, error: dict) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        valid = _valid_keys(error["loc"][:-1])
        return f"{path}: unknown key {where!r}; valid keys there: {', '.join(valid)}"
    return f"{path}: {where or 'card'}: {error['msg']}"


def _valid_keys(loc: tuple) -> list[str]:
    """The keys that are valid at a place in a card, found by walking the models along ``loc``."""
    model: type[BaseModel] = ModelCard
    steps = {"weights": Weights, "workload": WorkloadCard, "experiments": Experiment, "arms": ArmCard}
    for part in loc:
        model = steps.get(str(part), model)
    return list(model.model_fields)
