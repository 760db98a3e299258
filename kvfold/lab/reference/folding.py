"""A module folded to fewer key/value heads or to a latent, by the methods for checkpoints.

Legend: heads.py, ../metric.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor, nn

from ...convert.algebra.attention import Attention
from ...convert.algebra.metric import LayerMetric, weights_only
from ...convert.algebra.subspaces import matrix_root
from ...convert.algebra.target import GroupedTarget, LatentTarget
from ...convert.calibration.layer_metric import of_keys
from ...convert.calibration.statistics import LayerStatistics
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

Seen = LayerStatistics | Tensor | None


@overload
def fold(
    module: nn.Module,
    target: GroupedTarget,
    statistics: Seen = None,
    *,
    method: str | None = None,
    span: int = SPAN,
) -> MultiHeadAttention: ...


@overload
def fold(
    module: nn.Module,
    target: LatentTarget,
    statistics: Seen = None,
    *,
    method: str | None = None,
    span: int = SPAN,
) -> MultiHeadLatentAttention: ...


def fold(
    module: nn.Module,
    target: GroupedTarget | LatentTarget,
    statistics: Seen = None,
    *,
    method: str | None = None,
    span: int = SPAN,
) -> MultiHeadAttention | MultiHeadLatentAttention:
    """Return a new module with a smaller cache that computes nearly the same.

    As many groups as heads is exact. So is MLA with `slots="source"` of a module that rotates, and of full
    rank of one that does not (there the target has `qk_rope_head_dim=0`).

    Args:
        module: a MultiHeadAttention, or torch's own MultiheadAttention, which rotates nothing.
        target: GQA or MLA. Its slots: `source` keeps all pairs, `allocated` puts slots where they save most,
            `uniform` takes frequencies at even steps from the module's table.
        statistics: of the layer (`kvfold convert --save-statistics`), or a sample of its input (B, T, D) from
            which they are taken here; None folds by the weights alone.
        method: a name from `methods.names(target)`, the default when None; rules of others are for
            checkpoints.
        span: distances that attention reaches, where they are not measured.

    Returns:
        A module on the source's device and in its dtype; the algebra is float64 on the CPU.

    Raises:
        InvalidInput: the target does not fit the module.
    """
    source = _plain(module)
    weight = source.q_proj.weight
    attention = source.weights().to(torch.float64, "cpu")
    metric = _metric(source, attention, statistics, span)
    if isinstance(target, GroupedTarget):
        folded: MultiHeadAttention | MultiHeadLatentAttention = _pooled(
            source, attention, target, metric, method
        )
    else:
        folded = _latent(source, attention, target, metric, method)
    return folded.to(weight)


def halvings(
    module: nn.Module,
    statistics: LayerStatistics | Tensor | None = None,
    *,
    method: str | None = None,
    between: Callable[[MultiHeadAttention], MultiHeadAttention] | None = None,
) -> list[MultiHeadAttention]:
    """Fold to h, h/2, ... key/value heads down to an odd number, each from the one before.

    Args:
        module: as in `fold`; the first of the path.
        statistics: a sample of the input (B, T, D), or a layer's statistics, which then serve the first step
            alone.
        method: as in `fold`.
        between: what is done to each new module before the next step, for instance its training.

    Returns:
        All modules, the source first.
    """
    path = [_plain(module)]
    while path[-1].num_kv_heads % 2 == 0:
        seen = statistics if isinstance(statistics, Tensor) or len(path) == 1 else None
        folded = fold(
            path[-1], GroupedTarget(num_key_value_heads=path[-1].num_kv_heads // 2), seen, method=method
        )
        path.append(folded if between is None else between(folded))
    return path


def _plain(module: nn.Module) -> MultiHeadAttention:
    if isinstance(module, MultiHeadAttention):
        return module
    if isinstance(module, nn.MultiheadAttention):
        return MultiHeadAttention.from_torch(module)
    raise InvalidInput(
        f"{type(module).__name__} cannot be folded; give a MultiHeadAttention or torch's MultiheadAttention"
    )


def _table(source: MultiHeadAttention) -> Tensor:
    """Return radians per token of a head's pairs; without rotation they are all zero."""
    return torch.tensor(source.frequencies or (0.0,) * (source.head_dim // 2), dtype=torch.float64)


def _pooled(
    source: MultiHeadAttention,
    attention: Attention,
    target: GroupedTarget,
    metric: LayerMetric,
    method: str | None,
) -> MultiHeadAttention:
    groups, heads = target.num_key_value_heads, source.num_kv_heads
    if groups < 1 or heads % groups:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise InvalidInput(f"{heads} key/value heads do not fold into {groups}; choose from {fitting}")
    if source.head_dim % 2:
        raise InvalidInput(f"heads of width {source.head_dim} have no rotary pairs; the width must be even")
    name = methods.check(target, method)
    if name == methods.OWN:
        order, gain = arrangements(attention, metric, groups)[0]
        if gain > GAIN:
            attention, metric = reordered(attention, metric, order)
    pooled = methods.POOLS[name](attention, target, metric, _table(source))
    return MultiHeadAttention.from_weights(pooled, source.frequencies, causal=source.causal)


def _latent(
    source: MultiHeadAttention,
    attention: Attention,
    target: LatentTarget,
    metric: LayerMetric,
    method: str | None,
) -> MultiHeadLatentAttention:
    if target.rope != "decoupled":
        raise InvalidInput("these modules have a rotary key next to the latent; use rope='decoupled'")
    if method not in (None, methods.OWN):
        raise InvalidInput(f"method {method} does not apply to modules; use {methods.OWN}")
    if target.kv_lora_rank < 1:
        raise InvalidInput(f"kv_lora_rank {target.kv_lora_rank} does not fit; choose 1 or more")
    if not source.frequencies:
        if target.qk_rope_head_dim:
            raise InvalidInput(
                "the module rotates nothing, so there is no rotary key; use qk_rope_head_dim=0"
            )
        most = full_rank(source.d_model, 2 * source.num_kv_heads * source.head_dim, normed=False)
        target = replace(target, kv_lora_rank=min(target.kv_lora_rank, most))
        return MultiHeadLatentAttention.from_weights(
            unrotated(to_intact(attention, target, metric)), causal=source.causal
        )
    bands = _bands(attention, _table(source), target, metric)
    folded = to_mla(attention, target, _table(source), bands, metric)
    if target.slots == "source":  # slots of that exact form lie pair by pair, as the bands do
        assert len(folded.k_rope_RD) == 2 * sum(band.slots for band in bands)
    slots = [band.frequency for band in bands for _ in range(band.slots)]
    return MultiHeadLatentAttention.from_weights(folded, slots, causal=source.causal)


def _bands(
    attention: Attention, table_F: Tensor, target: LatentTarget, metric: LayerMetric
) -> tuple[Band, ...]:
    heads = len(attention.k_KHD)
    slots = target.qk_rope_head_dim // 2
    if target.slots == "source":
        return source_bands(table_F, heads)
    if target.slots not in ("allocated", "uniform"):
        raise InvalidInput(
            f"slots {target.slots!r} do not apply to modules; use 'source', 'allocated' or 'uniform'"
        )
    most = heads * len(table_F) if target.slots == "allocated" else len(table_F)
    if target.qk_rope_head_dim % 2 or not 1 <= slots <= most:
        raise InvalidInput(
            f"qk_rope_head_dim {target.qk_rope_head_dim} does not fit; choose an even number from 2 "
            f"to {2 * most}"
        )
    if target.slots == "allocated":
        return allocate(saved_by_slots(attention, table_F, metric), table_F, slots)
    return uniform_bands(table_F, table_F[torch.arange(slots) * len(table_F) // slots])


def _metric(source: MultiHeadAttention, attention: Attention, statistics: Seen, span: int) -> LayerMetric:
    if statistics is None:
        return weights_only(attention, span)
    if isinstance(statistics, LayerStatistics):
        return of_keys(statistics, attention)
    if statistics.ndim != 3 or statistics.shape[-1] != source.d_model:
        raise InvalidInput(
            f"a sample of shape {tuple(statistics.shape)} does not fit; it must be (B, T, {source.d_model})"
        )
    return _from_sample(source, attention, statistics.detach().to("cpu", torch.float64))


def _from_sample(source: MultiHeadAttention, attention: Attention, input_BTD: Tensor) -> LayerMetric:
    """Return the metric of the attention's own output on a sample.

    It is that of weights alone, but with the input's second moment: the metric of the same layer behind a
    root of the moment, whose input is isotropic.
    """
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
