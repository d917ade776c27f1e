"""The notebook on records that the real runner made, on the fake engine: what one writes the other reads."""

from __future__ import annotations

import json
import time

import nbformat
from deferred_engine import Tokenizer, engine, real_engine  # noqa: F401
from test_deferred_runner import HIDDEN, new_run, trace  # noqa: F401
from test_report_prefill import NOTEBOOK

from kit.deferred import request, runner, timeline
from kit.engines.exllamav3 import Layout, PrefillPlan, arms_named
from kit.measure import plan
from kit.report import notebook as nb


def test_every_section_that_a_cpu_can_fill_is_filled(engine, trace, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(plan, "LOCAL", tmp_path / "local")
    monkeypatch.setattr(plan, "RECORDED", tmp_path / "runs")
    monkeypatch.setattr(runner, "encoder", lambda checkpoint: lambda text: [ord(c) % 500 for c in text])
    wanted = PrefillPlan(
        folder=tmp_path / "runs" / "standin-27b" / "r",
        layout=Layout(checkpoint=tmp_path, chunk=512, draft_tokens=3),
        arms=arms_named(["no-mtp", "stock", "depth-2", "depth-4", "whole", "pinned", "coalesced", "stock-sync"]),
        lengths=[3000],
        output_tokens=20,
        repeats=1,
        warm_up_tokens=600,
        trace=trace,
    )
    e = engine()
    resolved = {"engine": "exllamav3", "layout": "one GPU", "split": None, "gpus": 1, "chunk": 512}
    loaded = request.Loaded(
        e.target, e.cache, Tokenizer(), lambda where, bits: (e.head, e.draft_cache), [], HIDDEN, resolved
    )
    run = new_run(wanted.folder)
    record = run.record.model_copy(update={"model": "standin-27b"})
    (wanted.folder / "run.json").write_text(record.model_dump_json())
    runner.run_plan(wanted, loaded, run, time.monotonic(), lambda line: None)
    assert {c.status for c in run.cells()} == {"ok"}
    # No GPU, no spans: what the profiler would have seen.
    spans = {"arm": "stock", "label": "stock MTP", "chunk": 512, "chunks": timeline.TIMELINE_CHUNKS}
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1000, "args": {"device": 0, "correlation": 1}}
    (wanted.folder / "timeline-stock.json").write_text(json.dumps(spans | timeline.gpu_spans([kernel])))

    shown: list[str] = []
    monkeypatch.setattr(nb, "_display", lambda html, metadata=None: shown.append(html))
    names: dict[str, object] = {}
    for cell in nbformat.read(NOTEBOOK, 4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source.replace('"auto"', '"never"'), NOTEBOOK.name, "exec"), names)
    page = "\n".join(shown)
    # On a CPU there is no peak of GPU memory; the figure then draws the predicted queue alone.
    assert "Not drawn" not in page
    headings = (
        "Is it exact?",
        "What the queue did",
        "Each pass by itself",
        "Three chunks, GPU by GPU",
        "A model of it",
    )
    assert [h for h in headings if f"<h2>{h}" not in page] == []
    assert "draft cache after the prompt bit-identical in 5 of 5 cells of the arms that claim it" in page
    assert "for the same prompt in 7 of 7 cells of all arms" in page
    assert "1 of 8 cells: there every pass was synchronised by force" in page and "acceptance was set" not in page
    assert "How busy the GPUs were" not in page
