"""Widen and deepen a checkpoint without changing the function it computes (after Net2Net, Chen et al. 2015).

**Widening** repeats units: hidden channels, MLP neurons, attention heads, delta-net heads. Whatever reads a repeated
unit must read the sum of its copies' shares: its input columns are divided among the copies. The shares are not 1/n
but the n powers of two that sum to 1 (for n = 3: 1/2, 1/4, 1/4), so that every product is exact in bfloat16 and the
grown checkpoint's function equals the small one's, for any n, up to the order in which an engine sums. RMS norms keep
their value, since repeating channels keeps their mean square. Copies are laid out as whole repetitions (0 1 2 0 1 2),
so that blocks of a row that are quantised together stay what they were.

Heads keep their groups: query head i reads key head i // (heads ÷ kv heads), and so do the delta net's value heads its
key heads. A grown key head gets queries of its own source's group only, each source query equally often.

**Deepening** inserts blocks of `full_attention_interval` layers (so the 3:1 pattern stays) whose projections into the
residual stream are zero: each is the identity and costs what any other layer costs. The rest of an inserted layer's
weights are those of the block before it: realistic values, nothing to overflow. Identity blocks are spread evenly.

The MTP head is widened with the trunk and is never deepened: a deeper target makes drafting relatively cheaper, as in
large models, whose MTP head is one layer beside dozens. The vocabulary is not grown.

The 12 M stand-in reaches the shape of Qwen3.5-27B (except its vocabulary): `LIKE_27B`.

Everything is done on the small tensors first (columns divided and repeated); rows are repeated while writing.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from kit.errors import KitError
from kit.standin.checkpoint import (
    BITS,
    Checkpoint,
    Tensor,
    from_float32,
    open_checkpoint,
    row_blocks,
    to_float32,
    write_checkpoint,
    zeros,
)

LAYER = re.compile(r"^(model\.(?:language_model\.)?layers)\.(\d+)\.(.+)$")
INTO_RESIDUAL = ("self_attn.o_proj.weight", "linear_attn.out_proj.weight", "mlp.down_proj.weight")
"""What an identity layer has zeros in."""


class GrowSpec(BaseModel):
    """How often each dimension is repeated; 1 leaves it as it is.

    Queries must fall into whole groups: heads × (queries per kv head) is divisible by kv_heads. So must value heads.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden: int = Field(1, ge=1)
    intermediate: int = Field(1, ge=1)
    heads: int = Field(1, ge=1)
    kv_heads: int | None = Field(None, ge=1, description="default: as heads")
    linear_key_heads: int = Field(1, ge=1)
    linear_value_heads: int | None = Field(None, ge=1, description="default: as linear_key_heads")
    layers: int = Field(1, ge=1)

    @property
    def kv(self) -> int:
        """Factor of key-value heads."""
        return self.kv_heads or self.heads

    @property
    def linear_values(self) -> int:
        """Factor of the delta net's value heads."""
        return self.linear_value_heads or self.linear_key_heads


VERSION = 1
"""Raised when the same checkpoint and spec would give other weights; part of the cache's key."""

LIKE_27B = GrowSpec(hidden=20, intermediate=34, heads=4, linear_key_heads=16, layers=8)
"""From the 12 M stand-in to 64 layers, hidden 5120, MLP 17408, 24 / 4 heads, 16 / 48 delta-net heads."""


def shares(n: int) -> np.ndarray:
    """n powers of two that sum to 1, as equal as they can be (float32 [n]): 2^-k and 2^-(k+1), k = floor(log2 n)."""
    k = n.bit_length() - 1
    large = 2 ** (k + 1) - n
    return np.array([2.0**-k] * large + [2.0 ** -(k + 1)] * (n - large), np.float32)


