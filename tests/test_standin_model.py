"""The model against transformers, the drafts against drafting one at a time, and a training run that resumes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is in the dev extra only")

from kit.errors import KitError  # noqa: E402
from kit.standin import corpus, train  # noqa: E402
from kit.standin import modeling as M  # noqa: E402

TOKENIZER = Path(__file__).resolve().parents[1] / "data/tiny-mtp"
SMALL = M.Shape(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2, head_dim=64, vocab_size=320
)


def parameters(shape: M.Shape) -> M.Params:
    """Random parameters with nothing left at zero, so that every path matters."""
    g = torch.Generator().manual_seed(3)
    p = M.init(shape, 0)
    return {k: t if t.any() else 0.1 * torch.randn(t.shape, generator=g) for k, t in p.items()}


def ids(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(4))


def test_the_shipped_checkpoint_has_the_configuration_that_is_written():
    shipped = json.loads((TOKENIZER / "config.json").read_text())
    assert M.config(M.Shape.from_config(shipped)) == shipped


def test_trunk_equals_transformers():
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    configuration = pytest.importorskip("transformers.models.qwen3_5.configuration_qwen3_5")
    text = {k: v for k, v in M.config(SMALL)["text_config"].items() if k not in ("model_type", "dtype")}
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [3, 3, 2]}
    reference = modeling.Qwen3_5ForCausalLM(configuration.Qwen3_5TextConfig(**text)).float().eval()
    p, tokens = parameters(SMALL), ids(2, 100, 320)
    state = {k.replace(M.TRUNK, "model."): v for k, v in p.items() if not k.startswith("mtp.")}
    assert reference.load_state_dict(state) is not None
    with torch.no_grad():
        mine = M.logits(p, M.trunk(p, M.embed(p, tokens, torch.float32), SMALL, M.Ops()))
        torch.testing.assert_close(mine, reference(tokens).logits, atol=2e-4, rtol=2e-4)


def test_drafts_of_all_anchors_at_once_equal_drafting_from_one_anchor():
    p, tokens, ops, anchor = parameters(SMALL), ids(2, 40, 320), M.Ops(), 21
    with torch.no_grad():
        x = M.embed(p, tokens, torch.float32)
        hidden = M.shift(M.trunk(p, x, SMALL, ops))
        state, first = M.mtp_first(p, x, hidden, SMALL, ops)
        states, later = [state], []
        for _ in range(3):
            state, slots = M.mtp_next(p, x, state, first, later, SMALL, ops)
            later.append(slots)
            states.append(state)
        context = hidden[:, : anchor + 1]
        for k, expected in enumerate(states):
            one, _ = M.mtp_first(p, x[:, : anchor + 1 + k], context, SMALL, ops)
            torch.testing.assert_close(one[:, -1], expected[:, anchor + k], atol=1e-5, rtol=1e-4)
            context = torch.cat((context, one[:, -1:]), 1)


def test_default_shape_is_twelve_million_parameters_in_engine_friendly_sizes():
    shapes = M.parameter_shapes(M.Shape())
    total = sum(int(np.prod(s)) for s in shapes.values())
    assert 11e6 < total < 13e6
    assert 2 * total <= 26e6
    s = M.Shape()
    assert all(n % 128 == 0 for n in (s.hidden_size, s.intermediate_size, s.vocab_size))
    assert s.vocab_size == corpus.VOCAB_SIZE


def test_save_and_load_round_trip_in_shards(tmp_path):
    p = parameters(SMALL)
    M.save(p, SMALL, tmp_path, shard_bytes=200_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    again, shape = M.load(tmp_path)
    assert shape == SMALL
    assert list(again) == list(p)
    for k, t in p.items():
        torch.testing.assert_close(again[k], t.bfloat16().float(), atol=0, rtol=0)


def test_acceptance_counts_a_run_by_hand():
    hits = np.zeros((2, 1, 12), dtype=bool)
    hits[0, 0, [3, 5, 6]] = True  # draft 1 right when anchored at 3, 5 and 6
    hits[1, 0, [3, 6]] = True
    # width 1 from 3 over tokens 3 … 9: 3 hit → 5 hit → 7 miss → 8 miss → 9 is the last
    assert train.acceptance(hits, [3], 7, 1) == ([2], 4, 6)
    # width 2: 3 both → 6 both → 9: no room for two more
    assert train.acceptance(hits, [3], 7, 2) == ([2, 2], 2, 6)


def test_learning_rate_warms_up_and_ends_at_zero():
    assert train.learning_rate(0.0) < 0.1
    assert train.learning_rate(0.3) == 1.0
    assert train.learning_rate(1.0) == 0.0


def test_muon_update_has_singular_values_near_one():
    g = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(train.orthogonalize(g))
    assert values.min() > 0.5 and values.max() < 1.3


@pytest.fixture
def small_run(tmp_path):
    """A folder with a stream that repeats, held-out requests from it, and the arguments of a run on it."""
    pattern = np.random.default_rng(0).integers(12, 320, 24).tolist()
    corpus.pack([pattern] * 60, tmp_path / "train.u16.xz")
    with gzip.open(tmp_path / "heldout.jsonl.gz", "wt") as f:
        f.write(json.dumps({"prompt": pattern * 1, "output": pattern[:16]}) + "\n")
    return [
        *("--corpus", str(tmp_path), "--tokenizer", str(TOKENIZER), "--out", str(tmp_path / "out")),
        *("--state", str(tmp_path / "state.pt"), "--device", "cpu", "--rows", "2", "--length", "64"),
        *("--recursive-rows", "1", "--eval-tokens", "16", "--log-every", "5", "--minutes", "30"),
    ]


def test_a_run_learns_resumes_and_reports(small_run, tmp_path, capsys):
    train.main([*small_run, "--steps", "25"], SMALL)
    first = capsys.readouterr().out
    losses = [float(line.split(": ")[1].split()[0]) for line in first.splitlines() if line.startswith("step ")]
    assert losses[-1] < losses[0] - 1
    train.main([*small_run, "--steps", "50"], SMALL)
    second = capsys.readouterr().out
    assert "resumed state.pt: step 25" in second
    report = json.loads(second.splitlines()[-1])
    assert report["requests"] == 1
    assert report["width_1"]["accepted_over_drafted"] > 0.5
    p, shape = M.load(tmp_path / "out")
    assert shape == SMALL and all(torch.isfinite(t).all() for t in p.values())


def test_a_missing_stream_is_a_clear_error(small_run, tmp_path):
    (tmp_path / "train.u16.xz").unlink()
    with pytest.raises(KitError, match="no training stream"):
        train.main(small_run, SMALL)
