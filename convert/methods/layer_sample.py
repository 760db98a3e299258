"""The sample of a source's layer that a fold of it is measured and refined on."""

from torch import Tensor

from ..algebra.attention import Attention
from ..calibration.statistics import LayerStatistics
from ..families.source import Source
from .refinement import LayerSample, agrees


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
