"""Write a Qwen3.5 checkpoint with its MTP head as a GGUF file for llama.cpp (architecture `qwen35`).

What llama.cpp expects to differ from the checkpoint (its `src/models/qwen35.cpp` and the GGUF of such models):

- norm weights with the 1 added (the delta net's gated norm has it already);
- `ssm_a` is -exp(A_log), and `ssm_dt.bias` is dt_bias;
- the convolution without its middle dimension, float32;
- the delta net's value heads in tiled order: it repeats key heads as a whole (k0 k1 k0 k1 …), where the checkpoint
  keeps a key head's value heads together. So value head r of key head k goes from place k·R + r to r·K + k;
- the MTP head as one more block after the trunk's, with `nextn.*` tensors; embeddings and output head are shared.

Matrices are written as bfloat16 or Q8_0 (32 weights share a float16 scale), everything one-dimensional as float32.
Only numpy and the `gguf` package are used; one tensor is in memory at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from kit.errors import KitError
from kit.standin.checkpoint import Checkpoint, Tensor, from_float32, open_checkpoint

if TYPE_CHECKING:
    from gguf import GGUFWriter

Quant = Literal["bf16", "q8_0"]
VERSION = 1
"""Raised when the same checkpoint would give a different file; part of the cache's key."""

Q8_BLOCK = 32

LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
TOP_NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
MTP_NAMES = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}
_LAYER = re.compile(r"^layers\.(\d+)\.(.+)$")


def gguf_name(name: str, layers: int) -> str | None:
    """llama.cpp's name of a tensor; None for the vision tower, which is left out. `layers` is the trunk's depth."""
    if ".visual." in name:
        return None
    if name in MTP_NAMES:
        return f"blk.{layers}.{MTP_NAMES[name]}"
    if name.startswith("mtp.layers."):
        match, offset = _LAYER.match(name.removeprefix("mtp.")), layers
    else:
        name = name.removeprefix("model.").removeprefix("language_model.")
        if name in TOP_NAMES:
            return TOP_NAMES[name]
        match, offset = _LAYER.match(name), 0
    if match is None or match[2] not in LAYER_NAMES:
        raise KitError(f"cannot export tensor {name}: it is not part of a Qwen3.5 text model with an MTP head")
    return f"blk.{offset + int(match[1])}.{LAYER_NAMES[match[2]]}"


def tiled_heads(key_heads: int, value_heads: int, width: int = 1) -> np.ndarray:
    """Old index of each new value channel: from grouped by key head to tiled, heads of `width` channels."""
    heads = np.arange(value_heads).reshape(key_heads, value_heads // key_heads).T.reshape(-1)
    return (heads[:, None] * width + np.arange(width)).reshape(-1)


def _transform(name: str, text: dict[str, Any]) -> Callable[[np.ndarray], np.ndarray]:
    """What happens to a tensor's float32 values on the way."""
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    heads = tiled_heads(keys, values)
    channels = tiled_heads(keys, values, text["linear_value_head_dim"])
    qk = np.arange(2 * keys * text["linear_key_head_dim"])
    qkv = np.concatenate((qk, channels + len(qk)))
    if name.endswith("linear_attn.norm.weight"):
        return lambda x: x
    if name.endswith("norm.weight") or "norm_" in name:
        return lambda x: x + 1
    return {
        "A_log": lambda x: -np.exp(x[heads]),
        "dt_bias": lambda x: x[heads],
        "conv1d.weight": lambda x: x.reshape(len(x), -1)[qkv],
        "in_proj_qkv.weight": lambda x: x[qkv],
        "in_proj_z.weight": lambda x: x[channels],
        "in_proj_a.weight": lambda x: x[heads],
        "in_proj_b.weight": lambda x: x[heads],
        "out_proj.weight": lambda x: x[:, channels],
    }.get(name.rpartition("linear_attn.")[2], lambda x: x)


def tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]]:
    """(llama.cpp's name, shape, a call that computes the float32 values) of every tensor."""
    text = checkpoint.text_config

    def values(tensor: Tensor, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[], np.ndarray]:
        return lambda: np.ascontiguousarray(change(tensor.float32()), np.float32)

    for name, tensor in checkpoint.tensors.items():
        new = gguf_name(name, text["num_hidden_layers"])
        if new is None:
            continue
        shape = (tensor.shape[0], tensor.shape[-1]) if name.endswith("conv1d.weight") else tensor.shape
        yield new, shape, values(tensor, _transform(name, text))


def _stored_as(name: str, shape: tuple[int, ...], quant: Quant) -> str:
    """The type a tensor is written in: `F32`, `BF16` or `Q8_0`."""
    if len(shape) == 1 or name.endswith("ssm_conv1d.weight"):
        return "F32"
    return "Q8_0" if quant == "q8_0" and shape[-1] % Q8_BLOCK == 0 else "BF16"


