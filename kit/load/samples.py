"""The server's own metrics, read generically: Prometheus text or a JSON page, as name → number.

A Prometheus name that has one series keeps its bare name. Several series of one name are kept apart by the
labels in which they differ, as ``name{position="0"}``; the draft position is always kept, so that a name means
the same at width 1 and width 2. A JSON page is flattened to dotted names
(``internal_states.0.speculative_num_steps``).
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Sequence

KNOWN_NAMES = {
    "llamacpp": [
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        "llamacpp:spec_decode_*",
        "llamacpp:prompt_tokens_total",
        "llamacpp:prompt_seconds_total",
        "llamacpp:tokens_predicted_total",
        "llamacpp:tokens_predicted_seconds_total",
        "llamacpp:n_decode_total",
        "llamacpp:n_busy_slots_per_decode",
    ],
    "sglang": [
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "sglang:cache_hit_rate",
        "sglang:gen_throughput",
        "sglang:spec_accept_length",
        "sglang:spec_accept_rate",
        "sglang:spec_num_steps",
        "sglang:spec_verify_calls_total",
        "sglang:max_total_num_tokens",
        "sglang:kv_cache_memory_usage_gb",
        "sglang:generation_tokens_total",
        "sglang:prompt_tokens_total",
        "sglang:forward_execution_seconds_total*",
        "internal_states.*.speculative_num_steps",
    ],
    "openai": [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:spec_decode_num_*",
    ],
}
"""Kept where a spec names none, by dialect."""

_SERIES = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_KEPT_LABELS = {"position"}


def parse(text: str, names: Sequence[str]) -> dict[str, float | None]:
    """The chosen names of a page; a value that is not finite is None."""
    try:
        page = json.loads(text)
    except ValueError:
        found = _prometheus(text)
    else:
        found = dict(_flatten(page, ""))
    return {name: value for name, value in found.items() if chosen(name, names)}


def chosen(name: str, names: Iterable[str]) -> bool:
    """Whether a name, with or without its labels, matches one of the patterns (``*`` only)."""
    bare = name.partition("{")[0]
    return any(fnmatch.fnmatchcase(n, pattern) for n in (name, bare) for pattern in names)


def _prometheus(text: str) -> dict[str, float | None]:
    series: dict[str, list[tuple[dict[str, str], float | None]]] = {}
    for line in text.splitlines():
        match = _SERIES.match(line.strip())
        if match is None:
            continue
        name, labels, value = match.groups()
        number = _finite(value)
        series.setdefault(name, []).append((dict(_LABEL.findall(labels or "")), number))
    found: dict[str, float | None] = {}
    for name, entries in series.items():
        keys = {key for labels, _ in entries for key in labels}
        differing = {k for k in keys if len({labels.get(k) for labels, _ in entries}) > 1} | (_KEPT_LABELS & keys)
        for labels, number in entries:
            suffix = ",".join(f'{k}="{labels[k]}"' for k in sorted(differing) if k in labels)
            found[f"{name}{{{suffix}}}" if suffix else name] = number
    return found


def _flatten(value: object, path: str) -> Iterable[tuple[str, float | None]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flatten(inner, f"{path}.{index}" if path else str(index))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, _finite(value)


def _finite(value: str | float) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None
