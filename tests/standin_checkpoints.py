"""Small checkpoints and the torch reference that the stand-in's tests compare with."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from kit.standin import modeling as M

TOKENIZER = Path(__file__).parent.parent / "data" / "tiny-mtp"
OPS = M.Ops()


def random_parameters(s: M.Shape, seed: int = 0, scale: float = 1.0) -> M.Params:
    """Every tensor random, bfloat16 values, activations of ordinary size. `scale` is that of the residual updates."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in M.parameter_shapes(s).items():
        t = torch.randn(shape, generator=g)
        if name.endswith(("norm.weight", "norm_embedding.weight", "norm_hidden.weight", "layernorm.weight")):
            t = t * 0.2 + (1.0 if name.endswith("linear_attn.norm.weight") else 0.0)
        elif name.endswith(("A_log", "dt_bias")):
            t = t * 0.5 - 1
        elif name.endswith("conv1d.weight"):
            t = t * 0.5
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            t = t * (scale / math.sqrt(shape[-1]))
        elif not name.endswith("embed_tokens.weight"):
            t = t / math.sqrt(shape[-1])
        out[name] = t.bfloat16().float()
    return out


def peaked_parameters(s: M.Shape, reject: float, seed: int = 0) -> M.Params:
    """The next token is a fixed successor of the last one, so that rounding cannot change greedy output.

    The MTP head predicts the same successor, except after a share `reject` of the tokens, where it names a decoy.
    """
    g = torch.Generator().manual_seed(seed)
    p = random_parameters(s, seed, scale=0.05)
    v, h = s.vocab_size, s.hidden_size
    first = 16  # special tokens stay out of the cycle
    order = torch.randperm(v - first, generator=g) + first
    n_bad = int(len(order) * reject / (1 + reject))
    cycle, decoys = order[n_bad:], order[:n_bad]
    bad = cycle[torch.randperm(len(cycle), generator=g)[:n_bad]]
    u = torch.randn(h, generator=g)
    u /= u.norm()
    e = torch.randn(v, h, generator=g)
    e -= (e @ u)[:, None] * u
    e[bad] += math.sqrt(h) * u
    e *= math.sqrt(h) / e.norm(dim=1, keepdim=True)
    head = torch.randn(v, h, generator=g) * 0.1
    head[cycle.roll(-1)] = e[cycle]
    head[decoys] = e[bad] - 2 * (e[bad] @ u)[:, None] * u
    inside = torch.zeros(v, dtype=torch.bool)
    inside[cycle] = True
    outside = (~inside).nonzero()[:, 0]
    e[outside] = e[cycle[torch.arange(len(outside)) % len(cycle)]]  # a prompt may hold any token
    mirror = torch.eye(h) - 2 * torch.outer(u, u)
    p[M.TRUNK + "embed_tokens.weight"] = e
    p["lm_head.weight"] = head / math.sqrt(h)
    p["mtp.fc.weight"] = torch.cat((mirror, torch.randn(h, h, generator=g) * 0.002), 1)
    for name in p:
        if name.endswith(("pre_fc_norm_embedding.weight", "mtp.norm.weight", M.TRUNK + "norm.weight")):
            p[name] = torch.zeros(h)
    return {k: t.bfloat16().float() for k, t in p.items()}


@torch.no_grad()
def all_logits(p: M.Params, s: M.Shape, ids: torch.Tensor, drafts: int) -> list[torch.Tensor]:
    """Logits [T, vocab] of the trunk and of draft steps 1 … `drafts`; step k at slot s predicts token s + 1.

    Step k ≥ 2 reads the token that step k - 1 drafted, as an engine does.
    """
    embedded = M.embed(p, ids[None], torch.float32)
    hidden = M.trunk(p, embedded, s, OPS)
    out = [M.logits(p, hidden)[0]]
    if not drafts:
        return out
    state, first = M.mtp_first(p, embedded, M.shift(hidden), s, OPS)
    out.append(M.logits(p, state)[0])
    later = []
    for _ in range(1, drafts):
        drafted = M.shift(out[-1].argmax(-1)[None])
        state, slots = M.mtp_next(p, M.embed(p, drafted, torch.float32), state, first, later, s, OPS)
        later.append(slots)
        out.append(M.logits(p, state)[0])
    return out


def margin(logits: torch.Tensor) -> torch.Tensor:
    """Distance from the best to the second logit, over the last dimension."""
    best = logits.topk(2, -1).values
    return best[..., 0] - best[..., 1]


@dataclass(frozen=True)
class Simulated:
    """What a server should report. `close` counts decisions that rounding could turn."""

    drafted: int
    accepted: int
    close: int


def simulate(drafts: list[torch.Tensor], ids: list[int], prompt: int, width: int, tolerance: float) -> Simulated:
    """Greedy speculation of `width` along the output `ids[prompt:]`, from the reference's draft logits.

    The first output token comes from the prompt; then each step drafts from the last known token, never more than is
    left to generate after the token that the step itself gives.
    """
    drafted = accepted = close = 0
    at = prompt  # index of the last known token
    while at < len(ids) - 1:
        room = min(width, len(ids) - 1 - at - 1)
        drafted += room
        run = 0
        for k in range(room):
            logits = drafts[k][at + k]
            close += bool(margin(logits) < tolerance)
            if int(logits.argmax()) != ids[at + k + 1]:
                break
            run += 1
        accepted += run
        at += run + 1
    return Simulated(drafted, accepted, close)