def write_gguf(
    checkpoint: Checkpoint, path: Path | str, quant: Quant = "q8_0", *, name: str = "stand-in", progress: bool = False
) -> Path:
    """Write the file (complete or not at all) and return its path.

    Raises KitError for a checkpoint of another architecture, without an MTP head or a tokenizer, or an unknown quant.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize
    from tqdm import tqdm

    path = Path(path)
    if quant not in get_args(Quant):
        raise KitError(f"unknown quant {quant!r}; known: {', '.join(get_args(Quant))}")
    if "mtp.fc.weight" not in checkpoint.tensors:
        raise KitError("the checkpoint has no MTP head (mtp.fc.weight)")
    if "lm_head.weight" not in checkpoint.tensors:
        raise KitError("the checkpoint has no lm_head.weight; tied embeddings are not exported")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    writer = GGUFWriter(partial, "qwen35")
    try:
        _add_hyperparameters(writer, checkpoint.text_config, quant, name)
        _add_tokenizer(writer, checkpoint)
        jobs = []
        for new, shape, compute in tensors(checkpoint):
            kind = GGMLQuantizationType[_stored_as(new, shape, quant)]
            size = {"F32": 4, "BF16": 2}.get(kind.name)
            row = shape[-1] * size if size else shape[-1] // Q8_BLOCK * (Q8_BLOCK + 2)
            nbytes = int(np.prod(shape[:-1], dtype=np.int64)) * row
            writer.add_tensor_info(new, shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
            jobs.append((kind, nbytes, compute))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        total = sum(n for _, n, _ in jobs)
        with tqdm(total=total, desc=f"writing {path.name}", unit="B", unit_scale=True, disable=not progress) as bar:
            for kind, nbytes, compute in jobs:
                data = compute()
                if kind.name == "BF16":
                    data = from_float32(data, "BF16")
                elif kind.name == "Q8_0":
                    data = quantize(data, kind)
                writer.write_tensor_data(data)
                bar.update(nbytes)
        writer.close()
        partial.rename(path)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)
    return path


def _add_hyperparameters(writer: GGUFWriter, text: dict[str, Any], quant: Quant, name: str) -> None:
    from gguf import LlamaFileType

    if text["linear_key_head_dim"] != text["linear_value_head_dim"]:
        raise KitError("llama.cpp needs equal key and value head widths in the delta net")
    rope = text["rope_parameters"]
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0 if quant == "q8_0" else LlamaFileType.MOSTLY_BF16)
    writer.add_quantization_version(2)
    writer.add_block_count(text["num_hidden_layers"] + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(text["head_dim"])
    writer.add_value_length(text["head_dim"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(text["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_ssm_conv_kernel(text["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(text["linear_key_head_dim"])
    writer.add_ssm_group_count(text["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(text["linear_num_value_heads"])
    writer.add_ssm_inner_size(text["linear_num_value_heads"] * text["linear_value_head_dim"])
    writer.add_full_attention_interval(text.get("full_attention_interval", 4))


def _content(checkpoint: Checkpoint, name: str) -> str | None:
    content = checkpoint.files.get(name)
    return content.read_text() if isinstance(content, Path) else content


def _add_tokenizer(writer: GGUFWriter, checkpoint: Checkpoint) -> None:
    """The byte-level BPE, its special tokens and the chat template."""
    from gguf import TokenType

    text = _content(checkpoint, "tokenizer.json")
    if text is None:
        raise KitError("the checkpoint has no tokenizer.json")
    tokenizer = json.loads(text)
    if tokenizer["model"]["type"] != "BPE":
        raise KitError(f"tokenizer.json holds a {tokenizer['model']['type']} model; a byte-level BPE is needed")
    added = {t["id"]: t for t in tokenizer.get("added_tokens", [])}
    by_id = {i: t for t, i in tokenizer["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    size = checkpoint.text_config["vocab_size"]
    if max(by_id) >= size:
        raise KitError(f"tokenizer.json has token id {max(by_id)}, the model only {size} tokens")
    names, types = [], []
    for i in range(size):
        names.append(by_id.get(i, f"[PAD{i}]"))
        if i in added:
            types.append(TokenType.CONTROL if added[i]["special"] else TokenType.USER_DEFINED)
        else:
            types.append(TokenType.NORMAL if i in by_id else TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(tokenizer))
    writer.add_token_list(names)
    writer.add_token_types(types)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    config = json.loads(_content(checkpoint, "tokenizer_config.json") or "{}")
    ids = {t: i for i, t in by_id.items()}
    for key, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        token = config.get(key)
        token = token["content"] if isinstance(token, dict) else token
        if token is not None:
            if token not in ids:
                raise KitError(f"tokenizer_config.json names {key} {token!r}, which tokenizer.json does not have")
            add(ids[token])
    writer.add_add_bos_token(bool(config.get("add_bos_token", False)))
    template = _content(checkpoint, "chat_template.jinja") or config.get("chat_template")
    if template:
        writer.add_chat_template(template)


def _pre_tokenizer(tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer, told by its split pattern.

    The Qwen2 and Qwen3.5 patterns differ in one thing: the newer one counts combining marks (\\p{M}) as letters.
    """
    pre = tokenizer.get("pre_tokenizer") or {}
    patterns = [p["pattern"].get("Regex", "") for p in pre.get("pretokenizers", []) if p["type"] == "Split"]
    for name, letters in (("qwen2", r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"), ("qwen35", r"[\p{L}\p{M}]+|\p{N}|")):
        if len(patterns) == 1 and letters in patterns[0]:
            return name
    raise KitError(f"unknown pre-tokenizer (split patterns {patterns}); known are those of Qwen2 and Qwen3.5")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: export SRC (grown on the way, if asked) to one GGUF file."""
    from kit.standin.grow import grow, spec_arguments, spec_from

    p = argparse.ArgumentParser(prog="python -m kit.standin.gguf_export", description=__doc__.split("\n")[0])
    p.add_argument("source", type=Path, help="checkpoint folder")
    p.add_argument("target", type=Path, help="the .gguf file to write")
    p.add_argument("--quant", choices=get_args(Quant), default="q8_0")
    spec_arguments(p)
    a = p.parse_args(argv)
    try:
        write_gguf(grow(open_checkpoint(a.source), spec_from(a)), a.target, a.quant, progress=True)
    except KitError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
