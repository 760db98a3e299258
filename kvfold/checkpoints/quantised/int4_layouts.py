"""GPTQ and AWQ: integers of a few bits in 32-bit words, with scales and zeros per group of inputs.

Both store a weight as (inputs, outputs). GPTQ packs the inputs, in order; its first version stores each zero
less one. AWQ packs the outputs, eight to a word in an order that suits its kernels.

Legend: I inputs, O outputs, G groups of inputs.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.errors import InvalidInput
from ...core.untrusted import shorten
from .packed_tensor import FLOATS, WIDTHS, WORD, PackedTensor, Parts, StoredTensors, fields

# The place of output n of a word in its eight fields, from the lowest bits up.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _group_size(stored: StoredTensors, config: Mapping[str, Any], inputs: int) -> int:
    size = config.get("group_size", config.get("q_group_size", 128))
    if type(size) is not int or size == 0 or size < -1:
        raise InvalidInput(
            f"{stored.directory} has group_size {shorten(size)} in its quantization_config, where a positive "
            "number, or -1 for whole columns, is needed"
        )
    return inputs if size == -1 else size


def _bits(stored: StoredTensors, config: Mapping[str, Any], widths: tuple[int, ...]) -> int:
    bits = config.get("bits", config.get("w_bit", 4))
    if bits not in widths:
        raise InvalidInput(
            f"{stored.directory} has {shorten(bits)} bits in its quantization_config; kvfold reads "
            f"{' or '.join(map(str, widths))} of them"
        )
    return int(bits)


def find_gptq(stored: StoredTensors, config: Mapping[str, Any]) -> dict[str, PackedTensor]:
    """Return the weights of `quant_method: gptq`, in both versions of the layout.

    Raises:
        InvalidInput: the configuration names another layout, or parts are missing or misshapen.
    """
    bits = _bits(stored, config, WIDTHS)
    version = config.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise InvalidInput(
            f"{stored.directory} has the GPTQ checkpoint_format {shorten(version)}; kvfold reads gptq and "
            "gptq_v2"
        )
    offset = 1 if version == "gptq" else 0
    found = {}
    for module in stored.ending(".qweight"):
        found[f"{module}.weight"] = _gptq(stored, module, bits, offset, config)
    return found


def _gptq(
    stored: StoredTensors, module: str, bits: int, offset: int, config: Mapping[str, Any]
) -> PackedTensor:
    name, packed = f"{module}.weight", stored.require(f"{module}.qweight", module, (), (torch.int32,))
    words, outputs = stored.shape(packed, 2)
    step = WORD // bits
    inputs = words * step
    size = _group_size(stored, config, inputs)
    groups = -(-inputs // size)
    parts = {
        "packed": packed,
        "scale": stored.require(f"{module}.scales", name, [(groups, outputs)], FLOATS),
        "zero": stored.require(f"{module}.qzeros", name, [(groups, -(-outputs // step))], (torch.int32,)),
    }
    if f"{module}.g_idx" in stored.specs or (config.get("desc_act") is True and groups > 1):
        parts["g_idx"] = stored.require(f"{module}.g_idx", name, [(inputs,)], (torch.int32, torch.int64))

    def unpack(found: Parts, first: int, count: int) -> Tensor:
        chunk = slice(first, first + count)
        numbers_IO = fields(found["packed"][:, chunk], bits, 0)
        words = slice(first // step, -(-(first + count) // step))
        zeros_GO = (fields(found["zero"][:, words], bits, 1)[:, :count] + offset) & (2**bits - 1)
        of_input = torch.arange(inputs) // size
        if "g_idx" in found:
            of_input = stored.group_of_columns(parts["g_idx"], found["g_idx"], groups)
        return _scaled_transposed(numbers_IO, zeros_GO, found["scale"][:, chunk], of_input)

    return PackedTensor(shape=(outputs, inputs), parts=parts, unpack=unpack, step=step)


def find_awq(stored: StoredTensors, config: Mapping[str, Any]) -> dict[str, PackedTensor]:
    """Return the weights of `quant_method: awq` in the layout of its GEMM kernels.

    Raises:
        InvalidInput: the configuration names another layout, or parts are missing or misshapen.
    """
    bits = _bits(stored, config, (4,))
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise InvalidInput(f"{stored.directory} has the AWQ version {shorten(version)}; kvfold reads gemm")
    found = {}
    for module in stored.ending(".qweight"):
        found[f"{module}.weight"] = _awq(stored, module, bits, config)
    return found


def _awq(stored: StoredTensors, module: str, bits: int, config: Mapping[str, Any]) -> PackedTensor:
    name, packed = f"{module}.weight", stored.require(f"{module}.qweight", module, (), (torch.int32,))
    inputs, words = stored.shape(packed, 2)
    step = WORD // bits
    outputs = words * step
    size = _group_size(stored, config, inputs)
    groups = -(-inputs // size)
    parts = {
        "packed": packed,
        "scale": stored.require(f"{module}.scales", name, [(groups, outputs)], FLOATS),
        "zero": stored.require(f"{module}.qzeros", name, [(groups, words)], (torch.int32,)),
    }

    def unpack(found: Parts, first: int, count: int) -> Tensor:
        chunk = slice(first, first + count)
        words = slice(first // step, -(-(first + count) // step))
        numbers_IO = _in_order(fields(found["packed"][:, words], bits, 1))[:, :count]
        zeros_GO = _in_order(fields(found["zero"][:, words], bits, 1))[:, :count]
        of_input = torch.arange(inputs) // size
        return _scaled_transposed(numbers_IO, zeros_GO, found["scale"][:, chunk], of_input)

    return PackedTensor(shape=(outputs, inputs), parts=parts, unpack=unpack, step=step)


def _in_order(packed_XO: Tensor) -> Tensor:
    words_XWF = torch.reshape(packed_XO, (len(packed_XO), -1, len(_AWQ_ORDER)))
    return torch.flatten(words_XWF[..., list(_AWQ_ORDER)], 1)


def _scaled_transposed(numbers_IO: Tensor, zeros_GO: Tensor, scale_GO: Tensor, group_I: Tensor) -> Tensor:
    """Return (number - zero) · scale as (O, I), float32, where each input has the zero of its group."""
    weight_IO = (numbers_IO - zeros_GO[group_I]).to(torch.float32)
    weight_IO *= scale_GO.to(torch.float32)[group_I]
    return torch.transpose(weight_IO, 0, 1)
