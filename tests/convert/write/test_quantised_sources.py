"""A quantised source folds like its dequantised twin, and what is not attention keeps its bytes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import kvfold
from kvfold.convert.decide.engine_choice import ENGINES, judge
from kvfold.convert.request import FoldRequest
from kvfold.convert.settle.settle import make_plan
from kvfold.engines.rules.engine_rules import lint
from kvfold.engines.rules.rule_types import open_written

from ...support.quantised import FORMATS, Format, quantise
from ...support.tiny import make

TARGETS: dict[str, Any] = {
    "gqa": kvfold.GQA(kv_heads=4),
    "mla": kvfold.MLA(rank=24, rope_dim=4),
    "intact": kvfold.MLA(rank=24, rope="intact"),
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 8}


def fold(source: Path, out: Path, to: str, **options: Any) -> dict[str, Tensor]:
    options = {"calibration": "none", "verify": "none", **options}
    kvfold.fold(source, TARGETS[to], out=out, **options)
    return load_file(out / "model.safetensors")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The quantised checkpoint of each format; its twin is next to it."""
    place = tmp_path_factory.mktemp("pairs")
    sources = {family: make(place / family, family, **SIZES) for family in ("llama", "gpt_oss")}
    return {name: quantise(sources[form.family], place / name, form) for name, form in FORMATS.items()}


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.flatten().view(torch.uint8), other.flatten().view(torch.uint8)
    )


@pytest.mark.parametrize(
    ("name", "to"),
    [(name, "gqa") for name in FORMATS]
    + [(name, "mla") for name in ("fp8 blocks", "compressed nvfp4", "gptq", "bitsandbytes nf4", "mxfp4")],
)
def test_attention_is_the_twins_the_rest_is_kept(
    name: str, to: str, pairs: dict[str, Path], tmp_path: Path
) -> None:
    form, source = FORMATS[name], pairs[name]
    if to == "mla" and form.family == "gpt_oss":
        to = "intact"
    container = {"container": "stock"} if to == "mla" else {}
    written = fold(source, tmp_path / "out", to, **container)
    twin = fold(Path(f"{source}-twin"), tmp_path / "twin", to, dtype="bfloat16", **container)
    stored = load_file(source / "model.safetensors")
    attention = {key for key in written if "self_attn" in key and "sinks" not in key}
    assert attention == {key for key in twin if "self_attn" in key and "sinks" not in key}
    for key in attention:
        assert same(written[key], twin[key]), key
        assert written[key].dtype == torch.bfloat16
    rest = {key for key in stored if "self_attn" not in key or "sinks" in key}
    assert written.keys() - attention == rest
    for key in rest:
        assert same(written[key], stored[key]), key
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    check_list(form, config["quantization_config"], attention, rest)
    if to != "intact":
        check_judgement(source, tmp_path / "out", to, **container)


def check_judgement(source: Path, out: Path, to: str, **options: Any) -> None:
    """Engines find in a plan what they find in the output, and miss no packed weight."""
    sizes = {"kv_heads": 4} if to == "gqa" else {"rank": 24, "rope_dim": 4}
    plan = make_plan(source, FoldRequest(model=str(source), to=to, calibration="none", **sizes, **options))
    written = open_written(out)
    assert plan.read_specs == dict(written.specs)
    assert plan.scheme == written.scheme != ""
    assert list(map(str, judge(plan, ENGINES))) == list(map(str, lint(out, ENGINES)))
    assert not any("there is no" in str(found) for found in judge(plan, ENGINES))


