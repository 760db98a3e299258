"""A module folded to fewer key/value heads or to a latent, by the methods for checkpoints.

The algebra is float64 on the CPU; a fold is on its source's device and in its dtype. Legend: heads.py.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ...convert.algebra.attention import Attention
from ...convert.algebra.metric import LayerMetric, weights_only
from ...convert.algebra.subspaces import matrix_root
from ...convert.algebra.target import GroupedTarget, LatentTarget
from ...convert.methods import table as methods
from ...convert.methods.allocation import allocate
from ...convert.methods.grouping import GAIN, arrangements, reordered
from ...convert.methods.intact import full_rank, to_intact, unrotated
from ...convert.methods.latent import Band, saved_by_slots, source_bands, to_mla, uniform_bands
from ...convert.methods.shared_key import affine
from ...core.errors import InvalidInput
from .latent_attention import MultiHeadLatentAttention
from .multi_head import MultiHeadAttention

SPAN = 4096  # distances that a fold by weights alone allows for


def fold_to_groups(
    source: MultiHeadAttention, groups: int, sample_BTD: Tensor | None = None, method: str = methods.OWN
) -> MultiHeadAttention:
    """Return a module with fewer key/value heads that computes nearly the same.

    As many groups as heads is exact.
    """
    if source.head_dim % 2:
        raise InvalidInput(f"heads of width {source.head_dim} have no rotary pairs; the width must be even")
    attention = source.weights().to(torch.float64, "cpu")
    metric = _metric(source, attention, sample_BTD)
    if method == methods.OWN:
        order, gain = arrangements(attention, metric, groups)[0]
        if gain > GAIN:
            attention, metric = reordered(attention, metric, order)
    target = GroupedTarget(num_key_value_heads=groups)
    pooled = methods.POOLS[method](attention, target, metric, _table(source))
    made = MultiHeadAttention.from_weights(pooled, source.frequencies, causal=source.causal)
    return made.to(source.q_proj.weight)


def fold_to_latent(
    source: MultiHeadAttention, target: LatentTarget, sample_BTD: Tensor | None = None
) -> MultiHeadLatentAttention:
    """Return a module with a latent cache that computes nearly the same.

    MLA with `slots="source"` of a module that rotates is exact, and so is full rank of one that does not
    (there the target has `qk_rope_head_dim=0`).

    Args:
        source: the module.
        target: widths. Its slots: `source` keeps all pairs, `allocated` puts slots where they save most,
            `uniform` takes frequencies at even steps from the module's table.
        sample_BTD: input of which statistics are taken; None folds by the weights alone.

    Raises:
        InvalidInput: the target does not fit the module.
    """
    attention = source.weights().to(torch.float64, "cpu")
    metric = _metric(source, attention, sample_BTD)
    slots: list[float] = []
    if source.frequencies:
        bands = _bands(attention, _table(source), target, metric)
        folded = to_mla(attention, target, _table(source), bands, metric)
        slots = [band.frequency for band in bands for _ in range(band.slots)]
    else:
        most = full_rank(source.d_model, 2 * source.num_kv_heads * source.head_dim, normed=False)
        target = replace(target, kv_lora_rank=min(target.kv_lora_rank, most))
        folded = unrotated(to_intact(attention, target, metric))
    made = MultiHeadLatentAttention.from_weights(folded, slots, causal=source.causal)
    return made.to(source.q_proj.weight)


def _table(source: MultiHeadAttention) -> Tensor:
    """Return radians per token of a head's pairs; without rotation they are all zero."""
    return torch.tensor(source.frequencies or (0.0,) * (source.head_dim // 2), dtype=torch.float64)


def _bands(
    attention: Attention, table_F: Tensor, target: LatentTarget, metric: LayerMetric
) -> tuple[Band, ...]:
    heads = len(attention.k_KHD)
    if target.slots == "source":
        return source_bands(table_F, heads)
    slots = target.qk_rope_head_dim // 2
    most = heads * len(table_F) if target.slots == "allocated" else len(table_F)
    if target.qk_rope_head_dim % 2 or not 1 <= slots <= most:
        raise InvalidInput(
            f"qk_rope_head_dim {target.qk_rope_head_dim} does not fit; choose an even number from 2 "
            f"to {2 * most}"
        )
    if target.slots == "allocated":
        return allocate(saved_by_slots(attention, table_F, metric), table_F, slots)
    return uniform_bands(table_F, table_F[torch.arange(slots) * len(table_F) // slots])


def _metric(source: MultiHeadAttention, attention: Attention, sample_BTD: Tensor | None) -> LayerMetric:
    """Return the metric of the attention's own output on a sample.

    It is that of weights alone, but with the input's second moment: the metric of the same layer behind a
    root of the moment, whose input is isotropic.
    """
    if sample_BTD is None:
        return weights_only(attention, SPAN)
    input_BTD = sample_BTD.detach().to("cpu", torch.float64)
    ones_BT1 = torch.ones_like(input_BTD[..., :1])
    input_XE = torch.cat([input_BTD, ones_BT1], -1).flatten(0, 1)
    moment_EE = input_XE.mT @ input_XE / len(input_XE)
    root_EE = matrix_root(moment_EE)
    behind = replace(
        attention,
        q_NHD=affine(attention.q_NHD, attention.q_NH) @ root_EE,
        k_KHD=affine(attention.k_KHD, attention.k_KH) @ root_EE,
        v_KHD=affine(attention.v_KHD, attention.v_KH) @ root_EE,
        q_NH=None,
        k_KH=None,
        v_KH=None,
    )
    metric = replace(weights_only(behind, 1), input_EE=moment_EE)
    return replace(metric, distance_NT=_distances(source, input_BTD))


def _distances(source: MultiHeadAttention, input_BTD: Tensor) -> Tensor:
    """Return how the mass p(1-p) of each head's attention spreads over distances.

    That mass is what an error in a score moves.
    """
    tokens = input_BTD.shape[1]
    weights = source.weights().to(torch.float64, "cpu")
    double = MultiHeadAttention.from_weights(weights, source.frequencies, causal=source.causal)
    at_T = torch.arange(tokens)
    distance_TX = (at_T[:, None] - at_T).abs()
    mass_NT = torch.zeros(source.num_heads, tokens, dtype=torch.float64)
    for sequence_TD in input_BTD:  # one at a time: a map is large
        map_NTX = double.probabilities(sequence_TD[None])[0]
        mass_NT.index_add_(1, distance_TX.flatten(), (map_NTX * (1 - map_NTX)).flatten(1))
    total_N1 = mass_NT.sum(1, keepdim=True)
    return torch.where(
        total_N1 > 0, mass_NT / total_N1.clamp(min=torch.finfo(mass_NT.dtype).tiny), 1 / tokens
    )
