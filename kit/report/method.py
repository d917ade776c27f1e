"""The method table: what was measured, on what, how often. Generated from records, so it cannot drift from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from kit.figures.figure import listed, number
from kit.figures.sweep import AGAIN, in_order
from kit.records.compare import compare
from kit.records.metrics import METRICS, METRICS_VERSION
from kit.records.schema import CellRecord, RequestRecord, RunRecord

_LOADS = {
    "closed": "Closed loop: c clients, each sending its next request when the last has ended (not an arrival rate)",
    "open": "Open loop: requests arrive at λ per second whether or not earlier ones have ended",
    "prefill": "Single requests of a given input length",
    "trace": "Arrivals that rise and fall over time",
}

Outputs = Mapping[str, Mapping[str, str]]
"""By arm: prompt hash → output hash."""


def outputs_by_arm(requests: Iterable[tuple[str, RequestRecord]]) -> dict[str, dict[str, str]]:
    """Collect (arm, request) pairs into prompt hash → output hash per arm. Only requests that ended well count."""
    found: dict[str, dict[str, str]] = {}
    for arm, request in requests:
        if request.status == "ok" and request.prompt_sha256 and request.output_sha256:
            found.setdefault(arm, {})[request.prompt_sha256] = request.output_sha256
    return found


def identical(outputs: Outputs, baseline: str) -> list[tuple[str, int, int]]:
    """(arm, outputs equal to the baseline's, outputs compared) for every other arm; matched by prompt."""
    base = outputs.get(baseline, {})
    counted = []
    for arm, mine in outputs.items():
        if arm != baseline:
            both = mine.keys() & base.keys()
            counted.append((arm, sum(mine[prompt] == base[prompt] for prompt in both), len(both)))
    return counted


def method(
    runs: Sequence[RunRecord],
    cells: Sequence[CellRecord],
    metrics: Sequence[str] = ("output_tps", "ttft_p50"),
    same: Sequence[tuple[str, int, int]] | None = None,
) -> list[tuple[str, str]]:
    """Rows (name, text) of the method table, from the records of one experiment."""
    if not runs or not cells:
        return []
    # Cells come in a shuffled order; the card's is the one a reader expects.
    order = [arm for r in runs for arm in _card_arms(r, cells[0].cell.experiment)]
    arms = in_order(cells, list(dict.fromkeys(c.cell.arm for c in cells)), order)
    every = {arm: next(c.arm.label for c in cells if c.cell.arm == arm) for arm in arms}
    labels = {arm: label for arm, label in every.items() if not arm.endswith(AGAIN)}
    twins = sorted(label for arm, label in every.items() if arm.endswith(AGAIN))
    kinds = list(dict.fromkeys(c.cell.load.kind for c in cells))
    loads = sorted({c.cell.load.value for c in cells})
    rows = [
        ("Model", "; ".join(dict.fromkeys(r.title + (" (stand-in model)" if r.stand_in else "") for r in runs))),
        ("Machine", "; ".join(dict.fromkeys(_machine(r) for r in runs))),
        ("Layout", _resolved(cells, "layout") or "not reported"),
        ("Runtime", "; ".join(dict.fromkeys(_runtime(r) for r in runs))),
        ("Arms", " · ".join(labels.values()) + (f"; A/A: {', '.join(twins)}" if twins else "")),
        ("Workload", _workload(cells)),
        ("Load", listed([_LOADS[kind] for kind in kinds]) + ": " + ", ".join(f"{v:g}" for v in loads)),
        ("Windows", _windows(cells)),
        (
            "Metrics",
            "; ".join(f"{METRICS[m].title}: {METRICS[m].formula}" for m in metrics) + f" (version {METRICS_VERSION})",
        ),
        ("Repeats", f"{_per_point(cells)}; arms interleaved within each repeat, order shuffled by seed"),
        ("Requests", _requests(cells)),
    ]
    if same is not None:
        rows.append(("Outputs", _identical_text(same, every)))
    lag = [c.metrics["client_lag_p99"] for c in cells if c.metrics.get("client_lag_p99") is not None]
    if lag:
        rows.append(("Client", f"event-loop lag p99 at most {number(max(lag) * 1000)} ms in any cell"))
    rows.append(
        ("Measured", "; ".join(dict.fromkeys(f"{r.created_at:%Y-%m-%d %H:%M} UTC, profile {r.profile}" for r in runs)))
    )
    rows.append(("Seed", ", ".join(dict.fromkeys(str(r.seed) for r in runs))))
    by_arm = {arm: [c for c in cells if c.cell.arm == arm and c.status == "ok"] for arm in labels}
    by_arm = {arm: found for arm, found in by_arm.items() if found}
    if len(by_arm) > 1:
        found = compare(by_arm)
        rows.append(("What differs", "; ".join(map(str, [*found.blocking, *found.differences])) or "nothing"))
    notes = list(dict.fromkeys(note for r in runs for note in r.notes))
    if notes:
        rows.append(("Notes", " ".join(notes)))
    return rows


def method_html(rows: Sequence[tuple[str, str]], title: str = "Method") -> str:
    """The rows as a table; all texts escaped."""
    body = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>' for name, text in rows)
    return (
        f'<section class="method"><h3>{escape(title)}</h3><table class="facts"><tbody>{body}</tbody></table></section>'
    )


def _card_arms(run: RunRecord, experiment: str) -> list[str]:
    card = run.card.get("experiments", {}).get(experiment, {})
    return list(card.get("arms", {})) if isinstance(card, dict) else []


def _machine(run: RunRecord) -> str:
    p = run.provenance
    gpus = [g.name for g in p.gpus]
    parts = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)]
    if p.cpu or p.cores:
        parts.append(" ".join(x for x in (p.cpu or "CPU", f"({p.cores} cores)" if p.cores else "") if x))
    if p.memory_gib:
        parts.append(f"{p.memory_gib:g} GiB")
    return ", ".join(parts) or "not recorded"


