"""The layouts of bitsandbytes: four bits as the index of a value (NF4, FP4), and eight bits with row scales.

Four-bit numbers are packed as one flat sequence, two per byte with the high bits first. Each block of the
sequence has a scale, `absmax`, which may be quantised itself (nested).

Legend: R rows, C columns, N = R · C numbers of the flat sequence.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.errors import InvalidInput
from ...core.untrusted import parse_json
from .packed_tensor import PackedTensor, Parts, StoredTensors, nibbles

_STATE = ".quant_state.bitsandbytes__"
_FULL = 127  # the int8 number of a row's greatest value
_STATE_BYTES = 10_000


def find_bitsandbytes(stored: StoredTensors, config: Mapping[str, Any]) -> dict[str, PackedTensor]:
    """Return the weights of `quant_method: bitsandbytes`.

    Raises:
        InvalidInput: parts are missing or misshapen, or a quantisation state cannot be read.
    """
    found: dict[str, PackedTensor] = {}
    states = {name.partition(_STATE)[0]: name for name in stored.specs if _STATE in name}
    for name, spec in stored.specs.items():
        if not name.endswith(".weight"):
            continue
        if spec.dtype == torch.uint8 or name in states:
            kind = "fp4" if config.get("bnb_4bit_quant_type", "fp4") == "fp4" else "nf4"
            state = states.get(name, f"{name}{_STATE}{kind}")
            found[name] = _four_bits(stored, name, stored.require(state, name, (), (torch.uint8,)))
        elif spec.dtype == torch.int8:
            found[name] = _eight_bits(stored, name)
    return found


def _eight_bits(stored: StoredTensors, name: str) -> PackedTensor:
    rows, columns = stored.shape(name, 2)
    scale = f"{name.removesuffix('.weight')}.SCB"
    stored.require(scale, name, [(rows,)], (torch.float32, torch.float16, torch.bfloat16))

    def unpack(found: Parts, first: int, count: int) -> Tensor:
        chunk = slice(first, first + count)
        numbers = found["weight"][chunk].to(torch.float32)
        numbers *= (found["scale"][chunk].to(torch.float32) / _FULL)[:, None]
        return numbers

    return PackedTensor(shape=(rows, columns), parts={"weight": name, "scale": scale}, unpack=unpack)


def _four_bits(stored: StoredTensors, name: str, state_name: str) -> PackedTensor:
    state = _state(stored, state_name)
    shape, block = tuple(state["shape"]), int(state["blocksize"])
    total = math.prod(shape)
    blocks, packed = -(-total // block), (-(-total // 2), 1)
    stored.require(name, name, [packed, packed[::-1]], (torch.uint8,))
    nested = state.get("nested_blocksize")
    scale, values = f"{name}.absmax", f"{name}.quant_map"
    parts = {"packed": name, "state": state_name}
    parts["scale"] = stored.require(
        scale, name, [(blocks,)], (torch.uint8,) if nested else (torch.float32, torch.bfloat16, torch.float16)
    )
    parts["values"] = stored.require(values, name, [(16,)], (torch.float32,))
    if nested:
        outer = -(-blocks // int(nested))
        parts["outer"] = stored.require(f"{name}.nested_absmax", name, [(outer,)], (torch.float32,))
        parts["table"] = stored.require(f"{name}.nested_quant_map", name, [(256,)], (torch.float32,))

    def unpack(found: Parts, first: int, count: int) -> Tensor:
        start, end = first * shape[1], (first + count) * shape[1]
        bytes_N = found["packed"].flatten()[start // 2 : -(-end // 2)]
        numbers: Tensor = found["values"][nibbles(bytes_N, high_first=True).int()][: end - start]
        at = slice(start // block, -(-end // block))
        scale = found["scale"][at]
        if nested:
            of_block = torch.arange(at.start, at.stop) // int(nested)
            scale = found["table"][scale.int()] * found["outer"][of_block] + float(state["nested_offset"])
        offset = start - at.start * block
        numbers *= scale.to(torch.float32).repeat_interleave(block)[offset : offset + len(numbers)]
        return torch.reshape(numbers, (-1, shape[1]))

    return PackedTensor(shape=shape, parts=parts, unpack=unpack, step=2 if shape[1] % 2 else 1)


def _state(stored: StoredTensors, name: str) -> dict[str, Any]:
    """Return a weight's quantisation state, which is stored as JSON in bytes."""
    where = f"{name} of {stored.directory}"
    content = bytes(stored.read(name).flatten()[:_STATE_BYTES].tolist())
    try:
        state: dict[str, Any] = parse_json(content, where, _STATE_BYTES)
        rows, columns = state["shape"]
        nested = state.get("nested_blocksize")
        float(state["nested_offset"] if nested else 0)
        sizes = (rows, columns, state["blocksize"], nested or 1)
        is_state = all(type(size) is int and 0 < size < 2**40 for size in sizes)
    except (InvalidInput, LookupError, TypeError, ValueError):
        is_state = False
    if not is_state:
        raise InvalidInput(
            f"{where} is no quantisation state, which is a JSON object in bytes with the shape and the "
            "blocksize of a weight; download or save it again"
        )
    return state