@dataclass(frozen=True)
class Axis:
    """How one axis grows: `source[i]` is the old index of new index i, `share[i]` its part of that index's weight."""

    source: np.ndarray
    share: np.ndarray

    def __len__(self) -> int:
        return len(self.source)

    def of(self, width: int) -> Axis:
        """The same growth where each unit is `width` consecutive entries."""
        at = (self.source[:, None] * width + np.arange(width)).reshape(-1)
        return Axis(at, np.repeat(self.share, width))

    def __add__(self, other: Axis) -> Axis:
        """Two axes one after the other; `other`'s old indices come after this one's."""
        offset = int(self.source.max()) + 1
        return Axis(np.concatenate((self.source, other.source + offset)), np.concatenate((self.share, other.share)))


def _axis(source: np.ndarray) -> Axis:
    """Give the copies of each old index their shares, in order of appearance."""
    share = np.empty(len(source), np.float32)
    for old in range(int(source.max()) + 1):
        at = np.flatnonzero(source == old)
        share[at] = shares(len(at))
    return Axis(source, share)


def repeated(size: int, factor: int) -> Axis:
    """An axis of `size` units repeated `factor` times as a whole."""
    return Axis(np.tile(np.arange(size), factor), np.repeat(shares(factor), size))


def grouped(members: int, groups: int, member_factor: int, group_factor: int, what: str) -> Axis:
    """The members' axis where consecutive members share a group and groups are `repeated(groups, group_factor)`.

    Raises KitError if the grown members do not fall into whole groups.
    """
    per_group = members // groups
    if member_factor * per_group % group_factor:
        raise KitError(
            f"cannot grow {what}: {members} × {member_factor} over {groups} × {group_factor} groups; "
            f"{member_factor} × {per_group} must be divisible by {group_factor}"
        )
    grown_per_group = member_factor * per_group // group_factor
    source = [
        group * per_group + (copy * grown_per_group + i) % per_group
        for copy in range(group_factor)
        for group in range(groups)
        for i in range(grown_per_group)
    ]
    return _axis(np.array(source))


@dataclass(frozen=True)
class _Axes:
    """The axes that the tensors are made of."""

    hidden: Axis
    neurons: Axis
    queries: Axis  # rows of q_proj: query and gate of each head
    attention: Axis  # columns of o_proj
    keys: Axis  # rows of k_proj and v_proj
    linear_qkv: Axis
    linear_values: Axis  # value channels
    linear_heads: Axis  # one entry for each value head

    @classmethod
    def of(cls, text: dict[str, Any], spec: GrowSpec) -> _Axes:
        heads, kv = text["num_attention_heads"], text["num_key_value_heads"]
        lk, lv = text["linear_num_key_heads"], text["linear_num_value_heads"]
        q = grouped(heads, kv, spec.heads, spec.kv, "attention heads")
        v = grouped(lv, lk, spec.linear_values, spec.linear_key_heads, "delta-net value heads")
        key = repeated(lk, spec.linear_key_heads).of(text["linear_key_head_dim"])
        value = v.of(text["linear_value_head_dim"])
        return cls(
            hidden=repeated(text["hidden_size"], spec.hidden),
            neurons=repeated(text["intermediate_size"], spec.intermediate),
            queries=q.of(2 * text["head_dim"]),
            attention=q.of(text["head_dim"]),
            keys=repeated(kv, spec.kv).of(text["head_dim"]),
            linear_qkv=key + key + value,
            linear_values=value,
            linear_heads=v,
        )

    def rule(self, name: str) -> tuple[Axis | None, Axis | None] | None:
        """(rows, columns) of the tensor whose name ends so; None for a tensor that stays as it is."""
        h = self.hidden
        rules: dict[str, tuple[Axis | None, Axis | None] | None] = {
            # embeddings write hidden channels, along their columns: copied, not divided
            "embed_tokens.weight": (None, Axis(h.source, np.ones(len(h), np.float32))),
            "lm_head.weight": (None, h),
            "mtp.fc.weight": (h, h + h),
            "mlp.gate_proj.weight": (self.neurons, h),
            "mlp.up_proj.weight": (self.neurons, h),
            "mlp.down_proj.weight": (h, self.neurons),
            "self_attn.q_proj.weight": (self.queries, h),
            "self_attn.k_proj.weight": (self.keys, h),
            "self_attn.v_proj.weight": (self.keys, h),
            "self_attn.o_proj.weight": (h, self.attention),
            "self_attn.q_norm.weight": None,
            "self_attn.k_norm.weight": None,
            "linear_attn.in_proj_qkv.weight": (self.linear_qkv, h),
            "linear_attn.in_proj_z.weight": (self.linear_values, h),
            "linear_attn.in_proj_a.weight": (self.linear_heads, h),
            "linear_attn.in_proj_b.weight": (self.linear_heads, h),
            "linear_attn.conv1d.weight": (self.linear_qkv, None),
            "linear_attn.A_log": (self.linear_heads, None),
            "linear_attn.dt_bias": (self.linear_heads, None),
            "linear_attn.norm.weight": None,
            "linear_attn.out_proj.weight": (h, self.linear_values),
            "input_layernorm.weight": (h, None),
            "post_attention_layernorm.weight": (h, None),
            "pre_fc_norm_embedding.weight": (h, None),
            "pre_fc_norm_hidden.weight": (h, None),
            # the vision tower (multimodal form) writes into the hidden channels with its last layer only
            "visual.merger.linear_fc2.weight": (h, None),
            "visual.merger.linear_fc2.bias": (h, None),
            "mtp.norm.weight": (h, None),
            "language_model.norm.weight": (h, None),
            "model.norm.weight": (h, None),
        }
        for ending, found in rules.items():
            if name.endswith(ending):
                return found
        if ".visual." in name:
            return None
        raise KitError(f"cannot grow tensor {name}: it is not part of a Qwen3.5 text model with an MTP head")


