"""The prefill notebook's evidence: layouts apart, the right numbers, and a notebook that runs on one and two GPUs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import figures_data as data
import nbformat
import prefill_data
import pytest

from kit import measure
from kit.cards import load_card
from kit.engines.exllamav3 import ARMS
from kit.errors import KitError
from kit.figures.figure import NotRecorded
from kit.measure import plan
from kit.records.schema import CellKey, Load
from kit.report import notebook as nb
from kit.report import prefill
from kit.report.notebook import Evidence

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "prefill.ipynb"
ONE = ["no-mtp", "stock", "depth-2", "depth-4", "depth-8", "whole", "pinned", "coalesced", "unblock-8", "ngram",
       "stock-q8", "depth-8-q8", "no-mtp-sync", "stock-sync"]  # fmt: skip
TWO = ["no-mtp", "no-mtp-unblocked", "stock", "stock-last", "depth-2", "depth-4", "depth-8", "whole", "pinned",
       "rolling", "unblock", "unblock-8", "stock-sync"]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """``data/runs`` with a one-GPU run, a two-GPU run and a small later one on two GPUs."""
    root = tmp_path_factory.mktemp("data") / "runs"
    prefill_data.make_run(root / "standin-27b" / "one", ONE, 1)
    prefill_data.make_run(root / "standin-27b" / "two", TWO, 2)
    prefill_data.make_run(root / "standin-27b" / "two-later", ["no-mtp", "stock", "no-mtp-sync"], 2, repeats=1,
                          run_id="20260103T000000Z")  # fmt: skip
    return root


@pytest.fixture
def recorded(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "LOCAL", tmp_path / "local")
    monkeypatch.setattr(plan, "RECORDED", runs)
    return nb.records("standin-27b", "prefill", measure="never")


def test_each_layout_is_a_part_drawn_from_its_fullest_run(recorded):
    two, one = prefill.parts(recorded)
    assert (two.title, one.title) == ("2 GPUs, layers 16 + 16", "one GPU")
    assert two.run.folder.name == "two" and [run.folder.name for run in two.others] == ["two-later"]
    assert {c.resolved["gpus"] for c in two.good} == {2} and {c.resolved["gpus"] for c in one.good} == {1}
    assert two.labels == [two.title, "stand-in model", "recorded 2026-01-02 on 2 × NVIDIA Test"]
    assert not any("sync" in arm for arm in (*two.sweep.arms, *one.sweep.arms))
    assert two.sweep.baseline == "no-mtp"


def test_a_local_run_that_was_asked_for_comes_before_a_fuller_recorded_one(recorded, tmp_path):
    prefill_data.make_run(tmp_path / "local" / "standin-27b" / "mine", ["no-mtp", "stock"], 1, run_id="mine")
    found = prefill.parts(nb.records("standin-27b", "prefill", measure="never"))
    assert [part.run.folder.name for part in found] == ["two", "mine"]


def test_the_answer_says_what_the_records_were_made_to_say(recorded):
    two, one = prefill.parts(recorded)
    long = next(text for text in prefill.answers(two) if text.startswith("124,928"))
    length = 124928
    expected = prefill_data.seconds(_arm("no-mtp"), prefill_data.TWO, length) / prefill_data.seconds(
        _arm("stock"), prefill_data.TWO, length
    )
    assert two.sweep.effect("input_tps", "stock", length).ratio.mean == pytest.approx(expected, rel=0.01)
    assert f"stock MTP reads the prompt at {expected:.2f}×" in long
    gains = {a: two.sweep.effect("input_tps", a, length, baseline="stock").ratio.mean for a in two.remedies}
    best = two.sweep.label(max(gains, key=gains.get))
    assert f"against stock, {best} {max(gains.values()):.2f}×" in long and "no interruption" not in " ".join(
        prefill.answers(two)
    )
    said = " ".join(prefill.answers(one))
    assert "On one GPU deferring has no interruption to win back" in said
    assert "no remedy differs from stock by more than the noise" in said
    assert "draft cache after the prompt bit-identical in 48 of 48 cells of the arms that claim it" in said


def _arm(name):
    return ARMS[name]


def test_depths_are_plain_queues_and_only_a_split_gets_a_line(recorded):
    two, one = prefill.parts(recorded)
    short, long = prefill.depth_series(two)
    assert [p.depth for p in long.points] == [1, 2, 4, 8, None]
    assert long.fit.line.a == pytest.approx(0.076, rel=0.05) and long.fit.line.b == pytest.approx(0.065, rel=0.05)
    assert short.context_tokens == 16384 and len(long.no_mtp) == 3
    assert all(s.fit is None for s in prefill.depth_series(one))
    shown = prefill.depth_series(two, with_published=True)
    assert [s.published for s in shown] == [False, False, True, True]


def test_memory_leaves_rows_in_host_memory_without_a_prediction(recorded):
    one = prefill.parts(recorded)[-1]
    rows = {row.label: row for row in prefill.memory_rows(one)}
    assert rows["depth 8"].predicted_bytes == 8 * 3072 * 5120 * 2
    assert rows["whole prompt, rows in pinned memory"].predicted_bytes is None
    assert "stock MTP, Q8 draft cache" not in rows and "n-gram lookup" not in rows


def test_identity_is_counted_against_stock_of_the_same_cache(recorded):
    one = prefill.parts(recorded)[-1]
    table = prefill.identity_table(one).set_index("arm")
    assert table.loc["depth 8", "draft cache as stock's"] == "6 of 6"
    assert table.loc["depth 8, coalesced passes", "draft cache as stock's"] == "0 of 6"
    assert table.loc["depth 8, Q8 draft cache", "draft cache as stock's"] == "6 of 6"
    assert table.loc["depth 8, Q8 draft cache", "compared with"] == "stock, Q8 draft cache"
    assert table.loc["n-gram lookup", "draft cache as stock's"] == "no MTP cache"


def test_counters_passes_and_utilisation_are_told(recorded):
    two, one = prefill.parts(recorded)
    queue = prefill.queue_table(two).set_index(["arm", "input"])
    assert queue.loc[("depth 8", "124,928"), "chunks queued"] == 41
    assert queue.loc[("depth 8", "124,928"), "flushes"] == "queue full 5; end of the prompt 1"
    sync = prefill.sync_table(one)
    assert list(sync["MTP ÷ target"].dropna()) == ["4.2 %", "4.2 %"]
    busy = prefill.utilisation_table(two).set_index("arm")
    assert list(busy.loc["stock MTP"]) == ["60 %", "70 %"] * 2 and "GPU 1, 124,928" in busy.columns


def test_what_the_run_lacks_may_come_from_another_of_its_layout(recorded):
    two = prefill.parts(recorded)[0]
    later = prefill.Part(Evidence("prefill", two.others))
    bare = prefill.Part(Evidence("prefill", two.others), [two.run])
    assert set(prefill.sync_table(bare)["arm"]) == {"no MTP, forced synchronisation"}
    assert len(prefill.lanes(bare)) == 2
    with pytest.raises(NotRecorded):
        prefill.sync_table(prefill.Part(Evidence("prefill", [_without(later.run, "no-mtp-sync")])))


def _without(run, arm):
    class Less:
        folder, record = run.folder, run.record

        def cells(self):
            return [c for c in run.cells() if c.cell.arm != arm]

    return Less()


def test_the_model_is_fitted_where_it_can_be_and_advises_within_a_budget(recorded):
    two, one = prefill.parts(recorded)
    table = prefill.model_table(two).set_index("arm")
    assert abs(table.loc["depth 8", "model ÷ measured, 124,928"] - 1) < 0.03
    assert "n-gram lookup" not in set(prefill.model_table(one)["arm"])
    said = prefill.advice(two)
    assert said[0].startswith("Within 64 MiB, depth 2 (60 MiB) does not reach 95 %")
    assert "A prediction, not a measurement" in said[-1]
    assert prefill.advice(one)[0].startswith("Within 64 MiB, depth 1 (0 MiB) reaches 100 %")
    few = prefill.Part(Evidence("prefill", two.others))
    assert prefill.advice(few)[0].startswith("The model gives no advice for 2 GPUs")


def test_the_model_gives_no_advice_where_an_arm_is_much_faster_than_it_allows(recorded, monkeypatch):
    two = prefill.parts(recorded)[0]
    real = two.mean
    fast = lambda metric, arm, length: (real(metric, arm, length) or 0) * (1.2 if arm == "unblock-8" else 1)  # noqa: E731
    monkeypatch.setattr(prefill.Part, "mean", lambda self, *a: fast(*a))
    assert "that does not hold here. It gives unblocked inputs and depth 8" in prefill.advice(two)[0]


def test_the_memory_is_shown_at_the_length_that_most_arms_have(recorded, monkeypatch):
    two = prefill.parts(recorded)[0]
    assert prefill.memory_length(two) == 124928
    few = lambda self, metric, arm, length: [1.0] if length == 16384 or arm == "stock" else []  # noqa: E731
    monkeypatch.setattr(prefill.Part, "values", few)
    assert prefill.memory_length(two) == 16384 and "16,384 input tokens" in prefill.memory_caption(two)


def test_the_hosts_time_is_told_apart_by_turn_wait_and_embedding():
    spans = [[0, 10e3, "embedding"], [10e3, 50e3, "target"], [50e3, 60e3, "mtp"], [52e3, 56e3, "embedding"]]
    twice = spans + [[b + 100e3, e + 100e3, label] for b, e, label in spans]
    timeline = {
        "label": "x", "chunks": 2, "gpus": [{"device": 0, "spans": [[0, 60e3, "target"], [60e3, 70e3, "copy"]]}],
        "host": twice, "iterations": [[0, 100e3], [100e3, 200e3]],
        "host_waits": [[20e3, 25e3, "cudaMemcpyAsync"], [53e3, 55e3, "cudaEventSynchronize"], [150e3, 154e3, "x"],
                       [210e3, 250e3, "cudaDeviceSynchronize"]],
    }  # fmt: skip
    t = prefill.host_time(timeline)
    assert t.waiting == pytest.approx((5 + 2 + 4) / 2)
    assert t.embedding == pytest.approx((10 + 4 - 2 + 10 + 4 - 2) / 2)  # the second turn's wait covers half of it
    assert t.mtp == pytest.approx((10 - 2 - 2 + 10 - 4 - 2) / 2)
    assert t.launching == pytest.approx(t.mtp + (40 - 5 + 40) / 2)
    assert t.total == pytest.approx(100) and t.own == pytest.approx(100 - t.waiting)
    assert t.gpus == {0: pytest.approx(30)}


def test_no_scheduling_wins_back_the_mtp_passes_own_work(recorded):
    work, *_ = prefill.own_work(prefill.parts(recorded)[0])  # unblock-8 defers: its chunks hold other chunks' passes
    assert work.arm == "stock" and work.mtp == pytest.approx(5.5) and work.target == pytest.approx(120)
    assert work.ceiling == pytest.approx(120 / 125.5)
    assert any("this alone would leave MTP 0.96×" in text for text in prefill.answers(prefill.parts(recorded)[0]))


def test_timelines_show_stock_and_the_best_arm_that_has_one(recorded):
    two = prefill.parts(recorded)[0]
    first, second = prefill.lanes(two)
    assert (first.label, second.label) == ("stock MTP", "unblocked inputs and depth 8, head on the last GPU")
    assert set(first.gpus) == {0, 1} and 0.3 < first.busy(0) < 0.6


@pytest.mark.parametrize("kept", [["one"], ["two"], ["one", "two", "two-later"]])
def test_the_notebook_draws_everything_for_whatever_layouts_there_are(runs, tmp_path, monkeypatch, kept):
    root = tmp_path / "kept" / "standin-27b"
    root.mkdir(parents=True)
    for name in kept:
        (root / name).symlink_to(runs / "standin-27b" / name)
    monkeypatch.setattr(plan, "LOCAL", tmp_path / "local")
    monkeypatch.setattr(plan, "RECORDED", tmp_path / "kept")
    shown: list[str] = []
    monkeypatch.setattr(nb, "_display", lambda html, metadata=None: shown.append(html))
    names: dict[str, object] = {}
    for cell in nbformat.read(NOTEBOOK, 4).cells:
        if cell.cell_type == "code":
            source = cell.source.replace('MEASURE = "auto"', 'MEASURE = "never"')
            exec(compile(source, NOTEBOOK.name, "exec"), names)
    page = "\n".join(shown)
    assert "Not drawn" not in page and page.count("input t/s, published") == 1
    for title in ["one GPU"] * ("one" in kept) + ["2 GPUs, layers 16 + 16"] * ("two" in kept):
        for expected in (f"<h3>On {title}</h3>", f"<h3>Method: {title}</h3>", f"advice for {title}"):
            assert expected in page, expected
    for heading in (
        "Is it exact?",
        "What the queue did",
        "Each pass by itself",
        "Three chunks, GPU by GPU",
        "A model of",
    ):
        assert f"<h2>{heading}" in page
    if len(kept) > 1:  # of which layout a finding is, a reader of the summary must see
        assert "2 GPUs, layers 16 + 16: stock MTP reads" in page and "One GPU: no defer depth differs" in page
    assert len(set(_ids(page))) == len(_ids(page))


def _ids(page: str) -> list[str]:
    return re.findall(r'\bid="([^"]+)"', page)


def test_no_good_cell_is_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "LOCAL", tmp_path / "local")
    monkeypatch.setattr(plan, "RECORDED", tmp_path / "runs")
    run = data.make_run(tmp_path / "run", [], model="standin-27b")
    with pytest.raises(KitError, match="no cell of prefill ended well"):
        prefill.parts(Evidence("prefill", [run]))


# ------------------------------------------------------------------------------------------ sections of related cards


@pytest.fixture
def page_of(tmp_path, monkeypatch, runs):
    """The page of tiny-mtp with notebooks that print what they are given."""
    module = sys.modules["kit.report.make"]
    own = data.make_run(tmp_path / "mine")
    widths = [
        c.model_copy(update={"cell": CellKey(experiment="draft_width", arm=c.cell.arm, load=c.cell.load, repeat=0)})
        for c in data.cells(repeats=1)
    ]
    mine = data.make_run(tmp_path / "widths", widths)
    monkeypatch.setattr(
        measure, "ensure_all", lambda request: measure.Found({"concurrency": [own], "draft_width": [mine]}, {})
    )
    monkeypatch.setattr(plan, "LOCAL", tmp_path / "local")
    for name in ("kit.report.make", "kit.report.build"):
        monkeypatch.setattr(sys.modules[name], "NOTEBOOKS", tmp_path)
    for name in ("concurrency", "draft_width", "prefill"):
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        book = nbformat.v4.new_notebook(metadata={"title": name, "kernelspec": kernel})
        first = nbformat.v4.new_code_cell("MODEL = ''\nPROFILE = ''\nMEASURE = 'auto'")
        first.metadata["tags"] = ["parameters"]
        book.cells = [first, nbformat.v4.new_code_cell(f"print(f'{name} reads {{MODEL}} {{MEASURE}}')")]
        nbformat.write(book, tmp_path / f"{name}.ipynb")

    def make(root: Path) -> str:
        monkeypatch.setattr(plan, "RECORDED", root)
        return module.make(measure.Request("tiny-mtp"), out=tmp_path / "out", pdf="no").read_text()

    return make


def test_recorded_experiments_of_related_cards_are_labelled_sections(page_of, runs, tmp_path, capsys):
    root = tmp_path / "runs" / "standin-27b"
    root.mkdir(parents=True)
    for name in ("one", "two"):
        (root / name).symlink_to(runs / "standin-27b" / name)
    widths = [
        prefill_data.cell(_arm("stock"), 16384, 0, 1, "w").model_copy(
            update={"cell": CellKey(experiment="draft_width", arm="b0", load=Load(kind="closed", value=1), repeat=0)}
        )
    ]
    data.make_run(root / "widths", widths, model="standin-27b")
    page = page_of(tmp_path / "runs")
    for text in (
        "draft_width reads tiny-mtp never",
        "draft_width reads standin-27b never",
        "prefill reads standin-27b",
    ):
        assert text in page
    assert page.index("draft_width reads tiny-mtp") < page.index("prefill reads standin-27b")
    title = load_card("standin-27b").title
    assert (
        f"From MODEL=standin-27b ({title}), not measured for this page: recorded 2026-01-02 on 2 × NVIDIA Test" in page
    )
    assert page.count("recorded 2026-01-02 on 1 × NVIDIA Test") >= 1
    names = {path.name for path in (tmp_path / "out").glob("*.ipynb")}
    assert names == {
        "concurrency.ipynb",
        "draft_width.ipynb",
        "draft_width.standin-27b.ipynb",
        "prefill.standin-27b.ipynb",
    }
    assert "standin-27b / policy is not on the page: nothing is recorded" in capsys.readouterr().err


def test_a_related_card_without_records_is_left_out_with_a_line(page_of, tmp_path, capsys):
    page = page_of(tmp_path / "nothing")
    assert "standin-27b" not in page
    assert "standin-27b / prefill is not on the page: nothing is recorded" in capsys.readouterr().err


def test_the_published_notes_are_a_model_of_their_own(tmp_path):
    module = sys.modules["kit.report.make"]
    page = module.make(measure.Request("published"), out=tmp_path / "out", pdf="no").read_text()
    assert "What the two published notes measured" in page and "prefill.ipynb" not in page
