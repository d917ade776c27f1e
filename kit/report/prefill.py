"""What the prefill notebook shows: from the records of ExLlamaV3 runs to what the figures take.

Runs on one GPU and runs that split layers over several are different layouts and never share a chart, nor do runs of
different requests (other output lengths): each is a :class:`Part`, and the notebook draws its figures for each part.

Arms are told apart by their settings (``kit.engines.exllamav3.ArmSettings``), not by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, TypeVar

import pandas as pd

from kit.deferred.model import (
    Schedule,
    StageTimes,
    advise,
    chunk_bytes,
    seconds_per_chunk,
    two_gpu_times,
)
from kit.deferred.runner import DETAILS, identity
from kit.engines.exllamav3 import ArmSettings, chunks
from kit.errors import KitError
from kit.figures.figure import Figure, NotRecorded, listed, number, times, times_within
from kit.figures.memory_bill import MIB, MemoryRow
from kit.figures.prefill_depth import DepthFit, DepthPoint, DepthSeries, fit_depths
from kit.figures.sweep import Effect, Sweep, sentence_case
from kit.figures.timeline_gpus import Lanes, timeline_gpus
from kit.measure import plan
from kit.records.metrics import ratio
from kit.records.schema import CellRecord
from kit.records.stats import estimate
from kit.records.store import Run, find_runs
from kit.report import published
from kit.report.notebook import Evidence

NO_MTP, STOCK, UNBLOCKED = "no-mtp", "stock", "no-mtp-unblocked"

Made = TypeVar("Made")

BUDGETS_MIB = (64, 256, 1024)
"""Memory budgets the model's advice is given for."""


@dataclass(frozen=True)
class Part:
    """One layout: the run its figures are drawn from, and other runs of the same layout (for what that one lacks)."""

    evidence: Evidence
    others: Sequence[Run] = ()
    apart: bool = False
    """Whether another part has the same layout, so that the title must tell them apart."""

    @property
    def run(self) -> Run:
        """The run the figures are drawn from."""
        return self.evidence.runs[0]

    @cached_property
    def good(self) -> list[CellRecord]:
        """The cells that ended well."""
        return [c for c in self.evidence.cells if c.status == "ok"]

    @property
    def gpus(self) -> int:
        """GPUs the layers lie on."""
        return int(self.good[0].resolved.get("gpus") or 1)

    @property
    def title(self) -> str:
        """How a reader knows the part: one GPU; 2 GPUs, layers 16 + 16."""
        split = self.good[0].resolved.get("split")
        text = "one GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        text += f", layers {str(split).replace(',', ' + ')}" if split and self.gpus > 1 else ""
        scan = self.good[0].resolved.get("scan_tokens")
        text += f", scans of {int(scan):,} tokens" if scan else ""
        return f"{text}, {self.good[0].asked.get('output_tokens')} output tokens" if self.apart else text

    @property
    def suffix(self) -> str:
        """For the names of its figures."""
        split = self.good[0].resolved.get("split")
        text = f"{self.gpus}gpu" + (f"-{str(split).replace(',', '-')}" if split else "")
        scan = self.good[0].resolved.get("scan_tokens")
        text += f"-scan{scan}" if scan else ""
        return f"{text}-out{self.good[0].asked.get('output_tokens')}" if self.apart else text

    @property
    def labels(self) -> list[str]:
        """What must stand with every number of the part."""
        return [self.title, *self.evidence.labels]

    @property
    def answer_tokens(self) -> int:
        """Output tokens of every request."""
        return int(self.good[0].asked.get("output_tokens") or 0)

    @property
    def chunk(self) -> int:
        """Tokens of a prompt chunk."""
        return int(self.good[0].resolved["chunk"] or 0)

    @property
    def arms(self) -> dict[str, ArmSettings]:
        """Settings of the arms that have good cells, in the card's order (else as measured)."""
        found = {c.cell.arm: ArmSettings.of(c.arm) for c in self.good}
        order = self.evidence.order
        return dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))

    @property
    def lengths(self) -> list[int]:
        """Prompt lengths in tokens."""
        return sorted({int(c.cell.load.value) for c in self.good})

    @cached_property
    def sweep(self) -> Sweep:
        """All arms but those that were synchronised by force, against no MTP."""
        drawn = [arm for arm, settings in self.arms.items() if not settings.forced_sync]
        return self.evidence.sweep(arms=drawn, baseline=NO_MTP if NO_MTP in drawn else None)

    @cached_property
    def against_stock(self) -> Sweep:
        """The arms with an MTP head, against stock: what they accept on the same prompts."""
        drawn = [arm for arm, s in self.arms.items() if s.drafting == "mtp" and not s.forced_sync]
        return self.evidence.sweep(arms=drawn, baseline=STOCK if STOCK in drawn else None)

    def n(self, length: float) -> tuple[int, int]:
        """Fewest and most repeats of an arm that is drawn, at a length."""
        counts = [n for arm in self.sweep.arms if (n := len(self.values("input_tps", arm, length)))]
        return (min(counts), max(counts)) if counts else (0, 0)

    def values(self, metric: str, arm: str, length: float) -> list[float]:
        """Known values by repeat."""
        found = (
            c.metrics.get(metric)
            for c in sorted(self.good, key=lambda c: c.cell.repeat)
            if c.cell.arm == arm and c.cell.load.value == length
        )
        return [v for v in found if v is not None]

    def mean(self, metric: str, arm: str, length: float) -> float | None:
        """Mean over the repeats."""
        found = estimate(self.values(metric, arm, length))
        return found.mean if found else None

    def server(self, name: str, arm: str, length: float) -> float | None:
        """Mean over the repeats of a figure that the engine told of itself."""
        cells = [c for c in self.good if c.cell.arm == arm and c.cell.load.value == length]
        found = estimate([c.server.get(name) for c in cells])
        return found.mean if found else None

    @property
    def remedies(self) -> list[str]:
        """Arms that leave the draft cache as stock does and change when or how it is filled."""
        return [
            arm
            for arm, s in self.arms.items()
            if s.drafting == "mtp" and s.draft_bits == 4 and not s.coalesce and not s.forced_sync
            and (s.depth != 1 or s.unblock or s.mtp_gpu == "last")
        ]  # fmt: skip

    def effects(self, length: float, baseline: str | None = None, metric: str = "input_tps") -> list[Effect]:
        """The remedies measured at a length, against an arm (None: no MTP)."""
        found = (self.sweep.effect(metric, arm, length, baseline=baseline) for arm in self.remedies)
        return [effect for effect in found if effect is not None]

    @cached_property
    def timelines(self) -> list[dict[str, Any]]:
        """The recorded timelines (``kit.deferred.timeline``), those of the part's own run first."""
        return [
            json.loads(path.read_text())
            for run in (self.run, *self.others)
            for path in sorted(run.folder.glob("timeline-*.json"))
        ]

    @cached_property
    def details(self) -> list[dict[str, Any]]:
        """The lines of ``prefill.jsonl``; none if the run has no such file."""
        path = self.run.folder / DETAILS
        if not path.is_file():
            return []
        good = {c.cell.id for c in self.good}
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if line["cell"] in good]

    def depth_context(self, with_published: bool) -> dict[str, Any]:
        """For ``nb.show``: the same for the figure of depths, with the note's source where its points are drawn."""
        shown = {**self.context("prefill-depth"), "under": self.title}
        if with_published:
            shown["sources"] = [*shown["sources"], published.load("exllamav3-note").source("note")]
        return shown

    def look(self, name: str) -> dict[str, Any]:
        """For ``nb.show``: name, labels and layout of a figure drawn from the part's sweep, which has the sources."""
        return {"name": f"{name}-{self.suffix}", "flags": self.labels, "under": self.title}

    def context(self, name: str) -> dict[str, Any]:
        """Name, sources and labels of a figure of this part."""
        return {"name": f"{name}-{self.suffix}", "sources": self.sweep.sources, "flags": self.labels}


