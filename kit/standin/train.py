"""Train the stand-in on one GPU within a wall-clock budget, evaluate it, write its checkpoint.

    python -m kit.standin.train --corpus DIR --tokenizer DIR --out DIR --state FILE --minutes 6

Loss: next token for the trunk, plus the MTP head's drafts 1 … 4, each drafting from its own last state (the way engines
run it), joint with the trunk, so that the trunk's hidden states also learn what the head needs. Drafts 2 … 4 are run on
`--recursive-rows` rows of the batch. Matrices are trained with Muon, the rest with AdamW; the learning rate warms up,
stays, and falls linearly to zero at the end of the budget, whatever the hardware's speed.

Rows are cut from one token stream at offsets drawn from the seed and the epoch, so a step's batch depends on (seed,
step) alone; the state file (written every `--save-seconds`, atomically) holds parameters, optimizer state, step and the
time already used, and a run that finds it goes on from there.

Fast paths are tried, checked against the plain ones on this machine, and dropped with a printed warning if they fail or
disagree: flash-linear-attention's Triton kernel for the delta rule, and torch.compile for the rest.

The last line printed is one JSON object with the evaluation on held-out requests.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kit.errors import KitError
from kit.standin import modeling as M

STEP_WEIGHTS = (0.5, 0.3, 0.2, 0.1)
"""Loss weight of MTP drafts 1 … 4; the trunk's own loss has weight 1."""


def say(*words: object) -> None:
    """Print a progress line at once, whatever the output is connected to."""
    print(*words, flush=True)


# ---------------------------------------------------------------- data


def read_tokens(path: Path) -> np.ndarray:
    """The training stream written by `corpus.pack`, as uint16."""
    if not path.is_file():
        raise KitError(
            f"no training stream at {path}; write it with `python -m kit.standin.corpus --out {path.parent} …`"
        )
    with lzma.open(path) as f:
        return np.frombuffer(f.read(), dtype="<u2")


class Batches:
    """Rows of `length` + 1 tokens; batch i depends on (seed, i) alone."""

    def __init__(self, tokens: np.ndarray, rows: int, length: int, seed: int, device: str) -> None:
        if len(tokens) < (rows + 1) * (length + 1):
            raise KitError(f"the stream has {len(tokens)} tokens; one batch needs {(rows + 1) * (length + 1)}")
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        self.rows, self.length, self.seed = rows, length, seed
        self.per_epoch = (len(tokens) - length - 1) // length // rows
        self.reach = torch.arange(length + 1, device=device)
        self.epoch, self.order = -1, torch.empty(0)

    def __call__(self, i: int) -> Tensor:
        """Batch i: int64 [rows, length + 1]."""
        epoch, at = divmod(i, self.per_epoch)
        if epoch != self.epoch:
            g = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            offset = int(torch.randint(self.length, (1,), generator=g))
            count = (len(self.tokens) - offset - 1) // self.length
            starts = torch.randperm(count, generator=g) * self.length + offset
            self.epoch, self.order = epoch, starts.to(self.tokens.device)
        rows = torch.arange(at * self.rows, (at + 1) * self.rows, device=self.tokens.device) % len(self.order)
        return self.tokens[self.order[rows][:, None] + self.reach].long()


# ---------------------------------------------------------------- optimizer


def orthogonalize(g: Tensor) -> Tensor:
    """Newton-Schulz iteration to the nearest semi-orthogonal matrix, batched [n, rows, cols] (Jordan's Muon, 2024)."""
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).to(g.dtype)


