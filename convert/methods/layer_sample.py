"""The inputs of a source's layer that a fold of it is measured, refined and fitted on."""

import torch
from torch import Tensor

from ..algebra.attention import Attention
from ..calibration.statistics import LayerStatistics
from ..families.source import Source
from .refinement import LayerSample, agrees

_DRAWN = (8, 512)  # sequences of so many tokens, where a layer's inputs are not known


def drawn_inputs(source: Source, number: int) -> Tensor:
    """Return inputs (B, T, D) of a layer's attention that is folded by weights alone, float32.

    They are as an RMSNorm leaves them: of one length, times its weights. Their directions are random, from
    one seed.

    Args:
        source: one whose layers have the names of Llama's.
        number: of the layer.
    """
    width = source.geometry.hidden_size
    drawn_BTD = torch.randn(*_DRAWN, width, generator=torch.Generator().manual_seed(number))
    drawn_BTD /= drawn_BTD.square().mean(-1, keepdim=True).sqrt()
    norm, block = f"{source.family.prefix}layers.{number}.input_layernorm.weight", source.family.block
    if norm not in source.checkpoint:
        return drawn_BTD
    weight_D = source.checkpoint[norm].to(torch.float32)
    return drawn_BTD * (weight_D if isinstance(block, str) else weight_D + block.norm_shift)


def sample_of(
    source: Source,
    taken: LayerStatistics | None,
    number: int,
    attention: Attention,
    table_F: Tensor,
    rotary_factor: float = 1.0,
) -> LayerSample | None:
    """Return the sample of a layer.

    Args:
        source: the checkpoint.
        taken: statistics of the layer.
        number: of the layer.
        attention: its weights, float64.
        table_F: its angular frequencies.
        rotary_factor: factor on cosines and sines, unless `attention` has it.

    Returns:
        None without statistics, and where this package's forward pass does not compute what the source does.
    """
    if taken is None:
        return None
    sample = LayerSample(
        input_BTD=taken.input_BTD,
        output_BTD=taken.output_BTD,
        fisher_DD=taken.output_fisher,
        scoring=source.scoring(number, rotary_factor),
    )
    return sample if agrees(attention, table_F, sample) else None
