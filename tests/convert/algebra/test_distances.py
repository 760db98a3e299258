"""Attention distances beyond the calibration text."""

import pytest
import torch
from torch import Tensor

from kvfold.convert.algebra.distances import extended


def spread(power_N: Tensor, *lengths: int, first: float = 0.0) -> Tensor:
    """Attention to keys whose weight falls with a power of the distance, and to the first key in any case."""
    far_U = torch.arange(max(lengths), dtype=torch.float64)
    weight_NU = (far_U + 1) ** -power_N[:, None]
    found_NU = torch.zeros_like(weight_NU)
    for length in lengths:
        for query in range(length):
            mass_NU = torch.where(far_U <= query, weight_NU, 0)
            found_NU += (1 - first) * mass_NU / mass_NU.sum(1, keepdim=True) / length / len(lengths)
        found_NU[:, :length] += first / length / len(lengths)
    return found_NU


POWER_N = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64)


def none(length: int) -> Tensor:
    """The part at the first key, where there is none."""
    return torch.zeros(len(POWER_N), length, dtype=torch.float64)


@pytest.mark.parametrize("length", [16, 64, 200])
@pytest.mark.parametrize("times", [0.5, 1, 2, 8])
def test_a_power_law_is_found_again(length: int, times: float) -> None:
    span = int(length * times)
    found_NU = extended(spread(POWER_N, length), [span], none(length))
    torch.testing.assert_close(found_NU.sum(1), torch.ones(4, dtype=torch.float64))
    # A mean of a span stands for its middle, so short texts leave some error in the power.
    expected_NU = spread(POWER_N, span)
    torch.testing.assert_close(found_NU, expected_NU, atol=0.02, rtol=0.1 if length < 64 else 0.05)
    near_N, far_N = (rows_NU @ torch.arange(span, dtype=torch.float64) for rows_NU in (found_NU, expected_NU))
    torch.testing.assert_close(near_N, far_N, rtol=0.15, atol=0.1)


def test_attention_to_the_first_key_stays_what_it_is() -> None:
    """It would seem to be attention that does not fall with distance."""
    near_NT, far_NU = spread(POWER_N, 64, first=0.4), spread(POWER_N, 1024, first=0.4)
    first_NT = torch.full_like(near_NT, 0.4 / 64)
    apart_NU, together_NU = (extended(near_NT, [1024], part_NT) for part_NT in (first_NT, none(64)))
    torch.testing.assert_close(apart_NU, far_NU, atol=0.01, rtol=0.1)
    off, off_together = ((rows_NU - far_NU).abs().sum(1) for rows_NU in (apart_NU, together_NU))
    assert bool((off < 0.1).all())
    assert bool((off_together[2:] > 0.3).all())


def test_texts_of_several_lengths_count_alike() -> None:
    near_NT = spread(POWER_N, 64)
    torch.testing.assert_close(
        extended(near_NT, [64, 128, 200], none(64)), spread(POWER_N, 64, 128, 200), atol=0.01, rtol=0.1
    )


def test_what_no_text_shows_stays_without_mass() -> None:
    """A window shorter than the text, or a head that reads its own position alone, has no tail."""
    near_NT = torch.zeros(2, 64, dtype=torch.float64)
    near_NT[0, 0] = 1
    near_NT[1, :8] = 1 / 8
    found_NU = extended(near_NT, [256], torch.zeros_like(near_NT))
    assert float(found_NU[:, 8:].sum()) == 0
    torch.testing.assert_close(found_NU.sum(1), torch.ones(2, dtype=torch.float64))


def test_a_head_that_reads_the_first_key_alone_reads_it_in_longer_texts() -> None:
    first_NT = torch.full((1, 16), 1 / 16, dtype=torch.float64)
    found_NU = extended(first_NT, [64], first_NT)
    torch.testing.assert_close(found_NU, torch.full((1, 64), 1 / 64, dtype=torch.float64))


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_the_shortest_texts_take_the_power_of_the_prior(length: int) -> None:
    found_NU = extended(spread(POWER_N, length), [40], none(length))
    assert found_NU.shape == (4, 40)
    assert bool((found_NU > 0).all())
    torch.testing.assert_close(found_NU.sum(1), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("least", [0.0, 1e-300, 1e-45])
def test_a_head_that_reads_nothing_near_gets_finite_distances(least: float) -> None:
    """No weights give such a mass: the first query reads nothing but itself."""
    for near in (1, 2, 5, 15):
        near_NT = torch.full((2, 16), 1 / 16, dtype=torch.float64)
        near_NT[0, :near] = least
        near_NT[1, near - 1] = least
        found_NU = extended(near_NT / near_NT.sum(1, keepdim=True), [16, 64], torch.zeros_like(near_NT))
        assert bool(found_NU.isfinite().all())
        assert bool((found_NU >= 0).all())