def parts(evidence: Evidence) -> list[Part]:
    """The layouts of a model's runs of this experiment: more GPUs first, then more arms.

    A part's figures come from the run that the request found, if it is a local one; else from the recorded run with the
    most good cells (the newest of equals).

    Raises KitError if no cell of any run ended well.
    """
    asked = list(evidence.runs)
    model = asked[0].record.model
    found = {run.folder.resolve(): run for run in asked}
    for run in find_runs([plan.LOCAL, plan.RECORDED], model, evidence.experiment):
        found.setdefault(run.folder.resolve(), run)
    groups: dict[tuple, list[Run]] = {}
    cells = {run.folder: [c for c in plan.experiment_cells([run], evidence.experiment) if c.status == "ok"]
             for run in found.values()}  # fmt: skip
    for run in found.values():
        if cells[run.folder]:
            resolved = cells[run.folder][0].resolved
            layout = (int(resolved.get("gpus") or 1), str(resolved.get("split")), resolved.get("scan_tokens"))
            groups.setdefault((layout, cells[run.folder][0].workload_hash), []).append(run)
    if not groups:
        raise KitError(f"no cell of {evidence.experiment} ended well in any run of {model}")

    def rank(run: Run) -> tuple:
        local = run in asked and plan.LOCAL in run.folder.parents
        return (local, len(cells[run.folder]), run.record.created_at)

    layouts = [layout for layout, _ in groups]
    made = []
    for (layout, _), runs in groups.items():
        first, *rest = sorted(runs, key=rank, reverse=True)
        made.append(Part(_named(Evidence(evidence.experiment, [first])), rest, apart=layouts.count(layout) > 1))

    def order(part: Part) -> tuple:
        return (part.gpus, len(part.sweep.arms), part.run.record.created_at)

    return sorted(made, key=order, reverse=True)


def _named(evidence: Evidence) -> Evidence:
    """The same cells; of a run on one GPU without the words for where the head lies, which mean nothing there."""

    def named(cell: CellRecord) -> CellRecord:
        if int(cell.resolved.get("gpus") or 1) > 1:
            return cell
        arm = cell.arm.model_copy(update={"label": cell.arm.label.replace(", head on the last GPU", "")})
        return cell.model_copy(update={"arm": arm})

    return evidence.with_cells([named(cell) for cell in evidence.cells])


def with_depths(of: Sequence[Part]) -> list[Part]:
    """The parts in which more depths than stock were measured."""
    return [p for p in of if any(len(s.points) > 1 for s in depth_series(p))]


# ------------------------------------------------------------------------------------------------------------- answers


def answers(part: Part) -> list[str]:
    """What MTP prefill costs here and what each remedy wins back, by prompt length, as far as the repeats support it.

    With fewer than three repeats no remedy is told from another: the numbers are in the figures, each with its n.
    """
    said = _in_short(part)
    for length in part.lengths:
        stock = part.sweep.effect("input_tps", STOCK, length)
        if stock is None:
            continue
        n = f" (n = {stock.ratio.n})" if stock.ratio.low is None else ""
        text = f"{length:,} tokens: stock MTP reads the prompt at {times_within(stock.ratio)} the speed of no MTP{n}"
        over = part.effects(length, STOCK)
        known = [e for e in over if e.verdict != "unknown"]
        beyond = sorted((e for e in known if e.verdict == "above"), key=lambda e: -e.ratio.mean)
        if beyond:
            text += "; against stock, " + listed([_gain(part, e) for e in beyond[:MOST_NAMED]])
            others = [f"{n} more above the noise" for n in [len(beyond[MOST_NAMED:])] if n]
            others += [f"{n} not above it" for n in [len(known) - len(beyond)] if n]
            text += f" (of the other remedies {listed(others)})" if others else ""
        elif known:
            top = max(known, key=lambda e: e.ratio.mean)
            text += (
                f"; no remedy differs from stock by more than the noise (the highest, {part.sweep.label(top.arm)}: "
                f"{times_within(top.ratio)} stock)"
            )
        if over and not known:
            text += (
                f"; with n = {len(part.values('input_tps', STOCK, length))} of stock no remedy can be judged against it"
            )
            told = [e for e in part.effects(length) if e.ratio.low is not None]
            sure = [f"{part.sweep.label(e.arm)} {times_within(e.ratio)}" for e in told]
            text += f". Against no MTP: {listed(sure)}" if sure else ""
        said.append(text + ".")
    said += [*_yardstick(part), *_floor(part), *_pace(part), *_outliers(part), *_exactness(part)]
    if part.gpus == 1:
        said.append(
            "On one GPU deferring has no interruption to win back: target and MTP passes share it, and only their "
            "order changes. Unblocked inputs save the host's waits there too"
            + ("." if UNBLOCKED in part.sweep.arms else "; how much they would give no MTP was not measured here.")
        )
    return said


