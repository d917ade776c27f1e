"""The plan of the draft-width experiment: which arms share a server, how large its pools are, what is measured when.

Two questions, two kinds of arms. *Isolation*: one deployment, only the width is changed while it runs. *Ablation*: a
ladder from no speculation to drafting in which each rung differs from the one before in one thing::

    a          no speculation, the pool that its memory allows     (a → a-capped: capacity)
    a-capped   no speculation, the pool of the MTP deployment      (a-capped → b0: fixed cost of carrying MTP)
    b0         the MTP deployment at width 0                       (b0 → b0s: draft-extend, left out)
    b0s        width 0 with draft-extend skipped                   (b0 → bk: drafting and verification)
    b1 … bk    width k

**Equal memory.** What an arm's pool *would* be is a matter of the memory left, and several deployments that share a
GPU for a fair comparison in time cannot each have it all. So the memory is declared instead: a budget that holds the
MTP deployment's pools exactly, and every other deployment's pool is what the same budget gives it by SGLang's own
arithmetic (``mem_cache/kv_cache_configurator.py``, ``model_executor/pool_configurator.py``):

* KV: tokens × cell, and with MTP the cell grows by (1 + draft layers ÷ target's KV layers);
* gated-delta-net states: (requests + 1) × state, without a radix cache;
* with speculation also (requests + 1) × draft tokens × state, for the positions of a draft;
* the MTP head's own weights.

The sizes that the server then logs are recorded beside it.

Pure: no clock, no server, no file.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kit.errors import KitError
from kit.records.schema import Arm, CellKey, CellRecord, Load, Scalar

RUNNER_SETTINGS = ("pool", "mtp_pool_tokens", "mtp_draft_tokens", "width_mode", "output_tokens")
"""Settings of an arm that are the runner's and not SGLang's.

``mtp_pool_tokens``, ``mtp_draft_tokens``: the MTP deployment's pool, and its widest step plus one. ``pool``: ``mtp`` (a
pool of that size) or ``budget`` (what the same memory gives this arm); without it ``max_total_tokens`` counts, or
SGLang's own choice. ``width_mode``: ``auto`` (the kit's policy) or ``sglang``. ``output_tokens``: length of every
answer (otherwise the trace's).
"""

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """What of a checkpoint decides pool sizes. Bytes."""

    kv_layers: int
    draft_layers: int
    kv_bytes_per_layer: int
    """K and V of one token in one layer."""
    state_bytes: int
    """All gated-delta-net layers' state of one request (0 without such layers)."""
    mtp_weight_bytes: int

    @property
    def cell(self) -> int:
        """KV bytes of a token without speculation."""
        return self.kv_layers * self.kv_bytes_per_layer

    @property
    def mtp_cell(self) -> int:
        """KV bytes of a token with the draft's layers."""
        return (self.kv_layers + self.draft_layers) * self.kv_bytes_per_layer


def shape_of(config: Mapping[str, Any], kv_element_bytes: int = 2, state_element_bytes: int = 4) -> Shape:
    """Pool-relevant sizes of a checkpoint's ``config.json`` (Qwen3.5's form, or a plain transformer's).

    Raises KitError if a field it needs is missing.
    """
    text = config.get("text_config", config)
    try:
        hidden, heads = text["hidden_size"], text["num_attention_heads"]
        head = text.get("head_dim") or hidden // heads
        kinds = text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]
        linear = kinds.count("linear_attention")
        state = 0
        if linear:
            key, value = text["linear_num_key_heads"], text["linear_num_value_heads"]
            key_dim, value_dim = text["linear_key_head_dim"], text["linear_value_head_dim"]
            matrix = value * key_dim * value_dim * state_element_bytes
            # The last kernel − 1 inputs of the short convolution over queries, keys and values, in bf16.
            convolution = (2 * key * key_dim + value * value_dim) * (text["linear_conv_kernel_dim"] - 1) * 2
            state = linear * (matrix + convolution)
        draft = int(text.get("mtp_num_hidden_layers") or text.get("num_nextn_predict_layers") or 0)
        attention = (2 * heads + 2 * text["num_key_value_heads"]) * head * hidden + heads * head * hidden
        mlp = 3 * hidden * text["intermediate_size"]
        weights = 2 * draft * (attention + mlp) + 2 * 2 * hidden * hidden if draft else 0
        return Shape(
            kv_layers=len(kinds) - linear,
            draft_layers=draft,
            kv_bytes_per_layer=2 * text["num_key_value_heads"] * head * kv_element_bytes,
            state_bytes=state,
            mtp_weight_bytes=weights,
        )
    except KeyError as error:
        raise KitError(f"config.json has no {error}, which the pool sizes depend on") from error


def budget_bytes(shape: Shape, *, tokens: int, requests: int, draft_tokens: int) -> int:
    """Memory that the MTP deployment's pools and head take: a pool of ``tokens``, ``requests`` running at once."""
    return tokens * shape.mtp_cell + _states(shape, requests, draft_tokens) + shape.mtp_weight_bytes