def _runtime(run: RunRecord) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.provenance.versions.items())
    commit = f" @ {run.provenance.commit[:10]}" if run.provenance.commit else ""
    dirty = " with uncommitted changes" if run.provenance.dirty else ""
    return f"{run.engine} ({versions}); kit{commit}{dirty}"


def _resolved(cells: Sequence[CellRecord], field: str) -> str:
    return ", ".join(dict.fromkeys(str(c.resolved[field]) for c in cells if c.resolved.get(field) is not None))


def _workload(cells: Sequence[CellRecord]) -> str:
    asked = cells[0].asked
    named = [f"{key} {asked[key]}" for key in ("trace", "api", "max_output_tokens", "think_time_s") if key in asked]
    hashes = ", ".join(dict.fromkeys(c.workload_hash for c in cells))
    return ", ".join([*named, f"hash {hashes}"])


def _windows(cells: Sequence[CellRecord]) -> str:
    parts = []
    for key, title in (("burn_in_s", "burn-in"), ("warm_up_s", "warm-up"), ("window_s", "window")):
        values = list(dict.fromkeys(c.asked.get(key) for c in cells if c.asked.get(key) is not None))
        if values:
            parts.append(f"{', '.join(f'{v:g}' if isinstance(v, int | float) else str(v) for v in values)} s {title}")
    text = " + ".join(parts) if parts else "not recorded"
    return (
        text + "; load flows across the window's edges, a token counts when it arrives in the window" if parts else text
    )


def _requests(cells: Sequence[CellRecord]) -> str:
    counts = [c.counts for c in cells if c.counts]
    if not counts:
        return "not recorded"
    total = {name: sum(getattr(c, name) for c in counts) for name in type(counts[0]).model_fields}
    words = {
        "sent": "sent", "completed": "completed", "failed": "failed", "timed_out": "timed out",
        "cancelled": "cancelled", "cut_off": "cut off by the window's end",
    }  # fmt: skip
    return ", ".join(f"{total[name]} {word}" for name, word in words.items() if name in total)


def _identical_text(same: Sequence[tuple[str, int, int]], labels: Mapping[str, str]) -> str:
    if not same or not any(compared for _, _, compared in same):
        return "no prompt was answered in two arms, so outputs could not be compared"
    parts = [f"{labels.get(arm, arm)}: {equal} of {compared}" for arm, equal, compared in same if compared]
    return "identical to the baseline's for the same prompt: " + "; ".join(parts)


def _per_point(cells: Sequence[CellRecord]) -> str:
    """Good cells per arm and load: a run that was cut short does not have as many of each."""
    counts = Counter((c.cell.experiment, c.cell.arm, c.cell.load.value) for c in cells if c.status == "ok")
    low, high = min(counts.values(), default=0), max(counts.values(), default=0)
    return f"{low} per point" if low == high else f"{low} to {high} per point"
