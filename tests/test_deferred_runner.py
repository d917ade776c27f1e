"""The measuring process on the fake engine, end to end: from a plan to a run that the reports can read."""

import json
import os
import random
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from deferred_engine import Tokenizer, engine, real_engine, torch  # noqa: F401

from kit.deferred import request, runner, timeline
from kit.engines import exllamav3
from kit.engines.exllamav3 import ArmSettings, Layout, PrefillPlan, arms_named, chunks, predicted_queue_bytes
from kit.engines.process import EngineError
from kit.errors import KitError
from kit.records.metrics import METRICS
from kit.records.schema import Arm, RunRecord
from kit.records.store import Run

HIDDEN = 8


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "sessions.jsonl"
    rng = random.Random(0)
    with path.open("w") as lines:
        for _ in range(4):
            words = ["".join(rng.choices("abcdefgh", k=6)) for _ in range(400)]
            turns = [("user", words[:200]), ("assistant", words[200:300]), ("user", words[300:]), ("assistant", words)]
            lines.write(json.dumps({"messages": [{"role": r, "content": " ".join(w)} for r, w in turns]}) + "\n")
    return path


def new_run(folder):
    record = RunRecord(
        run_id="test",
        model="fake",
        title="fake",
        stand_in=True,
        engine="exllamav3",
        profile="prefill",
        created_at=datetime.now(UTC),
        seed=1,
        card={},
        provenance=runner.provenance.collect([], {}),
    )
    return Run.create(folder, record)


@pytest.fixture
def plan(tmp_path, trace):
    names = ("no-mtp", "stock", "depth-2", "depth-8", "whole", "pinned", "rolling", "coalesced", "unblock", "unblock-8")
    return PrefillPlan(
        folder=tmp_path / "run",
        layout=Layout(checkpoint=tmp_path, chunk=512, draft_tokens=3),
        arms=arms_named([*names, "stock-sync"]),
        lengths=[700, 3000],
        output_tokens=20,
        repeats=2,
        warm_up_tokens=600,
        trace=trace,
        seed=3,
    )


@pytest.fixture
def loaded(engine):  # noqa: F811
    e = engine()
    return request.Loaded(
        e.target, e.cache, Tokenizer(), lambda where, bits: (e.head, e.draft_cache), [], HIDDEN, {"engine": "exllamav3"}
    )


_measured: list[Run] = []


@pytest.fixture
def measured(plan, loaded, monkeypatch):
    """One run of the whole plan, measured once for all tests that read it."""
    if not _measured:
        monkeypatch.setattr(runner, "encoder", lambda checkpoint: lambda text: [ord(c) % 500 for c in text])
        run = new_run(plan.folder)
        runner.run_plan(plan, loaded, run, time.monotonic(), lambda line: None)
        _measured.append(run)
    return _measured[0]


def test_every_cell_becomes_a_record(measured, plan):
    run = measured
    cells = run.cells()
    assert {c.cell.id for c in cells} == {key.id for key, _ in plan.cells()}
    assert {c.status for c in cells} == {"ok"}
    assert all(set(c.metrics) <= set(METRICS) for c in cells)
    for cell in cells:
        assert cell.metrics["input_tps"] > 0
        assert cell.metrics["wall_s"] >= cell.metrics["ttft_s"] > 0
        [sent] = run.requests(cell)
        assert (sent.prompt_tokens, sent.completion_tokens) == (cell.cell.load.value, 20)
        assert sent.cached_tokens == 0
        assert (sent.accepted_tokens is None) == (cell.arm.name == "no-mtp")


def test_arms_of_a_repeat_read_one_prompt_and_leave_one_draft_cache(measured):
    run = measured
    rows = json.loads((run.folder / "identity.json").read_text())
    assert {row["arm"] for row in rows} == {c.arm.name for c in run.cells()}
    assert all(row["output_equal"] for row in rows)
    unequal = {row["arm"] for row in rows if row["draft_cache_equal"] is False}
    assert unequal == {"coalesced"}
    details = [json.loads(line) for line in (run.folder / runner.DETAILS).read_text().splitlines()]
    assert len({line["draft_cache_sha256"] for line in details if line["arm"] == "stock"}) == 4


