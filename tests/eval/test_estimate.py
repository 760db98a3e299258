"""Standard errors and intervals are those of scipy and of the formulas; equal values have no error at all."""

import math

import numpy as np
import pytest
from scipy import stats

from kvfold.eval.estimate import Array, estimate, paired_difference, resampled, transformed


def test_a_mean_has_the_error_and_the_interval_of_students_t() -> None:
    values = [1.0, 2.0, 4.0, 5.0]
    found = estimate(values)
    interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.mean, found.standard_error) == (3.0, pytest.approx(np.std(values, ddof=1) / 2))
    assert (found.low, found.high) == pytest.approx(tuple(interval))
    assert estimate([1.0]).standard_error is None


def test_a_mean_of_unlike_windows_has_the_error_of_a_quotient() -> None:
    values, weights = np.array([1.0, 2.0, 4.0, 5.0, 2.5]), np.array([10.0, 1.0, 3.0, 5.0, 20.0])
    found = estimate(values.tolist(), weights.tolist())
    mean = (values * weights).sum() / weights.sum()
    residuals = values * weights - mean * weights
    error = math.sqrt(5 / 4 * (residuals**2).sum()) / weights.sum()
    assert (found.mean, found.standard_error) == (pytest.approx(mean), pytest.approx(error))
    assert estimate(values.tolist(), [3.0] * 5).standard_error == pytest.approx(
        estimate(values.tolist()).standard_error
    )


def test_a_constant_difference_has_no_error_however_the_windows_vary() -> None:
    difference = paired_difference([1.5, 2.5, 9.5], [1.0, 2.0, 9.0], [3, 1, 7])
    assert (difference.mean, difference.standard_error) == (0.5, 0.0)
    assert estimate([0.1] * 7).mean == 0.1


def test_a_function_of_an_estimate_follows_its_slope() -> None:
    found = transformed(estimate([1.0, 2.0, 4.0]), lambda value: 3 * value + 1, 3.0)
    assert (found.mean, found.standard_error) == (
        pytest.approx(8),
        pytest.approx(3 * np.std([1, 2, 4], ddof=1) / math.sqrt(3)),
    )
    assert transformed(estimate([1.0]), math.exp, math.e).standard_error is None


def test_resampling_a_mean_agrees_with_its_formula_and_repeats_itself() -> None:
    values = np.random.default_rng(1).normal(size=(40, 2))

    def means(count_RN: Array) -> Array:
        found: Array = (count_RN @ values / 40).T
        return found

    found = resampled(means, 40)
    assert found == resampled(means, 40)
    for column, value in enumerate(found):
        expected = estimate(values[:, column].tolist())
        assert value.mean == pytest.approx(expected.mean)
        assert value.standard_error == pytest.approx(expected.standard_error, rel=0.15)
        assert value.low is not None
        assert value.high is not None
        assert value.low < value.mean < value.high


def test_what_is_undefined_in_some_draws_has_no_error() -> None:
    def quotient(count_RN: Array) -> Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            return (count_RN[:, 0] / count_RN[:, 1])[None]

    (found,) = resampled(quotient, 2)
    assert (found.mean, found.standard_error) == (1.0, None)
