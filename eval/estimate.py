"""Means over windows with standard errors and 95 % intervals.

Windows are taken as independent, not tokens, since the losses of neighbouring tokens are correlated.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoints.quality_blocks import Estimate

LEVEL = 0.95
RESAMPLES = 400  # of the bootstrap; the standard error is then known to 4 %

Array = npt.NDArray[Any]


def estimate(values: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """Return the mean of one value per window, with Student's interval.

    Args:
        values: one per window, e.g. the mean loss of its tokens.
        weights: the weight of each value, e.g. its number of tokens; None: equal weights. The standard error
            is that of a ratio of two sums over windows (Cochran, Sampling Techniques, 6.3); for equal weights
            it is s / sqrt(N).
    """
    value_N = np.asarray(values, np.float64)
    weight_N = np.ones_like(value_N) if weights is None else np.asarray(weights, np.float64)
    weight_N = weight_N / weight_N.sum()
    # The first value is subtracted, so that equal values have exactly their own mean and no error.
    shift = value_N[0]
    mean = float(shift + weight_N @ (value_N - shift))
    windows = len(value_N)
    if windows < 2:
        return Estimate(mean, None)
    # Here, since importing it takes half a second in every process that might evaluate.
    from scipy import stats  # type: ignore[import-untyped]

    error = math.sqrt(windows / (windows - 1)) * float(np.linalg.norm(weight_N * (value_N - mean)))
    margin = float(stats.t.ppf((1 + LEVEL) / 2, windows - 1)) * error
    return Estimate(mean, error, mean - margin, mean + margin)


def paired_difference(
    ours: Sequence[float], theirs: Sequence[float], weights: Sequence[float] | None = None
) -> Estimate:
    """Return the mean of `ours` - `theirs` on the same windows.

    The windows' own difficulty cancels in its standard error.
    """
    return estimate([our - their for our, their in zip(ours, theirs, strict=True)], weights)


def transformed(value: Estimate, function: Callable[[float], float], slope: float) -> Estimate:
    """Return an increasing function of an estimate by the delta method.

    Args:
        value: the estimate.
        function: the function.
        slope: its derivative at the mean.
    """
    if value.standard_error is None or value.low is None or value.high is None:
        return Estimate(function(value.mean), None)
    return Estimate(
        function(value.mean), slope * value.standard_error, function(value.low), function(value.high)
    )


def resampled(statistic: Callable[[Array], Array], windows: int) -> list[Estimate]:
    """Return statistics that are not means, with the percentile bootstrap over windows.

    Every call with the same statistic returns the same bits.

    Args:
        statistic: maps the number of times that each window counts (R, N), for R resamples at once, to the
            numbers (K, R).
        windows: N.
    """
    found = statistic(np.ones((1, windows), np.int64))[:, 0]
    if windows < 2:
        return [Estimate(float(value), None) for value in found]

    def of_indices(index_RN: Array, axis: int) -> Array:
        counts = np.zeros(index_RN.shape, np.int64)
        np.add.at(counts, (np.arange(len(index_RN))[:, None], index_RN), 1)
        return statistic(counts)

    from scipy import stats

    with np.errstate(invalid="ignore", divide="ignore"):
        again = stats.bootstrap(
            (np.arange(windows),),
            of_indices,
            n_resamples=RESAMPLES,
            batch=RESAMPLES,
            vectorized=True,
            confidence_level=LEVEL,
            method="percentile",
            rng=np.random.default_rng(0),
        )
    bounds = zip(found, again.standard_error, *again.confidence_interval, strict=True)
    # A number that is undefined in some resamples, such as a correlation with a constant, has no error.
    return [
        Estimate(*map(float, four)) if np.isfinite(four).all() else Estimate(float(four[0]), None)
        for four in bounds
    ]