def test_the_queue_is_reported_beside_its_prediction(measured):
    run = measured
    by_arm = {c.arm.name: c for c in run.cells() if c.cell.load.value == 3000}
    for name in ("depth-2", "depth-8", "whole", "pinned", "rolling"):
        server = by_arm[name].server
        assert server["queue_queued"] == 6
        assert server["queue_peak_bytes"] == server["predicted_queue_bytes"] > 0, name
    assert by_arm["stock"].server["predicted_queue_bytes"] == 0
    assert "queue_queued" not in by_arm["stock"].server
    assert by_arm["coalesced"].server["queue_passes"] < 6
    assert by_arm["whole"].resolved["depth"] == "whole"


def test_forced_synchronisation_is_labelled(measured):
    run = measured
    for cell in run.cells():
        assert cell.flags == (["forced-synchronisation"] if cell.arm.name == "stock-sync" else [])
        assert ("forced_sync_mtp_s" in cell.server) == (cell.arm.name == "stock-sync")


def test_a_run_is_resumed_and_a_budget_is_kept(plan, loaded, monkeypatch):
    monkeypatch.setattr(runner, "encoder", lambda checkpoint: lambda text: [ord(c) % 500 for c in text])
    run = new_run(plan.folder)
    spent = plan.model_copy(update={"budget_s": 0.0})
    said = []
    assert runner.run_plan(spent, loaded, run, time.monotonic() - 5, said.append) == 0
    assert all("left out" in line or "warm-up" in line for line in said)
    small = plan.model_copy(update={"arms": plan.arms[:2], "lengths": [700], "repeats": 1})
    assert runner.run_plan(small, loaded, run, time.monotonic(), said.append) == 2
    assert runner.run_plan(small, loaded, Run.open(plan.folder), time.monotonic(), said.append) == 0


def test_a_failed_cell_is_recorded_and_the_run_goes_on(plan, loaded, monkeypatch):
    monkeypatch.setattr(runner, "encoder", lambda checkpoint: lambda text: [ord(c) % 500 for c in text])
    monkeypatch.setattr(runner, "_warm_up", lambda *a: None)
    small = plan.model_copy(update={"arms": arms_named(["stock", "ngram"]), "lengths": [700], "repeats": 1})
    run = new_run(plan.folder)
    runner.run_plan(small, loaded, run, time.monotonic(), lambda line: None)
    by_arm = {c.arm.name: c for c in run.cells()}
    assert by_arm["stock"].status == "ok"
    assert by_arm["ngram"].status == "failed"  # the stub extension has no suffix automaton
    assert by_arm["ngram"].reason


def test_the_order_is_shuffled_and_interleaved(plan):
    cells = [(key.repeat, int(key.load.value), key.arm) for key, _ in plan.cells()]
    assert [c[:2] for c in cells] == sorted([c[:2] for c in cells], key=lambda c: (c[0], plan.lengths.index(c[1])))
    orders = [[arm for *where, arm in cells if tuple(where) == group] for group in dict.fromkeys(c[:2] for c in cells)]
    assert len({tuple(order) for order in orders}) > 1
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


# -------------------------------------------------------------------------------------------------------------- prompts


def test_prompts_have_their_length_and_end_before_an_answer():
    texts = [
        f"<|im_start|>user\nhello {n}<|im_end|>\n<|im_start|>assistant\nworld<|im_end|>\n" * n for n in range(2, 6)
    ]

    def encode(text):
        return list(text.encode())

    for length in (50, 300, 5000):
        ids = runner.make_prompt(encode, texts, length, "a")
        assert len(ids) == length
        assert bytes(ids).endswith(b"<|im_start|>assistant\n")
        assert ids == runner.make_prompt(encode, texts, length, "a")
    assert runner.make_prompt(encode, texts, 5000, "a") != runner.make_prompt(encode, texts, 5000, "b")


def test_an_empty_trace_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(KitError, match="no sessions"):
        runner.session_texts(tmp_path / "empty.jsonl")


