"""MXFP4 as gpt-oss stores its experts: blocks of 32 four-bit floats, each with a power of two.

The OCP Microscaling format: E2M1 numbers, two per byte with the low bits first, and one E8M0 scale per block.

Legend: E experts, R rows (outputs), G groups of 32 inputs, B 16 bytes of a group.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .bit_fields import fp4
from .packed_tensor import POWERS, PackedTensor, Parts, StoredTensors, as_scale

_BYTES = 16  # of a block, whose 32 numbers share a scale


def find_mxfp4(stored: StoredTensors, config: Mapping[str, Any]) -> dict[str, PackedTensor]:
    """Return the expert weights of `quant_method: mxfp4`, as (E, inputs, outputs).

    Raises:
        InvalidInput: blocks or scales are missing or misshapen.
    """
    found: dict[str, PackedTensor] = {}
    for name in stored.ending("_blocks"):
        blocks = f"{name}_blocks"
        shape = stored.shape(blocks, 4)
        stored.require(blocks, name, [(*shape[:3], _BYTES)], (torch.uint8,))
        scales = stored.require(f"{name}_scales", name, [shape[:3]], POWERS)
        experts, rows, groups, _ = shape
        found[name] = PackedTensor(
            shape=(experts, groups * 2 * _BYTES, rows),
            parts={"blocks": blocks, "scale": scales},
            unpack=_unpack,
        )
    return found


def _unpack(found: Parts, first: int, count: int) -> Tensor:
    chunk = slice(first, first + count)
    numbers_ERGX = fp4(found["blocks"][chunk])
    numbers_ERGX *= as_scale(found["scale"][chunk])[..., None]
    return numbers_ERGX.flatten(2).mT