def pool_tokens(shape: Shape, budget: int, *, requests: int, draft_tokens: int = 0) -> int:
    """Tokens that a deployment *without* a draft model gets from a budget (n-gram: with ``draft_tokens``).

    Raises KitError if the budget does not even hold the states.
    """
    tokens = (budget - _states(shape, requests, draft_tokens)) // shape.cell
    if tokens < 1:
        raise KitError(f"a budget of {budget / GIB:.2f} GiB holds no pool for {requests} requests")
    return tokens


def _states(shape: Shape, requests: int, draft_tokens: int) -> int:
    return (requests + 1) * shape.state_bytes * (1 + draft_tokens)


def server_settings(arm: Arm, shape: Shape, *, useful_tokens: int | None = None) -> dict[str, Scalar]:
    """An arm's settings as SGLang's, with its pool worked out.

    ``useful_tokens``: a pool is not made larger than this, since nothing could ever fill the rest. Raises KitError if
    the pool's settings contradict each other.
    """
    settings = {name: value for name, value in arm.settings.items() if name not in RUNNER_SETTINGS}
    pool = arm.settings.get("pool")
    if pool is None:
        return settings
    size, draft = arm.settings.get("mtp_pool_tokens"), arm.settings.get("mtp_draft_tokens")
    if pool not in ("mtp", "budget") or settings.get("max_total_tokens") is not None:
        raise KitError(f"arm {arm.name}: pool is mtp or budget, and goes without max_total_tokens")
    if not isinstance(size, int) or not isinstance(draft, int):
        raise KitError(f"arm {arm.name}: pool needs mtp_pool_tokens and mtp_draft_tokens")
    if pool == "budget":
        requests = int(settings.get("max_running_requests") or 64)
        budget = budget_bytes(shape, tokens=size, requests=requests, draft_tokens=draft)
        own = int(settings.get("ngram_draft_tokens") or 12) if settings.get("speculation") == "ngram" else 0
        fits = pool_tokens(shape, budget, requests=requests, draft_tokens=own)
        size = fits if useful_tokens is None else min(fits, max(useful_tokens, size))
    return {**settings, "max_total_tokens": size}


@dataclass(frozen=True)
class Shared:
    """One deployment and the arms measured on it."""

    settings: dict[str, Scalar]
    arms: tuple[str, ...]

    @property
    def name(self) -> str:
        """A short name for logs and folders: its first arm's."""
        return self.arms[0]


def deployments(arms: Sequence[Arm], shape: Shape, *, useful_tokens: int | None = None) -> list[Shared]:
    """Arms grouped by the server they need: those that differ in the width alone share one that can change it."""
    groups: dict[str, tuple[dict[str, Scalar], list[str]]] = {}
    for arm in arms:
        settings = server_settings(arm, shape, useful_tokens=useful_tokens)
        if settings.get("candidate_widths") is not None:
            settings = {name: value for name, value in settings.items() if name != "draft_width"}
        key = repr(sorted(settings.items()))
        groups.setdefault(key, (settings, []))[1].append(arm.name)
    return [Shared(settings, tuple(names)) for settings, names in groups.values()]


def in_order(
    name: str,
    arms: Sequence[str],
    loads: Sequence[Load],
    repeats: int,
    seed: int,
    tiers: Sequence[Sequence[float]] = (),
) -> list[CellKey]:
    """Cells in the order to measure: the loads of the first tier in all repeats, then those of the next.

    Within a tier all arms and loads of a repeat are measured before the next repeat begins, shuffled anew for each
    (seeded), so that a drift of the machine does not fall on one arm. Without ``tiers`` all loads are one tier.
    """
    values = [load.value for load in loads]
    planned = [list(tier) for tier in tiers] or [values]
    left = [value for value in values if not any(value in tier for tier in planned)]
    order: list[CellKey] = []
    for tier in [*planned, left]:
        chosen = [load for load in loads if load.value in tier]
        for repeat in range(repeats):
            cells = [CellKey(experiment=name, arm=arm, load=load, repeat=repeat) for arm in arms for load in chosen]
            random.Random(f"{seed}/{name}/{tier}/{repeat}").shuffle(cells)
            order += cells
    return order


EQUAL = {
    "pool": ("max_total_num_tokens", "running_limit", "chunked_prefill_size", "engine_build", "attention_backend"),
    "limits": ("running_limit", "chunked_prefill_size", "engine_build", "attention_backend"),
}
"""Resolved settings that arms must share: with ``pool`` also the pool's size."""


def unequal(resolved: Mapping[str, Mapping[str, Scalar]], fields: Iterable[str]) -> list[str]:
    """What differs among servers' resolved settings, a line each; empty if they may be compared."""
    found = []
    for field in fields:
        values = {name: settings.get(field) for name, settings in resolved.items()}
        if len(set(map(str, values.values()))) > 1:
            listed = ", ".join(f"{name}: {value}" for name, value in values.items())
            found.append(f"{field} differs ({listed})")
    return found


def peak_rate(cells: Iterable[CellRecord], share: float = 0.7) -> float | None:
    """``share`` of the highest request rate (1/s) that any cell reached: the peak of a load that rises and falls."""
    rates = [rate for cell in cells if cell.status == "ok" and (rate := cell.metrics.get("request_rate"))]
    return share * max(rates) if rates else None