def test_the_digest_covers_the_prompts_rows_in_order():
    class Cache:
        def __init__(self, tensor):
            self.tensor = tensor

        def get_all_tensors(self):
            return [self.tensor]

    pages = torch.arange(4 * 256 * 2).reshape(4, 256, 2)
    table = torch.tensor([[3, 1]])
    digest = request.cache_digest(Cache(pages), table, 300)
    moved = pages[[2, 3, 0, 1]].clone()  # page 3 is now page 1, page 1 is now page 3
    assert request.cache_digest(Cache(moved), torch.tensor([[1, 3]]), 300) == digest
    after = pages.clone()
    after[1, 44:] = 0  # beyond row 300
    assert request.cache_digest(Cache(after), table, 300) == digest
    after[1, 43] = 0
    assert request.cache_digest(Cache(after), table, 300) != digest


# ---------------------------------------------------------------------------------------------------- plan and settings


def test_a_plan_without_a_budget_takes_it_from_the_environment(plan, loaded, monkeypatch):
    new_run(plan.folder)
    path = plan.folder / "plan.json"
    path.write_text(plan.model_dump_json())
    seen = []
    monkeypatch.setenv("KIT_BUDGET_S", "7.5")
    monkeypatch.setattr(runner, "encoder", lambda checkpoint: None)
    monkeypatch.setattr(runner, "load", lambda plan: loaded)
    monkeypatch.setattr(runner, "run_plan", lambda plan, *rest, **options: seen.append(plan.budget_s))
    assert runner.main(["--plan", str(path)]) == 0
    assert seen == [7.5]


@pytest.mark.parametrize(
    ("settings", "length", "expected"),
    [
        ({"depth": 8}, 124928, 8 * 3072 * 5120 * 2),
        ({"depth": 8}, 6000, 5999 * 5120 * 2),
        ({"depth": "whole"}, 16384, 16383 * 5120 * 2),
        ({"depth": 8, "queue_mib": 64}, 124928, 64 * 2**20),
        ({"depth": 1}, 124928, 0),
        ({"drafting": "none", "depth": 1}, 124928, 0),
    ],
)
def test_predicted_queue_bytes(settings, length, expected):
    assert predicted_queue_bytes(ArmSettings(**settings), length, 3072, 5120) == expected


def test_chunks_leave_the_last_token_out():
    assert [chunks(n, 3072) for n in (2, 3073, 3074, 124928)] == [1, 1, 2, 41]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"deepth": 4}, "unknown setting 'deepth'; valid: drafting"),
        ({"depth": 0}, "depth"),
        ({"draft_bits": 5}, "draft_bits"),
    ],
)
def test_settings_that_mean_nothing_are_named(settings, said):
    with pytest.raises(KitError, match=said):
        ArmSettings.of(Arm(name="a", label="a", settings=settings))


def test_stock_is_known_by_its_settings():
    stock = [arm.name for arm in exllamav3.ARMS.values() if ArmSettings.of(arm).stock]
    assert stock == ["stock", "stock-q8"]


def test_unknown_arms_are_listed():
    with pytest.raises(KitError, match=r"unknown arm 'deep'; the arms are: one-gpu, two-gpus, no-mtp"):
        arms_named(["stock", "deep"])
    assert [a.name for a in arms_named(["stock", "two-gpus", "stock"])].count("stock") == 1


def test_a_layer_split_puts_every_module_somewhere():
    class Module:
        def __init__(self, layer_idx=None):
            self.layer_idx = layer_idx

    modules = [Module(), *[Module(i) for i in range(5)], Module(), Module()]
    assert request.module_devices(modules, (2, 3)) == ["cuda:0"] * 3 + ["cuda:1"] * 5
    with pytest.raises(KitError, match="split 2,2 has 4 layers; the model has 5"):
        request.module_devices(modules, (2, 2))


