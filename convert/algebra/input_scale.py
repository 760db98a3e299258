"""The scale of each channel of a layer's input, which must not decide how the layer is folded.

The norm before attention can make a channel as large as it likes, and the projections take that back: the
function is the same. Energies of keys and values do not notice. Two things would: shrinkage of the input's
moment, and steps of refinement, which are as large as a tensor is on the whole. So a layer is folded with
channels of about equal size, and its result is written for the channels as they are.

Scales are powers of two, so that no number is rounded.

Legend: attention.py; E = D and the constant 1.
"""

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from .attention import Attention, IntactAttention, LatentAttention

Layer = TypeVar("Layer", bound=Attention | LatentAttention | IntactAttention)


def channel_scales(input_EE: Tensor) -> Tensor:
    """Return the size of every input channel (D,) next to their geometric mean; 1 for silent channels."""
    size_D = input_EE.diagonal()[:-1].clamp(min=0).sqrt()
    log_D = torch.where(size_D > 0, size_D, torch.nan).log2()
    exponent_D = (log_D - log_D.nanmean()).nan_to_num(0.0)
    return torch.exp2(exponent_D.round())


def with_channels(layer: Layer, scale_D: Tensor) -> Layer:
    """Return the layer for an input whose channels are divided by these scales (D,)."""
    names = {"q_NHD", "k_KHD", "v_KHD", "gate_NHD", "q_down_AD"}
    if getattr(layer, "k_KHD", None) is None:  # the latent is one of the input, not of features
        names |= {"down_CE", "down_CD", "k_rope_RD"}
    if getattr(layer, "q_down_AD", None) is None:
        names |= {"q_NHA"} if hasattr(layer, "q_NHA") else {"q_nope_NPA", "q_rope_NRA"}
    found = ((name, getattr(layer, name, None)) for name in names)
    changed: dict[str, Any] = {name: rows * scale_D for name, rows in found if rows is not None}
    return replace(layer, **changed)
