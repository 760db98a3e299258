"""Quantised multimodal sources: attention folds like the dequantised twin's, and the rest keeps its bytes."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.quantizers.quantizers_utils import should_convert_module

import kvfold
from kvfold.convert.towers.text_class import decoder_place
from kvfold.convert.towers.tower import find_tower
from kvfold.core.errors import InvalidInput

from ...support.quantised import FORMATS, Format, quantise, quantised_tower
from ...support.tokenizers import save_tokenizer
from ...support.towers import TOWERS, make_multimodal

LOADED = ("fp8 blocks", "compressed fp8", "compressed int4")  # by transformers, on this machine


def make_quantised(place: Path, kind: str, name: str) -> Path:
    """Return a quantised checkpoint, with its twin next to it, which is written once for each place."""
    source = place / f"{kind} {name}"
    if source.exists():
        return source
    if not (place / kind).exists():
        file = make_multimodal(place / kind, kind, intermediate_size=64) / "model.safetensors"
        stored = {key: tensor.to(torch.bfloat16) for key, tensor in load_file(file).items()}
        save_file(stored, file, {"format": "pt"})
    return quantise(place / kind, source, quantised_tower(name))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


def fold(source: Path, out: Path, target: Any = None, **options: Any) -> dict[str, Tensor]:
    options = {"calibration": "none", "verify": "none", **options}
    kvfold.fold(source, target or kvfold.GQA(kv_heads=2), out=out, **options)
    return load_file(out / "model.safetensors")


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.flatten().view(torch.uint8), other.flatten().view(torch.uint8)
    )


def is_attention(name: str) -> bool:
    return "self_attn" in name and "vision" not in name and "visual" not in name


NAMES = [name for name, form in FORMATS.items() if form.family == "llama"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("llava", name) for name in NAMES] + [("qwen3_vl", "fp8 blocks"), ("qwen2_5_vl", "gptq"),
     ("qwen2_5_vl", "awq"), ("mistral3", "compressed fp8"), ("gemma3", "compressed int4")],
)  # fmt: skip
def test_attention_is_the_twins_the_rest_is_kept(kind: str, name: str, place: Path, tmp_path: Path) -> None:
    source = make_quantised(place, kind, name)
    stored = load_file(source / "model.safetensors")
    assert sum(is_attention(key) and not key.endswith("norm.weight") for key in stored) >= 8
    written = fold(source, tmp_path / "out")
    twin = fold(Path(f"{source}-twin"), tmp_path / "twin", text_only=True, dtype="bfloat16")
    tower = find_tower(source)
    attention = {key for key in written if is_attention(key)}
    assert {tower.names[key] for key in attention} == {key for key in twin if is_attention(key)}
    for key in attention:
        assert same(written[key], twin[tower.names[key]]), key
    rest = {key for key in stored if not is_attention(key)}
    assert written.keys() - attention == rest
    assert all(same(written[key], stored[key]) for key in rest)
    check_config(source, tmp_path / "out", quantised_tower(name), attention, rest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "twin", "twin.tower"]


def check_config(source: Path, out: Path, form: Format, attention: set[str], rest: set[str]) -> None:
    """The list names the folded modules as the files and as the class do, and no quantised one."""
    config = json.loads((out / "config.json").read_text())
    quantised = config["quantization_config"]
    assert "quantization_config" not in config["text_config"]
    tower = find_tower(source)
    inside = decoder_place(source)
    folded = {key.removesuffix(".weight") for key in attention if key.endswith("_proj.weight")}
    named = folded | {f"{inside}.{tower.names[f'{key}.weight'].removeprefix('model.').removesuffix('.weight')}"
                      for key in folded}  # fmt: skip
    packed = {re.sub(r"\.(weight_packed|qweight|weight)$", "", key) for key in rest if "mlp" in key}
    packed = {key for key in packed if key.endswith("_proj") and "vis" not in key}
    assert packed
    if form.skipped == "dynamic":
        patterns = [key.removeprefix("-:") for key in quantised["dynamic"]]
        assert all(any(re.match(pattern, module) for pattern in patterns) for module in named)
        assert not any(re.match(pattern, module) for pattern in patterns for module in packed)
        assert quantised["modules_in_block_to_quantize"] == [
            ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
        ]
        return
    listed = quantised[form.skipped]
    assert set(listed) >= named | set(form.config[form.skipped])
    assert not any(should_convert_module(module, listed) for module in named)
    assert all(should_convert_module(module, listed) for module in packed)


@pytest.mark.parametrize(
    ("kind", "name"), [("llava", name) for name in LOADED] + [("qwen3_vl", "fp8 blocks")]
)
def test_transformers_loads_it_in_its_own_class(kind: str, name: str, place: Path, tmp_path: Path) -> None:
    """With its own readers of quantised weights; logits, with an image, are those of the dequantised fold."""
    source = make_quantised(place, kind, name)
    fold(source, tmp_path / "out")
    fold(source, tmp_path / "plain", dequantize=True)
    logits = []
    for directory in ("out", "plain"):
        model = AutoModelForImageTextToText.from_pretrained(tmp_path / directory, dtype=torch.bfloat16).eval()
        inputs = TOWERS[kind][1]()
        inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
        with torch.no_grad():
            logits.append(model(**inputs).logits.float())
    spread = logits[1].std()
    assert (logits[0] - logits[1]).abs().max() < 0.05 * spread


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq", "bitsandbytes nf4", "compressed nvfp4"])
def test_dequantized_outputs_are_the_twins(name: str, place: Path, tmp_path: Path) -> None:
    source = make_quantised(place, "llava", name)
    written = fold(source, tmp_path / "out", dequantize=True)
    twin = load_file(Path(f"{source}-twin") / "model.safetensors")  # quantised weights in float32
    folded = fold(Path(f"{source}-twin"), tmp_path / "twin", text_only=True, dtype="bfloat16")
    tower = find_tower(source)
    assert written.keys() == twin.keys()
    for key in twin:
        wanted = folded[tower.names[key]] if is_attention(key) else twin[key].to(torch.bfloat16)
        assert same(written[key], wanted), key
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert "quantization_config" not in config["text_config"]


@pytest.mark.parametrize("name", ["fp8 blocks", "compressed int4", "gptq"])
def test_the_tower_alone_is_a_quantised_text_model(name: str, place: Path, tmp_path: Path) -> None:
    """Folded as the text model that it is; and put back it is the fold in its place."""
    source = make_quantised(place, "llava", name)
    inside = fold(source, tmp_path / "inside")
    fold(source, tmp_path / "alone", text_only=True)
    config = json.loads((tmp_path / "alone" / "config.json").read_text())
    listed = json.dumps(config["quantization_config"])
    assert "layers" in listed
    assert "language_model" not in listed
    if name != "gptq":  # whose reader is not installed
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "alone", dtype=torch.bfloat16).eval()
        fold(source, tmp_path / "plain", text_only=True, dequantize=True)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).eval()
        ids = torch.arange(20)[None] * 3 % 80
        with torch.no_grad():
            one, other = loaded(ids).logits.float(), plain(ids).logits.float()
        assert (one - other).abs().max() < 0.05 * other.std()
    kvfold.assemble(tmp_path / "alone", str(source), out=tmp_path / "whole")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert whole.keys() == inside.keys()
    assert all(same(whole[key], inside[key]) for key in inside)
    configs = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("whole", "inside")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("is_in_config", [True, False])
def test_modelopt_of_the_tower_alone_is_in_its_own_files(is_in_config: bool, tmp_path: Path) -> None:
    """Where the source has it, in the tower's names; the card says that transformers cannot read it."""
    source = make_quantised(tmp_path, "llava", "modelopt nvfp4")
    file, config_file = (source / name for name in ("hf_quant_config.json", "config.json"))
    content = json.loads(file.read_text())
    content["quantization"]["exclude_modules"] = ["lm_head", "vision_tower*", "language_model.model.layers.7"]
    file.write_text(json.dumps(content))
    if not is_in_config:
        config = json.loads(config_file.read_text())
        del config["quantization_config"]
        config_file.write_text(json.dumps(config))
    inside = fold(source, tmp_path / "inside")
    fold(source, tmp_path / "alone", text_only=True)
    for place, folded in (("alone.tower", []), ("alone", ["model.layers.0.self_attn.k_proj"])):
        content = json.loads((tmp_path / place / file.name).read_text())["quantization"]
        assert content["quant_algo"] == "NVFP4"
        assert set(content["exclude_modules"]) >= {"lm_head", *folded}
        assert not any("vision" in name or "language_model" in name for name in content["exclude_modules"])
        assert (
            "quantization_config" in json.loads((tmp_path / place / "config.json").read_text())
        ) == is_in_config
    kvfold.assemble(tmp_path / "alone", str(source), out=tmp_path / "whole")
    again = load_file(tmp_path / "whole" / "model.safetensors")
    assert all(same(inside[key], again[key]) for key in inside)
    for place in ("inside", "alone"):
        assert "FP8 is loaded without its scales" in (tmp_path / place / "README.md").read_text()
        assert kvfold.verify(tmp_path / place, run=False).failures
    kvfold.plan(source, context=256, text_only=True)


