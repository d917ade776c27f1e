"""Checkpoints as values: a configuration, named tensors that are computed when asked for, and the files beside them.

`open_checkpoint` reads a folder of safetensors, `write_checkpoint` writes one, and what lies between (`grow`,
`hf_export`) maps a `Checkpoint` to a `Checkpoint` without touching the disk. A tensor is a generator of row blocks, so
that a checkpoint of any size is written with a few blocks in memory.

numpy has no bfloat16. It is kept as its bits (`uint16`), with the dtype's name beside it; `to_float32` and
`from_float32` convert (round to nearest even).

File format: https://github.com/huggingface/safetensors (an 8-byte length, a JSON header, then the tensors' bytes
without gaps).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kit.errors import KitError

BITS = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
"""How each safetensors dtype is held in numpy. BF16 is held as its bits."""

BLOCK_BYTES = 32 << 20
SHARD_BYTES = 2 << 30
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json")


@dataclass(frozen=True)
class Tensor:
    """A tensor that is computed when asked for.

    `blocks()` yields its rows (axis 0) in order, as contiguous arrays of `BITS[dtype]`; each call starts afresh.
    """

    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * BITS[self.dtype].itemsize

    def bits(self) -> np.ndarray:
        """The whole tensor, in `BITS[dtype]`."""
        blocks = list(self.blocks())
        return (blocks[0] if len(blocks) == 1 else np.concatenate(blocks)).reshape(self.shape)

    def float32(self) -> np.ndarray:
        """The whole tensor as float32 values."""
        return to_float32(self.bits(), self.dtype)


@dataclass(frozen=True)
class Checkpoint:
    """`config` is config.json; `files` are the files to go beside the weights: a path to copy, or the text itself."""

    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    files: Mapping[str, Path | str] = field(default_factory=dict)

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the configuration, whether nested (multimodal form) or not."""
        return self.config.get("text_config", self.config)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(math.prod(t.shape) for t in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(t.nbytes for t in self.tensors.values())


def to_float32(bits: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values of an array held as `BITS[dtype]`."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float32)


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` (float32) in `BITS[dtype]`, rounded to nearest even. NaN is not expected."""
    if dtype != "BF16":
        return values.astype(BITS[dtype])
    u = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def constant(bits: np.ndarray, dtype: str) -> Tensor:
    """A tensor that is already in memory."""
    return Tensor(dtype, tuple(bits.shape), lambda: iter([np.ascontiguousarray(bits)]))


def zeros(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of zeros that takes no memory until it is read."""

    def blocks() -> Iterator[np.ndarray]:
        for start, stop in row_blocks(shape, BITS[dtype].itemsize):
            yield np.zeros((stop - start, *shape[1:]), BITS[dtype])

    return Tensor(dtype, shape, blocks)


def row_blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
    """[start, stop) ranges over axis 0, each of about `BLOCK_BYTES`."""
    step = max(1, BLOCK_BYTES // max(1, math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], step):
        yield start, min(shape[0], start + step)


# ---------------------------------------------------------------- reading


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """Read a folder's headers. Weights are memory-mapped, and read when asked for.

    Raises KitError if the folder is no checkpoint, a shard is missing or broken, or a dtype is not BF16, F16 or F32.
    """
    folder = Path(folder)
    config = folder / "config.json"
    if not config.is_file():
        raise KitError(f"no checkpoint in {folder}: it has no config.json")
    shards = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [n for n in named if not (folder / n).is_file()]
        if missing:
            raise KitError(f"{folder} lacks {len(missing)} of {len(named)} shards, the first is {missing[0]}")
        shards = [folder / n for n in named]
    if not shards:
        raise KitError(f"no checkpoint in {folder}: it has no .safetensors file")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        tensors |= _read_header(shard)
    weights = {p for pattern in WEIGHT_FILES for p in folder.glob(pattern)}
    files = {p.name: p for p in sorted(folder.iterdir()) if p.is_file() and p not in weights}
    return Checkpoint(json.loads(config.read_text()), tensors, files)


def _read_header(path: Path) -> dict[str, Tensor]:
    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if not 2 <= length <= size - 8:
            raise KitError(f"{path} is no safetensors file, or is cut short")
        header = json.loads(f.read(length))
    header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
        if dtype not in BITS:
            raise KitError(f"{path}: tensor {name} has dtype {dtype}; {', '.join(BITS)} can be read")
        if 8 + length + end > size:
            raise KitError(f"{path} is cut short: tensor {name} ends after the file")
        shape = tuple(entry["shape"])
        out[name] = Tensor(dtype, shape, partial(_read_blocks, path, 8 + length + begin, dtype, shape))
    return out


def _read_blocks(path: Path, offset: int, dtype: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    data = np.memmap(path, BITS[dtype], "r", offset, shape)
    for start, stop in row_blocks(shape, BITS[dtype].itemsize):
        yield np.array(data[start:stop])


# ---------------------------------------------------------------- writing


def write_checkpoint(
    checkpoint: Checkpoint,
    folder: Path | str,
    *,
    shard_bytes: int = SHARD_BYTES,
    workers: int | None = None,
    progress: bool = False,
) -> Path:
    """Write safetensors shards, their index, config.json and the files beside them. Returns the folder.

    Shards are written at the same time by `workers` threads (numpy and the file system release the interpreter lock),
    each with one block in memory. The folder appears under its name when all of it is written.

    Raises KitError if the folder exists and is not empty, or the disk has too little room.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise KitError(f"{folder} exists and is not empty; name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if checkpoint.nbytes > free:
        raise KitError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, the checkpoint takes {checkpoint.nbytes / 1e9:.1f} GB"
        )
    partial_folder = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir()
    try:
        shards = _plan_shards(checkpoint.tensors, shard_bytes)
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        with (
            _bar(checkpoint.nbytes, f"writing {folder.name}", progress) as bar,
            ThreadPoolExecutor(workers or min(16, os.cpu_count() or 1)) as pool,
        ):
            jobs = [
                pool.submit(_write_shard, partial_folder / name, {n: checkpoint.tensors[n] for n in shard}, bar.update)
                for name, shard in zip(names, shards, strict=True)
            ]
            for job in jobs:
                job.result()
        index = {
            "metadata": {"total_size": checkpoint.nbytes},
            "weight_map": {n: name for name, shard in zip(names, shards, strict=True) for n in shard},
        }
        for name, content in checkpoint.files.items():
            if isinstance(content, Path):
                shutil.copyfile(content, partial_folder / name)
            else:
                (partial_folder / name).write_text(content)
        (partial_folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
        (partial_folder / "config.json").write_text(json.dumps(checkpoint.config, indent=1) + "\n")
        if folder.exists():
            folder.rmdir()
        partial_folder.rename(folder)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    return folder


def _plan_shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """Tensor names by shard, in the checkpoint's order, each shard at most `shard_bytes` (or one tensor)."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def _write_shard(path: Path, tensors: Mapping[str, Tensor], written: Callable[[int], Any]) -> None:
    # float32 first, so that every tensor starts at a multiple of its item size
    order = sorted(tensors, key=lambda n: -BITS[tensors[n].dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        t = tensors[name]
        header[name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [offset, offset + t.nbytes]}
        offset += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            size = 0
            for block in tensors[name].blocks():
                f.write(memoryview(np.ascontiguousarray(block)).cast("B"))
                size += block.nbytes
                written(block.nbytes)
            if size != tensors[name].nbytes:
                raise ValueError(f"tensor {name} gave {size} bytes, its shape needs {tensors[name].nbytes}")


def _bar(total: int, what: str, shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=not shown)


def rename(tensors: Iterable[tuple[str, Tensor]], old: str, new: str) -> dict[str, Tensor]:
    """The same tensors, with the prefix `old` replaced by `new` where a name has it."""
    return {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in tensors}
