"""Biases as weights, for a class without biases.

A linear function of a layer's input that is nearly constant stands for 1. Inputs of attention come out of a
norm and have a large mean. The farther that mean is from zero, the less is lost.

Legend: attention.py; E = D and the constant 1.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..algebra.attention import Attention, LatentAttention


def nearest_to_one(input_EE: Tensor) -> Tensor:
    """Return w (D,) with the least mean (w·x - 1)².

    That is w = C⁻¹ μ, with C the second moment of the input and μ its mean.
    """
    one_D: Tensor = torch.linalg.solve(input_EE[:-1, :-1], input_EE[:-1, -1])
    return one_D


def without_value_bias(attention: Attention, one_D: Tensor | None) -> Attention:
    """Move the value bias into the values' weights, before a fold, so that the latent carries it.

    Without w the layer does not change.
    """
    if one_D is None or attention.v_KH is None:
        return attention
    return replace(attention, v_KHD=attention.v_KHD + attention.v_KH[..., None] * one_D, v_KH=None)


def without_query_bias(attention: Attention, one_D: Tensor | None) -> Attention:
    """Move the query bias into the queries' weights; without w the layer does not change."""
    if one_D is None or attention.q_NH is None:
        return attention
    return replace(attention, q_NHD=attention.q_NHD + attention.q_NH[..., None] * one_D, q_NH=None)


def without_key_bias(latent: LatentAttention, one_D: Tensor | None) -> LatentAttention:
    """Move biases of queries and rotary keys into their weights, after a fold, which drops those of keys."""
    if one_D is None:
        return latent

    def taken(weight: Tensor, bias: Tensor | None) -> Tensor:
        return weight if bias is None else weight + bias[..., None] * one_D

    return replace(
        latent,
        q_nope_NPA=taken(latent.q_nope_NPA, latent.q_nope_NP),
        q_rope_NRA=taken(latent.q_rope_NRA, latent.q_rope_NR),
        k_rope_RD=taken(latent.k_rope_RD, latent.k_rope_R),
        q_nope_NP=None,
        q_rope_NR=None,
        k_rope_R=None,
    )