class Optimizer:
    """Muon for the layers' matrices (batched over equal shapes), AdamW for everything else."""

    def __init__(self, p: M.Params, muon_lr: float, adam_lr: float) -> None:
        self.p, self.muon_lr = p, muon_lr
        small = ("in_proj_a.weight", "in_proj_b.weight", "embed_tokens.weight", "lm_head.weight")
        groups: dict[tuple[int, ...], list[str]] = {}
        rest = []
        for name, t in p.items():
            if t.ndim == 2 and not name.endswith(small):
                groups.setdefault(tuple(t.shape), []).append(name)
            else:
                rest.append(name)
        self.groups = list(groups.values())
        self.momentum = [torch.zeros(len(g), *p[g[0]].shape, device=p[g[0]].device) for g in self.groups]
        cuda = next(iter(p.values())).is_cuda
        self.adam = torch.optim.AdamW(
            [p[n] for n in rest], lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=cuda
        )
        self.adam_lr = adam_lr

    @torch.no_grad()
    def step(self, scale: float, momentum: float) -> None:
        """One update with both learning rates multiplied by `scale`; gradients are cleared."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        for names, buffer in zip(self.groups, self.momentum, strict=True):
            grad = torch.stack([self.p[n].grad for n in names])
            buffer.lerp_(grad, 1 - momentum)
            update = orthogonalize(grad.lerp_(buffer, momentum))
            lr = self.muon_lr * scale
            gain = max(1.0, grad.shape[-2] / grad.shape[-1]) ** 0.5
            weights = [self.p[n] for n in names]
            torch._foreach_mul_(weights, 1 - lr * 0.1)
            torch._foreach_add_(weights, list(update.unbind(0)), alpha=-lr * gain)
        for t in self.p.values():
            t.grad = None

    def state(self) -> dict:
        """What `restore` needs."""
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def restore(self, state: dict) -> None:
        """Take over a state saved from the same parameters."""
        self.adam.load_state_dict(state["adam"])
        for mine, saved in zip(self.momentum, state["momentum"], strict=True):
            mine.copy_(saved)


# ---------------------------------------------------------------- loss


def slot_hidden(hidden: Tensor) -> Tensor:
    """Trunk hidden states shifted to MTP slots. Slot 0 is zero on even rows; on odd rows it repeats slot 1's state.

    Engines differ in what slot 0 holds (see `modeling`); this keeps the head from leaning on it.
    """
    out = M.shift(hidden)
    odd = (torch.arange(hidden.shape[0], device=hidden.device) % 2 == 1)[:, None]
    out[:, 0] = torch.where(odd, hidden[:, 0], out[:, 0])
    return out


def losses(p: M.Params, rows: Tensor, s: M.Shape, ops: M.Ops, dtype: torch.dtype, recursive_rows: int) -> list[Tensor]:
    """[trunk loss, MTP step 1, …, step 4] on rows [B, T + 1]."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    x = M.embed(p, inputs, dtype)
    hidden = M.trunk(p, x, s, ops)
    head = p["lm_head.weight"]
    teacher = hidden.detach()
    out = [ops.next_loss(hidden.flatten(0, 1), head, targets.flatten())]
    state, first = M.mtp_first(p, x, slot_hidden(hidden), s, ops)
    out.append(ops.draft_loss(state.flatten(0, 1), head, targets.flatten(), teacher.flatten(0, 1)))
    n = recursive_rows
    state, first, later = state[:n], (first[0][:n], first[1][:n]), []
    for _ in range(2, len(STEP_WEIGHTS) + 1):
        state, slots = M.mtp_next(p, x[:n], state, first, later, s, ops)
        later.append(slots)
        valid = slice(len(STEP_WEIGHTS) - 1, None)  # slots that have an anchor at every step: one shape for all steps
        flat = (t[:n, valid].flatten(0, 1) for t in (state, targets, teacher))
        y, target, known = flat
        out.append(ops.draft_loss(y, head, target, known))
    return out


def total_loss(parts: list[Tensor]) -> Tensor:
    """The trunk's loss plus the weighted losses of the drafts."""
    return parts[0] + sum(w * x for w, x in zip(STEP_WEIGHTS, parts[1:], strict=True))


# ---------------------------------------------------------------- fast paths


