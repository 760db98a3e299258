"""RMSNorms of each head between rotation and scores, in the place of norms in front of the rotation.

A rotation keeps the length of a head, so both kinds of norm divide by the same number. Only their weights
differ: behind the rotation, those of queries and keys are one gain on each dimension's share of a score. What
is common to a rotary pair's two gains could as well be in front of the rotation, so it is the weight of the
query's norm here. The rest stays behind it.

Legend: attention.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.directory import Checkpoint
from ..algebra.attention import Attention
from .family import Family
from .recognition import rotated


def has_late_norms(family: Family, config: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer normalises behind the rotation, from a complete config."""
    if family.late_norms == "bare":
        return rotated(family, config, layer)
    return family.late_norms is not None


def with_late_norms(attention: Attention) -> Attention:
    """Return a layer with the part of its norms that may stand in front of the rotation.

    Args:
        attention: with the weights of norms behind the rotation, or with none.
    """
    ones_1H = attention.k_KHD.new_ones(1, attention.k_KHD.shape[1])
    if attention.q_norm_NH is None or attention.k_norm_KH is None:
        return replace(attention, q_norm_NH=ones_1H, k_norm_KH=ones_1H)
    common_1H, _ = _parts(attention.q_norm_NH * attention.k_norm_KH)
    return replace(attention, q_norm_NH=common_1H, k_norm_KH=ones_1H)


def late_gain(checkpoint: Checkpoint, family: Family, layer: int, order_H: Tensor) -> Tensor | None:
    """Return the rest: the gain of each dimension behind the rotation, (H,), float64.

    Args:
        checkpoint: the source.
        family: its row.
        layer: a layer with such norms.
        order_H: for each dimension its place in the checkpoint.

    Returns:
        None where the norms have no weights.
    """
    names = [family.norm("q", layer), family.norm("k", layer)]
    weights = [checkpoint[name].to(torch.float64)[order_H] for name in names if name is not None]
    return _parts(weights[0] * weights[1])[1] if weights else None


def _parts(product_XH: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root mean square of each pair's two gains, and what is left of each gain."""
    real, imaginary = product_XH.chunk(2, -1)
    common = ((real.square() + imaginary.square()) / 2).sqrt().clamp_min(torch.finfo(product_XH.dtype).tiny)
    common_XH = torch.cat([common, common], -1)
    return common_XH, product_XH / common_XH
