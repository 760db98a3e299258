"""What a model makes of a text: means over windows with standard errors, paired differences, the share recovered.

All of it works on one number a window, the mean negative log likelihood (NLL) of its scored tokens in nats. Windows have
equally many scored tokens, so the mean over windows is the mean over tokens.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A mean over windows.

    Attributes:
        mean: the mean.
        standard_error: s / sqrt(N) over the N windows, taken as independent; None for a single window.
    """

    mean: float
    standard_error: float | None


@dataclass(frozen=True)
class Share:
    """A part of a loss that was won back.

    Attributes:
        value: 1 is all of it, 0 nothing, negative worse than before; None when it is undefined.
        reason: why it is undefined; None when it is not.
    """

    value: float | None
    reason: str | None


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error of one value a window."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(statistics.fmean(values), error)


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Mean of `ours` - `theirs` on the same windows; the windows' own difficulty cancels in its standard error."""
    return estimate([our - their for our, their in zip(ours, theirs, strict=True)])


def recovered_share(student: Sequence[float], teacher: Sequence[float] | None, parent: Sequence[float] | None) -> Share:
    """How much of what a conversion lost its distillation won back: (ln PPL₀ - ln PPL) / (ln PPL₀ - ln PPL_teacher).

    Args:
        student: window NLLs of the distilled checkpoint.
        teacher: of its source, if that was measured.
        parent: of the converted checkpoint it started from (PPL₀), if that was measured.

    Returns:
        The share; undefined when a model is missing or when the conversion's loss is not more than two standard errors of the
        paired difference, where the quotient would be noise.
    """
    if teacher is None or parent is None:
        return Share(None, "no teacher" if teacher is None else "no folded parent")
    lost = paired_difference(parent, teacher)
    if lost.standard_error is None:
        return Share(None, "a single window has no standard error")
    if lost.mean <= 2 * lost.standard_error:
        return Share(None, f"the fold lost {lost.mean:.2g} nats, within noise (2 SE = {2 * lost.standard_error:.2g})")
    return Share((statistics.fmean(parent) - statistics.fmean(student)) / lost.mean, None)
