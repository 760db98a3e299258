"""Tiny quantised checkpoints, written by hand after the published layouts, each with its dequantised twin.

Nothing of kvfold is used: an encoder returns what is stored and, from the same integers and scales, the
weight that this stands for.

Legend: R rows (outputs), C columns (inputs), G groups of columns.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 16
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = torch.float8_e4m3fn
# Stored tensors by the ending after the module's name, and the weight.
Encoded = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    """A way to store linear weights, and the quantization_config that says so."""

    encode: Callable[[Tensor], Encoded]
    config: dict[str, Any]
    skipped: str  # the field of the config that lists unconverted modules
    family: str = "llama"
    only: str = r"(self_attn|mlp)\.\w+\.weight$"
    files: dict[str, Any] = field(default_factory=dict)


def _groups(weight_RC: Tensor) -> Tensor:
    return weight_RC.unflatten(1, (-1, GROUP))


def _words(numbers: Tensor, bits: int, dim: int) -> Tensor:
    """Pack unsigned integers into int32 along a dimension, lowest bits first, one after another."""
    per = 32 // bits
    missing = -numbers.shape[dim] % per
    moved = torch.nn.functional.pad(numbers.movedim(dim, -1).long(), (0, missing)).unflatten(-1, (-1, per))
    word = sum(moved[..., place] << (bits * place) for place in range(per))
    word = torch.where(word >= 2**31, word - 2**32, word)
    return word.to(torch.int32).movedim(-1, dim).contiguous()


def _bytes(codes_RC: Tensor) -> Tensor:
    return (codes_RC[:, ::2] | (codes_RC[:, 1::2] << 4)).to(torch.uint8)


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    return (values[..., None] - table).abs().argmin(-1)


def fp8_block(weight_RC: Tensor, block: int = 16, name: str = ".weight_scale_inv") -> Encoded:
    rows, columns = weight_RC.shape
    scale = torch.empty(-(-rows // block), -(-columns // block))
    stored = torch.empty(rows, columns, dtype=E4M3)
    twin = torch.empty_like(weight_RC)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scale[i, j] = weight_RC[part].abs().max() / 448
            stored[part] = (weight_RC[part] / scale[i, j]).to(E4M3)
            twin[part] = stored[part].float() * scale[i, j]
    return {".weight": stored, name: scale}, twin


def fp8_tensor(weight_RC: Tensor) -> Encoded:
    scale = weight_RC.abs().max() / 448
    stored = (weight_RC / scale).to(E4M3)
    parts = {".weight": stored, ".weight_scale": scale, ".input_scale": torch.tensor(0.5)}
    return parts, stored.float() * scale


def fp8_channel(weight_RC: Tensor) -> Encoded:
    scale_R1 = (weight_RC.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    stored = (weight_RC / scale_R1.float()).to(E4M3)
    return {".weight": stored, ".weight_scale": scale_R1}, stored.float() * scale_R1.float()


def int8_channel(weight_RC: Tensor) -> Encoded:
    scale_R1 = weight_RC.abs().amax(1, keepdim=True) / 127
    stored = (weight_RC / scale_R1).round().to(torch.int8)
    return {".weight": stored, ".weight_scale": scale_R1}, stored.float() * scale_R1


def int4_packed(weight_RC: Tensor) -> Encoded:
    scale_RG = (_groups(weight_RC).abs().amax(2) / 7).to(torch.bfloat16)
    numbers = (_groups(weight_RC) / scale_RG.float()[..., None]).round().clamp(-8, 7)
    twin = (numbers * scale_RG.float()[..., None]).flatten(1) + 0.0  # no negative zero
    parts = {
        ".weight_packed": _words(numbers.flatten(1) + 8, 4, 1),
        ".weight_scale": scale_RG,
        ".weight_shape": torch.tensor(weight_RC.shape),
    }
    return parts, twin


def int4_zero_points(weight_RC: Tensor) -> Encoded:
    """Asymmetric, with columns in groups by activation order."""
    columns = weight_RC.shape[1]
    g_idx = torch.randperm(columns, generator=torch.Generator().manual_seed(1)) // GROUP
    low = torch.stack([weight_RC[:, g_idx == g].amin(1) for g in range(columns // GROUP)], 1)
    high = torch.stack([weight_RC[:, g_idx == g].amax(1) for g in range(columns // GROUP)], 1)
    scale_RG = (high - low) / 15
    zero_RG = (-8 - low / scale_RG).round().clamp(-8, 7)
    numbers = (weight_RC / scale_RG[:, g_idx] + zero_RG[:, g_idx]).round().clamp(-8, 7)
    parts = {
        ".weight_packed": _words(numbers + 8, 4, 1), ".weight_scale": scale_RG,
        ".weight_shape": torch.tensor(weight_RC.shape), ".weight_zero_point": _words(zero_RG + 8, 4, 0),
        ".weight_g_idx": g_idx.to(torch.int32),
    }  # fmt: skip
    return parts, (numbers - zero_RG[:, g_idx]) * scale_RG[:, g_idx] + 0.0


def nvfp4(weight_RC: Tensor, *, divides: bool) -> Encoded:
    whole = 448 * 6 / weight_RC.abs().max()
    scale_RG = (_groups(weight_RC).abs().amax(2) / 6 * whole).to(E4M3)
    factor = scale_RG.float() / whole if divides else scale_RG.float() * (1 / whole)
    codes = _nearest(_groups(weight_RC) / factor[..., None].clamp(min=1e-9), FP4)
    twin = (FP4[codes] * factor[..., None]).flatten(1)
    names = (".weight_packed", ".weight_global_scale") if divides else (".weight", ".weight_scale_2")
    parts = {names[0]: _bytes(codes.flatten(1)), ".weight_scale": scale_RG}
    parts[names[1]] = whole.reshape(1) if divides else 1 / whole
    return parts | {".input_global_scale" if divides else ".input_scale": torch.tensor(1.0)}, twin


def mxfp4_linear(weight_RC: Tensor) -> Encoded:
    blocks = torch.nn.functional.pad(weight_RC, (0, -weight_RC.shape[1] % 32)).unflatten(1, (-1, 32))
    exponent = (blocks.abs().amax(2) / 6).log2().ceil().clamp(-127, 127)
    codes = _nearest(blocks / 2 ** exponent[..., None], FP4)
    parts = {".weight_packed": _bytes(codes.flatten(1)), ".weight_scale": (exponent + 127).to(torch.uint8)}
    return parts, (FP4[codes] * 2 ** exponent[..., None]).flatten(1)


def mxfp4_experts(weight_EIO: Tensor) -> Encoded:
    blocks_EOGB = weight_EIO.mT.unflatten(2, (-1, 32))
    exponent = (blocks_EOGB.abs().amax(3) / 6).log2().ceil().clamp(-127, 127)
    codes = _nearest(blocks_EOGB / 2 ** exponent[..., None], FP4)
    stored = (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    twin = (FP4[codes] * 2 ** exponent[..., None]).flatten(2).mT
    return {"_blocks": stored, "_scales": (exponent + 127).to(torch.uint8)}, twin.contiguous()


def _asymmetric(weight_RC: Tensor, of_column: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers (C, R), zeros (G, R) of 1 and more, and scales (G, R) in half precision."""
    groups = int(of_column.max()) + 1
    low = torch.stack([weight_RC[:, of_column == g].amin(1) for g in range(groups)])
    high = torch.stack([weight_RC[:, of_column == g].amax(1) for g in range(groups)])
    scale_GR = ((high - low) / (2**bits - 1)).to(torch.float16)
    zero_GR = (-low / scale_GR.float()).round().clamp(1, 2**bits - 1)
    numbers_CR = weight_RC.mT / scale_GR.float()[of_column] + zero_GR[of_column]
    return numbers_CR.round().clamp(0, 2**bits - 1), zero_GR, scale_GR


