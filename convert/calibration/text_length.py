"""Statistics for texts of another length than those that they were taken on."""

from dataclasses import replace

import torch

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
        context: tokens of a text. Distances are extrapolated up to `SPAN`, and in layers with a window up to
            that. None: texts from the length of the calibration text on, each twice as long as the one
            before, up to the source's positions, or those before its own text breaks down. A fold for the
            longest alone loses more in all others than it gains there (docs/notes/slots.md).

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
        if layer.distance_NT.shape[1] == span:
            return layer
        lengths = [span] if context is not None else _doubling(length, span)
        share_N1 = layer.first_NT.sum(1, keepdim=True)
        first_NT = share_N1 * torch.stack([(torch.arange(span) < n) / n for n in lengths]).mean(0)
        distance_NT = extended(layer.distance_NT, lengths, layer.first_NT)
        return replace(layer, distance_NT=distance_NT, first_NT=first_NT)

    return replace(statistics, layers=tuple(map(at, source.attending, statistics.layers)))


def _doubling(length: int, longest: int) -> list[int]:
    """Return lengths of texts from one to another, each but the last twice the one before.

    Example:
        >>> _doubling(512, 4096), _doubling(512, 600), _doubling(512, 256)
        ([512, 1024, 2048, 4096], [512, 600], [256])
    """
    lengths = []
    while length < longest:
        lengths.append(length)
        length *= 2
    return [*lengths, longest]


def context_notice(source: Source, context: int, length: int) -> str | None:
    """Return a sentence where not all distances of `context` tokens count; else None.

    `length` is that of the calibration text.
    """
    spans = [min(SPAN, source.window(number) or SPAN) for number in source.attending]
    farthest = max(length, *spans)
    if context <= farthest:
        return None
    reason = "no layer reads farther" if farthest < SPAN else "farther distances are not extrapolated"
    return f"--context {context} counts as {farthest}: {reason}"
