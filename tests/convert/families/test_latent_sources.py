"""Sources whose attention is latent already: what a narrower latent keeps, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvfold
from kvfold.convert.families.source import open_source
from kvfold.convert.methods.narrowing import latent_metric, narrowed, source_latents
from kvfold.core.errors import InvalidInput
from kvfold.engines.rules.engine_rules import lint

from ...support.commands import run_main
from ...support.folds import attempt, convert
from ...support.quantised import FORMATS, quantise
from ...support.tiny import SETTINGS, make, same_bytes
from ...support.towers import make_multimodal

KINDS = ("deepseek_v2", "deepseek_v3", "kimi_linear", "axk1")
SHORT = ("--sequences", "6", "--length", "32", "--refine", "4")
RANK = 18  # of 24


@pytest.fixture(scope="module", params=KINDS)
def folded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp(request.param)
    source = make(root / "source", request.param)
    convert(source, "--to", "mla", "--rank", str(RANK), *SHORT, out=root / "out", code=0)
    return source, root / "out"


def kl(source: Path, out: Path) -> float:
    """KL(source || out) on 40 tokens."""
    ids = torch.arange(40)[None] ** 2 * 7 % 97
    with torch.no_grad():
        of_source, of_out = (
            AutoModelForCausalLM.from_pretrained(place)(ids).logits.log_softmax(-1) for place in (source, out)
        )
    return float((of_source.exp() * (of_source - of_out)).sum(-1).mean())


def test_only_attention_changes(folded: tuple[Path, Path]) -> None:
    """The config has another rank, the experts and all else their bytes, and the record the cache's size."""
    source, out = folded
    before, after = (load_file(place / "model.safetensors") for place in folded)
    attention = {name for layer in open_source(source).attending for name in open_source(source).reads(layer)}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - attention)
    configs = [json.loads((place / "config.json").read_text()) for place in folded]
    assert (configs[0].pop("kv_lora_rank"), configs[1].pop("kv_lora_rank")) == (24, RANK)
    assert configs[0].items() <= configs[1].items()
    cache = json.loads((out / "kvfold.json").read_text())["cache"]
    sides = [cache[side]["elements_per_token_per_layer"] for side in ("before", "after")]
    assert sides == [32, RANK + 8]
    assert not [finding for finding in lint(out, ["transformers"]) if finding.fails]


def test_a_wider_latent_loses_less(folded: tuple[Path, Path], tmp_path: Path) -> None:
    source, out = folded
    convert(source, "--to", "mla", "--rank", "4", *SHORT, out=tmp_path / "narrow", code=0)
    wide, narrow = kl(source, out), kl(source, tmp_path / "narrow")
    assert 0 < wide < narrow / 2, (wide, narrow)


def test_one_layer_in_memory_gives_the_same_bytes(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "deepseek_v2")
    for name, option in (("whole", "--no-layerwise"), ("layers", "--layerwise")):
        convert(source, "--to", "mla", "--rank", "8", *SHORT, option, out=tmp_path / name, code=0)
    assert same_bytes(tmp_path / "whole", tmp_path / "layers") in ([], ["kvfold.json"])


def test_no_other_rows_are_predicted_to_lose_less(tmp_path: Path) -> None:
    """The closed form has the least tr(G E C Eᵀ) of E = 1 - U P, which is what `lost` says."""
    source = make(tmp_path / "source", "deepseek_v2")
    layer = open_source(source).latent_attention(1)
    drawn = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0))
    metric = latent_metric(layer, source_latents(layer, drawn), None)
    _, reduction_Cr = narrowed(layer, metric, 8)
    root_rr = torch.linalg.cholesky(metric.moment_rr)

    def lost(rows_Cr: Tensor) -> float:
        kept_rC = (rows_Cr @ root_rr).mT
        gone_rr = root_rr - root_rr @ kept_rC @ torch.linalg.pinv(kept_rC)
        return float(((metric.fisher_rr @ gone_rr) * gone_rr).sum()) / 2

    ours = lost(reduction_Cr)
    assert ours == pytest.approx(metric.lost(8), rel=1e-6)
    generator = torch.Generator().manual_seed(1)
    for size in (1e-3, 1e-1, 10.0):
        moved = torch.randn(reduction_Cr.shape, generator=generator, dtype=torch.float64) * size
        assert lost(reduction_Cr + moved) > ours


