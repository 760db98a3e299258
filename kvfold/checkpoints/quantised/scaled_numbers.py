"""Weights of a byte or half a byte per number, with a scale per tensor, row, group of columns or block.

FP8 checkpoints of DeepSeek and Qwen store `weight_scale_inv` per block, those of other tools `weight_scale`;
either is multiplied with the numbers. MXFP4 is the OCP Microscaling format as gpt-oss stores its experts:
blocks of 32 E2M1 numbers, two per byte with the low bits first, each with one E8M0 scale, a power of two.

Legend: E experts, R rows, C columns, G groups of 32 inputs, X numbers of a group; leading dimensions
(experts) may precede rows.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .packed_tensor import FLOATS, FP8, POWERS, PackedTensor, Parts, Shape, StoredTensors, as_scale, fp4

_SCALES = ("_scale_inv", "_scale")  # endings of a scale's name after the weight's


def scaled(
    stored: StoredTensors,
    name: str,
    scale: str,
    grid: tuple[int, int],
    *,
    zero: str | None = None,
) -> PackedTensor:
    """Return a weight of bytes that scales of a grid multiply.

    Args:
        stored: the tensors as they are stored.
        name: of the weight, (..., R, C), whose dtype has been looked at.
        scale: name of the scales, one per field of the grid; or one for the tensor, or one per row.
        grid: rows and columns that share a scale.
        zero: name of the numbers that stand for zero, of the scales' shape.

    Raises:
        InvalidInput: the scales are missing, or have another shape or dtype.
    """
    shape = stored.specs[name].shape
    shapes = scale_shapes(shape, grid)
    counts = shapes[0]
    parts = {"weight": name, "scale": stored.require(scale, name, shapes, (*FLOATS, *POWERS[:1]))}
    if zero is not None:
        kept = {torch.int8, torch.int32, stored.specs[name].dtype}
        parts["zero"] = stored.require(zero, name, [stored.specs[scale].shape], sorted(kept, key=str))

    def unpack(found: Parts, first: int, count: int) -> Tensor:
        chunk = slice(first, first + count)
        numbers = found["weight"][chunk].to(torch.float32)
        for role in ("zero", "scale"):
            if role in found:
                table = as_scale(found[role]).reshape(counts)
                if len(shape) > 2:
                    table = table[chunk]
                else:
                    table = table[first // grid[0] : -(-(first + count) // grid[0])]
                spread = table.repeat_interleave(grid[0], -2)[..., : numbers.shape[-2], :]
                spread = spread.repeat_interleave(grid[1], -1)[..., : numbers.shape[-1]]
                numbers = numbers - spread if role == "zero" else numbers * spread
        return numbers

    return PackedTensor(
        shape=shape,
        parts=parts,
        unpack=unpack,
        step=grid[0] if len(shape) == 2 and grid[0] < shape[0] else 1,
    )


def scale_shapes(shape: Shape, grid: tuple[int, int]) -> list[Shape]:
    """Return the shapes that scales of a weight may be stored in; the first one has a value for every field.

    `grid` is the number of rows and columns that share a scale.
    """
    rows, columns = shape[-2:]
    counts = (*shape[:-2], -(-rows // grid[0]), -(-columns // grid[1]))
    if grid[1] < columns:
        return [counts]
    # Per row or per tensor, for which tools write one dimension or two.
    shapes: list[Shape] = [counts, counts[:-1]]
    if counts[-2] == 1:
        shapes += [counts[:-2], (1,), (1, 1)] if len(shape) == 2 else [counts[:-2]]
    return shapes


def find_fp8(stored: StoredTensors, config: Mapping[str, Any]) -> dict[str, PackedTensor]:
    """Return the FP8 weights of `quant_method: fp8`, with scales per block or per tensor.

    Raises:
        InvalidInput: a scale is missing or misshapen.
    """
    block = config.get("weight_block_size")
    found: dict[str, PackedTensor] = {}
    usual = next((end for end in _SCALES if stored.ending(f".weight{end}")), _SCALES[0])
    for name, spec in stored.specs.items():
        if spec.dtype in FP8:
            scale = next((name + end for end in _SCALES if name + end in stored.specs), name + usual)
            grid = (block[0], block[1]) if block else _whole(stored, name, scale)
            found[name] = scaled(stored, name, scale, grid)
    return found


def _whole(stored: StoredTensors, name: str, scale: str) -> tuple[int, int]:
    """Return the grid of a weight without blocks: one scale per row, or one for the tensor."""
    rows, columns = stored.specs[name].shape[-2:]
    found = stored.specs.get(scale)
    by_row = found is not None and found.shape in scale_shapes(stored.specs[name].shape, (1, columns))
    return (1 if by_row else rows), columns


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
