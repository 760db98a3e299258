"""Attention distances beyond the calibration text."""

import pytest
import torch
from torch import Tensor

from kvfold.convert.algebra.distances import extended


def spread(power_N: Tensor, length: int) -> Tensor:
    """Attention whose mass per pair of positions falls with a power of the distance."""
    far_T = torch.arange(length, dtype=torch.float64)
    mass_NT = (far_T + 1) ** -power_N[:, None] * (length - far_T)
    return mass_NT / mass_NT.sum(1, keepdim=True)


POWER_N = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize("length", [16, 64, 500])
@pytest.mark.parametrize("times", [0.5, 1, 2, 8])
def test_a_power_law_is_found_again(length: int, times: float) -> None:
    span = int(length * times)
    found_NU = extended(spread(POWER_N, length), span)
    torch.testing.assert_close(found_NU.sum(1), torch.ones(4, dtype=torch.float64))
    # A mean of a span stands for its middle, so short texts leave some error in the power.
    torch.testing.assert_close(found_NU, spread(POWER_N, span), atol=0.02, rtol=0.1 if length < 64 else 0.05)


def test_the_same_length_changes_nothing() -> None:
    near_NT = spread(POWER_N, 32)
    assert extended(near_NT, 32) is near_NT


def test_what_no_text_shows_stays_without_mass() -> None:
    """A window shorter than the text, or a head that reads its own position alone, has no tail."""
    near_NT = torch.zeros(2, 64, dtype=torch.float64)
    near_NT[0, 0] = 1
    near_NT[1, :8] = 1 / 8
    found_NU = extended(near_NT, 256)
    assert float(found_NU[:, 8:].sum()) == 0
    torch.testing.assert_close(found_NU.sum(1), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_the_shortest_texts_take_the_power_of_the_prior(length: int) -> None:
    found_NU = extended(spread(POWER_N, length), 40)
    assert found_NU.shape == (4, 40)
    assert bool((found_NU > 0).all())
    torch.testing.assert_close(found_NU.sum(1), torch.ones(4, dtype=torch.float64))
