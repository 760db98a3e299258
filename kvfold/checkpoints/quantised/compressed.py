"""The layouts of compressed-tensors: FP8 and int8 numbers, packed int2, int4 and int8, NVFP4, MXFP4.

A config group states how a part of the modules is quantised. A stored weight belongs to the first group that
its tensors fit, so that names and patterns of targets need no interpretation.

Legend: R rows, C columns, G groups of columns.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.errors import InvalidInput
from ...core.untrusted import shorten
from ..shards import TensorSpec
from .packed_tensor import (
    FLOATS,
    FP8,
    POWERS,
    WIDTHS,
    WORD,
    PackedTensor,
    Parts,
    Shape,
    StoredTensors,
    as_scale,
    fields,
    fp4,
)
from .scaled_numbers import scale_shapes, scaled

FORMATS = (
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip


def find_compressed(stored: StoredTensors, config: Mapping[str, Any]) -> dict[str, PackedTensor]:
    """Return the weights of `quant_method: compressed-tensors`.

    Raises:
        InvalidInput: the configuration names a format that kvfold does not read, or rotated weights, or the
            parts of a weight are missing or fit no group.
    """
    groups = _groups(stored, config)
    found: dict[str, PackedTensor] = {}
    for module in stored.ending(".weight_packed"):
        name, packed = f"{module}.weight", f"{module}.weight_packed"
        if stored.specs[packed].dtype == torch.uint8:
            found[name] = fp4_weight(stored, name, packed, f"{module}.weight_global_scale", divides=True)
        else:
            found[name] = _packed(stored, module, groups)
    for name, spec in stored.specs.items():
        if name.endswith(".weight") and spec.dtype in (*FP8, torch.int8):
            shape = stored.specs[name].shape
            scale, zero = f"{name}_scale", f"{name}_zero_point"
            group = _fitting(stored, name, scale, shape, groups)
            biased = zero in stored.specs or _all_have(groups, "symmetric", False)
            found[name] = scaled(
                stored, name, scale, _grid(group, *shape[-2:]), zero=zero if biased else None
            )
    return found


def _groups(stored: StoredTensors, config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if config.get("transform_config"):
        raise InvalidInput(
            f"{stored.directory} has a transform_config: its weights are rotated, and kvfold reads "
            "compressed-tensors without rotations"
        )
    groups = config["config_groups"]
    for kind in (config.get("format"), *(group.get("format") for group in groups.values())):
        if kind is not None and kind not in FORMATS:
            raise InvalidInput(
                f"{stored.directory} has the compressed-tensors format {shorten(kind)}; kvfold reads "
                f"{', '.join(FORMATS)}"
            )
    return [group["weights"] for group in groups.values() if group.get("weights")]


def _grid(group: Mapping[str, Any], rows: int, columns: int) -> tuple[int, int]:
    """Return how many rows and columns of a weight share a scale."""
    width, block = group.get("group_size"), group.get("block_structure")
    strategy = group.get("strategy") or ("group" if width else "tensor")
    if strategy == "block" and isinstance(block, list) and len(block) == 2:
        return block[0], block[1]
    if strategy in {"group", "tensor_group"} and isinstance(width, int) and width > 0:
        return 1, width
    return (rows if strategy == "tensor" else 1), columns


def _all_have(groups: list[Mapping[str, Any]], field: str, value: Any) -> bool:
    return bool(groups) and all(group.get(field) == value for group in groups)


def _fitting(
    stored: StoredTensors, name: str, scale: str, shape: tuple[int, ...], groups: list[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return the first group whose grid gives the scales their shape, or else the first one."""
    found = stored.specs.get(scale)
    for group in groups:
        if found is not None and _has_grid(found.shape, shape, group):
            return group
    if not groups:
        raise InvalidInput(f"{stored.directory} has a quantised {name}, but no config group has weights")
    return groups[0]


def _has_grid(scale: Shape, shape: Shape, group: Mapping[str, Any]) -> bool:
    return scale in scale_shapes(shape, _grid(group, *shape[-2:]))