SMALL_QUEUE_MIB = 256
"""A queue up to this size is advised where inputs cannot be unblocked."""


def _in_short(part: Part) -> list[str]:
    """What to do on a layout like this, at the longest prompt; nothing where no remedy is above the noise."""
    length = part.lengths[-1]
    above = sorted((e for e in part.effects(length, STOCK) if e.verdict == "above"), key=lambda e: -e.ratio.mean)
    if not above or part.gpus == 1:
        return []
    text = (
        f"In short, at {length:,} tokens: {part.sweep.label(above[0].arm)} gives {times_within(above[0].ratio)} stock"
    )
    queues = [
        (e, peak)
        for e in above
        if not part.arms[e.arm].unblock
        and (peak := part.server("queue_peak_bytes", e.arm, length))
        and peak <= SMALL_QUEUE_MIB * MIB
    ]
    if queues and part.arms[above[0].arm].unblock:
        effect, peak = queues[0]
        text += (
            f"; where inputs cannot be unblocked, {part.sweep.label(effect.arm)} gives {times_within(effect.ratio)} "
            f"for {number(peak / MIB)} MiB"
        )
    last = part.sweep.effect("input_tps", "stock-last", length, baseline=STOCK)
    if last is not None and part.arms[above[0].arm].unblock:
        text += (
            f". (That arm is two changes: the head on the last GPU alone gives {times_within(last.ratio)}; unblocked "
            "inputs with the head on the first were not measured.)"
        )
    return [text if text.endswith(")") else text + "."]


MOST_NAMED = 3
"""Remedies named in the answer; the figure of every arm has them all."""


def _gain(part: Part, effect: Effect) -> str:
    text = f"{part.sweep.label(effect.arm)} {times_within(effect.ratio)}"
    peak = part.server("queue_peak_bytes", effect.arm, effect.load)
    return text + (f" with a queue of {number(peak / MIB)} MiB" if peak else "")


def _yardstick(part: Part) -> list[str]:
    """The best remedy against no MTP. Unblocked inputs help no MTP too, so what MTP still costs is told against that.

    One GPU has no such arm of its own there, and no split to recover.
    """
    said = []
    for length in part.lengths:
        base = part.sweep.effect("input_tps", UNBLOCKED, length) if UNBLOCKED in part.sweep.arms else None
        if base is None:
            continue
        if over := part.effects(length):
            top = max(over, key=lambda e: e.ratio.mean)
            said.append(
                f"{length:,} tokens: against no MTP as it comes, the best remedy ({part.sweep.label(top.arm)}) reads "
                f"at {times_within(top.ratio)} the speed."
            )
        text = f"{length:,} tokens: unblocked inputs also change no MTP, {times_within(base.ratio)}"
        others = [
            f"{part.sweep.label(e.arm)} {times_within(e.ratio)}"
            for e in part.effects(length, UNBLOCKED)
            if part.arms[e.arm].unblock
        ]
        said.append(text + (f". Against that, {listed(others)}: this is what MTP still costs." if others else "."))
    return said


def arms_headline(part: Part) -> str | None:
    """Like with like at the longest prompt: a remedy that unblocks inputs against a no MTP with unblocked inputs.

    None where no such pair was measured well: the figure then says what it finds.
    """
    length = part.lengths[-1]
    stock = part.sweep.effect("input_tps", STOCK, length)
    if stock is None or UNBLOCKED not in part.sweep.arms:
        return None
    fair = [
        (base, e)
        for base, freed in ((NO_MTP, False), (UNBLOCKED, True))
        for e in part.effects(length, base)
        if part.arms[e.arm].unblock is freed
    ]
    base, best = max(fair, key=lambda pair: pair[1].ratio.mean, default=(None, None))
    if base is None or best is None or stock.ratio.low is None or best.ratio.low is None:
        return None
    return (
        f"Stock MTP reads {length:,} tokens at {times(stock.ratio.mean)} the speed of no MTP; "
        f"{part.sweep.label(best.arm)}: {times(best.ratio.mean)} that of {part.sweep.label(base)}"
    )