def gptq(weight_RC: Tensor, bits: int = 4, stored_less: int = 1, order: bool = True) -> Encoded:
    columns = weight_RC.shape[1]
    of_column = torch.arange(columns) // GROUP
    if order:
        of_column = of_column[torch.randperm(columns, generator=torch.Generator().manual_seed(2))]
    numbers_CR, zero_GR, scale_GR = _asymmetric(weight_RC, of_column, bits)
    parts = {
        ".qweight": _words(numbers_CR, bits, 0), ".qzeros": _words(zero_GR - stored_less, bits, 1),
        ".scales": scale_GR, ".g_idx": of_column.to(torch.int32),
    }  # fmt: skip
    return parts, ((numbers_CR - zero_GR[of_column]) * scale_GR.float()[of_column]).mT.contiguous()


def awq(weight_RC: Tensor) -> Encoded:
    of_column = torch.arange(weight_RC.shape[1]) // GROUP
    numbers_CR, zero_GR, scale_GR = _asymmetric(weight_RC, of_column, 4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the output of a word's fields, from the lowest bits up

    def packed(numbers: Tensor) -> Tensor:
        return _words(numbers.unflatten(1, (-1, 8))[..., order].flatten(1), 4, 1)

    parts = {".qweight": packed(numbers_CR), ".qzeros": packed(zero_GR), ".scales": scale_GR}
    return parts, ((numbers_CR - zero_GR[of_column]) * scale_GR.float()[of_column]).mT.contiguous()


def bnb_four(weight_RC: Tensor, *, nested: bool, block: int = 64, outer: int = 256) -> Encoded:
    table = torch.linspace(-1, 1, 16)
    flat = weight_RC.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).unflatten(0, (-1, block))
    absmax = blocks.abs().amax(1)
    state: dict[str, Any] = {
        "quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(weight_RC.shape),
    }  # fmt: skip
    parts = {".weight.quant_map": table}
    if nested:
        codes256 = torch.linspace(-1, 1, 256)
        offset = float(absmax.mean())
        inner = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % outer)).unflatten(0, (-1, outer))
        largest = inner.abs().amax(1).clamp(min=1e-9)
        stored = _nearest(inner / largest[:, None], codes256).to(torch.uint8)
        absmax = (codes256[stored.int()] * largest[:, None]).flatten()[: len(absmax)] + offset
        parts |= {".weight.absmax": stored.flatten()[: len(absmax)].contiguous()}
        parts |= {".weight.nested_absmax": largest, ".weight.nested_quant_map": codes256}
        state |= {"nested_blocksize": outer, "nested_dtype": "float32", "nested_offset": offset}
    else:
        parts[".weight.absmax"] = absmax
    codes = _nearest(blocks / absmax[:, None].clamp(min=1e-9), table)
    numbers = codes.flatten()[: len(flat)]
    parts[".weight"] = ((numbers[::2] << 4) | numbers[1::2]).to(torch.uint8)[:, None]
    parts[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    twin = (table[codes] * absmax[:, None]).flatten()[: len(flat)].reshape(weight_RC.shape)
    return parts, twin


def bnb_eight(weight_RC: Tensor) -> Encoded:
    row = weight_RC.abs().amax(1)
    stored = (weight_RC / row[:, None] * 127).round().to(torch.int8)
    parts = {".weight": stored, ".SCB": row, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, stored.float() * (row / 127)[:, None]


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {
        "format": form,
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
    }
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


_FP8 = {"num_bits": 8, "type": "float"}
_INT = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": GROUP}
_MODELOPT = {"producer": {"name": "modelopt"}, "quant_method": "modelopt", "ignore": ["lm_head"]}
_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": True, "sym": False}
_SKIP = "modules_to_not_convert"
FORMATS: dict[str, Format] = {
    "fp8 blocks": Format(
        fp8_block,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16], _SKIP: ["lm_head"]},
        _SKIP,
    ),
    "fp8 tensor": Format(
        fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "ignored_layers",
    ),
    "compressed fp8": Format(
        fp8_channel, _compressed("float-quantized", **_FP8, strategy="channel"), "ignore"
    ),
    "compressed fp8 tensor": Format(
        lambda weight: ({".weight": (p := fp8_tensor(weight))[0][".weight"], ".weight_scale": p[0][".weight_scale"].reshape(1)}, p[1]),
        _compressed("float-quantized", **_FP8, strategy="tensor"),
        "ignore",
    ),
    "compressed fp8 blocks": Format(
        lambda weight: fp8_block(weight, name=".weight_scale"),
        _compressed("float-quantized", **_FP8, strategy="block", block_structure=[16, 16]),
        "ignore",
    ),
    "compressed int8": Format(
        int8_channel, _compressed("int-quantized", type="int", num_bits=8, strategy="channel"), "ignore"
    ),
    "compressed int4": Format(int4_packed, _compressed("pack-quantized", **_INT), "ignore"),
    "compressed int4 with zeros": Format(
        int4_zero_points,
        _compressed("pack-quantized", **{**_INT, "symmetric": False, "actorder": "group"}),
        "ignore",
    ),
    "compressed nvfp4": Format(
        lambda weight: nvfp4(weight, divides=True),
        _compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16,
                    scale_dtype="torch.float8_e4m3fn"),
        "ignore",
    ),
    "gptq": Format(gptq, {**_GPTQ, "bits": 4}, "dynamic"),
    "gptq_v2 8 bits": Format(
        lambda weight: gptq(weight, 8, 0, order=False),
        {**_GPTQ, "bits": 8, "checkpoint_format": "gptq_v2", "desc_act": False},
        "dynamic",
    ),
    "awq": Format(
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
         _SKIP: None},
        _SKIP,
    ),
    "bitsandbytes nf4": Format(
        lambda weight: bnb_four(weight, nested=True),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
         "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "float32", "llm_int8_skip_modules": ["lm_head"]},
        "llm_int8_skip_modules",
    ),
    "bitsandbytes flat": Format(
        lambda weight: bnb_four(weight, nested=False),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
         "bnb_4bit_compute_dtype": "float32", "llm_int8_skip_modules": ["lm_head"]},
        "llm_int8_skip_modules",
    ),
    "bitsandbytes int8": Format(
        bnb_eight,
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
        "llm_int8_skip_modules",
    ),
    "modelopt fp8": Format(fp8_tensor, {**_MODELOPT, "quant_algo": "FP8"}, "ignore"),
    "modelopt nvfp4": Format(
        lambda weight: nvfp4(weight, divides=False),
        {**_MODELOPT, "quant_algo": "NVFP4"},
        "ignore",
        files={
            "hf_quant_config.json": {
                "producer": {"name": "modelopt", "version": "0.33"},
                "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
                                 "exclude_modules": ["lm_head"]},
            }
        },
    ),
    "mxfp4": Format(
        mxfp4_experts, {"quant_method": "mxfp4", _SKIP: ["model.layers.*.self_attn", "lm_head"]}, _SKIP,
        family="gpt_oss", only=r"experts\.(gate_up_proj|down_proj)$",
    ),
    "compressed mxfp4": Format(
        mxfp4_linear,
        _compressed("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32),
        "ignore",
    ),
}  # fmt: skip


