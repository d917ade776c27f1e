"""The stand-in model in plain torch: a Qwen3.5 trunk (gated delta net and full attention, 3:1) and its MTP head.

Parameters are a dict from the name on disk to a tensor, and the model is functions of that dict: `trunk`, `mtp_first`,
`mtp_next`, `logits`. Training, evaluation, export and tests all go through the same few functions.

Conventions (what exporters and growers rely on; the three engines agree on every one of them)

- Names are those of `Qwen3_5ForConditionalGeneration`: the trunk under `model.language_model.`, then `lm_head.weight`
  (untied) and `mtp.*`. There are no vision tensors.
- Norm weights are stored minus one: the scale is `1 + weight`. The exception is `linear_attn.norm.weight`, the gated
  norm of the delta net, which is the scale itself.
- Layer i has full attention where i % 4 == 3, else a gated delta net.
- `self_attn.q_proj` is [2 × heads × head_dim, hidden], per head query then gate; the attention output is multiplied by
  sigmoid(gate) before `o_proj`. q and k are RMS-normed per head, then rotated: the first quarter of head_dim, halves
  (NeoX style) paired, theta 1e7.
- `linear_attn.in_proj_qkv` rows are query, key, value; a causal depthwise convolution of width 4 and SiLU follow. Query
  and key are l2-normed, the query then scaled by 1 / sqrt(key head dim). Value head j uses key head j // (value heads ÷
  key heads). Decay is exp(-exp(A_log) × softplus(a + dt_bias)), write strength sigmoid(b).
  The output is gated_norm(o) × silu(z), then `out_proj`.
- **What feeds the MTP head**: at slot s, the embedding of token s and the trunk's hidden state of slot s - 1 *after*
  the trunk's final norm. `mtp.fc` takes [pre_fc_norm_embedding(embedding), pre_fc_norm_hidden(hidden)], in that order;
  one full-attention layer follows (`mtp.layers.0`), then `mtp.norm`, then the shared `lm_head`, giving token s + 1.
- **Recursive drafting**: the next step's hidden state is the head's own output *after* `mtp.norm`; the token is the one
  drafted. Attention sees the true slots (trunk hidden states) up to the anchor, and the draft's own slots after it.
- Slot 0 has no hidden state before it. llama.cpp and ExLlamaV3 fill it with zeros; SGLang has no such slot. Training
  covers both.

Sources: transformers' `Qwen3_5` modules for the trunk (compared in the tests); for the head SGLang 0.5.17
`models/qwen3_5_mtp.py`, ExLlamaV3 1.6.5 `qwen3_5_mtp.py` (`attach_to`), llama.cpp `models/qwen35.cpp` (`graph_mtp`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kit.standin.hf_export import VISION

Params = dict[str, Tensor]
TRUNK = "model.language_model."
MTP_LAYER = "mtp.layers.0."


@dataclass(frozen=True)
class Shape:
    """The model's dimensions. Defaults: the 12 M stand-in; its per-head geometry is Qwen3.5-27B's."""

    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    num_key_value_heads: int = 1
    head_dim: int = 256
    linear_num_key_heads: int = 1
    linear_num_value_heads: int = 3
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    vocab_size: int = 4096
    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    rms_norm_eps: float = 1e-6
    full_attention_interval: int = 4

    def full_attention(self, layer: int) -> bool:
        """Whether this layer has full attention."""
        return layer % self.full_attention_interval == self.full_attention_interval - 1

    @property
    def key_dim(self) -> int:
        """Width of all linear-attention keys together."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all linear-attention values together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @classmethod
    def from_config(cls, config: dict) -> Shape:
        """Read a config.json dict (with or without `text_config`)."""
        text = config.get("text_config", config)
        rope = text["rope_parameters"]
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in text.items() if k in known}
        return cls(**{**values, **{k: rope[k] for k in ("rope_theta", "partial_rotary_factor")}})


# ---------------------------------------------------------------- parameters