def test_the_command_line_says_what_is_missing(capsys, tmp_path):
    assert runner.main(["--out", str(tmp_path / "run")]) == 2
    assert "--checkpoint is missing" in capsys.readouterr().err
    assert runner.main(["--checkpoint", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


def test_a_length_can_have_arms_of_its_own(tmp_path):
    given = ["--checkpoint", str(tmp_path), "--out", str(tmp_path / "run"), "--arms", "no-mtp,stock,whole"]
    options = runner.parser().parse_args([*given, "--lengths", "700,3000", "--only", "3000=no-mtp,stock"])
    cells = [(c.load.value, arm.name) for c, arm in runner.plan_from(options).cells() if c.repeat == 0]
    assert sorted(cells) == [(700, "no-mtp"), (700, "stock"), (700, "whole"), (3000, "no-mtp"), (3000, "stock")]
    for wrong, told in (("3000", "LENGTH=ARM"), ("x=stock", "LENGTH=ARM"), ("700=deep", "unknown arm 'deep'")):
        with pytest.raises(KitError, match=told):
            runner.plan_from(runner.parser().parse_args([*given, "--only", wrong]))


# ------------------------------------------------------------------------------------------------------------- timeline


def test_spans_are_labelled_by_the_pass_that_launched_them():
    def x(cat, name, ts, dur, **args):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    events = [
        x("user_annotation", "pass:target", 0, 50),
        x("user_annotation", "pass:mtp", 60, 10),
        x("cuda_runtime", "cudaLaunchKernel", 10, 2, correlation=1),
        x("cuda_runtime", "cudaLaunchKernel", 12, 2, correlation=2),
        x("cuda_runtime", "cudaLaunchKernel", 62, 2, correlation=3),
        x("cuda_runtime", "cudaLaunchKernel", 90, 2, correlation=4),
        x("kernel", "a", 100, 40, correlation=1, device=0),
        x("kernel", "b", 145, 40, correlation=2, device=0),
        x("kernel", "c", 400, 100, correlation=3, device=1),
        x("kernel", "d", 300, 10, correlation=4, device=0),
        x("gpu_memcpy", "copy", 350, 10, correlation=3, device=0),
    ]
    spans = timeline.gpu_spans(events)
    assert [gpu["device"] for gpu in spans["gpus"]] == [0, 1]
    assert spans["gpus"][0]["spans"] == [[0, 85, "target"], [200, 210, "other"], [250, 260, "copy"]]
    assert spans["gpus"][1]["spans"] == [[300, 400, "mtp"]]
    assert spans["gpus"][0]["busy"] == pytest.approx(105 / 400)
    assert [label for *_, label in spans["host"]] == ["target", "mtp"]


def test_a_timeline_is_written_for_an_arm(plan, loaded):
    [arm] = arms_named(["depth-8"])
    plan.folder.mkdir()
    timeline.write_timeline(plan.folder, plan, loaded, arm, lambda length: [n % 500 for n in range(length)])
    written = json.loads((plan.folder / "timeline-depth-8.json").read_text())
    assert (written["arm"], written["chunks"]) == ("depth-8", 3)
    assert {label for *_, label in written["host"]} <= {"target", "mtp"}


# ------------------------------------------------------------------------------------------------------ its own process


CHILD = """
import json, sys, time
plan = json.loads(sys.stdin.read())
print("measuring", len(plan["arms"]), "arms", flush=True)
{rest}
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    def make(rest):
        (tmp_path / "fake_runner.py").write_text(CHILD.format(rest=rest))
        monkeypatch.setattr(exllamav3, "RUNNER", "fake_runner")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    return make


def test_the_process_gets_its_plan(plan, child):
    new_run(plan.folder)
    child("")
    run = exllamav3.measure(plan, deadline_s=60, poll_s=0.05)
    assert run.folder == plan.folder
    assert "measuring 11 arms" in (plan.folder / "exllamav3.log").read_text()


def test_a_failing_process_is_quoted(plan, child):
    new_run(plan.folder)
    child("sys.exit('no such GPU')")
    with pytest.raises(EngineError, match=r"(?s)ended with status 1.*no such GPU"):
        exllamav3.measure(plan, deadline_s=60, poll_s=0.05)


def test_the_deadline_ends_the_process(plan, child):
    new_run(plan.folder)
    pid_file = Path(plan.folder) / "pid"
    child(f"import os; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    with pytest.raises(EngineError, match="not done after"):
        exllamav3.measure(plan, deadline_s=3, poll_s=0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), signal.SIG_DFL)