def decode_caption(part: Part) -> str:
    """How small a difference in output rate could have been seen at the longest prompt."""
    ratios = [e.ratio for e in part.effects(part.lengths[-1], STOCK, "decode_tps")]
    wide = [r for r in ratios if r.low is not None and r.high is not None]
    text = f"An answer has {part.answer_tokens} tokens."
    if wide:
        usual = sorted(wide, key=lambda r: (r.high or 1.0) / (r.low or 1.0))[len(wide) // 2]
        text += f" Half the remedies' intervals against stock are wider than {usual.low:.2f}× to {usual.high:.2f}×: "
        text += "smaller differences may be there and would not show."
    return text


def _floor(part: Part) -> list[str]:
    """What the MTP passes cost whatever their order, from the timeline of the best arm that has one."""
    speed = {arm: part.mean("input_tps", arm, part.lengths[-1]) or 0.0 for arm in part.arms}
    works = sorted(own_work(part), key=lambda w: -speed.get(w.arm, 0.0))
    return [
        f"The MTP passes' own work, {work.where}, from a timeline of {work.label}: {number(work.mtp, 3)} ms of GPU "
        f"time per chunk beside {number(work.target, 3)} ms of the target's. If all GPUs shared all work evenly, with "
        f"MTP and without, and nothing ever waited, this alone would leave MTP {times(work.ceiling)} the speed of no "
        "MTP in such chunks. It grows with the prompt (see the table of it)."
        for work in works[:1]
    ]


@dataclass(frozen=True)
class OwnWork:
    """GPU time per chunk of the target's passes and of the MTP passes, over all GPUs, ms; from one profile."""

    arm: str
    label: str
    from_token: int | None
    target: float
    mtp: float

    @property
    def where(self) -> str:
        """In words, which chunks were profiled."""
        return where_in_prompt(self.from_token)

    @property
    def ceiling(self) -> float:
        """Throughput ÷ no MTP if all GPUs shared all work evenly without a wait: target ÷ (target + MTP)."""
        return self.target / (self.target + self.mtp)


def where_in_prompt(from_token: int | None) -> str:
    """Which chunks a timeline is of, in words; older ones do not say, and are of the fourth chunk on."""
    return f"from token {from_token:,} on" if from_token else "early in the prompt"


def own_work(part: Part) -> list[OwnWork]:
    """Of every timeline of an arm that runs MTP passes and defers none, so that a chunk's pass is in its turn; the
    part's own run before others."""
    found: dict[tuple[str, int | None], OwnWork] = {}
    for text in part.timelines:
        arm, from_token = text["arm"], text.get("from_token")
        settings = part.arms.get(arm)
        if settings is None or settings.drafting != "mtp" or settings.depth != 1 or settings.coalesce:
            continue
        spent = dict.fromkeys(("target", "mtp"), 0.0)
        for gpu in text["gpus"]:
            for begin, end, label in gpu["spans"]:
                if label in spent:
                    spent[label] += (end - begin) / text["chunks"] / 1000
        if all(spent.values()):
            found.setdefault((arm, from_token), OwnWork(arm, text["label"], from_token, **spent))
    return list(found.values())


def own_work_table(of: Sequence[Part]) -> pd.DataFrame:
    """Of every layout, since where a pass runs does not change what it does. Raises NotRecorded without a timeline."""
    rows = [
        {
            "layout": part.title,
            "timeline of": work.label,
            "chunks": work.where,
            "target (ms)": work.target,
            "MTP (ms)": work.mtp,
            "MTP ÷ target": f"{work.mtp / work.target * 100:.1f} %",
            "at best ÷ no MTP": round(work.ceiling, 3),
        }
        for part in of
        for work in own_work(part)
    ]
    if not rows:
        raise NotRecorded("no timeline of an arm with MTP passes was recorded")
    return pd.DataFrame(rows)


def _pace(part: Part) -> list[str]:
    """Of stock and of the best remedy that has a timeline; the table has the others."""
    try:
        found = host_times(part)
    except NotRecorded:
        return []
    shown = [lane.label for lane in lanes(part)][:2]
    return [f"From a timeline of {host_note(part, t)}" for label in shown for t in found if t.label == label]


ODD_ONE = {"input_tps": 0.6, "decode_tps": 0.25}
"""By metric: a cell below this part of the best of its arm's other repeats is named, as more than noise (output rates
differ more between prompts)."""


def _outliers(part: Part) -> list[str]:
    """Cells far below the arm's other repeats, so that no mean with one in it is read as a result."""
    odd: dict[str, list[str]] = {metric: [] for metric in ODD_ONE}
    for cell in sorted(part.good, key=lambda c: (c.cell.load.value, c.cell.arm, c.cell.repeat)):
        mates = [
            c
            for c in part.good
            if (c.cell.arm, c.cell.load.value) == (cell.cell.arm, cell.cell.load.value) and c is not cell
        ]
        for metric, least in ODD_ONE.items():
            value = cell.metrics.get(metric)
            others = [v for c in mates if (v := c.metrics.get(metric))]
            if value and others and value < least * max(others):
                odd[metric].append(
                    f"{cell.arm.label}, {cell.cell.load.value:,.0f} tokens, repeat {cell.cell.repeat + 1} "
                    f"({number(value)} t/s against {number(max(others))})"
                )
    said = []
    if odd["input_tps"]:
        said.append(
            f"Apart from their arm's other repeats stand, in input throughput: {listed(odd['input_tps'])}. Each is a "
            "point of its own in the figure; read no result from a mean that holds it."
        )
    if odd["decode_tps"]:
        said.append(
            f"In output rate: {listed(odd['decode_tps'])}. {part.answer_tokens} output tokens are soon over, so that "
            "one stall of a second shows."
        )
    return said


def _exactness(part: Part) -> list[str]:
    """In how many cells the draft cache and the output were those of stock; arms that claim to be exact, and others."""
    rows = [row for row in identity(part.details) if not part.arms[row["arm"]].stock]
    outputs = [r["output_equal"] for r in rows]
    if not outputs:
        return []
    text = f"Output identical to stock's for the same prompt in {sum(outputs)} of {len(outputs)} cells of all arms"
    with_mtp = [r["output_equal"] for r in rows if part.arms[r["arm"]].drafting == "mtp"]
    if with_mtp and sum(outputs) < len(outputs):
        text += f" (of those with an MTP head: {sum(with_mtp)} of {len(with_mtp)})"
    caches = {exact: [r["draft_cache_equal"] for r in rows if r["draft_cache_equal"] is not None
                      and part.arms[r["arm"]].coalesce is not exact] for exact in (True, False)}  # fmt: skip
    if caches[True]:
        text += f"; draft cache after the prompt bit-identical in {sum(caches[True])} of {len(caches[True])} cells"
        text += " of the arms that claim it" if caches[False] else ""
    if caches[False]:
        text += f", and in {sum(caches[False])} of {len(caches[False])} with coalesced passes, which do not claim it"
    return [text + "."]


# ------------------------------------------------------------------------------------------------------ input by depth


def _plain_depth(settings: ArmSettings) -> bool:
    """A depth of the queue that the note describes, with nothing else changed."""
    s = settings
    return (
        s.drafting == "mtp" and s.draft_bits == 4 and s.where == "device" and s.mtp_gpu == "first"
        and not (s.rolling or s.coalesce or s.unblock or s.forced_sync) and s.queue_mib is None
    )  # fmt: skip


def depth_series(part: Part, with_published: bool = False) -> list[DepthSeries]:
    """Input throughput by depth for each prompt length; the published two-GPU points if asked for."""
    found = []
    for length in part.lengths:
        points = [
            DepthPoint(None if s.depth == "whole" else int(s.depth), values)
            for arm, s in part.arms.items()
            if _plain_depth(s) and (values := part.values("input_tps", arm, length))
        ]
        level = part.values("input_tps", NO_MTP, length)
        found.append(DepthSeries(f"{length:,} tokens", length, points, level, _fit(part, length, points)))
    return found + (published_series() if with_published else [])


def _fit(part: Part, length: int, points: Sequence[DepthPoint]) -> DepthFit | None:
    """t(N) = a + b/N over the depths that the prompt fills (a deeper queue than the prompt has chunks is not deeper);
    only for a layer split, since one GPU has no pipeline to drain."""
    if part.gpus == 1:
        return None
    full = [p for p in points if p.depth is not None and p.depth <= chunks(length, part.chunk)]
    return fit_depths(full, part.chunk) if len({p.depth for p in full}) > 2 else None


def published_series() -> list[DepthSeries]:
    """The published two-GPU points."""
    return [
        replace(s, label=f"note (two GPUs), {s.label}")
        for s in published.depth_series(published.load("exllamav3-note"))
    ]


# --------------------------------------------------------------------------------------------------------------- memory


def memory_rows(part: Part) -> list[MemoryRow]:
    """Peak memory beside the predicted queue, at :func:`memory_length`; stock is the reference.

    Rows that wait in pinned host memory are no GPU memory: for those arms the prediction is left out.
    """
    length = memory_length(part)
    rows = []
    for arm, s in part.arms.items():
        if s.drafting != "mtp" or s.draft_bits != 4 or s.forced_sync or (part.gpus > 1 and s.mtp_gpu == "last"):
            continue
        predicted = part.server("predicted_queue_bytes", arm, length) if s.where == "device" else None
        if arm == STOCK or s.depth != 1:
            label = part.sweep.label(arm)
            rows.append(MemoryRow(label, part.values("peak_memory_bytes", arm, length), predicted))
    return rows


def memory_length(part: Part) -> int:
    """The prompt length at which most arms were measured; of equals the longest."""
    return max(part.lengths, key=lambda n: (sum(bool(part.values("peak_memory_bytes", a, n)) for a in part.arms), n))


def memory_caption(part: Part) -> str:
    """What the memory figure's bars are."""
    text = f"Allocator peaks of all GPUs over a request of {memory_length(part):,} input tokens."
    text += " The process keeps every MTP head and draft cache that any arm needed: read differences, not the level."
    if any(s.where == "pinned" for s in part.arms.values()):
        text += " Rows in pinned memory take their bytes of the host's memory instead."
    if any(s.coalesce for s in part.arms.values()):
        text += " A coalesced pass also holds the activations of all its chunks, which the prediction leaves out."
    return text


# --------------------------------------------------------------------------------------------------------------- tables


def identity_table(part: Part) -> pd.DataFrame:
    """How many cells left the draft cache and the output that stock left for the same prompt.

    Raises NotRecorded without the run's details.
    """
    rows = identity(part.details)
    if not rows:
        raise NotRecorded("no digests of draft caches and outputs were recorded")
    found = []
    for arm in part.arms:
        mine = [row for row in rows if row["arm"] == arm]
        if part.arms[arm].stock or not mine:
            continue
        caches = [row["draft_cache_equal"] for row in mine if row["draft_cache_equal"] is not None]
        outputs = [row["output_equal"] for row in mine]
        found.append(
            {
                "arm": _label(part, arm),
                "draft cache as stock's": f"{sum(caches)} of {len(caches)}" if caches else "no MTP cache",
                "output as stock's": f"{sum(outputs)} of {len(outputs)}",
                "compared with": "stock, Q8 draft cache" if part.arms[arm].draft_bits == 8 else "stock",
            }
        )
    return pd.DataFrame(found)


_FLUSH_WORDS = {
    "depth": "queue full", "bytes": "byte cap", "prefill_end": "end of the prompt", "draft_forward": "a draft read",
    "draft_prefill": "a draft write", "copy_page": "page copied", "store": "page stored", "hash_swap": "hash swap",
    "deallocate": "pages freed", "uninstall": "uninstalled",
}  # fmt: skip


def queue_table(part: Part) -> pd.DataFrame:
    """The queue's own counters per request, mean over the repeats. Raises NotRecorded if no arm had a queue."""
    rows = []
    for length in part.lengths:
        for arm in part.arms:
            queued = part.server("queue_queued", arm, length)
            if queued is None or part.arms[arm].depth == 1:
                continue
            peak = part.server("queue_peak_bytes", arm, length)
            predicted = part.server("predicted_queue_bytes", arm, length)
            reasons = {name: part.server(f"flushes_{name}", arm, length) for name in _FLUSH_WORDS}
            rows.append(
                {
                    "arm": _label(part, arm),
                    "input": f"{length:,}",
                    "chunks queued": queued,
                    "MTP passes": part.server("queue_passes", arm, length),
                    "flushes": "; ".join(f"{_FLUSH_WORDS[name]} {count:g}" for name, count in reasons.items() if count),
                    "dropped": part.server("queue_dropped", arm, length),
                    "peak (MiB)": None if peak is None else peak / MIB,
                    "predicted (MiB)": None if predicted is None else predicted / MIB,
                    "in flushes (s)": part.server("queue_flush_seconds", arm, length),
                }
            )
    if not rows:
        raise NotRecorded("no arm with a queue was measured")
    frame = pd.DataFrame(rows)
    return frame if frame["dropped"].any() else frame.drop(columns="dropped")


def sync_table(part: Part) -> pd.DataFrame:
    """Target pass and MTP pass under forced synchronisation, beside what the same arm takes without it.

    From the part's run or another run of the same layout. Raises NotRecorded if none has such cells.
    """
    rows = []
    for run in (part.run, *part.others):
        mine = Part(Evidence(part.evidence.experiment, [run]))
        synced = [arm for arm, s in mine.arms.items() if s.forced_sync]
        for length in mine.lengths if synced else ():
            for arm in synced:
                target = mine.server("forced_sync_target_s", arm, length)
                if target is None:
                    continue
                mtp = mine.server("forced_sync_mtp_s", arm, length)
                free = part.mean("prefill_s", NO_MTP if mtp is None else STOCK, length)
                rows.append(
                    {
                        "arm": _label(mine, arm),
                        "input": f"{length:,}",
                        "target passes (s)": target,
                        "MTP passes (s)": mtp,
                        "MTP ÷ target": None if mtp is None else f"{mtp / target * 100:.1f} %",
                        "whole prompt, synchronised (s)": mine.mean("prefill_s", arm, length),
                        "whole prompt, not (s)": free,
                    }
                )
        if rows:
            break
    if not rows:
        raise NotRecorded("no cell was measured with forced synchronisation")
    return pd.DataFrame(rows)


def utilisation_table(part: Part) -> pd.DataFrame:
    """Utilisation of each GPU over a request, mean over the repeats. Raises NotRecorded if it was not sampled."""
    rows = []
    for arm in part.arms:
        found = {
            f"GPU {gpu}, {length:,}": part.server(f"utilisation_gpu{gpu}", arm, length)
            for length in part.lengths
            for gpu in range(part.gpus)
        }
        if any(v is not None for v in found.values()):
            shown = {column: None if v is None else f"{v:.0f} %" for column, v in found.items()}
            rows.append({"arm": _label(part, arm), **shown})
    if not rows:
        raise NotRecorded("the GPUs' utilisation was not sampled")
    return pd.DataFrame(rows)


def lanes(part: Part) -> list[Lanes]:
    """The recorded timelines: stock, the remedy with the best input throughput that has one, the best arm without MTP.

    Raises NotRecorded if there is none.
    """
    found: dict[str, Lanes] = {}
    for text in part.timelines:
        gpus = {int(g["device"]): [(b, e, label) for b, e, label in g["spans"]] for g in text["gpus"]}
        if text["arm"] not in found and any(gpus.values()):
            host = [(b, e, label) for b, e, label in text.get("host", ())]
            waits = [(b, e) for b, e, call in text.get("host_waits", ()) if call != PROFILE_END]
            found[text["arm"]] = Lanes(text["label"], gpus, host, text.get("chunks"), waits, checkpoints(text))
    if not found:
        raise NotRecorded("no timeline of the GPUs was recorded")
    speed = {arm: part.mean("input_tps", arm, part.lengths[-1]) or 0.0 for arm in found}
    ranked = sorted(found, key=lambda arm: -speed[arm])
    plain = [arm for arm in ranked if arm in part.arms and part.arms[arm].drafting == "none"]
    remedies = [arm for arm in ranked if arm != STOCK and arm not in plain]
    return [found[arm] for arm in ([STOCK] if STOCK in found else []) + remedies[:1] + plain[:1]]


PROFILE_END = "cudaDeviceSynchronize"
"""The wait with which the profile itself ends."""

CHECKPOINT_COPIES = 8
"""Blocking copies in a row, after a chunk's last pass, that tell the copy of recurrent states to the host: two for each
linear-attention layer, where a chunk's own uploads are two or three."""


def checkpoints(timeline: dict[str, Any]) -> list[tuple[float, float]]:
    """When the engine copied recurrent states to the host (once every 32,768 tokens), as [begin, end] in µs."""
    found = []
    for begin, end in timeline.get("iterations", ()):
        passes = [span[1] for span in timeline.get("host", ()) if begin <= span[0] < end]
        after = [
            w
            for w in timeline.get("host_waits", ())
            if passes and max(passes) <= w[0] < end and w[2].startswith("cudaMemcpy")
        ]
        if len(after) >= CHECKPOINT_COPIES:
            found.append((after[0][0], after[-1][1]))
    return found


@dataclass(frozen=True)
class HostTime:
    """Where a chunk's time goes on the host, and each GPU's own work in it; ms per chunk, from one profile.

    Attributes:
        launching: Inside the target's and MTP's passes, waits and embedding rows left out: handing work to the GPUs.
        mtp: The part of ``launching`` that is the MTP passes'.
        waiting: Runtime calls that took long, wherever they were: blocking copies. Not those of a checkpoint.
        embedding: Gathering, widening and sending the embedding rows, waits left out; None where it was not told apart
            (then it is in ``between``).
        between: All other time of the chunk's turn.
        gpus: Work by GPU, gaps left out.
    """

    label: str
    where: str
    launching: float
    mtp: float
    waiting: float
    embedding: float | None
    between: float
    gpus: dict[int, float]
    checkpoint: float = 0.0
    """The copy of recurrent states to the host, ms in all: once every 32,768 tokens, so in no chunk's average."""

    @property
    def own(self) -> float:
        """What the host does itself, per chunk: all but waiting."""
        return self.launching + (self.embedding or 0.0) + self.between

    @property
    def total(self) -> float:
        """Of the host, per chunk."""
        return self.own + self.waiting


BETWEEN_US = 20_000.0
"""Passes further apart than this belong to different chunks, in a timeline that does not mark the chunks' turns."""


def host_times(part: Part) -> list[HostTime]:
    """Of every timeline of the part that has the host's spans, one an arm. Raises NotRecorded if there is none.

    Arms that defer are left out: their three chunks hold the passes of all the chunks that were queued.
    """
    found: dict[str, HostTime] = {}
    for text in part.timelines:
        settings = part.arms.get(text["arm"])
        if settings is not None and settings.depth != 1:
            continue
        made = host_time(text)
        if made is not None:
            found.setdefault(made.label, made)
    if not found:
        raise NotRecorded("no timeline tells where the host's time went")
    return list(found.values())


def host_time(timeline: dict[str, Any]) -> HostTime | None:
    """One timeline's (``kit.deferred.timeline``); None if it has fewer than two chunks or no host spans."""
    turns, spans = timeline.get("iterations"), sorted(timeline.get("host", ()))
    if "host_waits" not in timeline or not spans:
        return None
    if not turns:
        # From the first pass of a chunk to the first of the next; the last chunk, whose turn has no end, is left out.
        starts = [spans[0][0], *(b[0] for a, b in pairwise(spans) if b[0] - a[1] > BETWEEN_US)]
        turns = [list(pair) for pair in pairwise(starts)]
    if len(turns) < 2:
        return None
    pauses = checkpoints(timeline)
    waits = [
        w
        for w in timeline["host_waits"]
        if w[2] != PROFILE_END and not any(begin <= w[0] < end for begin, end in pauses)
    ]
    # One lane of the host: what lies innermost is what it does, and a wait lies in whatever waits.
    busy = {label: [s for s in spans if s[2] == label] for label in ("target", "mtp", "embedding")}
    sums = dict.fromkeys(("waiting", *busy), 0.0)
    for begin, end in turns:
        sums["waiting"] += _overlap(waits, begin, end)
        for label, mine in busy.items():
            for span in mine:
                since, until = max(begin, span[0]), min(end, span[1])
                if since >= until:
                    continue
                sums[label] += until - since - _overlap(waits, since, until)
                if label == "mtp":  # its input asks the embedding for rows, whose own waits are out of it already
                    for inner in busy["embedding"]:
                        a, b = max(since, inner[0]), min(until, inner[1])
                        sums["mtp"] -= max(0.0, b - a - _overlap(waits, a, b)) if a < b else 0.0
    paused = sum(end - begin for begin, end in pauses)
    whole = sum(end - begin for begin, end in turns) - paused
    told = bool(busy["embedding"])
    per_chunk = 1 / len(turns) / 1000
    return HostTime(
        label=timeline["label"],
        where=where_in_prompt(timeline.get("from_token")),
        launching=(sums["target"] + sums["mtp"]) * per_chunk,
        mtp=sums["mtp"] * per_chunk,
        waiting=sums["waiting"] * per_chunk,
        embedding=sums["embedding"] * per_chunk if told else None,
        between=(whole - sum(sums.values())) * per_chunk,
        gpus={
            int(g["device"]): sum(e - b for b, e, label in g["spans"] if label != "copy") / timeline["chunks"] / 1000
            for g in timeline["gpus"]
        },
        checkpoint=paused / 1000,
    )


def _overlap(spans: Sequence[Sequence[Any]], begin: float, end: float) -> float:
    """How much of [begin, end) lies in the spans (which do not lie in one another)."""
    return sum(max(0.0, min(end, span[1]) - max(begin, span[0])) for span in spans)


def host_table(part: Part) -> pd.DataFrame:
    """Where the host's time goes, beside each GPU's own work; ms per chunk. Raises NotRecorded without a timeline."""
    return pd.DataFrame(
        [
            {
                "arm": t.label,
                "chunks": t.where,
                "launching (ms)": t.launching,
                "of it MTP (ms)": t.mtp,
                "embedding rows (ms)": t.embedding,
                "other (ms)": t.between,
                "waiting for a GPU (ms)": t.waiting,
                "host, all (ms)": t.total,
                **({"state checkpoint, once (ms)": t.checkpoint} if t.checkpoint else {}),
                **{f"GPU {gpu} works (ms)": busy for gpu, busy in t.gpus.items()},
            }
            for t in host_times(part)
        ]
    )


WAITS = 0.2
"""Part of a chunk's turn: a host that waits for longer is what keeps the GPUs from working at once."""


def host_note(part: Part, t: HostTime) -> str:
    """What sets the pace, in words."""
    slowest = max(t.gpus.values())
    rows = "" if t.embedding is None else f", {number(t.embedding, 3)} ms on embedding rows"
    among = " (the embedding rows among it)" if t.embedding is None else ""
    text = (
        f"{t.label}, {t.where}: for each chunk the host spends {number(t.launching, 3)} ms launching{rows}, "
        f"{number(t.between, 3)} ms on other work of its own{among} and {number(t.waiting, 3)} ms waiting for a "
        f"GPU; the busier GPU has {number(slowest, 3)} ms of work."
    )
    if t.checkpoint:
        text += f" The copy of recurrent states to the host, {number(t.checkpoint, 3)} ms once, is not in this."
    if t.waiting > WAITS * t.total and t.own > t.total / 2:
        text += " While it waits it hands no GPU any work, so the GPUs take turns."
    if t.own > slowest:
        text += (
            f" So in these chunks the host is slower than either GPU, and a layer split has little to pipeline: "
            f"without any wait it would still take {number(t.own, 3)} ms a chunk, under a profiler, which slows it. "
            "Later chunks of a long prompt give the GPUs more to do and the host no more."
        )
    return text


def timeline(part: Part) -> Figure:
    """The timelines; the headline says so if the host, and no GPU, sets the pace. Raises NotRecorded without any."""
    figure = timeline_gpus(lanes(part), **part.context("prefill-timeline"))
    try:
        first = host_times(part)[0]
    except NotRecorded:
        return figure
    own, slowest = first.own, max(first.gpus.values(), default=0.0)
    if own <= slowest:
        return figure
    return replace(
        figure,
        headline=f"{sentence_case(first.label)}: {first.where} the host sets the pace, with "
        f"{number(own, 3)} ms of its own work per chunk against {number(slowest, 3)} ms on the busier GPU",
    )


# ---------------------------------------------------------------------------------------------------------------- model


def stage_times(part: Part, length: int) -> StageTimes:
    """The model's stage times at a prompt length, fitted to measurements.

    For two GPUs to the depths and no MTP; for one GPU the MTP pass is what stock takes more than no MTP.

    Raises NotRecorded where too little was measured, or the model's premises do not hold for what was.
    """
    plain = _per_chunk(part, NO_MTP, length)
    stock = _per_chunk(part, STOCK, length)
    if plain is None or stock is None:
        raise NotRecorded("the model needs no MTP and stock at the same prompt length")
    if part.gpus == 1:
        return StageTimes((plain,), max(0.0, stock - plain))
    series = next(s for s in depth_series(part) if s.context_tokens == length)
    if part.gpus != 2 or series.fit is None:
        raise NotRecorded("the model's fit needs two GPUs, no MTP and three depths that the prompt fills")
    try:
        return two_gpu_times(series.fit.line, plain)
    except ValueError as error:
        raise NotRecorded(f"the model does not fit what was measured at {length:,} tokens: {error}") from error


def stages_of(part: Part, length: int, settings: ArmSettings, stages: StageTimes) -> StageTimes:
    """An arm's stage times; with unblocked inputs the target's are scaled to no MTP with unblocked inputs.

    What blocks without MTP is in the fitted stages, and no order of the passes takes it out. So that arm is reproduced
    by construction, as no MTP is; without it every arm has the fitted times.
    """
    plain, freed = _per_chunk(part, NO_MTP, length), _per_chunk(part, UNBLOCKED, length)
    if not settings.unblock or plain is None or freed is None:
        return stages
    return replace(stages, stages=tuple(stage * freed / plain for stage in stages.stages))


def schedule_of(settings: ArmSettings) -> Schedule | None:
    """An arm as the model's schedule; None for one that the model does not know."""
    s = settings
    if s.drafting == "ngram" or s.coalesce or s.forced_sync or s.queue_mib is not None or s.draft_bits != 4:
        return None
    return Schedule(
        mtp=None if s.drafting == "none" else s.mtp_gpu,
        depth=None if s.depth == "whole" else int(s.depth),
        pinned=s.where == "pinned",
        rolling=s.rolling,
        unblocked=s.unblock,
    )


def model_table(part: Part) -> pd.DataFrame:
    """The model's input throughput beside the measured, by arm and prompt length.

    Raises NotRecorded if it can be made for no length.
    """
    stages, problems = {}, []
    for length in part.lengths:
        try:
            stages[length] = stage_times(part, length)
        except NotRecorded as error:
            problems.append(str(error))
    rows = []
    for arm, settings in part.arms.items():
        schedule = schedule_of(settings)
        row: dict[str, object] = {}
        for length, times_there in stages.items() if schedule else ():
            measured = part.mean("input_tps", arm, length)
            if measured is not None:
                own = stages_of(part, length, settings, times_there)
                model = part.chunk / seconds_per_chunk(own, schedule, chunks(length, part.chunk))
                row[f"model t/s, {length:,}"] = model
                row[f"measured t/s, {length:,}"] = measured
                row[f"model ÷ measured, {length:,}"] = round(model / measured, 3)
        if row:
            rows.append({"arm": _label(part, arm), **row})
    if not rows:
        raise NotRecorded("; ".join(dict.fromkeys(problems)) or "the model knows none of the measured arms")
    return pd.DataFrame(rows)


def advice(part: Part) -> list[str]:
    """The depth that the model says reaches 95 % of a whole-prompt queue's throughput, by memory budget."""
    length = part.lengths[-1]
    try:
        stages = stage_times(part, length)
    except NotRecorded as error:
        return [f"The model gives no advice for {part.title}: {error}."]
    missed = premise_missed(part, length)
    if missed:
        return [missed]
    size = _bytes_per_chunk(part, length)
    if size is None:
        return [f"The model gives no advice for {part.title}: no arm with a queue tells the size of a chunk's rows."]
    said = []
    for budget in BUDGETS_MIB:
        found = advise(stages, chunks=chunks(length, part.chunk), bytes_per_chunk=size, budget=budget * MIB)
        reach = "reaches" if found.reached else "does not reach 95 %: it gives"
        said.append(
            f"Within {budget:,} MiB, depth {found.depth} ({number(found.queue_bytes / MIB)} MiB) {reach} "
            f"{found.of_limit * 100:.0f} % of what deferring the whole prompt gives."
        )
    parts_ = [f"{number(s * 1000)} ms" for s in stages.stages]
    said.append(
        f"Model for {part.title} at {length:,} tokens, from fitted times per {part.chunk}-token chunk: target "
        f"{' + '.join(parts_)}, MTP pass {number(stages.mtp * 1000)} ms. A prediction, not a measurement."
    )
    return said


PREMISE = 0.1
"""A measured throughput this much above the model's says that the model's premise does not hold."""


def premise_missed(part: Part, length: int) -> str | None:
    """Why no advice can be taken from the model at a length; None if it comes near what was measured."""
    times_there = stage_times(part, length)
    worst: tuple[float, str, float, float] | None = None
    for arm, settings in part.arms.items():
        schedule, measured = schedule_of(settings), part.mean("input_tps", arm, length)
        if schedule is None or measured is None:
            continue
        own = stages_of(part, length, settings, times_there)
        model = part.chunk / seconds_per_chunk(own, schedule, chunks(length, part.chunk))
        if measured > model * (1 + PREMISE) and (worst is None or measured / model > worst[0]):
            worst = (measured / model, arm, measured, model)
    if worst is None:
        return None
    _, arm, measured, model = worst
    return (
        f"No advice for {part.title}: the model takes the GPUs to set the pace, and that does not hold here. It gives "
        f"{_label(part, arm)} {number(model)} t/s at {length:,} tokens; measured were {number(measured)}. The time "
        "that is fitted as a GPU's stage is, in part, the host's."
    )


def _per_chunk(part: Part, arm: str, length: int) -> float | None:
    return ratio(part.chunk, part.mean("input_tps", arm, length))


def _bytes_per_chunk(part: Part, length: int) -> int | None:
    """From the predicted size of a device queue that the prompt fills (hidden size × 2 bytes × tokens)."""
    for arm, s in part.arms.items():
        if isinstance(s.depth, int) and 1 < s.depth < chunks(length, part.chunk):
            predicted = part.server("predicted_queue_bytes", arm, length)
            if predicted:
                hidden = predicted / s.depth / part.chunk / 2
                return chunk_bytes(part.chunk, round(hidden))
    return None


def _label(part: Part, arm: str) -> str:
    return next(c.arm.label for c in part.good if c.cell.arm == arm)


def each(of: Sequence[Part], make: Callable[[Part], Made]) -> dict[str, Callable[[], Made]]:
    """What ``nb.sections`` takes: a part's title → what makes its figure or table."""
    return {part.title: partial(make, part) for part in of}
