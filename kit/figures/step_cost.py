"""Why drafting helps or not: what a verify step yields against what it costs.

A stream's decode rate is tokens per step ÷ time per step. So, with the baseline's step yielding one token,

    (rate ÷ baseline's rate) = tokens per step ÷ (step time ÷ baseline's step time)

and the relative cost of a step follows from two recorded numbers. Drafting pays while a step yields more than it
costs. The cost is everything that makes a stream's step longer: drafting, verification of more tokens, and waiting
for a batch that others share.
"""

from __future__ import annotations

import pandas as pd

from kit.figures.figure import Figure, NotRecorded, number, times
from kit.figures.lines import draw_lines
from kit.figures.style import MUTED, Look, panels, styled, to_svg
from kit.figures.sweep import Sweep
from kit.records.stats import ratio_estimate

YIELD, COST = "tokens_per_step", "decode_rate_p50"


def step_cost(sweep: Sweep, name: str = "step-cost") -> Figure:
    """A panel per drafting arm: tokens per step, and the implied cost of a step relative to the baseline's.

    Raises NotRecorded if tokens per step or the decode rate (of an arm and the baseline) was not recorded.
    """
    base = sweep.baseline
    arms = [arm for arm in sweep.others() if sweep.known(YIELD, arm) and sweep.known(COST, arm)]
    if base is None or not arms or not sweep.known(COST, base):
        raise NotRecorded("the cost of a step needs tokens per step and the decode rate of an arm and of the baseline")
    yields: dict[str, dict[float, dict[int, float | None]]] = {}
    costs: dict[str, dict[float, dict[int, float | None]]] = {}
    for arm in arms:
        for load in sweep.loads:
            steps, rates = sweep.repeats(YIELD, arm, load), sweep.repeats(COST, arm, load)
            bases = sweep.repeats(COST, base, load)
            for repeat in steps.keys() & rates.keys() & bases.keys():
                tokens, rate, plain = steps[repeat], rates[repeat], bases[repeat]
                if tokens and rate and plain:
                    yields.setdefault(arm, {}).setdefault(load, {})[repeat] = tokens
                    costs.setdefault(arm, {}).setdefault(load, {})[repeat] = tokens * plain / rate
    arms = [arm for arm in arms if arm in costs]
    if not arms:
        raise NotRecorded("no repeat has tokens per step and the decode rate of both an arm and the baseline")
    rows = []
    with styled():
        heights = [2.5] * (len(arms) - 1) + [2.85]
        figure, all_axes = panels(heights)
        for axes, arm, height in zip(all_axes, arms, heights, strict=True):
            look = sweep.look(arm)
            pair = Sweep(
                arms={"yield": "step yields", "cost": "step costs"},
                loads=[load for load in sweep.loads if load in costs[arm]],
                values={YIELD: {"yield": yields[arm], "cost": costs[arm]}},
                load_kind=sweep.load_kind,
                styles={"yield": look, "cost": Look(MUTED, "x")},
            )
            draw_lines(axes, pair, YIELD, f"{sweep.label(arm)}: against a plain step", height, last=arm == arms[-1])
            axes.set_ylim(bottom=0)
            for load in pair.loads:
                got, paid = pair.estimate(YIELD, "yield", load), pair.estimate(YIELD, "cost", load)
                rows.append(
                    {
                        "arm": sweep.label(arm),
                        sweep.load_letter: f"{load:g}",
                        "tokens per step": got.mean,
                        "cost of a step (× plain)": paid.mean,
                        "pays": _pays(yields[arm][load], costs[arm][load]),
                        "n": got.n,
                    }
                )
        svg = to_svg(figure, name)
    first, last = sweep.loads[0], sweep.loads[-1]
    arm = arms[0]
    said = [
        f"{times(_mean(costs[arm], load))} at {sweep.at(load)}"
        for load in dict.fromkeys((first, last))
        if load in costs[arm]
    ]
    headline = (
        f"A step of {sweep.label(arm)} costs {' and '.join(said)} of a plain one, "
        f"and yields {_span(yields[arm])} tokens"
    )
    return Figure(
        name=name,
        svg=svg,
        headline=headline,
        caption="This is about the rate of one stream, not about the service's throughput. "
        "Drafting speeds a stream up while its step yields more tokens than it costs. The cost is not "
        "measured directly: it follows from tokens per step and the per-stream decode rates (median) of the arm and "
        "the baseline, and holds everything that lengthens a step, other requests' prompts between two steps among it. "
        + sweep.caption(COST),
        alt="Line charts of tokens per verify step and of the relative cost of a step against load.",
        table=pd.DataFrame(rows),
        sources=sweep.sources,
        n=sweep.n_text(COST),
        flags=sweep.flags,
    )


def _pays(got: dict[int, float | None], paid: dict[int, float | None]) -> str:
    """Whether a step yields more than it costs; undecided with too few repeats, or where the ratio's interval holds 1.

    Yield ÷ cost is the ratio of the decode rates, paired by repeat.
    """
    found = ratio_estimate(got, paid)
    if found is None or found.low is None or found.high is None or found.low <= 1 <= found.high:
        return "undecided"
    return "yes" if found.mean > 1 else "no"


def _mean(by_load: dict[float, dict[int, float | None]], load: float) -> float:
    values = [v for v in by_load[load].values() if v is not None]
    return sum(values) / len(values)


def _span(by_load: dict[float, dict[int, float | None]]) -> str:
    means = [_mean(by_load, load) for load in by_load]
    low, high = number(min(means)), number(max(means))
    return low if low == high else f"{low} to {high}"