def _grown(small: Tensor, rows: Axis | None, columns: Axis | None) -> Tensor:
    """The tensor with its rows repeated and its columns repeated and divided."""
    shape = (len(rows) if rows else small.shape[0], *small.shape[1:])
    if columns:
        shape = (shape[0], len(columns))

    def blocks() -> Iterator[np.ndarray]:
        wide = small.bits()
        if columns:
            # one power of two at a time, on the small tensor: exact, and cheap
            values = to_float32(wide, small.dtype)
            out = np.empty((len(wide), len(columns)), BITS[small.dtype])
            for share in np.unique(columns.share):
                at = columns.share == share
                out[:, at] = from_float32(values * share, small.dtype)[:, columns.source[at]]
            wide = out
        if rows is None:
            yield wide
            return
        for start, stop in row_blocks(shape, BITS[small.dtype].itemsize):
            yield wide[rows.source[start:stop]]

    return Tensor(small.dtype, shape, blocks)


def _layer_plan(layers: int, interval: int, factor: int) -> list[tuple[int, bool]]:
    """(source layer, identity?) for each grown layer: every block is followed by factor - 1 identity copies."""
    plan = []
    for block in range(layers // interval):
        for copy in range(factor):
            plan += [(block * interval + i, copy > 0) for i in range(interval)]
    return plan


def grown_config(config: dict[str, Any], spec: GrowSpec) -> dict[str, Any]:
    """config.json of the grown model, in the form (nested or not) of `config`."""
    text = dict(config.get("text_config", config))
    factors = {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv,
        "linear_num_key_heads": spec.linear_key_heads,
        "linear_num_value_heads": spec.linear_values,
        "num_hidden_layers": spec.layers,
    }
    for key, factor in factors.items():
        text[key] = text[key] * factor
    interval = text.get("full_attention_interval", 4)
    if "layer_types" in text:
        text["layer_types"] = [
            "full_attention" if i % interval == interval - 1 else "linear_attention"
            for i in range(text["num_hidden_layers"])
        ]
    if "text_config" not in config:
        return text
    vision = config.get("vision_config")
    out = {**config, "text_config": text}
    if vision is not None:
        out["vision_config"] = {**vision, "out_hidden_size": text["hidden_size"]}
    return out


def grow(checkpoint: Checkpoint, spec: GrowSpec) -> Checkpoint:
    """The grown checkpoint. Nothing is computed until its tensors are read.

    Raises KitError for tied embeddings, layers that do not make whole blocks, heads that do not fall into whole groups,
    and tensors that do not belong to this architecture.
    """
    text = checkpoint.text_config
    interval, layers = text.get("full_attention_interval", 4), text["num_hidden_layers"]
    if "lm_head.weight" not in checkpoint.tensors:
        raise KitError("cannot grow without lm_head.weight: tied embeddings cannot be both copied and divided")
    if layers % interval:
        raise KitError(f"cannot grow {layers} layers: not a multiple of full_attention_interval, {interval}")
    axes = _Axes.of(text, spec)
    by_layer: dict[int, list[tuple[str, str, Tensor]]] = {}
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        rule = axes.rule(name)
        grown = _grown(tensor, *rule) if rule else tensor
        if match := LAYER.match(name):
            by_layer.setdefault(int(match[2]), []).append((match[1], match[3], grown))
        elif name.endswith("embed_tokens.weight"):
            tensors[name] = grown
        else:
            rest[name] = grown
    for new, (old, identity) in enumerate(_layer_plan(layers, interval, spec.layers)):
        for prefix, ending, tensor in by_layer[old]:
            silent = identity and ending in INTO_RESIDUAL
            tensors[f"{prefix}.{new}.{ending}"] = zeros(tensor.dtype, tensor.shape) if silent else tensor
    grown = Checkpoint(grown_config(checkpoint.config, spec), tensors | rest)
    return Checkpoint(grown.config, grown.tensors, {**checkpoint.files, "README.md": _card(checkpoint, grown, spec)})


def _card(small: Checkpoint, grown: Checkpoint, spec: GrowSpec) -> str:
    """The grown folder's model card, in place of the small checkpoint's."""
    factors = ", ".join(f"{k} × {v}" for k, v in spec.model_dump(exclude_none=True).items() if v > 1) or "none"
    return (
        f"# Stand-in, grown\n\nA checkpoint of {small.parameters / 1e6:.2f} M parameters grown to "
        f"{grown.parameters / 1e6:.2f} M by `kit/standin/grow.py` (factors: {factors}). It computes the small model's "
        "function: its speed is that of its size, its text and its draft acceptance are the small model's.\n"
    )


def spec_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one option for each field of `GrowSpec`, and `--like`."""
    for name, info in GrowSpec.model_fields.items():
        text = info.description or "factor, default 1"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    parser.add_argument("--like", choices=["27b"], help="all factors at once: the shape of Qwen3.5-27B")


def spec_from(arguments: argparse.Namespace) -> GrowSpec:
    """The spec that parsed options ask for; single options override `--like`."""
    base = LIKE_27B.model_dump(exclude_none=True) if arguments.like else {}
    own = {n: v for n in GrowSpec.model_fields if (v := getattr(arguments, n)) is not None}
    bad = [n for n, v in own.items() if v < 1]
    if bad:
        raise KitError(f"--{bad[0].replace('_', '-')} must be at least 1")
    return GrowSpec(**(base | own))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: grow SRC into DST."""
    p = argparse.ArgumentParser(prog="python -m kit.standin.grow", description=__doc__.split("\n")[0])
    p.add_argument("source", type=Path, help="folder of the small checkpoint")
    p.add_argument("target", type=Path, help="folder to write; must not exist")
    p.add_argument("--hf", action="store_true", help="write the form SGLang and ExLlamaV3 load (see hf_export)")
    p.add_argument("--workers", type=int, help="threads, default one for each core, at most 16")
    p.add_argument("--shard-gb", type=float, default=2.0, help="shard size, default 2")
    spec_arguments(p)
    a = p.parse_args(argv)
    try:
        small = open_checkpoint(a.source)
        if a.hf:
            from kit.standin.hf_export import conditional_generation

            small = conditional_generation(small)
        big = grow(small, spec_from(a))
        print(f"{small.parameters / 1e6:.1f} M → {big.parameters / 1e6:.1f} M parameters, {big.nbytes / 1e9:.2f} GB")
        write_checkpoint(big, a.target, shard_bytes=int(a.shard_gb * 1e9), workers=a.workers, progress=True)
    except KitError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
