"""Key norms: a latent of features.

A norm makes a key a non-linear function of the layer's input x. But keys and values are linear functions of
the features f = [norm(k); v] of their token. With f in the place of x, slots, latent and absorption are those
of a layer without norms (latent.py). The cost is that k and v of a new token are projected in full, as in the
source.

Legend: attention.py.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..algebra.attention import Attention, LatentAttention, NormedLatentAttention
from ..algebra.metric import LayerMetric
from ..algebra.subspaces import low_rank_energy
from ..calibration.statistics import LayerStatistics
from ..families.source import Source
from .intact import RIDGE, Encoded, encoded, linearised, metric_behind_norms
from .latent import behind_values, output_bias
from .layer_sample import sample_of


def in_features(attention: Attention) -> Attention:
    """Return attention whose keys and values are functions of features, and whose queries are normed ones.

    The value bias is moved to the output, which it shifts by a constant.
    """
    heads, width = attention.k_KHD.shape[:2]
    k_KHE, v_KHE = torch.eye(2 * heads * width, dtype=attention.k_KHD.dtype).unflatten(0, (2, heads, width))
    return Attention(
        q_NHD=torch.eye(width, dtype=k_KHE.dtype).expand(len(attention.q_NHD), -1, -1),
        k_KHD=k_KHE,
        v_KHD=v_KHE,
        **behind_values(attention),
    )


def with_features(latent: LatentAttention, attention: Attention) -> NormedLatentAttention:
    """Return a fold of `in_features(attention)` with the projections and norms that make its features."""
    return NormedLatentAttention(
        **vars(latent),
        q_NHA=attention.q_NHD,
        **{name: getattr(attention, name) for name in ("k_KHD", "v_KHD", "q_NH", "k_KH")},
        q_norm_NH=attention.q_norm_NH,
        k_norm_KH=attention.k_norm_KH,
        centred=attention.centred,
    )


def feature_metric(
    attention: Attention, statistics: LayerStatistics | None, span: int, seen: Encoded | None
) -> LayerMetric:
    """Return the metric of a layer whose input is its features.

    Args:
        attention: the source's weights, with key norms and without a value bias, float64.
        statistics: of the layer; None: the metric comes from the weights alone.
        span: max_position_embeddings.
        seen: features on a sample; where there is none, norms count as the linear maps that they are on
            average.
    """
    metric = metric_behind_norms(attention, statistics, span, seen)
    if seen is None:
        plain = linearised(attention, metric.input_EE)
        rows_ED = torch.cat([plain.k_KHD, plain.v_KHD]).flatten(0, 1)
        moved_ED = rows_ED if metric.input_EE is None else rows_ED @ metric.input_EE[:-1, :-1]
        moment_EE = moved_ED @ rows_ED.mT
    else:
        moment_EE = seen.moment_EE
    ridge_EE = RIDGE * moment_EE.diagonal().mean() * torch.eye(len(moment_EE), dtype=moment_EE.dtype)
    return replace(metric, input_EE=pad(moment_EE + ridge_EE, (0, 1, 0, 1)))


def features_of(
    source: Source, number: int, attention: Attention, table_F: Tensor, taken: LayerStatistics | None
) -> tuple[Attention, LayerMetric]:
    """Return a layer with key norms as attention over its features, and its metric.

    The other arguments are its weights, float64, its frequencies and its statistics.
    """
    unbiased = replace(attention, v_KH=None, o_D=output_bias(attention))
    sample = sample_of(source, taken, number, attention, table_F)
    seen = None if sample is None else encoded(unbiased, table_F, sample)
    return in_features(attention), feature_metric(unbiased, taken, source.positions, seen)


def lost_intact(attention: Attention, metric: LayerMetric, rank: int) -> float:
    """Return the predicted loss of a layer whose latent of this rank has all of its keys, nats per token.

    The layer rotates nothing, or is one of features (`features_of`) whose rotation is left intact.
    """
    energy = low_rank_energy(
        torch.cat([attention.k_KHD, attention.v_KHD]).flatten(0, 1),
        torch.cat([metric.key_BSS, metric.value_BSS]),
        metric.moment(attention.k_KHD),
    )
    return float(energy[rank:].sum()) / 2
