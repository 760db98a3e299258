"""Statistics for texts of another length than those that they were taken on."""

from dataclasses import replace

from ...core.errors import InvalidInput
from ..algebra.distances import extended
from ..algebra.metric import SPAN
from ..families.source import Source
from .statistics import LayerStatistics, Statistics


def at_context(source: Source, statistics: Statistics | None, context: int | None) -> Statistics | None:
    """Return the statistics with the attention distances of texts of some length.

    Statistics that have them already are returned as they are.

    Args:
        source: the checkpoint that they are of.
        statistics: None where there are none.
        context: tokens of a text; None: the source's positions, or those before its own text breaks down.
            Distances are extrapolated up to `SPAN`, and in layers with a window up to that.

    Raises:
        InvalidInput: the source has fewer positions.
    """
    if context is not None and context > source.positions:
        raise InvalidInput(
            f"--context {context} exceeds the source's max_position_embeddings, {source.positions}; use at "
            f"most that"
        )
    if statistics is None:
        return None
    wanted = context or min(source.positions, statistics.reach or source.positions)

    def at(number: int, layer: LayerStatistics) -> LayerStatistics:
        length = layer.input_BTD.shape[1]
        # A window of the calibration text's length or less leaves distances beyond it without mass.
        span = min(wanted, max(length, min(SPAN, source.window(number) or SPAN)))
        return replace(layer, distance_NT=extended(layer.distance_NT, span))

    return replace(statistics, layers=tuple(map(at, source.attending, statistics.layers)))


def context_notice(source: Source, context: int, length: int) -> str | None:
    """Return a sentence where distances of texts of some length are not all counted; else None.

    Args:
        source: the checkpoint.
        context: the length of the texts that its output is for.
        length: of the calibration text.
    """
    spans = [min(SPAN, source.window(number) or SPAN) for number in source.attending]
    farthest = max(length, *spans)
    if context <= farthest:
        return None
    reason = "no layer reads farther" if farthest < SPAN else "farther distances are not extrapolated"
    return f"--context {context} counts as {farthest}: {reason}"
