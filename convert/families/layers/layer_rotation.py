"""The rotary embedding of each layer by config.json, and as transformers' class computes it."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from ....core.errors import InvalidInput
from ....models.expected_weights import RotaryTable
from ...algebra.rotary import FIXED, frequencies, rope_parameters


def layer_rope(config: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Return a layer's rope parameters, from a complete config.

    Layers of two kinds may have different ones.
    """
    kind = _kind(config, layer)
    nested = config.get("rope_parameters")
    if isinstance(nested, dict) and isinstance(nested.get(kind), dict):
        return rope_parameters({**config, "rope_parameters": nested[kind], "rope_scaling": None})
    return rope_parameters(dict(config))


def _kind(config: Mapping[str, Any], layer: int) -> str:
    kinds = config.get("layer_types") or []
    return str(kinds[layer]) if layer < len(kinds) else "full_attention"


def fixed_rotation(
    config: Mapping[str, Any], widths: Mapping[int, int]
) -> dict[str, tuple[int, RotaryTable | None]]:
    """Return the rotary frequencies that a config.json defines, by kind of layer.

    Returns:
        For each kind its rotary dimensions and its table; no table where the length of the input decides.
    """
    tables: dict[str, tuple[int, RotaryTable | None]] = {}
    for layer, width in widths.items():
        kind = _kind(config, layer)
        if kind not in tables:
            rope = layer_rope(config, layer)
            table = None
            if rope["rope_type"] in FIXED:
                table = RotaryTable(*frequencies(rope, width, config["max_position_embeddings"]))
            tables[kind] = width, table
    return tables


def check_rotation(
    ours: Mapping[str, tuple[int, RotaryTable | None]], theirs: Mapping[str, RotaryTable], name: str
) -> None:
    """Check that the class rotates as config.json says.

    A class may ignore a field of config.json that kvfold reads, such as rotary_dim.
    """
    for kind, (width, table) in ours.items():
        other = theirs.get(kind) or theirs.get("")
        if other is None:
            continue
        rotated = 2 * len(other.frequencies_F)
        if rotated != width:
            raise InvalidInput(
                f"config.json has {width} rotary dimensions per head, but {name} of transformers rotates "
                f"{rotated}; correct rotary_dim"
            )
        if table is None:
            continue
        is_same = torch.allclose(table.frequencies_F, other.frequencies_F.double(), rtol=1e-4, atol=0)
        if not is_same or not math.isclose(table.factor, other.factor, rel_tol=1e-4):
            raise InvalidInput(
                f"config.json has rope parameters from which {name} of transformers computes other "
                "frequencies than their rope_type defines; correct rope_parameters"
            )
