"""Standard errors and intervals are those of scipy and of the formulas; equal values have no error at all."""

import math

import numpy as np
import pytest
from scipy import stats

from kvfold.eval.estimate import (
    LEAST_WINDOWS,
    LEVEL,
    Array,
    estimate,
    paired_difference,
    proportion,
    proportion_difference,
    resampled,
    transformed,
)


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


def test_a_proportion_has_the_interval_of_wilson() -> None:
    for right in (0, 1, 49, 50):
        found = proportion([1.0] * right + [0.0] * (50 - right))
        wilson = stats.binomtest(right, 50).proportion_ci(LEVEL, method="wilson")
        assert found.mean == right / 50
        assert (found.low, found.high) == pytest.approx((wilson.low, wilson.high))
        assert found.standard_error == pytest.approx((wilson.high - wilson.low) / 2 / stats.norm.ppf(0.975))
    assert proportion([0.5, 1.0]).mean == 0.75


def test_a_difference_of_proportions_has_the_interval_of_agresti_and_min() -> None:
    ours, theirs = [1.0] * 3 + [0.0] * 7, [1.0] * 9 + [0.0]
    found = proportion_difference(ours, theirs)
    lost, won, count = 6.5, 0.5, 12  # by the paper's formula: half a pair is added to each of four cells
    error = math.sqrt((lost + won) - (won - lost) ** 2 / count) / count
    assert (found.mean, found.standard_error) == (pytest.approx(-0.6), pytest.approx(error))
    margin = float(stats.norm.ppf(0.975)) * error
    assert (found.low, found.high) == pytest.approx((-0.5 - margin, -0.5 + margin))
    same = proportion_difference(ours, ours)
    assert same.low is not None
    assert same.high is not None
    assert same.low < same.mean == 0 < same.high


@pytest.mark.parametrize("probability", [0.9, 0.98, 0.99])
def test_intervals_of_proportions_hold_the_truth_near_one(probability: float) -> None:
    """Those by Student's t hold 0.98 in 64 % of all samples of 50."""
    draw = np.random.default_rng(0)
    found = [proportion((draw.random(50) < probability).astype(float).tolist()) for _ in range(500)]
    held = [one.low <= probability <= one.high for one in found if one.low and one.high]
    assert len(held) == 500
    assert np.mean(held) > 0.88


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

    (found,) = resampled(quotient, LEAST_WINDOWS)
    assert (found.mean, found.standard_error) == (1.0, None)


def test_few_windows_are_not_resampled() -> None:
    def first(count_RN: Array) -> Array:
        return count_RN[:, :1].T.astype(float)

    assert resampled(first, LEAST_WINDOWS - 1)[0].low is None
    assert resampled(first, LEAST_WINDOWS)[0].low is not None