@pytest.mark.parametrize(("options", "sentence"), [
    (("--to", "gqa", "--kv-heads", "2"), "its attention is latent already, and caches 24+8 numbers"),
    (("--to", "mqa"), "its attention is latent already, and caches 24+8 numbers"),
    (("--to", "mla", "--rank", "24"), "choose an even rank from 2 to 22, or --rank full"),
    (("--to", "mla", "--rank", "7"), "choose an even rank from 2 to 22, or --rank full"),
    (("--to", "mla", "--kv-budget", "20%"), "the least would be 31.25%"),
    (("--to", "mla", "--rank", "8", "--rope-dim", "4"), "the source's rotary key of 8 numbers stays"),
    (("--to", "mla", "--rank", "8", "--rope", "intact"), "--rope does not apply"),
    (("--to", "mla", "--rank", "8", "--q-lora-rank", "8"), "--q-lora-rank does not apply"),
    (("--to", "mla", "--rank", "8", "--slots", "uniform"), "DeepSeek-V2, whose rotary key stays"),
    (("--to", "mla", "--rank", "8", "--container", "remote"), "is written in the source's own class"),
    (("--to", "mla", "--rank", "8", "--method", "svd"), "--method svd does not apply to DeepSeek-V2"),
    (("--to", "mla", "--rank", "8", "--latent-norm", "linear"), "--latent-norm linear applies only"),
])  # fmt: skip
def test_what_does_not_apply_is_said(options: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", "deepseek_v2")
    code, text = attempt(source, tmp_path / "out", *options)
    assert code == 2
    assert sentence in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("field", "value"), [
    ("kv_lora_rank", 0), ("q_lora_rank", -1), ("qk_rope_head_dim", -2), ("qk_nope_head_dim", -4),
    ("v_head_dim", 10**12), ("mscale_all_dim", 1e308), ("mscale", "x"),
])  # fmt: skip
def test_impossible_numbers_are_named(field: str, value: object, tmp_path: Path) -> None:
    source = make(tmp_path / "source", "deepseek_v3")
    config = json.loads((source / "config.json").read_text())
    part = config["rope_parameters"] if field.startswith("mscale") else config
    part[field] = value
    (source / "config.json").write_text(json.dumps(config))
    code, text = attempt(source, tmp_path / "out", "--to", "mla", "--rank", "8")
    assert code == 2
    assert f"config.json has {field} " in text


def test_a_layer_for_multi_token_prediction_is_told(tmp_path: Path) -> None:
    """DeepSeek-V3 has it as layer 61, whose weights its class ignores."""
    sizes = {"num_hidden_layers": 61, "first_k_dense_replace": 61}
    source = make(tmp_path / "source", "deepseek_v3", **sizes)
    weights = load_file(source / "model.safetensors")
    for name in [name for name in weights if "layers.60." in name]:
        weights[name.replace("layers.60.", "layers.61.")] = weights[name].clone()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    code, text = attempt(source, tmp_path / "out", "--to", "mla", "--rank", "8", "--calibration", "none")
    assert (code, "layer 61 comes after the 61 layers of config.json" in text) == (0, True), text


def test_a_plan_has_the_width_of_engines_kernels(tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 64}
    source = make(tmp_path / "source", "deepseek_v3", **sizes)
    done = run_main("plan", source, "--context", "64", "--json")
    labels = [row["label"] for row in json.loads(done.stdout)["candidates"]]
    assert "MLA 256+64, narrowed" in labels
    assert "saves nothing here" not in done.output


def test_a_text_tower_is_narrowed_alone(tmp_path: Path) -> None:
    """Its place in a multimodal class was not tried, and no other target has one."""
    tower = {**SETTINGS["youtu"], "model_type": "youtu", "num_key_value_heads": 4, "num_attention_heads": 4}
    source = make_multimodal(tmp_path / "source", "llava", **tower)
    half = ("--to", "mla", "--rank", "12", "--calibration", "none")
    code, text = attempt(source, tmp_path / "out", *half)
    assert (code, "write the tower alone with --text-only" in text) == (2, True), text
    code, text = attempt(source, tmp_path / "out", *half, "--text-only")
    assert code == 0, text
    assert json.loads((tmp_path / "out" / "config.json").read_text())["kv_lora_rank"] == 12


def test_biases_are_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "deepseek_v2", attention_bias=True)
    with pytest.raises(InvalidInput, match="attention_bias True; kvfold folds DeepSeek-V2 where it is False"):
        kvfold.fold(source, kvfold.MLA(rank=8), out=tmp_path / "out")


def test_quantised_experts_keep_their_bytes(tmp_path: Path) -> None:
    """Attention of an FP8 source is dequantised and folded; all else passes."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    source = make(tmp_path / "source", "deepseek_v3", **sizes)
    projections = r"layers\.\d+\.(self_attn|mlp)\..*proj(_with_mqa)?\.weight$"
    stored = quantise(source, tmp_path / "fp8", replace(FORMATS["fp8 blocks"], only=projections))
    kvfold.fold(stored, kvfold.MLA(rank=16), out=tmp_path / "out", calibration="none", verify="none")
    before, after = (load_file(place / "model.safetensors") for place in (stored, tmp_path / "out"))
    rest = {name for name in before if "self_attn" not in name}
    assert sum(".experts." in name for name in rest) > 8
    for name in rest:
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name
    assert after["model.layers.1.self_attn.kv_a_layernorm.weight"].shape == (16,)
    assert after["model.layers.1.self_attn.kv_b_proj.weight"].dtype == torch.bfloat16