def _attention_shapes(s: Shape, prefix: str) -> dict[str, tuple[int, ...]]:
    q = s.num_attention_heads * s.head_dim
    kv = s.num_key_value_heads * s.head_dim
    p = prefix + "self_attn."
    return {
        p + "q_proj.weight": (2 * q, s.hidden_size),
        p + "k_proj.weight": (kv, s.hidden_size),
        p + "v_proj.weight": (kv, s.hidden_size),
        p + "o_proj.weight": (s.hidden_size, q),
        p + "q_norm.weight": (s.head_dim,),
        p + "k_norm.weight": (s.head_dim,),
    }


def _delta_shapes(s: Shape, prefix: str) -> dict[str, tuple[int, ...]]:
    p, n, c = prefix + "linear_attn.", s.linear_num_value_heads, 2 * s.key_dim + s.value_dim
    return {
        p + "in_proj_qkv.weight": (c, s.hidden_size),
        p + "in_proj_z.weight": (s.value_dim, s.hidden_size),
        p + "in_proj_b.weight": (n, s.hidden_size),
        p + "in_proj_a.weight": (n, s.hidden_size),
        p + "conv1d.weight": (c, 1, s.linear_conv_kernel_dim),
        p + "A_log": (n,),
        p + "dt_bias": (n,),
        p + "norm.weight": (s.linear_value_head_dim,),
        p + "out_proj.weight": (s.hidden_size, s.value_dim),
    }


def _block_shapes(s: Shape, prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "mlp.gate_proj.weight": (s.intermediate_size, s.hidden_size),
        prefix + "mlp.up_proj.weight": (s.intermediate_size, s.hidden_size),
        prefix + "mlp.down_proj.weight": (s.hidden_size, s.intermediate_size),
        prefix + "input_layernorm.weight": (s.hidden_size,),
        prefix + "post_attention_layernorm.weight": (s.hidden_size,),
    }


def parameter_shapes(s: Shape) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape, in the order of the checkpoint."""
    out: dict[str, tuple[int, ...]] = {TRUNK + "embed_tokens.weight": (s.vocab_size, s.hidden_size)}
    for i in range(s.num_hidden_layers):
        p = f"{TRUNK}layers.{i}."
        out |= (_attention_shapes if s.full_attention(i) else _delta_shapes)(s, p) | _block_shapes(s, p)
    out |= {TRUNK + "norm.weight": (s.hidden_size,), "lm_head.weight": (s.vocab_size, s.hidden_size)}
    out |= {"mtp.fc.weight": (s.hidden_size, 2 * s.hidden_size)}
    out |= {f"mtp.{n}.weight": (s.hidden_size,) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    return out | _attention_shapes(s, MTP_LAYER) | _block_shapes(s, MTP_LAYER)


def init(s: Shape, seed: int, device: str | torch.device = "cpu") -> Params:
    """Fresh float32 parameters. Projections into the residual stream start at zero: every layer starts as identity."""
    g = torch.Generator().manual_seed(seed)
    out: Params = {}
    for name, shape in parameter_shapes(s).items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "lm_head.weight")):
            t = torch.zeros(shape)
        elif name.endswith("A_log"):
            t = torch.log(torch.empty(shape).uniform_(0.05, 4, generator=g))
        elif name.endswith("dt_bias"):  # softplus(dt_bias) log-uniform in [0.002, 0.2]
            dt = torch.exp(torch.empty(shape).uniform_(math.log(0.002), math.log(0.2), generator=g))
            t = dt + torch.log(-torch.expm1(-dt))
        elif name.endswith("linear_attn.norm.weight"):
            t = torch.ones(shape)
        elif name.endswith("norm.weight") or "norm_" in name:
            t = torch.zeros(shape)
        elif name.endswith("conv1d.weight"):
            t = torch.randn(shape, generator=g) * 0.1
            t[:, :, -1] += 1
        elif name.endswith("embed_tokens.weight"):
            t = torch.randn(shape, generator=g) * 0.3
        else:
            t = torch.randn(shape, generator=g) * 0.5 / math.sqrt(shape[-1])
        out[name] = t.to(device)
    return out


# ---------------------------------------------------------------- pieces (pure; tensors in, tensors out)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, scale 1 + weight, computed in float32."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * (1 + weight.float())).to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in x's dtype; master weights may be float32."""
    return F.linear(x, weight.to(x.dtype))


