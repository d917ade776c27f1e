"""The grown, exported stand-in on this machine: made once, then found by what it is made of.

The key is a hash of the checkpoint's weights, configuration and tokenizer, the growth, the quantisation, and the
versions of grower and exporter. Times and paths are left out: the same checkpoint at another place is the same model.
A file appears under its name only when it is complete, so two processes may make it at once.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kit.errors import KitError
from kit.standin import gguf_export, grow, hf_export
from kit.standin.checkpoint import open_checkpoint, write_checkpoint
from kit.standin.gguf_export import Quant
from kit.standin.grow import GrowSpec

FOLDER = Path(".cache/standin")
"""Below the current directory; ignored by git."""

SMALL = GrowSpec()
"""The checkpoint as it is."""


def key(checkpoint_dir: Path, spec: GrowSpec, form: str) -> str:
    """16 hex digits that name the exported weights; `form` is a GGUF quant or `hf`."""
    if not checkpoint_dir.is_dir():
        raise KitError(f"no checkpoint folder {checkpoint_dir}")
    digest = hashlib.sha256()
    settings = {
        "spec": {**spec.model_dump(), "kv_heads": spec.kv, "linear_value_heads": spec.linear_values},
        "form": form,
        "grow": grow.VERSION,
        "export": hf_export.VERSION if form == "hf" else gguf_export.VERSION,
    }
    digest.update(json.dumps(settings, sort_keys=True).encode())
    # the model card and the like do not change the weights
    inputs = {".safetensors", ".json", ".jinja"}
    for path in sorted(p for p in checkpoint_dir.iterdir() if p.suffix in inputs):
        digest.update(f"\0{path.name}\0".encode())
        with path.open("rb") as f:
            while block := f.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]


def standin_gguf(
    checkpoint_dir: Path | str,
    grow_spec: GrowSpec = SMALL,
    quant: Quant = "q8_0",
    *,
    cache: Path | str = FOLDER,
    progress: bool = True,
) -> Path:
    """Path of the GGUF file of `checkpoint_dir` grown by `grow_spec`; made if it is not there yet.

    Raises KitError as `open_checkpoint`, `grow` and `write_gguf` do.
    """
    checkpoint_dir = Path(checkpoint_dir)
    name = checkpoint_dir.resolve().name
    path = Path(cache) / f"{name}-{quant}-{key(checkpoint_dir, grow_spec, quant)}.gguf"
    if not path.is_file():
        grown = grow.grow(open_checkpoint(checkpoint_dir), grow_spec)
        gguf_export.write_gguf(grown, path, quant, name=f"{name} (grown)", progress=progress)
    return path


def standin_hf(
    checkpoint_dir: Path | str, grow_spec: GrowSpec = SMALL, *, cache: Path | str = FOLDER, progress: bool = True
) -> Path:
    """Folder of `checkpoint_dir` in the form SGLang and ExLlamaV3 load, grown by `grow_spec`; made if not there yet.

    Raises KitError as `open_checkpoint`, `conditional_generation`, `grow` and `write_checkpoint` do.
    """
    checkpoint_dir = Path(checkpoint_dir)
    name = checkpoint_dir.resolve().name
    folder = Path(cache) / f"{name}-hf-{key(checkpoint_dir, grow_spec, 'hf')}"
    if not folder.is_dir():
        form = hf_export.conditional_generation(open_checkpoint(checkpoint_dir))
        try:
            write_checkpoint(grow.grow(form, grow_spec), folder, progress=progress)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    return folder
