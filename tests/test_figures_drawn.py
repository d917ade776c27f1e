"""Every figure: valid SVG with text, escaped HTML with a table, and the numbers a reader would check."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import figures_data as data
import pytest

from kit.figures.acceptance import acceptance
from kit.figures.arms import arms
from kit.figures.core_result import core_result
from kit.figures.figure import Figure, NotRecorded, number, percent, ranges, times
from kit.figures.goodput import goodput
from kit.figures.latency import STREAMING, latency
from kit.figures.memory_bill import MIB, MemoryRow, memory_bill
from kit.figures.prefill_depth import DepthPoint, DepthSeries, fit_depths, prefill_depth
from kit.figures.ratio import ratio
from kit.figures.step_cost import step_cost
from kit.figures.sweep import Sweep, from_cells
from kit.figures.throughput import throughput
from kit.figures.timeline_policy import Timeline, timeline_policy
from kit.figures.waterfall import Ladder, Rung, waterfall


def depth_points() -> list[DepthPoint]:
    return [DepthPoint(n, [3072 / (4 + 2 / n)] * 3) for n in (1, 2, 4, 8)]


def every_figure() -> dict[str, Figure]:
    sweep = from_cells(data.cells(), flags=["stand-in model"])
    rungs = [
        Rung("baseline", {0: 100, 1: 101, 2: 99}),
        Rung("capped", {0: 98, 1: 99, 2: 97}, "capacity"),
        Rung("MTP", {0: 80, 1: 81, 2: 79}, "drafting + verification"),
    ]
    return {
        "throughput": throughput(sweep),
        "latency": latency(sweep),
        "streaming": latency(sweep, STREAMING, name="streaming"),
        "ratio": ratio(sweep),
        "core": core_result(sweep),
        "acceptance": acceptance(sweep),
        "step": step_cost(sweep),
        "depth": prefill_depth([DepthSeries("long", 1000, depth_points(), [768], fit_depths(depth_points(), 3072))]),
        "memory": memory_bill([MemoryRow("stock", [1e9]), MemoryRow("depth 8", [1e9 + 240 * MIB], 240 * MIB)], "stock"),
        "waterfall": waterfall([Ladder(8, rungs)]),
        "timeline": timeline_policy([Timeline("off", [0, 1], [1, 2], [0, 0], [10, 20], [15]),
                                     Timeline("adaptive", [0, 1], [1, 2], [2, 0], [12, 21], [16.5])]),
    }  # fmt: skip


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return every_figure()


def test_every_figure_is_an_svg_with_text_and_a_full_account(figures: dict[str, Figure]) -> None:
    for name, figure in figures.items():
        root = ET.fromstring(figure.svg)
        texts = ["".join(t.itertext()) for t in root.iter("{http://www.w3.org/2000/svg}text")]
        assert texts, name
        assert root.get("viewBox") and root.get("width") is None, name
        assert figure.headline and figure.caption and figure.alt and len(figure.table), name
        page = figure.to_html()
        assert 'role="img"' in page and "aria-label=" in page and "<figcaption>" in page and "<table>" in page, name


def test_the_same_numbers_give_the_same_bytes(figures: dict[str, Figure]) -> None:
    sweep = from_cells(data.cells(), flags=["stand-in model"])
    assert throughput(sweep).to_html() == figures["throughput"].to_html()
    assert ratio(sweep).to_html() == figures["ratio"].to_html()


def test_texts_of_records_are_escaped_and_never_read_as_mathematics() -> None:
    hostile = '<script>alert("x")</script> $\\frac{1}{2}$ & "quoted"'
    cells = [
        c.model_copy(update={"arm": c.arm.model_copy(update={"label": hostile})}) if c.cell.arm == "mtp-1" else c
        for c in data.cells()
    ]
    sweep = from_cells(cells, flags=["<img src=x onerror=alert(1)>"])
    for figure in (throughput(sweep), ratio(sweep), core_result(sweep), latency(sweep)):
        page = figure.to_html()
        assert "<script" not in page and "<img" not in page
        assert "&lt;script&gt;" in page and "&lt;img" in page
        ET.fromstring(figure.svg)
    # Long labels are wrapped, so look for a piece that no line break splits.
    assert "\\frac{1}{2}$" in re.sub(r"<[^>]+>", "", throughput(sweep).svg)


def test_with_one_repeat_no_interval_is_drawn(figures: dict[str, Figure]) -> None:
    one = from_cells(data.cells(repeats=1, again=False))
    for draw in (throughput, ratio, core_result):
        figure = draw(one)
        assert "n = 1" in figure.caption and "noise is unknown" in figure.headline
        assert figure.table["95 % interval"].isna().all()
    # An interval bar is a line collection of its own; with one repeat there is none.
    assert "LineCollection" not in throughput(one).svg
    assert "LineCollection" in figures["throughput"].svg


def test_ratio_shows_the_value_the_noise_and_the_base() -> None:
    figure = ratio(from_cells(data.cells()))
    text = re.sub(r"<[^>]+>", " ", figure.svg)
    row = figure.table[(figure.table["arm"] == "MTP, width 2") & (figure.table["c"] == "8")].iloc[0]
    assert row["verdict"] == "below 1×" and row["ratio"] == pytest.approx(0.8, abs=0.02)
    assert times(row["ratio"]) in text
    assert "base 411 tok/s" in text
    assert "A/A" in figure.caption


def test_undecided_points_have_a_mark_of_their_own_that_the_caption_names() -> None:
    cells = [c for c in data.cells(again=False) if c.cell.load.value != 8 or c.cell.repeat < 2]
    figure = ratio(from_cells(cells))
    text = re.sub(r"<[^>]+>", " ", figure.svg)
    assert text.count("×  ?") + text.count("× ?") == 2
    assert "filled: larger" in figure.caption and "hollow: not larger" in figure.caption
    assert "with ?: undecided" in figure.caption
    assert set(figure.table[figure.table["c"] == "8"]["verdict"]) == {"undecided"}
    assert "undecided" not in ratio(from_cells(data.cells())).caption
    assert "(undecided, n = 2)" in throughput(from_cells(cells)).headline


def test_an_interval_of_a_throughput_ends_at_0() -> None:
    sweep = Sweep({"a": "A", "b": "B"}, [8], {"output_tps": {
        "a": {8: {0: 10.0, 1: 90.0, 2: 30.0}}, "b": {8: {0: 30.0, 1: 31.0, 2: 32.0}}}}, baseline="b")  # fmt: skip
    assert sweep.estimate("output_tps", "a", 8).low < 0
    for figure in (throughput(sweep), arms(sweep, "output_tps", relative=False)):
        first, second = figure.table["95 % interval"]
        assert first == "0 (clipped) to 147" and second == "28.5 to 33.5"


def test_core_result_changes_are_against_drafting_off() -> None:
    figure = core_result(from_cells(data.cells()))
    assert list(figure.table["c"].unique()) == ["1", "8"]
    assert "gains" in figure.headline and "costs" in figure.headline


def test_core_result_says_gain_only_of_a_row_that_is_larger_than_the_noise() -> None:
    def some(width_2: list[float]) -> Sweep:
        known = {"off": [100, 101, 99], "w1": [104, 106], "w2": width_2}
        values = {arm: {8: dict(enumerate(v))} for arm, v in known.items()}
        return Sweep({a: a for a in known}, [8], {"output_tps": values}, baseline="off")

    figure = core_result(some([60, 193, 400]))
    assert "gains" not in figure.headline and "no more than the noise (n = 3)" in figure.headline
    assert list(figure.table["larger than the noise"])[1:] == ["undecided, n = 2", "no"]
    figure = core_result(some([103, 104, 102]))  # less than width 1 seems to gain, but known to
    assert "gains 3.0\u00a0%" in figure.headline and "(w2, n = 3)" in figure.headline
    figure = core_result(some([99, 100]))
    assert figure.headline.startswith("Undecided at c\u00a0=\u00a08") and "n = 2" in figure.headline


def test_core_result_takes_what_was_measured_if_the_usual_loads_were_not() -> None:
    cells = [c for c in data.cells() if c.cell.load.value in (2, 4)]
    assert list(core_result(from_cells(cells)).table["c"].unique()) == ["2", "4"]


def test_step_cost_follows_from_rate_and_tokens_per_step() -> None:
    table = step_cost(from_cells(data.cells())).table
    row = table[(table["arm"] == "MTP, width 1") & (table["c"] == "8")].iloc[0]
    assert row["tokens per step"] == pytest.approx(1.75)
    assert row["cost of a step (× plain)"] == pytest.approx(1.75 / 0.88, rel=0.02)
    assert row["pays"] == "no"
    assert set(table[table["c"] == "4"]["pays"]) == {"undecided"}, "the rates are equal within the noise"
    few = step_cost(from_cells(data.cells(repeats=2, again=False)))
    assert set(few.table["pays"]) == {"undecided"} and "not about the service's throughput" in few.caption


def test_what_was_not_recorded_is_refused_not_drawn_as_zero() -> None:
    sweep = from_cells(data.cells())
    with pytest.raises(NotRecorded, match="latency targets"):
        goodput(sweep)
    bare = replace(sweep, values={"output_tps": sweep.values["output_tps"]})
    for draw in (acceptance, step_cost, latency):
        with pytest.raises(NotRecorded):
            draw(bare)
    with pytest.raises(NotRecorded):
        ratio(replace(sweep, baseline=None))


def test_a_partly_recorded_metric_keeps_its_gaps() -> None:
    cells = [
        c.model_copy(update={"metrics": {**c.metrics, "ttft_p50": None}}) if c.cell.load.value == 8 else c
        for c in data.cells()
    ]
    table = latency(from_cells(cells), ["ttft_p50"]).table
    assert "8" not in set(table["c"])


def test_a_p99_of_few_requests_is_flagged_and_a_ratio_has_its_own_n() -> None:
    figure = latency(from_cells(data.cells()))  # 9 requests ended in every window
    assert "as few as 9 at c\u00a0=\u00a01" in figure.caption
    assert set(figure.table["requests ended, fewest"]) == {"9 (few for a p99)"}
    many = [c.model_copy(update={"counts": c.counts.model_copy(update={"completed": 40})}) for c in data.cells()]
    assert "Fewer than" not in latency(from_cells(many)).caption
    cells = [c for c in data.cells() if (c.cell.arm, c.cell.repeat) != ("baseline", 2)]
    table = throughput(from_cells(cells)).table
    assert set(table[table["arm"] == "MTP, width 1"]["n"]) == {3}
    assert set(table[table["arm"] == "MTP, width 1"]["n of the ratio"]) == {"2"}


def test_goodput_is_drawn_with_its_targets() -> None:
    cells = [
        c.model_copy(update={"metrics": {**c.metrics, "goodput": c.cell.load.value / 2, "attainment": 0.9}})
        for c in data.cells()
    ]
    figure = goodput(from_cells(cells), "TTFT ≤ 500 ms")
    assert "TTFT ≤ 500 ms" in figure.caption and "every request sent" in figure.caption


def test_fit_recovers_the_model_and_its_limit() -> None:
    fit = fit_depths([*depth_points(), DepthPoint(None, [3072 / 4])], 3072)
    assert tuple(fit.line) == (pytest.approx(4), pytest.approx(2))
    assert fit.input_tps(float("inf")) == pytest.approx(768)
    assert fit_depths([DepthPoint(4, [700.0])], 3072) is None


def test_depth_figure_labels_the_model_and_counts_the_recovery(figures: dict[str, Figure]) -> None:
    figure = figures["depth"]
    assert "model" in figure.caption and "not a measurement" in figure.caption
    assert "+41.2" in figure.headline and "82" in figure.headline  # stock 512, depth 8 722.8, no MTP 768


def test_with_too_few_repeats_no_depth_is_called_best() -> None:
    few = [DepthPoint(p.depth, p.input_tps[:1]) for p in depth_points()]
    headline = prefill_depth([DepthSeries("long", 1000, few, [768])]).headline
    assert "n = 1, too few repeats to tell depths apart" in headline and "+41" not in headline
    with pytest.raises(NotRecorded):  # stock alone is no depth
        prefill_depth([DepthSeries("long", 1000, few[:1], [768])])


def test_memory_below_the_prediction_is_told_as_that() -> None:
    rows = [MemoryRow("stock", [1e9]), MemoryRow("d8", [1e9 + 210 * MIB], 240 * MIB)]
    assert "never costs more memory than predicted; at most 30 MiB less" in memory_bill(rows, "stock").headline


def test_waterfall_without_repeats_names_no_largest_cost() -> None:
    rungs = [Rung("A", {0: 100}), Rung("B", {0: 80}, "x"), Rung("C", {0: 160}, "y")]
    said = waterfall([Ladder(8, rungs)]).headline
    assert "largest" not in said and "x −20" in said and "n = 1, so the noise is unknown" in said


def test_memory_tells_when_the_prediction_fails() -> None:
    good = memory_bill([MemoryRow("stock", [1e9]), MemoryRow("d8", [1e9 + 245 * MIB], 240 * MIB)], "stock")
    assert "was predicted" in good.headline
    bad = memory_bill([MemoryRow("stock", [1e9]), MemoryRow("d8", [1e9 + 400 * MIB], 240 * MIB)], "stock")
    assert "160 MiB more" in bad.headline


def test_waterfall_names_the_largest_cost(figures: dict[str, Figure]) -> None:
    figure = figures["waterfall"]
    assert figure.headline.startswith("Drafting + verification is the largest cost at c\u00a0=\u00a08")
    assert list(figure.table["step"]) == ["capacity", "drafting + verification"]


def test_waterfall_of_steps_within_the_noise_says_so() -> None:
    rungs = [Rung("A", {0: 100, 1: 90, 2: 110}), Rung("B", {0: 95, 1: 101, 2: 99}, "x")]
    assert "No single step" in waterfall([Ladder(8, rungs)]).headline


def test_numbers_are_written_for_people() -> None:
    assert [number(v) for v in (0, 1234.5, 52.71, 0.01234, -3.0)] == ["0", "1,234", "52.7", "0.0123", "−3"]
    assert percent(0.879) == "−12.1\u00a0%"
    assert times(1.002) == "1.002×" and times(1.5) == "1.50×"
    assert ranges([3, 4, 5, 8, 11, 10]) == "3–5, 8, 10–11"