def test_latent_attention_is_named_as_unconverted(place: Path, tmp_path: Path) -> None:
    source = make_quantised(place, "llava", "fp8 blocks")
    written = fold(source, tmp_path / "out", kvfold.MLA(rank=16, rope_dim=8))
    listed = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.language_model.layers.1.self_attn.kv_b_proj" in listed["modules_to_not_convert"]
    assert not any("k_proj" in module for module in listed["modules_to_not_convert"])
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in written.values())


def test_a_config_inside_text_config_is_read(place: Path, tmp_path: Path) -> None:
    """transformers reads both places."""
    source = make_quantised(place, "llava", "fp8 blocks")
    nested = tmp_path / "nested"
    shutil.copytree(source, nested)
    config = json.loads((nested / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (nested / "config.json").write_text(json.dumps(config))
    one, other = fold(nested, tmp_path / "one"), fold(source, tmp_path / "other")
    assert one.keys() == other.keys()
    assert all(same(one[key], other[key]) for key in one)
    configs = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("one", "other")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def test_scales_of_the_cache_are_left_out(place: Path, tmp_path: Path) -> None:
    source = make_quantised(tmp_path, "llava", "compressed fp8")
    tensors = load_file(source / "model.safetensors")
    prefix = "language_model.model.layers.0.self_attn"
    save_file(tensors | {f"{prefix}.{part}_scale": torch.ones(1) for part in "kv"}, source / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    written = fold(source, tmp_path / "out")
    assert not [name for name in written if name.endswith((".k_scale", ".v_scale"))]


def test_scales_around_the_tower_are_kept(place: Path, tmp_path: Path) -> None:
    """The keys and values that they belong to are."""
    source = make_quantised(tmp_path, "llava", "compressed fp8")
    tensors = load_file(source / "model.safetensors")
    scale = "vision_tower.vision_model.encoder.layers.0.self_attn.k_scale"
    save_file(tensors | {scale: torch.full((3,), 0.5)}, source / "model.safetensors", {"format": "pt"})
    for options in ({}, {"dequantize": True}):
        written = fold(source, tmp_path / f"out{len(options)}", **options)
        assert same(written[scale], torch.full((3,), 0.5))


def test_float16_stays_float16(tmp_path: Path) -> None:
    """As it is stored around what is quantised; config.json says the same, and towers alone fit back in."""
    source = make_multimodal(tmp_path / "plain", "llava", intermediate_size=64)
    tensors = load_file(source / "model.safetensors")
    vision = next(name for name in tensors if "vision_tower" in name)
    tensors = {name: tensor.half() for name, tensor in tensors.items()} | {vision: tensors[vision]}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["dtype"] = config["text_config"]["dtype"] = "float16"
    (source / "config.json").write_text(json.dumps(config))
    source = quantise(source, tmp_path / "llava", quantised_tower("awq"))
    whole = fold(source, tmp_path / "plain-out", dequantize=True)
    assert {name for name, tensor in whole.items() if tensor.dtype != torch.float16} == {vision}
    assert same(whole[vision], tensors[vision])
    for name, options in {"deq": {"dequantize": True}, "q": {}}.items():
        inside = fold(source, tmp_path / name, **options)
        alone = fold(source, tmp_path / f"{name}-text", text_only=True, **options)
        assert {tensor.dtype for tensor in alone.values()} == {torch.float16} | (
            {torch.int32} if name == "q" else set()
        )
        kvfold.assemble(tmp_path / f"{name}-text", str(source), out=tmp_path / f"{name}-whole")
        again = load_file(tmp_path / f"{name}-whole" / "model.safetensors")
        assert inside.keys() == again.keys()
        assert all(same(inside[key], again[key]) for key in inside)
        said = [json.loads((tmp_path / each / "config.json").read_text()) for each in (name, f"{name}-text")]
        assert {said[0]["dtype"], said[0]["text_config"]["dtype"], said[1]["dtype"]} == {"float16"}


def test_a_plan_counts_what_is_written(place: Path, tmp_path: Path) -> None:
    source = make_quantised(place, "llava", "fp8 blocks")
    found = kvfold.plan(source, context=256)
    written = fold(source, tmp_path / "out")
    row = next(row for row in found if row["label"] == "GQA-2")
    assert row["memory"]["weights"] == sum(tensor.nbytes for tensor in written.values())


@pytest.mark.usefixtures("warm_probe")
def test_a_fold_is_verified_next_to_its_source(tmp_path: Path) -> None:
    """Both are run dequantised, in the whole class."""
    source = make_multimodal(tmp_path / "plain", "llava", vocab_size=258)
    save_tokenizer(source, bos="<s>")
    source = quantise(source, tmp_path / "llava", quantised_tower("fp8 blocks"))
    folded = kvfold.fold(
        source, kvfold.GQA(kv_heads=2), out=tmp_path / "out", calibration="self", sequences=2, length=16,
        verify="full",
    )  # fmt: skip
    assert not folded.verification.failures
    assert folded.verification.measured["kl"] < 1
    assert type(folded.load(device="cpu")).__name__ == "LlavaForConditionalGeneration"


def test_damaged_quantised_sources_are_refused(place: Path, tmp_path: Path) -> None:
    source = make_quantised(tmp_path, "llava", "fp8 blocks")
    tensors = load_file(source / "model.safetensors")
    scale = "language_model.model.layers.1.self_attn.q_proj.weight_scale_inv"
    save_file(
        {k: v for k, v in tensors.items() if k != scale}, source / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(InvalidInput, match=f"has no {re.escape(scale)}, without which"):
        fold(source, tmp_path / "out")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "hqq"
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="is quantised by 'hqq', which kvfold does not read"):
        fold(source, tmp_path / "out")
