"""From a card and WEIGHTS= to weights an engine can load, or an error that says what is missing and what to do."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from kit.cards import ROOT, EngineName, ModelCard
from kit.errors import KitError

Format = Literal["gguf", "hf", "exl3"]

FORMATS: dict[EngineName, tuple[Format, ...]] = {
    "llamacpp": ("gguf",),
    "sglang": ("hf",),
    "exllamav3": ("exl3", "hf"),
    "openai": (),
}
"""What each engine loads. An attached server needs no weights here."""


def format_of(path: Path) -> Format:
    """Whether a path is a GGUF file, an EXL3 or a Hugging Face folder. Raises KitError saying what it should hold."""
    if not path.exists():
        raise KitError(f"WEIGHTS={path}: there is nothing at that path; give a GGUF file or a checkpoint folder")
    if path.is_file():
        with path.open("rb") as handle:
            if handle.read(4) == b"GGUF":
                return "gguf"
        raise KitError(f"WEIGHTS={path}: the file is not GGUF; give a .gguf file or the folder of a checkpoint")
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise KitError(f"WEIGHTS={path}: a checkpoint folder holds config.json and *.safetensors; this one does not")
    text = (path / "config.json").read_text()
    exl3 = '"exl3"' in text or (path / "quantization_config.json").is_file()
    return "exl3" if exl3 else "hf"


def missing_for(engine: EngineName) -> str | None:
    """Why an engine cannot run here, with what to do; None if it can. Looks, and imports nothing heavy."""
    if engine == "openai":
        return None
    if engine == "llamacpp":
        found = importlib.util.find_spec("xllamacpp")
        return None if found else "the package xllamacpp is not installed: pip install xllamacpp"
    lacking = []
    if shutil.which("nvidia-smi") is None:
        lacking.append("no NVIDIA GPU is visible (nvidia-smi is not on the PATH)")
    if importlib.util.find_spec(engine) is None:
        extra = {"sglang": "sglang", "exllamav3": "exl3"}[engine]
        lacking.append(
            f"the package {engine} is not installed: pip install -e '.[{extra}]' in the GPU host's environment"
        )
    return "; ".join(lacking) or None


def obstacles(card: ModelCard, engine: EngineName, weights: str | None) -> list[str]:
    """Everything that keeps an engine from measuring a card here, each with what to do; empty if nothing does.

    Looks only: no weights are grown or read.
    """
    found = [reason for reason in (missing_for(engine),) if reason]
    if engine != "openai" and weights is None and card.weights.kind == "path":
        found.append(f"no weights were given: {card.weights.hint}")
    return found


def resolve(card: ModelCard, engine: EngineName, weights: str | None) -> Path | None:
    """The weights an engine is to load: WEIGHTS= if given, else the card's stand-in, grown and exported once.

    ``weights`` is a path, ``"standin"`` or None. None for an attached server. Raises KitError where weights are missing
    or of a format the engine does not load.
    """
    if engine == "openai":
        return None
    if weights and weights != "standin":
        path = Path(weights).expanduser()
        found = format_of(path)
        if found not in FORMATS[engine]:
            raise KitError(f"WEIGHTS={weights} is {found}; {engine} loads {' or '.join(FORMATS[engine])}")
        return path
    if weights is None and card.weights.kind == "path":
        raise KitError(f"MODEL={card.name} needs weights: {card.weights.hint}")
    return _stand_in(card, engine)


def _stand_in(card: ModelCard, engine: EngineName) -> Path:
    if card.weights.checkpoint is None:
        raise KitError(f"MODEL={card.name} names no stand-in checkpoint (weights.checkpoint in its card)")
    checkpoint = ROOT / card.weights.checkpoint
    if not (checkpoint / "config.json").is_file():
        raise KitError(f"{checkpoint} holds no checkpoint: config.json is missing; is the checkout complete?")
    from kit.standin import cache  # grows with numpy: only when weights are needed
    from kit.standin.grow import GrowSpec

    try:
        spec = GrowSpec(**card.weights.grow)
    except ValidationError as error:
        valid = ", ".join(GrowSpec.model_fields)
        raise KitError(
            f"data/models/{card.name}.yaml: weights.grow: {error.errors()[0]['msg']}; it takes {valid}"
        ) from error
    if engine == "llamacpp":
        return cache.standin_gguf(checkpoint, spec, card.weights.quant, cache=ROOT / cache.FOLDER)
    return cache.standin_hf(checkpoint, spec, cache=ROOT / cache.FOLDER)
