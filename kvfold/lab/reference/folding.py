"""A layer folded to fewer key/value heads or to a latent, as checkpoints are folded, on a sample of inputs.

The algebra is float64 on the CPU; a fold has its source's dtype. Legend: modules.py.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...convert.algebra.attention import Attention, LatentAttention
from ...convert.algebra.metric import LayerMetric, weights_only
from ...convert.algebra.subspaces import matrix_root
from ...convert.algebra.target import GroupedTarget, LatentTarget
from ...convert.methods import table as methods
from ...convert.methods.grouping import GAIN, arrangements, reordered
from ...convert.methods.intact import full_rank, to_intact, unrotated
from ...convert.methods.latent import to_mla, uniform_bands
from ...convert.methods.shared_key import affine
from ...core.errors import InvalidInput
from .modules import MultiHeadAttention


def fold_to_groups(
    source: Attention, frequencies: Sequence[float], groups: int, sample_BTD: Tensor
) -> Attention:
    """Return a layer with fewer key/value heads that computes nearly the same.

    As many groups as heads is exact.
    """
    layer, metric, table_F = _taken(source, frequencies, sample_BTD)
    order, gain = arrangements(layer, metric, groups)[0]
    if gain > GAIN:
        layer, metric = reordered(layer, metric, order)
    target = GroupedTarget(num_key_value_heads=groups)
    return methods.POOLS[methods.OWN](layer, target, metric, table_F).to(source.q_NHD.dtype)


def fold_to_latent(
    source: Attention, frequencies: Sequence[float], target: LatentTarget, sample_BTD: Tensor
) -> tuple[LatentAttention, list[float]]:
    """Return a layer with a latent cache that computes nearly the same, and the frequencies of its slots.

    Full rank of a layer that does not rotate is exact; there the target has `qk_rope_head_dim=0`. Slots of
    others are at even steps of the table.

    Raises:
        InvalidInput: the target does not fit the layer.
    """
    layer, metric, table_F = _taken(source, frequencies, sample_BTD)
    if not frequencies:
        heads, width, d_model = layer.k_KHD.shape
        most = full_rank(d_model, 2 * heads * width, normed=False)
        target = replace(target, kv_lora_rank=min(target.kv_lora_rank, most))
        return unrotated(to_intact(layer, target, metric)).to(source.q_NHD.dtype), []
    slots, most = target.qk_rope_head_dim // 2, len(table_F)
    if target.qk_rope_head_dim % 2 or not 1 <= slots <= most:
        raise InvalidInput(
            f"qk_rope_head_dim {target.qk_rope_head_dim} does not fit; choose an even number from 2 "
            f"to {2 * most}"
        )
    bands = uniform_bands(table_F, table_F[torch.arange(slots) * most // slots])
    folded = to_mla(layer, target, table_F, bands, metric)
    return folded.to(source.q_NHD.dtype), [band.frequency for band in bands]


def _taken(
    source: Attention, frequencies: Sequence[float], sample_BTD: Tensor
) -> tuple[Attention, LayerMetric, Tensor]:
    """Return the layer in float64, the metric of its own output on a sample, and radians per token of pairs.

    The metric is that of weights alone, but with the input's second moment: the metric of the same layer
    behind a root of the moment, whose input is isotropic.
    """
    layer = source.to(torch.float64, "cpu")
    input_BTD = sample_BTD.detach().to("cpu", torch.float64)
    ones_BT1 = torch.ones_like(input_BTD[..., :1])
    input_XE = torch.cat([input_BTD, ones_BT1], -1).flatten(0, 1)
    moment_EE = input_XE.mT @ input_XE / len(input_XE)
    root_EE = matrix_root(moment_EE)
    behind = replace(
        layer,
        q_NHD=affine(layer.q_NHD, layer.q_NH) @ root_EE,
        k_KHD=affine(layer.k_KHD, layer.k_KH) @ root_EE,
        v_KHD=affine(layer.v_KHD, layer.v_KH) @ root_EE,
        q_NH=None,
        k_KH=None,
        v_KH=None,
    )
    distance_NT = _distances(layer, frequencies, input_BTD)
    metric = replace(weights_only(behind, 1), input_EE=moment_EE, distance_NT=distance_NT)
    # Without rotation all pairs turn by nothing.
    table = frequencies or (0.0,) * (layer.k_KHD.shape[1] // 2)
    return layer, metric, torch.tensor(table, dtype=torch.float64)


def _distances(layer: Attention, frequencies: Sequence[float], input_BTD: Tensor) -> Tensor:
    """Return how the mass p(1-p) of each head's attention spreads over distances.

    That mass is what an error in a score moves.
    """
    module, tokens = MultiHeadAttention(layer, frequencies), input_BTD.shape[1]
    at_T = torch.arange(tokens)
    distance_TX = (at_T[:, None] - at_T).abs()
    mass_NT = torch.zeros(len(layer.q_NHD), tokens, dtype=torch.float64)
    for sequence_TD in input_BTD:  # one at a time: a map is large
        map_NTX = module.probabilities(sequence_TD[None])[0]
        mass_NT.index_add_(1, distance_TX.flatten(), (map_NTX * (1 - map_NTX)).flatten(1))
    total_N1 = mass_NT.sum(1, keepdim=True)
    return torch.where(
        total_N1 > 0, mass_NT / total_N1.clamp(min=torch.finfo(mass_NT.dtype).tiny), 1 / tokens
    )
