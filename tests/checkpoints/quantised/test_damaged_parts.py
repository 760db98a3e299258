"""A quantised checkpoint that is not as its configuration says is one sentence, before any work."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...support.commands import run_main
from ...support.quantised import FORMATS, quantise
from ...support.tiny import make

MODULE, KEYS = "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.k_proj"
Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("sources")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 8}
    return {family: make(place / family, family, **sizes) for family in ("llama", "gpt_oss")}


def without(end: str, module: str = MODULE) -> Change:
    def apply(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        del tensors[module + end]

    return apply


def changed(end: str, change: Callable[[Tensor], Tensor], module: str = MODULE) -> Change:
    def apply(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        tensors[module + end] = change(tensors[module + end]).contiguous()

    return apply


def with_input_scale(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    tensors[f"{MODULE}.pre_quant_scale"] = torch.ones(64)


def config(**values: Any) -> Change:
    return lambda _, quantised: quantised.update(values)


def first_becomes(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        flat = tensor.flatten().clone()
        flat[0] = value
        return flat.reshape(tensor.shape)

    return change


def plain(end: str) -> Change:
    """Store a weight as an unquantised one, and leave its scales."""
    return changed(end, lambda tensor: torch.zeros(96, 64))


def shorter(tensor: Tensor) -> Tensor:
    return tensor[:-1]


def empty(tensor: Tensor) -> Tensor:
    return tensor[:0, :0]


def halves(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64)


def state(**values: Any) -> Change:
    def apply(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        name = f"{MODULE}.weight.quant_state.bitsandbytes__nf4"
        known = json.loads(bytes(tensors[name].tolist())) | values
        tensors[name] = torch.tensor(list(json.dumps(known).encode()), dtype=torch.uint8)

    return apply


def both(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    tensors[f"{MODULE}.weight"] = torch.zeros(96, 64)


EXPERTS = "model.layers.0.mlp.experts.down_proj"
NAN = first_becomes(float("nan"))
# format, what is done to it, a part of the sentence
CASES: list[tuple[str, Change, str]] = [
    ("fp8 blocks", without(".weight_scale_inv"), f"has no {MODULE}.weight_scale_inv, without which"),
    ("fp8 blocks", changed(".weight_scale_inv", shorter), "has shape (5, 4), where the quantised"),
    ("fp8 blocks", changed(".weight_scale_inv", NAN), "holds NaN or infinite values"),
    ("fp8 blocks", plain(".weight"), f"has {MODULE}.weight_scale_inv, which a LlamaForCausalLM"),
    ("fp8 tensor", without(".weight_scale"), f"has no {MODULE}.weight_scale, without which the quantised"),
    ("compressed fp8", without(".weight_scale"), f"has no {MODULE}.weight_scale"),
    ("compressed fp8", without(".weight"), f"has no {MODULE}.weight, which a"),
    ("compressed fp8", config(format="marlin-24"), "format 'marlin-24'; kvfold reads float-quantized"),
    ("compressed fp8", config(transform_config={"a": 1}), "its weights are rotated"),
    ("compressed int4", changed(".weight_packed", lambda t: t[:, :-1]), "does not hold a weight of shape"),
    ("compressed int4", changed(".weight_scale", lambda t: t[:, :-1]), "has shape (96, 3), where the quant"),
    ("compressed int4", without(".weight_shape"), f"has no {MODULE}.weight_shape"),
    ("compressed int4 with zeros", without(".weight_zero_point"), f"has no {MODULE}.weight_zero_point"),
    ("compressed int4 with zeros", without(".weight_g_idx"), f"has no {MODULE}.weight_g_idx"),
    ("compressed int4 with zeros", changed(".weight_g_idx", first_becomes(4), KEYS), "where numbers from 0 to 3"),
    ("compressed nvfp4", without(".weight_global_scale"), f"has no {MODULE}.weight_global_scale"),
    ("gptq", without(".qzeros"), f"has no {MODULE}.qzeros"),
    ("gptq", without(".qweight"), f"{MODULE}.g_idx of"),
    ("gptq", without(".g_idx"), f"has no {MODULE}.g_idx, without which the quantised"),
    ("gptq", changed(".scales", shorter), "scales of"),
    ("gptq", changed(".scales", NAN), "holds NaN or infinite"),
    ("gptq", changed(".g_idx", first_becomes(-1), KEYS), "holds -1, where numbers from 0 to 3 are possible"),
    ("gptq", config(bits=3), "has 3 bits in its quantization_config; kvfold reads 2 or 4 or 8"),
    ("gptq", config(checkpoint_format="marlin"), "checkpoint_format 'marlin'; kvfold reads gptq and"),
    ("awq", changed(".qzeros", lambda t: t[:, :-1]), "qzeros of"),
    ("awq", config(version="gemv"), "has the AWQ version 'gemv'; kvfold reads gemm"),
    ("bitsandbytes nf4", without(".weight.absmax"), f"has no {MODULE}.weight.absmax"),
    ("bitsandbytes nf4", changed(".weight", shorter), f"{MODULE}.weight of"),
    ("bitsandbytes nf4", state(shape=[96]), "is no quantisation state"),
    ("bitsandbytes nf4", changed(".weight.nested_absmax", NAN), "holds NaN or infinite"),
    ("bitsandbytes nf4", changed(".weight.quant_state.bitsandbytes__nf4", shorter), "is no quantisation state"),
    ("compressed int4", changed(".weight_packed", empty), "does not hold a weight of shape"),
    ("awq", changed(".qweight", lambda t: t[:0]), "scales of"),
    ("bitsandbytes int8", without(".SCB"), f"has no {MODULE}.SCB"),
    ("bitsandbytes int8", without(".weight"), f"{MODULE}.weight_format of"),
    ("modelopt fp8", config(quant_algo="W4A8_AWQ"), "quant_algo 'W4A8_AWQ'; kvfold reads FP8"),
    ("modelopt fp8", with_input_scale, f"has {MODULE}.pre_quant_scale"),
    ("modelopt nvfp4", without(".weight_scale_2"), f"has no {MODULE}.weight_scale_2"),
    ("gptq", config(quant_method=None), "has a quantization_config without quant_method, where one of fp8"),
    ("fp8 blocks", config(modules_to_not_convert=5), "has modules_to_not_convert 5 in its"),
    ("gptq", config(dynamic="all"), "has dynamic 'all' in its"),
    ("gptq", both, f"has {MODULE}.weight both quantised and unquantised"),
    ("compressed fp8", config(config_groups=None), "has values without a meaning for compressed-tensors"),
    ("fp8 blocks", config(weight_block_size=[16]), "has values without a meaning for fp8"),
    ("gptq", config(group_size=0), "group_size 0"),
    ("mxfp4", without("_scales", EXPERTS), f"has no {EXPERTS}_scales"),
    ("mxfp4", without("_blocks", EXPERTS), f"{EXPERTS}_scales of"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "sentence"), CASES)
def test_damage_is_one_sentence_before_any_work(
    name: str, change: Change, sentence: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    form = FORMATS[name]
    source = quantise(sources[form.family], tmp_path / "q", form)
    tensors = load_file(source / "model.safetensors")
    content = json.loads((source / "config.json").read_text())
    change(tensors, content["quantization_config"])
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(content))
    out = tmp_path / "out"
    options = ["--to", "gqa", "--kv-heads", "4", "--calibration", "none", "--out", str(out)]
    result = run_main("convert", source, *options, code=2)
    assert sentence in result.output.replace("\n", " ")
    assert result.output.count("Error: ") == 1
    assert not out.exists()
    assert not list(tmp_path.glob("out*"))