def fitting_groups(
    specs: Mapping[str, TensorSpec], name: str, shape: tuple[int, ...], groups: Mapping[str, Any]
) -> list[str]:
    """Return the names of the config groups by which a weight may have been quantised.

    Numbers and scales tell; targets are not read, since a stranger's pattern may run for ever. `groups` were
    checked by `find_compressed`.
    """
    packed, scale = specs.get(f"{name}_packed"), specs.get(f"{name}_scale")
    found = []
    for label, group in groups.items():
        weights = group.get("weights")
        if not isinstance(weights, dict) or scale is None:
            continue
        bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
        if packed is None:
            is_stored = kind == ("float" if specs[name].dtype in FP8 else "int") and bits <= 8
        elif packed.dtype == torch.uint8:
            is_stored = kind == "float" and bits == 4
        else:
            is_stored = kind == "int" and -(-shape[1] * bits // WORD) == packed.shape[1]
        if is_stored and _has_grid(scale.shape, shape, weights):
            found.append(label)
    return found


def _packed(stored: StoredTensors, module: str, groups: list[Mapping[str, Any]]) -> PackedTensor:
    """Return integers that are packed in 32-bit words, each stored as its value plus half of the range."""
    name, packed = f"{module}.weight", f"{module}.weight_packed"
    stored.require(packed, name, (), (torch.int32, torch.uint8))  # of bytes are the other formats
    rows, words = stored.shape(packed, 2)
    sizes = stored.require(f"{name}_shape", name, [(2,)], (torch.int64, torch.int32))
    shape = tuple(int(size) for size in stored.read(sizes))
    widths = [group.get("num_bits") for group in groups]
    fits = [bits for bits in widths if bits in WIDTHS and -(-shape[1] * bits // WORD) == words]
    if shape[0] != rows or not fits:
        raise InvalidInput(
            f"{packed} of {stored.directory} has shape {(rows, words)}, which does not hold a weight of "
            f"shape {shape} with {' or '.join(str(bits) for bits in widths) or 'unknown'} bits (kvfold reads "
            "2, 4 and 8); download or save it again"
        )
    same = [group for group in groups if group.get("num_bits") in fits]
    group = _fitting(stored, name, f"{name}_scale", shape, same)
    bits: int = group["num_bits"]
    step = WORD // bits
    width = _grid(group, *shape)[1]
    counts = (rows, -(-shape[1] // width))
    parts = {"packed": packed, "scale": f"{name}_scale"}
    scalar = [(1,), (1, 1), ()] if group.get("strategy") == "tensor" else []
    stored.require(parts["scale"], name, [counts, *scalar], FLOATS)
    if f"{name}_zero_point" in stored.specs or _all_have(same, "symmetric", False):
        zeros = (-(-rows // step), counts[1])
        parts["zero"] = stored.require(f"{name}_zero_point", name, [zeros], (torch.int32,))
    if f"{name}_g_idx" in stored.specs or (_all_have(same, "actorder", "group") and counts[1] > 1):
        parts["g_idx"] = stored.require(f"{name}_g_idx", name, [(shape[1],)], (torch.int32, torch.int64))

    def unpack(found: Parts, first: int, count: int) -> Tensor:
        chunk = slice(first, first + count)
        numbers = fields(found["packed"][chunk], bits, 1)[:, : shape[1]].to(torch.float32)
        scale = found["scale"].to(torch.float32).expand(counts)[chunk]
        zero = torch.full((1, 1), float(2 ** (bits - 1)))
        if "zero" in found:
            rows_of_words = found["zero"][first // step : -(-(first + count) // step)]
            zero = fields(rows_of_words, bits, 0)[:count].to(torch.float32)
        of_column = torch.arange(shape[1]) // width
        if "g_idx" in found:
            of_column = stored.group_of_columns(parts["g_idx"], found["g_idx"], counts[1])
        numbers -= zero.expand(-1, counts[1])[:, of_column]
        numbers *= scale[:, of_column]
        return numbers

    return PackedTensor(shape=shape, parts=parts, unpack=unpack, step=step)


def fp4_weight(stored: StoredTensors, name: str, packed: str, whole: str, *, divides: bool) -> PackedTensor:
    """Return a weight of E2M1 numbers, low bits first: NVFP4 with FP8 scales, or MXFP4 with powers of two.

    Args:
        stored: the tensors as they are stored.
        name: of the weight.
        packed: name of the bytes, (R, C / 2).
        whole: name of NVFP4's scale of the whole tensor.
        divides: whether that divides the other scales (compressed-tensors) or multiplies them (ModelOpt).

    Raises:
        InvalidInput: a part is missing or misshapen.
    """
    rows, half = stored.shape(packed, 2)
    columns, scale = 2 * half, f"{name}_scale"
    is_nv = scale not in stored.specs or stored.specs[scale].dtype not in POWERS
    width = 16 if is_nv else 32
    stored.require(scale, name, [(rows, -(-columns // width))], (torch.float8_e4m3fn, *POWERS))
    parts = {"packed": stored.require(packed, name, (), (torch.uint8,)), "scale": scale}
    if is_nv:
        parts["whole"] = stored.require(whole, name, [(1,), ()], (torch.float32,))

    def unpack(found: Parts, first: int, count: int) -> Tensor:
        chunk = slice(first, first + count)
        numbers = fp4(found["packed"][chunk])
        scale = as_scale(found["scale"][chunk])
        if "whole" in found:
            factor = found["whole"].reshape(())
            scale = scale / factor if divides else scale * factor
        numbers *= scale.repeat_interleave(width, 1)[:, :columns]
        return numbers

    return PackedTensor(shape=(rows, columns), parts=parts, unpack=unpack)
