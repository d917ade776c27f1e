"""Output throughput against load, one line per arm."""

from __future__ import annotations

from kit.figures.figure import Figure, NotRecorded, listed, number
from kit.figures.lines import draw_lines, line_table
from kit.figures.style import panels, styled, to_svg
from kit.figures.sweep import Sweep, finding, sentence_case
from kit.records.stats import MIN_REPEATS_FOR_INTERVAL


def throughput(sweep: Sweep, metric: str = "output_tps", name: str = "throughput") -> Figure:
    """Aggregate output tokens per second seen by the clients, against concurrency.

    Raises NotRecorded if no cell has the metric.
    """
    if not sweep.known(metric):
        raise NotRecorded("output throughput was not recorded in these cells")
    with styled():
        height = 3.7
        figure, (axes,) = panels([height])
        draw_lines(axes, sweep, metric, "aggregate output (tok/s)", height)
        svg = to_svg(figure, name)
    ends = []
    for arm in sweep.arms:
        points = [(load, e.mean) for load in sweep.loads if (e := sweep.estimate(metric, arm, load))]
        if points:
            ends.append(
                f"{sweep.label(arm)} from {number(points[0][1])} tok/s at {sweep.at(points[0][0])} "
                f"to {number(points[-1][1])} at {sweep.at(points[-1][0])}"
            )
    return Figure(
        name=name,
        svg=svg,
        headline=_headline(sweep, metric),
        caption=sweep.caption(metric),
        alt=f"Line chart of output throughput against {sweep.load_title}: {listed(ends)}.",
        table=line_table(sweep, [metric]),
        sources=sweep.sources,
        n=sweep.n_text(metric),
        flags=sweep.flags,
    )


def _headline(sweep: Sweep, metric: str) -> str:
    """Who gives the most output at the fewest and at the most clients, as far as the noise lets one say."""
    if sweep.baseline is None or len(sweep.arms) < 2:
        return finding(sweep, metric)
    parts = []
    for load in dict.fromkeys((sweep.loads[0], sweep.loads[-1])):
        means = {arm: e.mean for arm in sweep.arms if (e := sweep.estimate(metric, arm, load))}
        effects = {arm: e for arm in sweep.others() if (e := sweep.effect(metric, arm, load))}
        verdicts = {arm: e.verdict for arm, e in effects.items()}
        if not means or not verdicts:
            continue
        best = max(means, key=lambda arm: means[arm])
        leads = verdicts.get(best, "below" if "noise" not in verdicts.values() else "noise")
        if all(v == "noise" for v in verdicts.values()):
            parts.append(f"at {sweep.at(load)} all arms are within the noise, near {number(means[best])} tok/s")
        elif leads == "noise":
            base = f"{sweep.label(sweep.baseline)} ({number(means[sweep.baseline])} tok/s)"
            parts.append(f"at {sweep.at(load)} no arm beats {base}")
        else:
            few = [e.ratio.n for arm, e in effects.items() if e.verdict == "unknown" and best in (arm, sweep.baseline)]
            parts.append(
                f"most output at {sweep.at(load)}: {sweep.label(best)}, {number(means[best])} tok/s"
                + (
                    f" (undecided, n = {min(few)})"
                    if few and sweep.count(metric)[1] >= MIN_REPEATS_FOR_INTERVAL
                    else ""
                )
            )
    if not parts:
        return finding(sweep, metric)
    n = sweep.count(metric)[1]
    return sentence_case("; ".join(parts)) + (
        f" (n = {n}, so the noise is unknown)" if n < MIN_REPEATS_FOR_INTERVAL else ""
    )
