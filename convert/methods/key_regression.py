"""Key norms in a class that has none: normed queries and keys as linear functions of the layer's input.

This is the best linear function in the mean square on a sample. It loses what no linear function of the input
can say, the length that the norm takes away, so a layer is never folded like this unless an engine takes
nothing else. Refinement then fits the fold to the source's layer, norms included.

Legend: attention.py; I heads.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..algebra.attention import Attention
from ..algebra.forward import concatenate, keys_and_values
from ..algebra.metric import LayerMetric
from ..calibration.layer_metric import SHRINKAGE, of_keys
from ..calibration.statistics import LayerStatistics
from ..families.source import Source
from .intact import behind_norms, encoded, linearised
from .layer_sample import sample_of
from .refinement import BATCH, LayerSample, fitting_device

NO_FULL_RANK = (
    "--rank full keeps everything, but the stock class has no norms of queries and keys; use --container "
    "remote, or choose a rank"
)


def regressed(
    source: Source, number: int, attention: Attention, table_F: Tensor, taken: LayerStatistics
) -> tuple[Attention, LayerMetric]:
    """Return a layer with key norms as attention without norms, and its metric.

    The other arguments are its weights, float64, its frequencies and its statistics.
    """
    metric = of_keys(taken, attention)
    sample = sample_of(source, taken, number, attention, table_F)
    if sample is None:
        return linearised(attention, metric.input_EE), behind_norms(metric, attention)
    seen = encoded(attention, table_F, sample)
    metric = replace(metric, key_BSS=seen.key_BSS, value_BSS=seen.value_BSS)
    return without_norms(attention, sample), metric


def without_norms(attention: Attention, sample: LayerSample) -> Attention:
    """Return attention whose queries and keys are the best linear functions of the input on a sample.

    Args:
        attention: the source's weights, with norms of queries and keys, float64.
        sample: of its inputs; sequences that are held back take no part.
    """
    # In the place of keys, queries are computed as keys are.
    queries = replace(attention, k_KHD=attention.q_NHD, k_KH=attention.q_NH, k_norm_KH=attention.q_norm_NH)
    device, hidden = fitting_device(), attention.q_NHD.shape[-1]
    layers = [layer.to(torch.float32, device) for layer in (queries, attention)]
    widths = [layer.k_KHD.shape[0] * layer.k_KHD.shape[1] for layer in layers]
    moment_DD = torch.zeros(hidden, hidden, dtype=torch.float64)
    seen = [torch.zeros(width, hidden, dtype=torch.float64) for width in widths]
    for part in sample.used.split(BATCH):
        input_BTD = sample.input_BTD[part].to(device, torch.float32)
        input_XD = input_BTD.flatten(0, 1)
        moment_DD += (input_XD.mT @ input_XD).to("cpu", torch.float64)
        for total_ED, layer in zip(seen, layers, strict=True):
            k_BITH, _ = keys_and_values(layer, input_BTD, sample.scoring.norm_epsilon)
            rows_XE = concatenate(k_BITH).flatten(0, 1)
            total_ED += (rows_XE.mT @ input_XD).to("cpu", torch.float64)
    moment_DD.diagonal().add_(SHRINKAGE * moment_DD.diagonal().mean())
    q_NHD, k_KHD = (
        torch.linalg.solve(moment_DD, total_ED.mT).mT.view_as(layer.k_KHD)
        for total_ED, layer in zip(seen, (queries, attention), strict=True)
    )
    return replace(
        attention,
        q_NHD=q_NHD,
        k_KHD=k_KHD,
        q_NH=None if attention.q_NH is None else torch.zeros_like(attention.q_NH),
        k_KH=None if attention.k_KH is None else torch.zeros_like(attention.k_KH),
        q_norm_NH=None,
        k_norm_KH=None,
    )
