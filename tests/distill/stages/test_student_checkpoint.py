"""Rounding of trained weights: exact numbers stay, and the mean of small changes survives."""

import pytest
import torch

from kvfold.distill.stages import student_checkpoint
from kvfold.distill.stages.student_checkpoint import round_fairly

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def grid(dtype: torch.dtype) -> torch.Tensor:
    """Return finite numbers of a dtype from its whole range."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    return numbers[numbers.isfinite()]


@HALVES
def test_numbers_of_the_dtype_stay(dtype: torch.dtype) -> None:
    assert torch.equal(round_fairly(grid(dtype).float(), dtype, "a"), grid(dtype))
    scaled_back = grid(dtype).float() * 0.3 / 0.3
    assert not torch.equal(scaled_back, grid(dtype).float())
    assert torch.equal(round_fairly(scaled_back, dtype, "a"), grid(dtype))


@HALVES
def test_a_number_becomes_one_of_the_two_next_to_it(dtype: torch.dtype) -> None:
    ordered = grid(dtype).float().unique()
    below, above = ordered[:-1], ordered[1:]
    for share in (0.01, 0.5, 0.99):
        found = round_fairly(torch.lerp(below, above, share), dtype, "a").float()
        assert ((found == below) | (found == above)).all()
        assert abs((found == above).float().mean() - share) < 0.01


@HALVES
@pytest.mark.parametrize("sign", [1, -1])
def test_changes_smaller_than_a_step_survive_in_the_mean(dtype: torch.dtype, sign: int) -> None:
    start = torch.rand(4096, 64, generator=torch.Generator().manual_seed(0)).add(1).to(dtype).float()
    step = torch.finfo(dtype).eps
    trained = sign * (start + 0.1 * step)
    assert torch.equal(trained.to(dtype).float(), sign * start)  # all of it lost
    change = sign * round_fairly(trained, dtype, "a").float().double() - start.double()
    assert float(change.mean()) == pytest.approx(0.1 * step, rel=0.02)


def test_random_numbers_follow_from_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.rand(40, 50, generator=torch.Generator().manual_seed(0))
    found = round_fairly(weight, torch.bfloat16, "a")
    assert torch.equal(found, round_fairly(weight, torch.bfloat16, "a"))
    assert not torch.equal(found, round_fairly(weight, torch.bfloat16, "b"))
    assert found.shape == weight.shape
    monkeypatch.setattr(student_checkpoint, "_AT_ONCE", 16)
    assert ((round_fairly(weight, torch.bfloat16, "a").float() - weight).abs() <= 2.0**-8).all()


def test_other_dtypes_take_the_nearest_and_what_is_too_large_is_infinite() -> None:
    weight = torch.tensor([1 / 3, 1e9])
    assert torch.equal(round_fairly(weight, torch.float32, "a"), weight)
    assert round_fairly(weight, torch.float16, "a")[1].isinf()
    assert round_fairly(torch.tensor([torch.nan]), torch.bfloat16, "a").isnan()
