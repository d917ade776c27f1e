"""Growing keeps the function: logits of trunk and MTP head, on disk and back, over several shapes."""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from standin_checkpoints import TOKENIZER, all_logits, random_parameters  # noqa: E402

from kit.errors import KitError  # noqa: E402
from kit.standin import grow as G  # noqa: E402
from kit.standin import modeling as M  # noqa: E402
from kit.standin.checkpoint import from_float32, open_checkpoint, to_float32, write_checkpoint  # noqa: E402
from kit.standin.grow import GrowSpec, grow  # noqa: E402
from kit.standin.hf_export import conditional_generation  # noqa: E402

SHAPE = M.Shape(
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    vocab_size=96,
)
IDS = torch.randint(0, SHAPE.vocab_size, (70,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "ck"
    M.save(random_parameters(SHAPE), SHAPE, folder)
    return folder


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    return all_logits(random_parameters(SHAPE), SHAPE, IDS, drafts=3)


SPECS = [
    dict(hidden=3),
    dict(intermediate=5),
    dict(heads=2),
    dict(heads=3, kv_heads=1),
    dict(heads=2, kv_heads=3),
    dict(linear_key_heads=3),
    dict(linear_key_heads=1, linear_value_heads=2),
    dict(linear_key_heads=3, linear_value_heads=2),
    dict(layers=3),
    dict(hidden=5, intermediate=3, heads=4, kv_heads=2, linear_key_heads=2, layers=2),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()))
def test_logits_and_mtp_logits_stay(small, expected, tmp_path, spec):
    write_checkpoint(grow(open_checkpoint(small), GrowSpec(**spec)), tmp_path / "big")
    p, shape = M.load(tmp_path / "big")
    assert shape.hidden_size == SHAPE.hidden_size * spec.get("hidden", 1)
    assert shape.num_hidden_layers == SHAPE.num_hidden_layers * spec.get("layers", 1)
    for step, (got, want) in enumerate(zip(all_logits(p, shape, IDS, drafts=3), expected, strict=True)):
        difference = (got - want).abs().max().item()
        assert difference < 2e-4 * want.abs().max().item(), f"step {step} (0: trunk) differs by {difference}"


def test_a_wrong_growth_would_be_seen(small, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(G, "shares", lambda n: np.full(n, 1.01 / n, np.float32))
    write_checkpoint(grow(open_checkpoint(small), GrowSpec(intermediate=2)), tmp_path / "big")
    p, shape = M.load(tmp_path / "big")
    assert (all_logits(p, shape, IDS, drafts=0)[0] - expected[0]).abs().max() > 1e-2 * expected[0].abs().max() / 10


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 16, 17, 20, 34])
def test_shares_are_exact_in_bfloat16(n):
    s = G.shares(n)
    assert s.sum(dtype=np.float64) == 1 and len(s) == n
    assert np.all(np.frexp(s)[0] == 0.5), "not a power of two"
    assert s.max() <= 2 * s.min()


def test_shape_of_27b(tmp_path):
    shape = M.Shape()
    text = G.grown_config(M.config(shape), G.LIKE_27B)["text_config"]
    wanted = dict(hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24)
    wanted |= dict(num_key_value_heads=4, linear_num_key_heads=16, linear_num_value_heads=48, head_dim=256)
    assert {k: text[k] for k in wanted} == wanted
    assert text["layer_types"].count("full_attention") == 16


def test_identity_layers_do_work_but_write_nothing(small):
    big = grow(open_checkpoint(small), GrowSpec(layers=2)).tensors
    down = [big[f"model.language_model.layers.{i}.mlp.down_proj.weight"].float32() for i in range(8)]
    up = [big[f"model.language_model.layers.{i}.mlp.up_proj.weight"].float32() for i in range(8)]
    assert [bool(d.any()) for d in down] == [True] * 4 + [False] * 4
    assert all(u.any() for u in up)


def test_multimodal_form_grows_and_keeps_the_function(small, expected, tmp_path):
    ck = open_checkpoint(small)
    ck.files.update({p.name: p for p in TOKENIZER.glob("tokenizer*.json")})
    form = conditional_generation(ck)
    added = json.loads((TOKENIZER / "tokenizer.json").read_text())["added_tokens"]
    assert form.config["image_token_id"] == next(t["id"] for t in added if t["content"] == "<|image_pad|>")
    write_checkpoint(grow(form, GrowSpec(hidden=3, layers=2)), tmp_path / "big", shard_bytes=100_000)
    again = open_checkpoint(tmp_path / "big")
    assert again.tensors["model.visual.merger.linear_fc2.weight"].shape[0] == 144
    assert again.config["vision_config"]["out_hidden_size"] == again.config["text_config"]["hidden_size"] == 144
    assert {"preprocessor_config.json", "video_preprocessor_config.json", "tokenizer.json"} <= set(again.files)
    p, shape = M.load(tmp_path / "big")
    got = all_logits(p, shape, IDS, drafts=1)
    assert all((g - e).abs().max() < 2e-4 * e.abs().max() for g, e in zip(got, expected, strict=False))


def test_multimodal_form_loads_in_transformers(small, tmp_path):
    transformers = pytest.importorskip("transformers")
    ck = open_checkpoint(small)
    ck.files.update({p.name: p for p in TOKENIZER.glob("tokenizer*.json")})
    write_checkpoint(grow(conditional_generation(ck), GrowSpec(hidden=2)), tmp_path / "hf")
    model, report = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert not [k for k in report["unexpected_keys"] if not k.startswith("mtp.")]
    with torch.no_grad():
        got = model(input_ids=IDS[None]).logits[0]
    want = all_logits(random_parameters(SHAPE), SHAPE, IDS, drafts=0)[0]
    assert (got - want).abs().max() < 1e-3 * want.abs().max()


def test_bfloat16_rounds_to_nearest_even():
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 3
    want = x.bfloat16()
    bits = from_float32(x.numpy(), "BF16")
    assert np.array_equal(bits, want.view(torch.uint16).numpy())
    assert np.array_equal(to_float32(bits, "BF16"), want.float().numpy())


def test_readable_by_safetensors(small, tmp_path):
    from safetensors.torch import load_file

    write_checkpoint(open_checkpoint(small), tmp_path / "copy", shard_bytes=60_000)
    shards = sorted((tmp_path / "copy").glob("*.safetensors"))
    assert len(shards) > 3
    copied = {k: v for f in shards for k, v in load_file(f).items()}
    assert all(torch.equal(copied[k].float(), v) for k, v in random_parameters(SHAPE).items())


def test_command_line(small, tmp_path, capsys):
    assert G.main([str(small), str(tmp_path / "out"), "--hidden", "2", "--layers", "2"]) == 0
    assert open_checkpoint(tmp_path / "out").text_config["num_hidden_layers"] == 8
    assert "hidden × 2, layers × 2" in (tmp_path / "out" / "README.md").read_text()
    assert G.main([str(small), str(tmp_path / "out")]) == 2
    assert "not empty" in capsys.readouterr().err
    assert G.main([str(tmp_path / "nothing"), str(tmp_path / "x")]) == 2
    assert "no config.json" in capsys.readouterr().err
    assert G.main([str(small), str(tmp_path / "y"), "--heads", "1", "--kv-heads", "2"]) == 2
    assert "divisible" in capsys.readouterr().err
    assert not (tmp_path / "y").exists()


def test_broken_shard_is_named(small, tmp_path):
    write_checkpoint(open_checkpoint(small), tmp_path / "copy")
    shard = next((tmp_path / "copy").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(KitError, match="cut short"):
        open_checkpoint(tmp_path / "copy")