def pick_delta_rule(device: str) -> tuple[object, str]:
    """The fastest delta rule that agrees with the plain one here, forward and backward; and its name."""
    if device == "cpu":
        return M.delta_rule, "torch"
    g = torch.Generator(device=device).manual_seed(0)
    rand = lambda *n: torch.randn(*n, generator=g, device=device)  # noqa: E731
    q, k, v = M.l2norm(rand(2, 320, 1, 128)), M.l2norm(rand(2, 320, 1, 128)), rand(2, 320, 3, 128)
    q, k, v = (t.bfloat16().float() for t in (q, k, v))
    decay, beta, up = -torch.rand(2, 320, 3, device=device), torch.rand(2, 320, 3, device=device), rand(2, 320, 3, 128)

    def run(rule, dtype: torch.dtype) -> list[Tensor]:  # noqa: ANN001
        args = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        args += [t.clone().requires_grad_() for t in (decay, beta)]
        o = rule(*args)
        return [o, *torch.autograd.grad((o * up.to(o.dtype)).sum(), args)]

    reference = run(M.delta_rule, torch.float32)
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception as e:  # whatever breaks the import, the plain path works
        say(f"WARNING: flash-linear-attention does not import ({type(e).__name__}: {e}); using the torch delta rule")
        return M.delta_rule, "torch"

    def grouped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return chunk_gated_delta_rule(q, k, v, g, beta.to(v.dtype))[0]

    def repeated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        n = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(n, 2) for x in (q, k))
        return chunk_gated_delta_rule(q, k, v, g, beta.to(v.dtype))[0]

    for rule, name in ((grouped, "fla"), (repeated, "fla, heads repeated")):
        try:
            got = run(rule, torch.bfloat16)
            torch.cuda.synchronize()
            error = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(got, reference, strict=True)]
        except Exception as e:
            say(f"WARNING: delta rule '{name}' fails here: {type(e).__name__}: {str(e)[:300]}")
            continue
        shown = " ".join(f"{e:.1e}" for e in error)
        say(f"delta rule '{name}' against torch, relative error of o, dq, dk, dv, dg, dbeta: {shown}")
        if max(error) < 5e-2:
            return rule, name
        say(f"WARNING: delta rule '{name}' disagrees with the reference; not used")
    return M.delta_rule, "torch"


def compiled(ops: M.Ops) -> M.Ops:
    """The same pieces through torch.compile (the delta rule and attention are kernels already and stay as they are)."""
    import torch._dynamo

    torch._dynamo.config.cache_size_limit = 64
    fast = M.Ops(delta_rule=ops.delta_rule, attention=ops.attention)
    for name in (
        "delta_in",
        "delta_out",
        "attention_in",
        "attention_out",
        "mlp",
        "mtp_in",
        "rms",
        "next_loss",
        "draft_loss",
    ):
        setattr(fast, name, torch.compile(getattr(M, name), dynamic=False))
    return fast


def pick_ops(s: M.Shape, rows: Tensor, a: argparse.Namespace) -> M.Ops:
    """Choose the delta rule, then compile if that gives the same loss and gradients and is faster."""
    rule, name = pick_delta_rule(a.device)
    plain = M.Ops(delta_rule=rule)
    say(f"delta rule: {name}")
    if a.device == "cpu" or a.no_compile:
        return plain
    p = M.init(s, 1, a.device)
    for t in p.values():
        if not t.any():
            t.normal_(0, 0.03)
        t.requires_grad_()

    def run(ops: M.Ops, repeats: int) -> tuple[float, Tensor, float]:
        for t in p.values():
            t.grad = None
        loss = total_loss(losses(p, rows, s, ops, a.dtype, a.recursive_rows))
        loss.backward()
        grad = torch.cat([t.grad.flatten() for t in p.values()])
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            total_loss(losses(p, rows, s, ops, a.dtype, a.recursive_rows)).backward()
        torch.cuda.synchronize()
        return loss.item(), grad, (time.perf_counter() - start) / repeats

    loss, grad, seconds = run(plain, 4)
    rate = rows.shape[0] * (rows.shape[1] - 1) / seconds
    say(f"plain: loss {loss:.4f}, {seconds * 1e3:.0f} ms a step, {rate:,.0f} tokens/s")
    try:
        start = time.perf_counter()
        fast = compiled(plain)
        loss_c, grad_c, seconds_c = run(fast, 4)
        took = time.perf_counter() - start
    except Exception as e:
        say(f"WARNING: torch.compile fails here ({type(e).__name__}: {str(e)[:300]}); using plain pieces")
        return plain
    error = ((grad_c - grad).norm() / grad.norm()).item()
    say(
        f"compiled in {took:.0f} s: loss {loss_c:.4f}, {seconds_c * 1e3:.0f} ms a step, gradient differs by {error:.1e}"
    )
    if abs(loss_c - loss) > 0.02 or not error < 0.2:
        say("WARNING: compiled pieces disagree with the plain ones; using plain pieces")
        return plain
    return fast if seconds_c < seconds else plain


# ---------------------------------------------------------------- evaluation


