"""Method and limits: each sentence is there because a record says so, and goes when the record says otherwise."""

from __future__ import annotations

from pathlib import Path

import figures_data as data

from kit.figures.sweep import from_cells
from kit.records.schema import Counts, Gpu, Provenance
from kit.report.limits import limits, limits_html
from kit.report.method import identical, method, method_html, outputs_by_arm
from kit.report.notebook import Evidence, _server_words, verdicts, when_and_where


def joined(**changes) -> str:
    run = data.run_record(**{k: v for k, v in changes.items() if k in ("stand_in", "engine", "notes")})
    return " ".join(limits([run], changes.get("cells", data.cells()), changes.get("same")))


def test_limits_name_the_stand_in_only_where_it_is_one() -> None:
    assert "stand-in" in joined()
    assert "stand-in" not in joined(stand_in=False)


def test_limits_tell_n() -> None:
    assert "n = 1" in joined(cells=data.cells(repeats=1))
    assert "between days" in joined()


def test_limits_tell_confounds_and_a_missing_noise_floor() -> None:
    assert "no arm was measured twice" in joined(cells=data.cells(again=False))
    assert "no arm was measured twice" not in joined()
    changed = [c.model_copy(update={"resolved": {**c.resolved, "slots": c.cell.arm}}) for c in data.cells()]
    assert "more than one setting (draft_width and slots)" in joined(cells=changed)
    assert "more than one setting" not in joined()


def test_limits_tell_what_was_not_recorded_and_what_was_lost() -> None:
    assert "goodput" in joined()
    failed = Counts(sent=10, completed=7, failed=2, timed_out=1, cancelled=0, cut_off=0)
    lost = [c.model_copy(update={"counts": failed}) for c in data.cells(repeats=1)]
    assert "48 of 160 requests failed or timed out" in joined(cells=lost)
    bad = [*data.cells(), data.cell("mtp-1", 1, 9, status="failed", reason="server died")]
    assert "1 cells that failed" in joined(cells=bad) and "server died" in joined(cells=bad)


def test_limits_tell_forced_acceptance_and_a_late_client() -> None:
    cells = data.cells()
    cells[0] = cells[0].model_copy(update={"flags": ["forced-acceptance", "client-bound"]})
    text = joined(cells=cells)
    assert "labelled forced or simulated" in text and "1 of 48 cells" in text
    assert "forced" not in joined()


def test_limits_tell_differing_outputs() -> None:
    assert "losslessness" in joined(same=[("mtp-1", 11, 12)])
    assert "losslessness" not in joined(same=[("mtp-1", 12, 12)])
    assert "could be compared" in joined(same=[("mtp-1", 0, 0)])


def test_a_run_with_nothing_good_shows_nothing() -> None:
    cells = [data.cell("mtp-1", 1, 0, status="failed", reason="x")]
    assert limits([data.run_record()], cells) == ["Nothing: no cell ended well."]


def test_outputs_are_matched_by_prompt() -> None:
    outputs = outputs_by_arm(
        [
            ("baseline", data.request(0, "p1", "a")),
            ("baseline", data.request(1, "p2", "b")),
            ("mtp", data.request(0, "p2", "b")),
            ("mtp", data.request(1, "p1", "other")),
            ("mtp", data.request(2, "p3", "c")),
            ("mtp", data.request(3, "p1", "a").model_copy(update={"status": "failed"})),
        ]
    )
    assert identical(outputs, "baseline") == [("mtp", 1, 2)]


def test_method_says_machine_runtime_and_counts_and_escapes() -> None:
    rows = dict(method([data.run_record()], data.cells()))
    assert rows["Machine"] == "test CPU (2 cores)"
    assert rows["Arms"] == "baseline · MTP, width 1 · MTP, width 2; A/A: baseline, again"
    assert "480 sent" in rows["Requests"] and "48 cut off" in rows["Requests"]
    assert "not an arrival rate" in rows["Load"]
    assert "at most 2 ms" in rows["Client"]
    assert "&lt;for&gt;" in method_html(list(rows.items()))
    assert "&lt;b&gt;" in limits_html(["<b>"])


def test_evidence_reads_a_run_and_takes_the_cards_baseline(tmp_path: Path) -> None:
    run = data.make_run(tmp_path / "runs" / "synthetic" / "r1")
    evidence = Evidence("concurrency", [run])
    sweep = evidence.sweep()
    assert evidence.baseline == "baseline" == sweep.baseline
    assert sweep.sources[0].lines == "1–48" and sweep.sources[0].commit == "0123456789abcdef"
    assert str(tmp_path.parent) not in str(sweep.sources[0])
    assert evidence.labels[0] == "stand-in model" and "recorded 2026-01-01 on test CPU" in evidence.labels
    assert ("mtp-2", 8, 12) in evidence.identical


def test_the_answer_says_where_each_arm_helps() -> None:
    said = verdicts(from_cells(data.cells()))
    assert said[0] == (
        "MTP, width 1: more output throughput than baseline at c\u00a0=\u00a01 and 2; less at c\u00a0=\u00a08; "
        "no difference larger than the noise at c\u00a0=\u00a04."
    )
    assert (
        "with fewer than three repeats the noise is unknown"
        in verdicts(from_cells(data.cells(repeats=1, again=False)))[0]
    )


def test_the_servers_own_words_are_translated_and_positions_counted() -> None:
    server = {
        "llamacpp:requests_processing": 3.5,
        "llamacpp:requests_deferred": 0.5,
        "llamacpp:spec_decode_num_drafts_total": 200.0,
        "llamacpp:spec_decode_num_accepted_tokens_total": 250.0,
        'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 150.0,
        'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 100.0,
        "llamacpp:tokens_predicted_total": 1e6,
    }
    words = _server_words(server)
    short = _server_words({**server, "llamacpp:spec_decode_num_accepted_tokens_total": 300.0})
    assert short == {"running": 3.5, "queued": 0.5}, "positions that miss accepted tokens are not shown"
    assert words == {"running": 3.5, "queued": 0.5, "accepted at position 1": 0.75, "accepted at position 2": 0.5}


def test_short_notes_follow_every_figure_and_long_ones_stand_in_the_method_table(tmp_path: Path) -> None:
    long = "Deployments ran side by side on one GPU, one of them driven at a time."
    run = data.make_run(tmp_path / "run", notes=["forced split", long])
    evidence = Evidence("concurrency", [run])
    assert "forced split" in evidence.labels and long not in evidence.labels
    rows = dict(method(evidence.run_records, evidence.cells))
    assert long in rows["Notes"]
    assert rows["What differs"] == "draft_width (baseline: 0, mtp-1: 1, mtp-2: 2)"


def test_the_badge_names_the_gpus_that_were_used_not_those_of_the_machine() -> None:
    two = data.run_record(provenance=Provenance(gpus=[Gpu(name="G")] * 2))

    def said(**resolved: object) -> str:
        return when_and_where(two, [data.cell("baseline", 1, 0, resolved=resolved)])

    assert said(layout="tp1") == "2026-01-01 on 1 × G (of a machine with 2)"
    assert said(layout="one GPU", gpus=1) == "2026-01-01 on 1 × G (of a machine with 2)"
    assert said(layout="tp2") == said(layout="layer split", gpus=2) == "2026-01-01 on 2 × G"
    assert said(layout="pd:tp1+tp1") == said() == when_and_where(two) == "2026-01-01 on a machine with 2 × G"
