"""The metric of a layer from its statistics: what errors of keys and values cost on calibration text.

Legend: ../algebra/metric.py; X tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..algebra.attention import Attention
from ..algebra.metric import LayerMetric, weights_only
from .statistics import LayerStatistics

# Of the input's moment towards its diagonal; from 1e-6 to 1e-2 nothing else changes (docs/notes/metric.md).
SHRINKAGE = 1e-3

# Cost of errors at first tokens, relative to all others', above which they are attention sinks: 0.3 and less
# in layers without one, 0.6 to 10 in those with one, in four models (docs/notes/metric.md).
# Without one nothing is gained.
SINK = 0.5


def metric_of(layer: LayerStatistics | None, attention: Attention, span: int) -> LayerMetric:
    """Return the metric of a layer's keys and values, from statistics if there are any, or weights alone."""
    return weights_only(attention, span) if layer is None else of_keys(layer, attention)


def of_keys(layer: LayerStatistics, attention: Attention) -> LayerMetric:
    """Return the metric of a layer's keys and values, where the first token counts as what it is.

    K-FAC takes gradients and inputs as independent. An attention sink is the opposite: one token, whose input
    is the same in every text, has up to 98 % of the gradient at the values of a layer and 0.05 % of its
    inputs' energy. Then errors of all tokens are weighed by the gradient at one. So the gradient is that of
    all other tokens, and the first token's input counts as often as its own error would cost as much.

    Args:
        layer: the statistics; without a sink, the result is `from_statistics`.
        attention: the source's weights, float64.
    """
    plain = from_statistics(layer)
    assert plain.input_EE is not None
    first = layer.first_key_fisher, layer.first_value_fisher
    rest = layer.key_fisher - first[0], layer.value_fisher - first[1]
    rows_CD = attention.k_KHD.flatten(0, 1), attention.v_KHD.flatten(0, 1)
    energies = [rows @ layer.input_EE[:-1, :-1] @ rows.mT for rows in rows_CD]
    length = layer.input_BTD.shape[1]
    factor = first_token_factor(first, rest, energies, length)
    if factor is None:
        return plain
    first_XE = pad(layer.input_BTD[:, 0].to(torch.float64), (0, 1), value=1)
    first_EE = first_XE.mT @ first_XE / (len(first_XE) * length)
    return replace(
        plain,
        input_EE=plain.input_EE + (factor - 1) * first_EE,
        key_BSS=rest[0][None],
        value_BSS=rest[1][None],
    )


def first_token_factor(
    first: Sequence[Tensor], rest: Sequence[Tensor], energies: Sequence[Tensor], length: int
) -> float | None:
    """Return how often a first token counts, for its error to cost as much as that of all its gradient.

    Args:
        first: second moments of the gradient at keys and at values, summed over first tokens.
        rest: the same over all others.
        energies: second moments of keys and values themselves.
        length: tokens of a sequence.

    Returns:
        The number; None where the first token is no sink.
    """
    at_first, at_rest = (
        sum(float((moment * energy).sum()) for moment, energy in zip(part, energies, strict=True))
        for part in (first, rest)
    )
    return length * at_first / at_rest if 0 < SINK * at_rest < at_first else None


def from_statistics(layer: LayerStatistics) -> LayerMetric:
    """Return the metric of a layer with statistics, in nats but for the factor ½ that all terms share.

    All tokens are alike in it, as they are to queries; for keys and values see `of_keys`.
    """
    input_EE = layer.input_EE.clone()
    # Directions that the calibration text never took are not free: other text takes them.
    # Each channel by its own size, which a norm's weight may have made anything; silent ones by a usual one.
    size_D = input_EE.diagonal()[:-1]
    usual = size_D[size_D > 0].log().mean().exp()
    size_D += SHRINKAGE * torch.where(size_D > 0, size_D, usual)
    return LayerMetric(
        input_EE=input_EE,
        key_BSS=layer.key_fisher[None],
        value_BSS=layer.value_fisher[None],
        query_NHH=layer.query_fisher,
        distance_NT=layer.distance_NT,
    )