def l2norm(x: Tensor) -> Tensor:
    """x divided by its length over the last dimension, computed in float32."""
    y = x.float()
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rope_tables(s: Shape, length: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [length, rotary dim], for positions 0 … length - 1."""
    dim = int(s.head_dim * s.partial_rotary_factor)
    inverse = 1.0 / (s.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim))
    angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * inverse
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `cos.shape[-1]` dimensions of x [batch, time, heads, head_dim]."""
    n = cos.shape[-1]
    r, rest = x[..., :n].float(), x[..., n:]
    half = torch.cat((-r[..., n // 2 :], r[..., : n // 2]), -1)
    return torch.cat(((r * cos[:, None] + half * sin[:, None]).to(x.dtype), rest), -1)


def mlp(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float) -> Tensor:
    """x plus its gated feed-forward."""
    y = rms(x, norm, eps)
    return x + linear(F.silu(linear(y, gate)) * linear(y, up), down)


def delta_in(
    x: Tensor,
    norm: Tensor,
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    s: Shape,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the delta rule: q, k [B, T, key heads, dim], v, decay (log space), write strength; and the gate z."""
    y = rms(x, norm, s.rms_norm_eps)
    batch, time, _ = y.shape
    mixed = linear(y, qkv)
    width = s.linear_conv_kernel_dim
    padded = F.pad(mixed, (0, 0, width - 1, 0))
    w = conv.to(y.dtype)[:, 0]
    mixed = F.silu(sum(padded[:, i : i + time] * w[:, i] for i in range(width)))
    q, k, v = mixed.split((s.key_dim, s.key_dim, s.value_dim), -1)
    q = l2norm(q.reshape(batch, time, -1, s.linear_key_head_dim))
    k = l2norm(k.reshape(batch, time, -1, s.linear_key_head_dim))
    v = v.reshape(batch, time, -1, s.linear_value_head_dim).contiguous()
    decay = -a_log.float().exp() * F.softplus(linear(y, a).float() + dt_bias.float())
    gate = linear(y, z).reshape(batch, time, -1, s.linear_value_head_dim)
    return q, k, v, decay, linear(y, b).float().sigmoid(), gate


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """The gated delta rule, in chunks (torch only; float32 inside). Shapes as `delta_in` gives them."""
    dtype, time, repeat = v.dtype, v.shape[1], v.shape[2] // k.shape[2]
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    q, k = (x.repeat_interleave(repeat, 1) for x in (q * q.shape[-1] ** -0.5, k))
    g, beta = (x.float().transpose(1, 2) for x in (g, beta))
    pad = -time % chunk
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    g, beta = (F.pad(x, (0, pad)).unflatten(2, (-1, chunk)) for x in (g, beta))
    total = g.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    kb = k * beta[..., None]
    # (I + strictly lower part) x = rhs gives each chunk's corrected values and the keys that read the state before it
    system = (kb @ k.transpose(-1, -2)) * decay
    right = torch.cat((v * beta[..., None], kb * total.exp()[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), -1)
    inside = (q @ k.transpose(-1, -2)) * decay
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    out = []
    for i in range(q.shape[2]):
        new = values[:, :, i] - keys[:, :, i] @ state
        out.append(q[:, :, i] @ state + inside[:, :, i] @ new)
        state = state * total[:, :, i, -1].exp()[..., None, None] + k[:, :, i].transpose(-1, -2) @ new
    return torch.cat(out, 2)[:, :, :time].transpose(1, 2).to(dtype)


def delta_out(x: Tensor, o: Tensor, z: Tensor, norm: Tensor, out: Tensor, eps: float) -> Tensor:
    """x plus the gated norm of the delta rule's output, projected."""
    y = o.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * norm.float() * F.silu(z.float())
    return x + linear(y.to(x.dtype).flatten(2), out)


def attention_in(
    x: Tensor,
    norm: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    s: Shape,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [B, T, heads, dim], k, v [B, T, kv heads, dim] (rotated), and the output gate [B, T, heads, dim]."""
    y = rms(x, norm, s.rms_norm_eps)
    q, gate = linear(y, wq).unflatten(-1, (s.num_attention_heads, 2 * s.head_dim)).chunk(2, -1)
    k, v = (linear(y, w).unflatten(-1, (s.num_key_value_heads, s.head_dim)) for w in (wk, wv))
    q, k = rms(q, q_norm, s.rms_norm_eps), rms(k, k_norm, s.rms_norm_eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v, gate


def attention_out(x: Tensor, o: Tensor, gate: Tensor, out: Tensor) -> Tensor:
    """x plus the gated attention output, projected. o and gate: [B, T, heads, dim]."""
    return x + linear((o * gate.float().sigmoid().to(o.dtype)).flatten(2), out)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, [B, T, heads, dim] in and out."""
    repeat = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeat, 2).transpose(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True).transpose(1, 2)


def mtp_in(embedding: Tensor, hidden: Tensor, fc: Tensor, norm_e: Tensor, norm_h: Tensor, eps: float) -> Tensor:
    """fc over [norm(embedding), norm(hidden)]."""
    return linear(torch.cat((rms(embedding, norm_e, eps), rms(hidden, norm_h, eps)), -1), fc)


def next_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean next-token cross-entropy of flat hidden states [N, H] against targets [N]."""
    return F.cross_entropy(linear(hidden, head).float(), targets)


def draft_loss(hidden: Tensor, head: Tensor, targets: Tensor, teacher: Tensor) -> Tensor:
    """Half cross-entropy against the data, half against the trunk's own distribution at the same position.

    What is accepted at serving time is what the trunk would say, so the trunk is a better label than the data where the
    two differ. `teacher`: the trunk's normed hidden states [N, H], detached by the caller.
    """
    logits = linear(hidden, head).float()
    with torch.no_grad():
        p = linear(teacher, head).float().softmax(-1)
    normalizer = logits.logsumexp(-1)
    data = normalizer - logits.gather(1, targets[:, None])[:, 0]
    return 0.5 * (data + normalizer - (p * logits).sum(-1)).mean()


@dataclass
class Ops:
    """The pieces as they are run: plain by default; `train` swaps in compiled pieces and the Triton delta rule."""

    delta_in: Callable = delta_in
    delta_rule: Callable = delta_rule
    delta_out: Callable = delta_out
    attention_in: Callable = attention_in
    attention: Callable = causal_attention
    attention_out: Callable = attention_out
    mlp: Callable = mlp
    mtp_in: Callable = mtp_in
    rms: Callable = rms
    next_loss: Callable = next_loss
    draft_loss: Callable = draft_loss
    tables: dict = field(default_factory=dict)  # rope tables by (length, device)

    def rope(self, s: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`rope_tables`, kept."""
        key = (length, str(device))
        if key not in self.tables:
            self.tables[key] = rope_tables(s, length, device)
        return self.tables[key]


# ---------------------------------------------------------------- the model


def _project(p: Params, prefix: str, x: Tensor, s: Shape, ops: Ops) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = prefix + "self_attn."
    weights = (p[a + n + ".weight"] for n in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"))
    cos, sin = ops.rope(s, x.shape[1], x.device)
    return ops.attention_in(x, p[prefix + "input_layernorm.weight"], *weights, cos, sin, s)


def _feed_forward(p: Params, prefix: str, x: Tensor, s: Shape, ops: Ops) -> Tensor:
    weights = (p[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return ops.mlp(x, p[prefix + "post_attention_layernorm.weight"], *weights, s.rms_norm_eps)


def _delta_layer(p: Params, prefix: str, x: Tensor, s: Shape, ops: Ops) -> Tensor:
    a = prefix + "linear_attn."
    weights = (p[f"{a}in_proj_{n}.weight"] for n in ("qkv", "z", "b", "a"))
    q, k, v, g, beta, z = ops.delta_in(
        x, p[prefix + "input_layernorm.weight"], *weights, p[a + "conv1d.weight"], p[a + "A_log"], p[a + "dt_bias"], s
    )
    o = ops.delta_rule(q, k, v, g, beta)
    return ops.delta_out(x, o, z, p[a + "norm.weight"], p[a + "out_proj.weight"], s.rms_norm_eps)


def embed(p: Params, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Token embeddings, [B, T, hidden] in `dtype`."""
    return F.embedding(ids, p[TRUNK + "embed_tokens.weight"]).to(dtype)


def trunk(p: Params, embedded: Tensor, s: Shape, ops: Ops) -> Tensor:
    """Hidden states after the final norm, [B, T, hidden], from embedded tokens. `lm_head` and MTP read them."""
    x = embedded
    for i in range(s.num_hidden_layers):
        prefix = f"{TRUNK}layers.{i}."
        if s.full_attention(i):
            q, k, v, gate = _project(p, prefix, x, s, ops)
            x = ops.attention_out(x, ops.attention(q, k, v), gate, p[prefix + "self_attn.o_proj.weight"])
        else:
            x = _delta_layer(p, prefix, x, s, ops)
        x = _feed_forward(p, prefix, x, s, ops)
    return ops.rms(x, p[TRUNK + "norm.weight"], s.rms_norm_eps)


def logits(p: Params, hidden: Tensor) -> Tensor:
    """`lm_head` over hidden states (of the trunk, or of the MTP head) after their final norm."""
    return linear(hidden, p["lm_head.weight"])


def shift(x: Tensor, n: int = 1) -> Tensor:
    """Move [B, T, …] n slots later; the first n slots become zero."""
    return torch.cat((x.new_zeros(x.shape[0], n, *x.shape[2:]), x[:, :-n]), 1)


def _mtp_tail(p: Params, x: Tensor, o: Tensor, gate: Tensor, s: Shape, ops: Ops) -> Tensor:
    x = ops.attention_out(x, o, gate, p[MTP_LAYER + "self_attn.o_proj.weight"])
    return ops.rms(_feed_forward(p, MTP_LAYER, x, s, ops), p["mtp.norm.weight"], s.rms_norm_eps)


def _mtp_head(p: Params, embedded: Tensor, hidden: Tensor, s: Shape, ops: Ops) -> Tensor:
    names = ("mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
    return ops.mtp_in(embedded, hidden, *(p[n] for n in names), s.rms_norm_eps)


Slots = tuple[Tensor, Tensor]
"""Keys and values of one step's slots, each [B, T, kv heads, head_dim]."""


def mtp_first(p: Params, embedded: Tensor, hidden: Tensor, s: Shape, ops: Ops) -> tuple[Tensor, Slots]:
    """Draft step 1 at every slot: (embedding of token s, trunk hidden of slot s - 1) → state that predicts token s + 1.

    `hidden` is already shifted (slot 0 holds zeros, or whatever the engine puts there). Returns the states after
    `mtp.norm`, and the slots' keys and values for later steps.
    """
    x = _mtp_head(p, embedded, hidden, s, ops)
    q, k, v, gate = _project(p, MTP_LAYER, x, s, ops)
    return _mtp_tail(p, x, ops.attention(q, k, v), gate, s, ops), (k, v)


def draft_attention(q: Tensor, first: Slots, later: list[Slots]) -> Tensor:
    """Attention of draft step k = len(later) + 1, for every anchor at once.

    The query at slot s belongs to the draft anchored at slot s - (k - 1). It sees the step-1 slots up to that anchor
    and one slot of each later step j, at s - (k - j): exactly what an engine's cache holds while it drafts.
    """
    steps = len(later) + 1
    _, time, heads, dim = q.shape
    repeat = heads // first[0].shape[2]
    expand = [tuple(x.repeat_interleave(repeat, 2).transpose(1, 2) for x in kv) for kv in (first, *later)]
    q = q.transpose(1, 2) * dim**-0.5
    at = torch.arange(time, device=q.device)
    seen = at[None, :] <= at[:, None] - (steps - 1)
    scores = [(q @ expand[0][0].transpose(-1, -2)).float().masked_fill(~seen, float("-inf"))]
    moved = []
    for j, (k, v) in enumerate(expand[1:], start=2):
        back = steps - j
        k, v = (F.pad(x, (0, 0, back, 0))[:, :, :time] for x in (k, v))
        scores.append((q * k).sum(-1, keepdim=True).float())
        moved.append(v)
    weights = torch.cat(scores, -1).softmax(-1).to(q.dtype)
    out = weights[..., :time] @ expand[0][1]
    for i, v in enumerate(moved):
        out = out + weights[..., time + i : time + i + 1] * v
    return out.transpose(1, 2)


def mtp_next(
    p: Params, embedded: Tensor, state: Tensor, first: Slots, later: list[Slots], s: Shape, ops: Ops
) -> tuple[Tensor, Slots]:
    """Draft step k ≥ 2: (embedding of token s, the last step's state of slot s - 1) → state that predicts token s + 1.

    `state` is the last step's output, not shifted. Slots below k - 1 have no anchor and mean nothing. `later` holds the
    slots of steps 2 … k - 1; the returned slots are step k's.
    """
    x = _mtp_head(p, embedded, shift(state), s, ops)
    q, k, v, gate = _project(p, MTP_LAYER, x, s, ops)
    return _mtp_tail(p, x, draft_attention(q, first, [*later, (k, v)]), gate, s, ops), (k, v)


# ---------------------------------------------------------------- disk


def config(s: Shape) -> dict:
    """config.json of the `Qwen3_5ForConditionalGeneration` form, which SGLang and ExLlamaV3 need for the MTP head."""
    names = [f.name for f in fields(s) if f.name not in ("rope_theta", "partial_rotary_factor")]
    kinds = ("linear_attention", "full_attention")
    text = {n: getattr(s, n) for n in names} | {
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "mamba_ssm_dtype": "float32",
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "layer_types": [kinds[s.full_attention(i)] for i in range(s.num_hidden_layers)],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": s.rope_theta,
            "partial_rotary_factor": s.partial_rotary_factor,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "vision_start_token_id": 3,
        "vision_end_token_id": 4,
        "image_token_id": 6,
        "video_token_id": 7,
        "text_config": text,
        "vision_config": {**VISION, "out_hidden_size": s.hidden_size},
    }


def save(p: Params, s: Shape, folder: Path, shard_bytes: int = 14 << 20) -> None:
    """Write bf16 safetensors in shards of at most `shard_bytes`, their index, and the two config files."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    shards: list[Params] = [{}]
    size = 0
    for name in parameter_shapes(s):
        t = p[name].detach().to("cpu", torch.bfloat16).contiguous()
        if size + 2 * t.numel() > shard_bytes and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = t
        size += 2 * t.numel()
    index: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    total = sum(2 * t.numel() for shard in shards for t in shard.values())
    text = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(text, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(config(s), indent=1) + "\n")
    generation = {"eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def load(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Params, Shape]:
    """Read a checkpoint folder written by `save`."""
    from safetensors.torch import load_file

    shape = Shape.from_config(json.loads((folder / "config.json").read_text()))
    p: Params = {}
    for file in sorted(folder.glob("model*.safetensors")):
        p |= load_file(file)
    return {k: p[k].to(device, dtype) for k in parameter_shapes(shape)}, shape