def check_list(form: Format, quantised: dict[str, Any], attention: set[str], rest: set[str]) -> None:
    """The list names every folded module and the head, and no quantised one."""
    modules = {key.removesuffix(".weight") for key in attention if key.endswith("proj.weight")}
    modules |= {key.removesuffix(".weight") for key in attention if "proj_with_mqa.weight" in key}
    packed = {
        re.sub(r"\.weight_packed$|\.qweight$|\.weight$|_blocks$", "", key) for key in rest if "mlp" in key
    }
    packed = {key for key in packed if key.endswith("_proj")}
    assert modules
    assert packed
    if form.skipped != "dynamic":
        assert {**quantised, form.skipped: None} == {**form.config, form.skipped: None}
        listed = set(quantised[form.skipped])
        assert modules | {"lm_head"} <= listed
        assert not packed & listed
        return
    patterns = [key.removeprefix("-:") for key in quantised["dynamic"]]
    assert all(any(re.match(pattern, name) for pattern in patterns) for name in modules | {"lm_head"})
    assert not any(re.match(pattern, name) for pattern in patterns for name in packed)
    inside = quantised["modules_in_block_to_quantize"]
    assert inside == [["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]]


@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_outputs_are_the_twins(name: str, pairs: dict[str, Path], tmp_path: Path) -> None:
    """In the dtype of what is not quantised."""
    written = fold(pairs[name], tmp_path / "out", "gqa", dequantize=True)
    twin = fold(Path(f"{pairs[name]}-twin"), tmp_path / "twin", "gqa")
    assert written.keys() == twin.keys()
    assert all(same(written[key], twin[key]) for key in twin)
    assert all(tensor.dtype == torch.float32 for tensor in written.values())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


def test_of_a_source_that_is_not_quantised_it_is_said(pairs: dict[str, Path], tmp_path: Path) -> None:
    fold(Path(f"{pairs['fp8 blocks']}-twin"), tmp_path / "out", "gqa", dequantize=True)
    notices = json.loads((tmp_path / "out" / "kvfold.json").read_text())["notices"]
    assert "the source is not quantised, so --dequantize changes nothing" in notices


def test_modelopt_is_listed_in_both_of_its_files(pairs: dict[str, Path], tmp_path: Path) -> None:
    fold(pairs["modelopt nvfp4"], tmp_path / "out", "gqa")
    content = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert "model.layers.1.self_attn.k_proj" in content["exclude_modules"]
    assert "model.layers.1.mlp.up_proj" not in content["exclude_modules"]
    notices = json.loads((tmp_path / "out" / "kvfold.json").read_text())["notices"]
    assert any("transformers has no reader of ModelOpt" in notice for notice in notices)
    assert kvfold.verify(tmp_path / "out", run=False).failures
    made = kvfold.fold(pairs["modelopt nvfp4"], TARGETS["gqa"], out=tmp_path / "checked", calibration="none")
    # It was not asked for transformers, where its source does not run.
    assert made.verification.failures == []
    with pytest.raises(kvfold.InvalidInput, match="weights are quantised by ModelOpt"):
        fold(pairs["modelopt nvfp4"], tmp_path / "asked", "gqa", engines="transformers")
    assert content["kv_cache_quant_algo"] is None, "its scales were those of the source's keys and values"


def test_a_linear_norm_leaves_stored_parts(tmp_path: Path) -> None:
    """Scales of AWQ are float16; the rest of the output is not, because a linear norm is not held by it."""
    source = make(tmp_path / "source", "llama", **SIZES, dtype=torch.float16)
    source = quantise(source, tmp_path / "q", FORMATS["awq"])
    asked = {"to": "mla", "rank": 24, "rope_dim": 4, "container": "stock", "latent_norm": "linear"}
    linear = make_plan(source, FoldRequest.model_validate({"model": str(source), **asked}))
    stored = load_file(source / "model.safetensors")
    parts = {name: copy for name, copy in linear.copies.items() if copy.part is not None}
    assert torch.float16 in {copy.spec.dtype for copy in parts.values()}
    assert all(copy.spec.dtype == stored[name].dtype for name, copy in parts.items())
    others = {copy.spec.dtype for copy in linear.copies.values() if copy.part is None}
    assert others == {torch.bfloat16}


def test_weights_that_a_class_changes_are_dequantised_and_listed(tmp_path: Path) -> None:
    """Granite's residual factor goes into down_proj in the stock class."""
    source = quantise(make(tmp_path / "source", "granite", **SIZES), tmp_path / "q", FORMATS["fp8 blocks"])
    written = fold(source, tmp_path / "out", "mla", container="stock")
    assert written["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16
    assert written["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    listed = config["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.0.mlp.down_proj" in listed
    assert "model.layers.0.mlp.up_proj" not in listed
    notices = json.loads((tmp_path / "out" / "kvfold.json").read_text())["notices"]
    assert any("change in the output's class" in notice for notice in notices)


def test_scales_of_the_cache_are_left_out(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = quantise(make(tmp_path / "source", **SIZES), tmp_path / "q", FORMATS["compressed fp8"])
    tensors = load_file(source / "model.safetensors")
    tensors |= {f"model.layers.{n}.self_attn.{part}_scale": torch.ones(1) for n in (0, 1) for part in "kv"}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (source / "config.json").write_text(json.dumps(config))
    written = fold(source, tmp_path / "out", "gqa")
    assert not [name for name in written if name.endswith((".k_scale", ".v_scale"))]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"] is None


def test_biases_of_zero_that_autogptq_adds_are_no_biases(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = quantise(make(tmp_path / "source", **SIZES), tmp_path / "q", FORMATS["gptq"])
    plain = fold(source, tmp_path / "plain", "mla", container="stock")
    tensors = load_file(source / "model.safetensors")
    widths = {name: tensors[name].shape[1] for name in tensors if name.endswith(".qweight")}
    biases = {name.replace("qweight", "bias"): torch.zeros(width) for name, width in widths.items()}
    save_file(tensors | biases, source / "model.safetensors", {"format": "pt"})
    written = fold(source, tmp_path / "out", "mla", container="stock")
    assert all(same(written[name], plain[name]) for name in plain)
    assert written.keys() - plain.keys() == {name for name in biases if ".mlp." in name}


def test_the_same_command_gives_the_same_bytes(pairs: dict[str, Path], tmp_path: Path) -> None:
    for out in ("one", "two"):
        kvfold.fold(pairs["gptq"], TARGETS["gqa"], out=tmp_path / out, calibration="none", shard_size="20KB")
    files = sorted(path.name for path in (tmp_path / "one").glob("*.safetensors"))
    assert len(files) > 2
    assert all(
        (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files
    )
