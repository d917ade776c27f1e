"""The form that SGLang 0.5.17 and ExLlamaV3 load: `Qwen3_5ForConditionalGeneration` with a tiny vision tower.

Both engines tie the MTP head to this multimodal architecture (SGLang 0.5.17 registers no text-only class; ExLlamaV3's
text-only class has no MTP component). The vision tower must be there, so one of 0.1 M parameters is made; it is
never used, its weights are random and seeded. Image and video tokens must be in the tokenizer.

Take the small checkpoint into this form and then grow it (`grow` widens the tower's last layer with the hidden
channels), so that the large one is written once.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from kit.errors import KitError
from kit.standin.checkpoint import Checkpoint, Tensor, constant, from_float32, rename

VERSION = 1
"""Raised when the same checkpoint would give other files; part of the cache's key."""

TRUNK = "model.language_model."
VISION = {
    "model_type": "qwen3_5",
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "in_channels": 3,
    "num_position_embeddings": 256,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}
"""The tower's configuration but for `out_hidden_size`, which is the trunk's width."""
TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_PIXELS = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PROCESSORS: dict[str, dict[str, Any]] = {
    "preprocessor_config.json": {
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        **_PIXELS,
    },
    "video_preprocessor_config.json": {
        "processor_class": "Qwen3VLProcessor",
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        **_PIXELS,
    },
}


def vision_shapes(vision: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names (below `model.visual.`) and shapes of the vision tower's tensors."""
    d, inner, merge = vision["hidden_size"], vision["intermediate_size"], vision["spatial_merge_size"] ** 2
    patch = (d, vision["in_channels"], vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    out: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": patch,
        "patch_embed.proj.bias": (d,),
        "pos_embed.weight": (vision["num_position_embeddings"], d),
    }
    linears = {"attn.qkv": (3 * d, d), "attn.proj": (d, d), "mlp.linear_fc1": (inner, d), "mlp.linear_fc2": (d, inner)}
    for i in range(vision["depth"]):
        for norm in ("norm1", "norm2"):
            out |= {f"blocks.{i}.{norm}.weight": (d,), f"blocks.{i}.{norm}.bias": (d,)}
        for name, shape in linears.items():
            out |= {f"blocks.{i}.{name}.weight": shape, f"blocks.{i}.{name}.bias": shape[:1]}
    merger = {"linear_fc1": (d * merge, d * merge), "linear_fc2": (vision["out_hidden_size"], d * merge)}
    out |= {"merger.norm.weight": (d,), "merger.norm.bias": (d,)}
    for name, shape in merger.items():
        out |= {f"merger.{name}.weight": shape, f"merger.{name}.bias": shape[:1]}
    return out


def conditional_generation(checkpoint: Checkpoint, seed: int = 0) -> Checkpoint:
    """The checkpoint in `Qwen3_5ForConditionalGeneration` form, with vision tensors and processor configurations.

    Takes the text-only form (`model.layers.…`), the nested form without a vision tower, and the finished form (returned
    with its own tower). Raises KitError if the tokenizer lacks an image or video token.
    """
    text = {"model_type": "qwen3_5_text", **checkpoint.text_config}
    text["model_type"] = "qwen3_5_text"
    text.setdefault("full_attention_interval", 4)  # SGLang 0.5.17 reads it from text_config
    ids = _token_ids(checkpoint)
    vision = {**VISION, **checkpoint.config.get("vision_config", {}), "out_hidden_size": text["hidden_size"]}
    for key in ("architectures", "text_config", "vision_config"):
        text.pop(key, None)
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": text.get("dtype", "bfloat16"),
        "tie_word_embeddings": False,
        **ids,
        "text_config": text,
        "vision_config": vision,
    }
    nested = any(n.startswith(TRUNK) for n in checkpoint.tensors)
    tensors = dict(checkpoint.tensors) if nested else rename(checkpoint.tensors.items(), "model.", TRUNK)
    if not any(".visual." in n for n in tensors):
        tensors |= _vision_tower(vision, seed)
    files = {**checkpoint.files, **{n: json.dumps(c, indent=1) + "\n" for n, c in PROCESSORS.items()}}
    tokenizer_config = _json_file(checkpoint, "tokenizer_config.json")
    names = {k.removesuffix("_id"): v for k, v in TOKENS.items()}
    extra = {**tokenizer_config.get("extra_special_tokens", {}), **names}
    tokenizer_config = {**tokenizer_config, **names, "extra_special_tokens": extra}
    files["tokenizer_config.json"] = json.dumps(tokenizer_config, indent=1) + "\n"
    return Checkpoint(config, tensors, files)


def _vision_tower(vision: dict[str, Any], seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    return {
        f"model.visual.{name}": constant(
            from_float32(rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02), "BF16"), "BF16"
        )
        for name, shape in vision_shapes(vision).items()
    }


def _json_file(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    content = checkpoint.files.get(name)
    if content is None:
        raise KitError(f"the checkpoint has no {name}")
    return json.loads(content if isinstance(content, str) else content.read_text())


def _token_ids(checkpoint: Checkpoint) -> dict[str, int]:
    tokenizer = _json_file(checkpoint, "tokenizer.json")
    known = {**tokenizer["model"]["vocab"], **{t["content"]: t["id"] for t in tokenizer.get("added_tokens", [])}}
    missing = [t for t in TOKENS.values() if t not in known]
    if missing:
        needed = ", ".join(TOKENS.values())
        raise KitError(f"the tokenizer has no {', '.join(missing)}; the multimodal form needs all of {needed}")
    return {key: known[token] for key, token in TOKENS.items()}
