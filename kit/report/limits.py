"""What a measurement does not show, told from its records: each sentence is there because a record says so."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kit.figures.figure import listed
from kit.figures.sweep import AGAIN
from kit.records.compare import compare
from kit.records.metrics import METRICS
from kit.records.schema import CellRecord, RunRecord
from kit.records.stats import MIN_REPEATS_FOR_INTERVAL

_EXPECTED = (
    "output_tps", "ttft_p50", "ttft_p99", "tpot_p50", "icl_p50", "decode_rate_p50", "e2e_p50", "acceptance",
    "tokens_per_step", "goodput", "cached_share",
)  # fmt: skip
"""What a reader of a serving experiment may look for; the prefill experiment is judged by its own metrics."""

SYNCHRONISED = "forced-synchronisation"
"""Flag of cells in which passes were timed one by one (``kit.deferred.runner``)."""

_EXPECTED_PREFILL = ("input_tps", "decode_tps", "ttft_s", "wall_s", "acceptance", "peak_memory_bytes")


def limits(
    runs: Sequence[RunRecord], cells: Sequence[CellRecord], identical: Sequence[tuple[str, int, int]] | None = None
) -> list[str]:
    """Sentences for "What this does not show", from the records of one experiment.

    ``identical``: (arm, outputs equal to the baseline's, outputs compared), from :func:`kit.report.method.identical`.
    """
    said: list[str] = []
    good = [c for c in cells if c.status == "ok"]
    if not good:
        return ["Nothing: no cell ended well."]
    counts = {}
    for c in good:
        key = (c.run_id, c.cell.arm, c.cell.load.value)
        counts[key] = counts.get(key, 0) + 1
    fewest = min(counts.values())
    if fewest < MIN_REPEATS_FOR_INTERVAL:
        said.append(
            f"Uncertainty: some points rest on n = {fewest}, from which no interval can be estimated; a small "
            "difference there may be chance."
        )
    else:
        said.append(
            f"Variation between days, machines or restarts: the {fewest} repeats of a point were made in one run on "
            "one machine, and the intervals hold the noise within it."
        )
    arms = {c.cell.arm for c in good}
    if not any(arm.endswith(AGAIN) for arm in arms) and len(arms) > 1:
        said.append("A noise floor: no arm was measured twice (A/A), so small effects have only their own intervals.")
    by_arm = {arm: [c for c in good if c.cell.arm == arm] for arm in sorted(arms) if not arm.endswith(AGAIN)}
    if len(by_arm) > 1:
        found = compare(by_arm)
        if len(found.differences) > 1:
            said.append(
                "The cause of a difference: the arms differ in more than one setting ("
                + listed([d.field for d in found.differences])
                + "), so deployments are compared and no single switch is shown to be responsible."
            )
    if any(r.stand_in for r in runs):
        said.append(
            "A product model's speed or quality: the weights are a stand-in (a small trained model grown to a larger "
            "shape without changing its function). Its acceptance is its own; a product model's may be higher or lower."
        )
    kinds = {c.cell.load.kind for c in good}
    if kinds == {"closed"}:
        said.append(
            "Behaviour at a given arrival rate: the loop is closed, so a slower server also receives fewer requests, "
            "and queueing under a controlled arrival rate is not measured."
        )
    synced = [c for c in good if SYNCHRONISED in c.flags]
    if synced:
        said.append(
            f"A service's speed in {len(synced)} of {len(good)} cells: there every pass was synchronised by force, to "
            "time it. They are in no figure of throughput."
        )
    labels = {f for c in good for f in c.flags} - {SYNCHRONISED} | {n for r in runs for n in r.notes}
    if any("forced" in label or "simulated" in label for label in labels):
        said.append(
            "Real acceptance everywhere: some cells are labelled forced or simulated; their acceptance was set."
        )
    if any(r.engine == "llamacpp" for r in runs):
        cores = [r.provenance.cores for r in runs if r.provenance.cores]
        where = f" ({min(cores)} cores)" if cores else ""
        said.append(
            f"A server that has the machine to itself: server and load driver share one CPU{where}. The driver's lag "
            "is recorded with every cell. A CPU's balance of compute and memory is not a GPU's, so where the crossover "
            "lies does not carry over."
        )
    bound = [c for c in good if "client-bound" in c.flags]
    if bound:
        said.append(
            f"The server's limit in {len(bound)} of {len(good)} cells: the driver itself was late there (client-bound)."
        )
    expected = _EXPECTED_PREFILL if kinds == {"prefill"} else _EXPECTED
    missing = [METRICS[tag].title for tag in expected if all(c.metrics.get(tag) is None for c in good)]
    if missing:
        counted = any("drive.acceptance" in c.server for c in good)
        said.append(
            f"Not recorded: {listed(missing)}."
            + (" (Of drafts the server's own counters by cell are used; requests carry none.)" if counted else "")
        )
    partly = [
        METRICS[tag].title
        for tag in expected
        if any(c.metrics.get(tag) is None for c in good) and any(c.metrics.get(tag) is not None for c in good)
        and not tag.startswith(("acceptance", "tokens_per_step"))
    ]  # fmt: skip
    if partly:
        said.append(f"Recorded only in some cells: {listed(partly)}.")
    bad = [c for c in cells if c.status != "ok"]
    if bad:
        reasons = listed(sorted({c.reason or c.status for c in bad}))
        said.append(
            f"{len(bad)} cells that failed or broke a rule of measurement are kept in the records and not drawn: "
            f"{reasons}."
        )
    lost = sum((c.counts.failed + c.counts.timed_out) for c in good if c.counts)
    if lost:
        sent = sum(c.counts.sent for c in good if c.counts)
        said.append(f"{lost} of {sent} requests failed or timed out; they are in no latency percentile.")
    window = {c.asked.get("window_s") for c in good} - {None}
    if window and max(float(w) for w in window) < 30:
        said.append(
            f"Steady state over minutes: windows are {max(float(w) for w in window):g} s, long enough for throughput, "
            "short for a 99th percentile and for drift."
        )
    if identical is not None and not any(compared for _, _, compared in identical):
        said.append(
            "That outputs are the same in all arms: no prompt was answered in two arms, so none could be compared."
        )
    elif identical is not None and any(same < compared for _, same, compared in identical):
        said.append(
            "Strict losslessness: some greedy outputs differ between arms. Batch shapes change the order of "
            "floating-point sums, which can flip a near-tie; the count is in the method table."
        )
    return said


def limits_html(said: Sequence[str], title: str = "What this does not show") -> str:
    """The sentences as a list."""
    items = "".join(f"<li>{escape(text)}</li>" for text in said)
    return f'<section class="limits"><h3>{escape(title)}</h3><ul>{items}</ul></section>'
