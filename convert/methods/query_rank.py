"""Compressed queries: those of all heads through one narrow projection, q = W (q_down x) + b.

That is equation 12 of arXiv 2405.04434. The part of the source's queries that is kept minimises tr(G E C Eᵀ),
as for keys and values (metric.py), here with G at the queries. The queries of a fold are linear functions T
of them, and least squares onto the same q_down is their own best compression: in the metric G' at the folded
queries, G'^½ T W C^½ has the right singular vectors of G = Tᵀ G' T. So one projection is chosen from the
source, whatever the slots are. Biases do not change. The cache does not change either; weights and their
reads do.

Legend: attention.py; M rows of a head.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..algebra.attention import Attention, IntactAttention, LatentAttention, NormedLatentAttention
from ..algebra.metric import LayerMetric, weights_only
from ..algebra.queries import turned
from ..algebra.subspaces import low_rank, low_rank_energy, regress
from ..algebra.target import LatentTarget, Target
from ..calibration.layer_metric import from_statistics
from .intact import gains, linearised

if TYPE_CHECKING:
    from ...checkpoints.shards import TensorSpec
    from ..calibration.statistics import LayerStatistics, Statistics
    from ..families.source import Source

_RIDGE = 1e-4  # of the mean energy: what no calibration token was seen to lose by still costs something

_QUERIES = ("q_nope_NPA", "q_rope_NRA", "q_NHA")

Compressible = TypeVar("Compressible", bound=LatentAttention | IntactAttention)


def compress(layer: Compressible, source: Attention, metric: LayerMetric, rank: int) -> Compressible:
    """Return a folded layer whose queries pass through `rank` numbers.

    Args:
        layer: with queries that are linear functions of the source's, float64.
        source: the layer that it was folded from; its queries' biases take no part.
        metric: what errors cost.
        rank: q_lora_rank; from min(D, N·H) on nothing is lost.
    """
    rows_XD = source.q_NHD.flatten(0, 1)
    moment_DD = metric.moment(source.q_NHD)
    if rank >= min(rows_XD.shape):
        # Any basis of the rows: what the metric calls worthless is kept as well.
        moment_DD = None
        basis_DA = torch.linalg.qr(rows_XD.mT).Q
        down_AD = basis_DA.mT if len(rows_XD) < rows_XD.shape[1] else torch.eye(rank, dtype=rows_XD.dtype)
    else:
        down_AD, _, _ = low_rank(rows_XD, _costs(metric), moment_DD, rank)

    def through(rows_NMD: Tensor) -> Tensor:
        rows_XA = regress(rows_NMD.flatten(0, 1), down_AD, moment_DD)
        return rows_XA.view(*rows_NMD.shape[:2], len(down_AD))

    # Those of normed latent attention are projected before the parts of each head are made of them.
    names = ("q_NHA",) if isinstance(layer, NormedLatentAttention) else _QUERIES
    changed: dict[str, Any] = {name: through(getattr(layer, name)) for name in names if hasattr(layer, name)}
    return replace(layer, q_down_AD=down_AD, **changed)


def lost_by_queries(source: Attention, metric: LayerMetric, rank: int) -> float:
    """Return the loss of a layer's queries at a rank, nats per token where the metric comes from data."""
    energy = low_rank_energy(source.q_NHD.flatten(0, 1), _costs(metric), metric.moment(source.q_NHD))
    return float(energy[rank:].sum()) / 2  # the quadratic form's ½


def query_metric(
    attention: Attention, statistics: "LayerStatistics | None", span: int, frequencies_F: Tensor
) -> LayerMetric:
    """Return the metric of errors at queries as they are projected, before any norm.

    It comes from statistics, or from the weights, in float64, alone.
    """
    if statistics is not None:
        return from_statistics(statistics)
    metric = weights_only(linearised(attention, None), span)
    gain_NH, _ = gains(attention, None)
    met_NHH = _met(metric.query_NHH, frequencies_F, metric.distance_NT)
    return replace(metric, query_NHH=gain_NH[:, :, None] * met_NHH * gain_NH[:, None, :])


def _met(moment_NHH: Tensor, frequencies_F: Tensor, distance_NT: Tensor) -> Tensor:
    """Return E_Δ[R(Δ) M R(Δ)ᵀ]: the moment of keys as queries at all distances meet them.

    Rows are in the half layout.
    """
    angle_FT = frequencies_F[:, None] * torch.arange(distance_NT.shape[1], dtype=torch.float64)
    turn_FT = torch.polar(torch.ones_like(angle_FT), -angle_FT)
    order_H = torch.arange(moment_NHH.shape[1]).view(2, -1).mT.flatten()  # pairs side by side
    back_H = order_H.argsort()
    met = []
    for moment_HH, weight_T in zip(moment_NHH, distance_NT.to(turn_FT.dtype), strict=True):
        weighted_FT = turn_FT * weight_T
        rows_HH = turned(moment_HH[order_H][:, order_H], weighted_FT @ turn_FT.mH, weighted_FT @ turn_FT.mT)
        met.append(rows_HH[back_H][:, back_H])
    return torch.stack(met)


def planned_losses(
    source: "Source", target: Target, statistics: "Statistics | None", losses: tuple[dict[str, float], ...]
) -> tuple[dict[str, float], ...]:
    """Return the predicted losses of all layers, including that of the queries where they are compressed.

    `losses` are those of keys and values; empty where they are not predicted.
    """
    if statistics is None or not isinstance(target, LatentTarget) or target.q_lora_rank is None:
        return losses
    kept = {"slots": 0.0, "latent": 0.0} if target.slots == "source" else {}
    found = []
    for number, (layer, taken) in enumerate(zip(source.attending, statistics.layers, strict=True)):
        lost = lost_by_queries(source.attention(layer), from_statistics(taken), target.q_lora_rank)
        found.append({**(losses[number] if losses else kept), "queries": lost})
    return tuple(found)


def query_parameters(target: Target, writes: "Mapping[str, TensorSpec]") -> tuple[int, int] | None:
    """Return the number of weights that make a layer's queries, in one matrix and as they are written.

    `writes` are the layer's output tensors. The result is None where queries are not compressed.
    """
    if not isinstance(target, LatentTarget) or target.q_lora_rank is None:
        return None
    down, up = (
        spec.shape
        for part in "ab"
        for name, spec in writes.items()
        if name.endswith(f".q_{part}_proj.weight")
    )
    return up[0] * down[1], down[0] * down[1] + up[0] * up[1]


def query_notices(target: Target, writes: "Mapping[str, TensorSpec]") -> list[str]:
    """Return a notice where compressed queries have more weights than uncompressed ones."""
    direct, made = query_parameters(target, writes) or (1, 0)
    if made < direct:
        return []
    assert isinstance(target, LatentTarget)
    return [
        f"queries of q_lora_rank {target.q_lora_rank} take {made:,} weights a layer, and {direct:,} "
        f"without: this saves nothing"
    ]


def _costs(metric: LayerMetric) -> Tensor:
    """Return G at the queries, made non-singular everywhere."""
    mean = metric.query_NHH.diagonal(dim1=1, dim2=2).mean()
    ridge_HH = _RIDGE * mean * torch.eye(metric.query_NHH.shape[-1], dtype=mean.dtype)
    costs_NHH: Tensor = metric.query_NHH + ridge_HH
    return costs_NHH
