"""The core result: one deployment at different draft widths, at few and at many clients.

Each load has its own panel and scale from 0, since the question is what the width changes at that load.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from kit.figures.figure import Figure, NotRecorded, listed, number, percent, percent_within
from kit.figures.style import FONT_PT, MUTED, panels, styled, to_svg
from kit.figures.sweep import Effect, Sweep
from kit.records.metrics import METRICS


def core_result(
    sweep: Sweep, loads: Sequence[float] = (1, 8), metric: str = "output_tps", name: str = "core-result"
) -> Figure:
    """Bars of the metric at each width and load, with the change against the sweep's baseline (drafting off).

    ``loads`` that were not measured are left out; if none was, the smallest and the largest measured load are drawn.
    Raises NotRecorded without a baseline or values.
    """
    if sweep.baseline is None or not sweep.known(metric, sweep.baseline):
        raise NotRecorded("the arm with drafting off was not recorded, so no change can be told")
    chosen = [load for load in loads if load in sweep.loads] or list(dict.fromkeys((sweep.loads[0], sweep.loads[-1])))
    arms = {load: [arm for arm in sweep.arms if sweep.estimate(metric, arm, load)] for load in chosen}
    with styled():
        heights = [len(arms[load]) * 0.42 + 0.75 for load in chosen]
        figure, all_axes = panels(heights)
        for axes, load in zip(all_axes, chosen, strict=True):
            _bars(axes, sweep, metric, load, arms[load])
        svg = to_svg(figure, name)
    rows = []
    for load in chosen:
        for arm in arms[load]:
            e = sweep.estimate(metric, arm, load)
            effect = sweep.effect(metric, arm, load) if arm != sweep.baseline else None
            rows.append(
                {
                    sweep.load_letter: f"{load:g}",
                    "arm": sweep.label(arm),
                    f"{METRICS[metric].title} ({METRICS[metric].unit})": None if e is None else e.mean,
                    "n": 0 if e is None else e.n,
                    "change": None if effect is None else percent(effect.ratio.mean),
                    "n of the change": None if effect is None else str(effect.ratio.n),
                    "95 % interval": None if effect is None else percent_within(effect.ratio),
                    "larger than the noise": None if effect is None else _beyond(effect),
                }
            )
    texts = [
        f"{sweep.at(load)}: "
        + listed([f"{sweep.label(a)} {number(sweep.estimate(metric, a, load).mean, 4)}" for a in arms[load]])
        for load in chosen
    ]
    return Figure(
        name=name,
        svg=svg,
        headline=_headline(sweep, metric, chosen),
        caption=f"Changes are against {sweep.label(sweep.baseline)}; (noise): not larger than it; (?): undecided. "
        + sweep.caption(metric).replace("; faint dots are the repeats", ""),
        alt=f"Bars of {METRICS[metric].title} in {METRICS[metric].unit}. " + ". ".join(texts) + ".",
        table=pd.DataFrame(rows),
        sources=sweep.sources,
        n=sweep.n_text(metric),
        flags=sweep.flags,
    )


def _bars(axes, sweep: Sweep, metric: str, load: float, arms: list[str]) -> None:  # noqa: ANN001 (matplotlib Axes)
    found = {arm: sweep.estimate(metric, arm, load) for arm in arms}
    top = max(e.high or e.mean for e in found.values())
    for y, arm in enumerate(arms):
        e = found[arm]
        axes.barh(y, e.mean, height=0.72, color=sweep.look(arm).color, alpha=0.85, zorder=2)
        if e.low is not None and e.high is not None:
            axes.errorbar(
                [e.mean], [y], xerr=[[e.mean - max(0.0, e.low)], [e.high - e.mean]], fmt="none", ecolor="#222222",
                elinewidth=1.1, capsize=2.5, zorder=3,
            )  # fmt: skip
        text = f"{e.mean:.1f} {METRICS[metric].unit}"
        effect = sweep.effect(metric, arm, load) if arm != sweep.baseline else None
        if effect is not None:
            text += f"  {percent(effect.ratio.mean)}" + {"noise": " (noise)", "unknown": " (?)"}.get(effect.verdict, "")
        axes.annotate(
            text, (max(e.mean, e.high or 0), y), xytext=(6, 0), textcoords="offset points", va="center",
            fontsize=FONT_PT - 0.5, color=sweep.look(arm).text,
        )  # fmt: skip
    axes.set_yticks(range(len(arms)), [sweep.label(arm) for arm in arms])
    axes.tick_params(axis="y", length=0, labelcolor="#333333")
    axes.set_ylim(len(arms) - 0.45, -0.55)
    axes.set_xlim(0, top * 1.75)
    axes.set_xticks([])
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_color(MUTED)
    axes.set_title(sweep.at(load), fontweight="bold")


def _beyond(effect: Effect) -> str:
    return {"above": "yes", "below": "yes", "noise": "no", "unknown": f"undecided, n = {effect.ratio.n}"}[
        effect.verdict
    ]


def _headline(sweep: Sweep, metric: str, loads: Sequence[float]) -> str:
    """What drafting changes at each load; verdict, value and n are those of the row that is named."""
    parts = []
    for load in loads:
        effects = [e for arm in sweep.others() if (e := sweep.effect(metric, arm, load)) is not None]
        if effects:
            parts.append(_at(sweep, load, effects))
    text = "; ".join(parts) if parts else "Throughput by draft width"
    return text[:1].upper() + text[1:]


def _at(sweep: Sweep, load: float, effects: Sequence[Effect]) -> str:
    above = [e for e in effects if e.verdict == "above"]
    # A width that is known to gain is named before one that seems to gain more.
    best = max(above or effects, key=lambda e: e.ratio.mean)
    change, where, n = percent(best.ratio.mean), sweep.at(load), f"n = {best.ratio.n}"
    who = sweep.label(best.arm)
    if above:
        return f"drafting gains {change.lstrip('+')} at {where} ({who}, {n})"
    if all(e.verdict == "noise" for e in effects):
        return f"at {where} no width differs by more than the noise"
    if best.verdict == "noise":
        return f"at {where} the best width ({who}, {change}) differs by no more than the noise ({n})"
    if best.verdict == "unknown":
        low = min(effects, key=lambda e: e.ratio.mean)
        if len(effects) > 1 and all(e.verdict == "unknown" and e.ratio.n == best.ratio.n for e in effects):
            seen = f"{percent(low.ratio.mean)} to {change}"  # no width is singled out
        else:
            seen = f"{who} {change}"
        return f"undecided at {where}: {seen} ({n}: the noise is unknown)"
    even = f" even at its best width ({who}, {n})" if len(effects) > 1 else f" ({who}, {n})"
    return f"drafting costs {change.lstrip('−')} at {where}{even}"