@torch.no_grad()
def generate(p: M.Params, prompts: list[list[int]], length: int, s: M.Shape, ops: M.Ops, dtype: torch.dtype) -> Tensor:
    """Greedy continuation without a cache: [n, longest prompt + length or more], zeros beyond each row's end."""
    device = p["lm_head.weight"].device
    total = -(-(max(map(len, prompts)) + length) // 64) * 64
    ids = torch.zeros(len(prompts), total, dtype=torch.long, device=device)
    for i, row in enumerate(prompts):
        ids[i, : len(row)] = torch.tensor(row, device=device)
    ends = torch.tensor([len(r) for r in prompts], device=device)
    at = torch.arange(len(prompts), device=device)
    for _ in range(length):
        hidden = M.trunk(p, M.embed(p, ids, dtype), s, ops)
        ids[at, ends] = M.logits(p, hidden[at, ends - 1]).argmax(-1)
        ends = ends + 1
    return ids


@torch.no_grad()
def draft_hits(p: M.Params, ids: Tensor, s: M.Shape, ops: M.Ops, dtype: torch.dtype, steps: int = 4) -> np.ndarray:
    """Whether draft k, anchored at slot s, says the token at s + k: bool [steps, n, T].

    The drafts are teacher-forced with `ids`, which is exact for speculation: draft k only counts where drafts 1 … k - 1
    were right, and then the forced tokens are the drafted ones.
    """
    x = M.embed(p, ids, dtype)
    state, first = M.mtp_first(p, x, M.shift(M.trunk(p, x, s, ops)), s, ops)
    later: list[M.Slots] = []
    hits = np.zeros((steps, *ids.shape), dtype=bool)
    for k in range(1, steps + 1):
        if k > 1:
            state, slots = M.mtp_next(p, x, state, first, later, s, ops)
            later.append(slots)
        for i in range(ids.shape[0]):  # row by row: all logits at once would be large
            guess = M.logits(p, state[i]).argmax(-1)  # at slot s + k - 1, says token s + k
            right = (guess[k - 1 : -1] == ids[i, k:]).cpu().numpy()
            hits[k - 1, i, : len(right)] = right
    return hits


def acceptance(hits: np.ndarray, starts: Sequence[int], length: int, width: int) -> tuple[list[int], int, int]:
    """Run greedy speculation of one width over known greedy text.

    `hits[k - 1, row, s]` as `draft_hits` gives; row i's generated tokens are at starts[i] … starts[i] + length - 1. The
    first of them comes from the prompt's own pass; each verify step then emits the accepted drafts and one token more.
    Returns (accepted per draft position, verify steps, tokens emitted).
    """
    accepted, verifies, emitted = [0] * width, 0, 0
    for row, start in enumerate(starts):
        at, last = start, start + length - 1
        while at + width <= last:
            verifies += 1
            n = 0
            while n < width and hits[n, row, at]:
                accepted[n] += 1
                n += 1
            at += n + 1
            emitted += n + 1
    return accepted, verifies, emitted


def evaluate(p: M.Params, s: M.Shape, ops: M.Ops, a: argparse.Namespace) -> dict:
    """Speculation figures on held-out requests, greedy, plus the trunk's loss on the recorded assistant text."""
    with gzip.open(a.corpus / "heldout.jsonl.gz", "rt") as f:
        requests = [json.loads(line) for line in f]
    requests = [r for r in requests if len(r["prompt"]) + max(len(r["output"]), a.eval_tokens) <= a.length]
    requests = requests[:: max(1, len(requests) // a.eval_requests)][: a.eval_requests]
    if not requests:
        raise KitError(f"no held-out request fits in --length {a.length} with --eval-tokens {a.eval_tokens}")
    totals = {w: [[0] * w, 0, 0] for w in (1, 2, 4)}
    nll, count, same, compared = 0.0, 0, 0, 0
    samples: list[dict] = []
    for i in range(0, len(requests), a.eval_rows):
        part = requests[i : i + a.eval_rows]
        prompts = [r["prompt"] for r in part]
        ids = generate(p, prompts, a.eval_tokens, s, ops, a.dtype)
        hits = np.concatenate([draft_hits(p, ids[j : j + 4], s, ops, a.dtype) for j in range(0, len(part), 4)], 1)
        for width, sums in totals.items():
            accepted, verifies, emitted = acceptance(hits, list(map(len, prompts)), a.eval_tokens, width)
            sums[0] = [x + y for x, y in zip(sums[0], accepted, strict=True)]
            sums[1] += verifies
            sums[2] += emitted
        for j, r in enumerate(part):
            text = torch.tensor([r["prompt"] + r["output"]], device=ids.device)
            with torch.no_grad():
                hidden = M.trunk(p, M.embed(p, text, a.dtype), s, ops)[0, len(r["prompt"]) - 1 : -1]
                nll += torch.nn.functional.cross_entropy(
                    M.logits(p, hidden).float(), text[0, len(r["prompt"]) :], reduction="sum"
                ).item()
            count += len(r["output"])
            mine = ids[j, len(r["prompt"]) :][: a.eval_tokens].tolist()
            n = min(len(mine), len(r["output"]))
            compared += n
            same += next((k for k in range(n) if mine[k] != r["output"][k]), n)
            if len(samples) < 4 and len(r["output"]) > 60:
                samples.append({"prompt_end": r["prompt"][-160:], "generated": mine, "recorded": r["output"]})
    report: dict = {
        "requests": len(requests),
        "tokens_each": a.eval_tokens,
        "greedy": True,
        "assistant_loss": nll / count,
        "share_of_recorded_text_before_first_difference": same / compared,
    }
    for width, (accepted, verifies, emitted) in totals.items():
        report[f"width_{width}"] = {
            "acceptance_by_position": [round(x / verifies, 4) for x in accepted],
            "accepted_over_drafted": round(sum(accepted) / (verifies * width), 4),
            "tokens_per_verify": round(emitted / verifies, 4),
        }
    report["samples"] = samples
    return report


def decode_samples(samples: list[dict], tokenizer: Path) -> list[dict]:
    """Token ids to text; the ids stay if `tokenizers` is not installed."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return samples
    t = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return [{k: t.decode(v, skip_special_tokens=False) for k, v in row.items()} for row in samples]


# ---------------------------------------------------------------- the run


def learning_rate(progress: float) -> float:
    """Scale at this share of the budget: warm-up over 2 %, flat to 45 %, then linear to zero."""
    if progress < 0.02:
        return max(progress / 0.02, 0.02)
    return min(1.0, max(0.0, (1.0 - progress) / 0.55))


def save_state(path: Path, p: M.Params, optimizer: Optimizer, step: int, used: float) -> None:
    """Write the resumable state; a reader sees the old file or the new one, never a part."""
    part = path.with_suffix(".part")
    state = {"p": {k: t.detach() for k, t in p.items()}, "optimizer": optimizer.state(), "step": step, "used": used}
    torch.save(state, part)
    os.replace(part, path)


def train(a: argparse.Namespace, s: M.Shape) -> dict:
    """Train, write the checkpoint, evaluate it. Returns the evaluation.

    Raises KitError where the stream is missing or too short, or the loss stops being finite.
    """
    begun = time.perf_counter()
    torch.manual_seed(a.seed)
    if a.device == "cuda":
        torch.set_float32_matmul_precision("high")
        say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if not (a.tokenizer / "tokenizer.json").is_file():
        raise KitError(f"no tokenizer.json in {a.tokenizer}; kit.standin.corpus writes one")
    if a.eval_tokens < 16:
        raise KitError(f"--eval-tokens {a.eval_tokens} is too few to count drafts of width 4; give at least 16")
    tokens = read_tokens(a.corpus / "train.u16.xz")
    batches = Batches(tokens, a.rows, a.length, a.seed, a.device)
    say(f"{len(tokens) / 1e6:.1f} M tokens, {batches.per_epoch} steps an epoch of {a.rows} × {a.length}")
    ops = pick_ops(s, batches(0), a)
    p = M.init(s, a.seed, a.device)
    for t in p.values():
        t.requires_grad_()
    say(f"{sum(t.numel() for t in p.values()) / 1e6:.2f} M parameters")
    optimizer = Optimizer(p, a.muon_lr, a.adam_lr)
    step, used = 0, 0.0
    if a.state.is_file():
        state = torch.load(a.state, map_location=a.device, weights_only=True)
        with torch.no_grad():
            for k, t in p.items():
                t.copy_(state["p"][k])
        optimizer.restore(state["optimizer"])
        step, used = state["step"], state["used"]
        say(f"resumed {a.state.name}: step {step}, {used:.0f} s used")
    budget = a.minutes * 60
    if a.total_minutes:
        budget = min(budget, used + a.total_minutes * 60 - (time.perf_counter() - begun) - a.reserve_seconds)
    say(f"set-up took {time.perf_counter() - begun:.0f} s; training budget {budget:.0f} s, {used:.0f} s of it used")
    start, saved, shown = time.perf_counter() - used, time.perf_counter(), (time.perf_counter(), step)
    history = []
    while True:
        progress = (time.perf_counter() - start) / budget
        if a.steps:
            progress = max(progress, step / a.steps)
        if progress >= 1:
            break
        parts = losses(p, batches(step), s, ops, a.dtype, a.recursive_rows)
        total_loss(parts).backward()
        optimizer.step(learning_rate(progress), 0.85 + 0.10 * min(1.0, step / 300))
        step += 1
        if step % 10 == 0 and a.device == "cuda":
            torch.cuda.synchronize()  # keeps the clock honest: steps are timed as run, not as queued
        if step % a.log_every == 0:
            values = [x.item() for x in parts]
            if not all(map(math.isfinite, values)):
                raise KitError(f"loss is not finite at step {step}: {values}; lower --muon-lr or --adam-lr")
            now = time.perf_counter()
            rate = (step - shown[1]) * a.rows * a.length / (now - shown[0])
            shown = now, step
            history.append({"step": step, "seconds": round(now - start, 1), "loss": [round(v, 4) for v in values]})
            text = " ".join(f"{v:.3f}" for v in values)
            scale = learning_rate(progress)
            say(f"step {step} {now - start:.0f} s {rate:,.0f} tok/s lr {scale:.2f} main mtp1-4: {text}")
        if time.perf_counter() - saved > a.save_seconds:
            save_state(a.state, p, optimizer, step, time.perf_counter() - start)
            saved = time.perf_counter()
    used = time.perf_counter() - start
    save_state(a.state, p, optimizer, step, used)
    with torch.no_grad():
        final = {k: t.detach().to(torch.bfloat16).float() for k, t in p.items()}  # evaluate what is written
    M.save(final, s, a.out)
    say(f"checkpoint written to {a.out}")
    metrics = {
        "steps": step,
        "tokens": step * a.rows * a.length,
        "training_seconds": round(used, 1),
        "seed": a.seed,
        "device": torch.cuda.get_device_name() if a.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "settings": {k: v for k, v in vars(a).items() if isinstance(v, int | float | str)},
        "history": history,
    }
    (a.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    plain = M.Ops(delta_rule=ops.delta_rule)  # evaluation runs other shapes than those that were compiled
    report = evaluate(final, s, plain, a)
    report["samples"] = decode_samples(report["samples"], a.tokenizer)
    (a.out / "metrics.json").write_text(json.dumps(metrics | {"evaluation": report}, indent=1) + "\n")
    for row in report["samples"]:
        say("----\n" + "\n".join(f"[{k}]\n{v}" for k, v in row.items()))
    return {k: v for k, v in report.items() if k != "samples"}


def main(argv: Sequence[str] | None = None, shape: M.Shape | None = None) -> None:
    """Command line. `shape`: another model than the 12 M stand-in."""
    p = argparse.ArgumentParser(description="Train the stand-in model and evaluate its MTP head.")
    p.add_argument("--corpus", type=Path, required=True, help="folder with train.u16.xz and heldout.jsonl.gz")
    p.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    p.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and metrics.json")
    p.add_argument("--state", type=Path, required=True, help="resumable state; the run goes on from it if it exists")
    p.add_argument("--minutes", type=float, default=6, help="training budget, without set-up and evaluation")
    p.add_argument(
        "--total-minutes", type=float, default=0, help="if given, shorten the budget so that all fits in this"
    )
    p.add_argument("--reserve-seconds", type=float, default=60, help="kept of --total-minutes for the evaluation")
    p.add_argument("--steps", type=int, default=0, help="stop after this many steps (0: the budget decides)")
    p.add_argument("--rows", type=int, default=32)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--recursive-rows", type=int, default=8)
    p.add_argument("--muon-lr", type=float, default=0.02)
    p.add_argument("--adam-lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--save-seconds", type=float, default=60)
    p.add_argument("--log-every", type=int, default=50)
    p.add_argument("--eval-requests", type=int, default=128)
    p.add_argument("--eval-tokens", type=int, default=128)
    p.add_argument("--eval-rows", type=int, default=64)
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args(argv)
    a.dtype = torch.bfloat16 if a.device == "cuda" else torch.float32
    a.out.mkdir(parents=True, exist_ok=True)
    a.state.parent.mkdir(parents=True, exist_ok=True)
    say(json.dumps(train(a, shape or M.Shape())))


if __name__ == "__main__":
    main()