# The modules around text towers that published checkpoints leave unquantised.
AROUND = ("lm_head", "vision_tower", "multi_modal_projector", "visual")


def quantised_tower(name: str) -> Format:
    """Return a format for the text tower of a multimodal checkpoint, with its list as published ones have it."""
    form = FORMATS[name]
    config = json.loads(json.dumps(form.config))
    if form.skipped == "dynamic":
        config["dynamic"] = {f"-:.*{part}": {} for part in AROUND}
    elif config["quant_method"] == "compressed-tensors":
        config["ignore"] = [f"re:.*{part}.*" for part in AROUND]
    else:
        config[form.skipped] = list(AROUND)
    only = r"^(?!.*vis).*layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight$"
    return replace(form, config=config, only=only)


def quantise(source: Path, out: Path, form: Format, *, shards: int = 1) -> Path:
    """Write a checkpoint quantised and its twin `<out>-twin`; of two shards one has all scales."""
    tensors = load_file(source / "model.safetensors")
    stored: dict[str, Tensor] = {}
    twin: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not re.search(form.only, name):
            stored[name] = twin[name] = tensor
            continue
        parts, twin[name] = form.encode(tensor.float())
        stored |= {name.removesuffix(".weight") + end: part.contiguous() for end, part in parts.items()}
    for place, content in ((out, stored), (Path(f"{out}-twin"), twin)):
        shutil.copytree(source, place)
        save_file(content, place / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    for name, content_of_file in form.files.items():
        (out / name).write_text(json.dumps(content_of_file))
    if shards == 2:
        _split(out, stored)
    return out


def _split(out: Path, stored: dict[str, Tensor]) -> None:
    """Put scales in a second file."""
    scales = {name for name in stored if re.search(r"scale|absmax|zeros|SCB", name)}
    files = {
        "model-00001-of-00002.safetensors": stored.keys() - scales,
        "model-00002-of-00002.safetensors": scales,
    }
    weight_map = {name: file for file, names in files.items() for name in names}
    for file, names in files.items():
        save_file({name: stored[name] for name in names}, out / file, {"format": "pt"})
    (out / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
