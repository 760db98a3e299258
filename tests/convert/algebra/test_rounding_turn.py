"""A rotation of the latent changes nothing but what rounding costs."""

import pytest
import torch
from torch import Tensor

from kvfold.convert.algebra.rounding_turn import least_rounded, turn

from ...support.layers import drawn


def cost(turn_CC: Tensor, first_CC: Tensor, second_CC: Tensor) -> float:
    turned = [(turn_CC @ matrix_CC @ turn_CC.mT).diagonal() for matrix_CC in (first_CC, second_CC)]
    return float((turned[0] * turned[1]).sum())


def rounded(rows: Tensor) -> Tensor:
    """Rounded to 15 steps of each row."""
    step = rows.abs().amax(-1, keepdim=True) / 7
    return (rows / step).round() * step


@pytest.mark.parametrize("width", [2, 7, 16])
def test_no_small_rotation_is_better(width: int) -> None:
    rows_CC, others_CC = drawn(width, width, seed=1), drawn(width, width, seed=2)
    first_CC, second_CC = rows_CC @ rows_CC.mT, others_CC @ others_CC.mT
    turn_CC = turn(first_CC, second_CC, sweeps=12)
    torch.testing.assert_close(turn_CC @ turn_CC.mT, torch.eye(width, dtype=torch.float64))
    least = cost(turn_CC, first_CC, second_CC)
    assert least < cost(torch.eye(width, dtype=torch.float64), first_CC, second_CC)
    for seed in range(20):
        skew_CC = 1e-2 * drawn(width, width, seed=3 + seed)
        nearby_CC = torch.matrix_exp(skew_CC - skew_CC.mT) @ turn_CC
        assert cost(nearby_CC, first_CC, second_CC) > least * (1 - 1e-6)


def test_rounded_weights_err_less() -> None:
    """With a latent whose large coordinates are read by large columns."""
    size_C = torch.logspace(0, -2, 12, dtype=torch.float64)
    down_CD = size_C[:, None] * drawn(12, 24)
    up_UC = drawn(40, 12, seed=1) * size_C
    input_BTD = drawn(2, 50, 24, seed=2)
    turn_CC = least_rounded(input_BTD, down_CD, up_UC)

    def error(down_CD: Tensor, up_UC: Tensor) -> float:
        made_UD = rounded(up_UC) @ rounded(down_CD)
        return float(((made_UD - up_UC @ down_CD) @ input_BTD[0].mT).square().mean())

    wanted_UD = up_UC @ down_CD
    torch.testing.assert_close((up_UC @ turn_CC.mT) @ (turn_CC @ down_CD), wanted_UD)
    assert error(turn_CC @ down_CD, up_UC @ turn_CC.mT) < error(down_CD, up_UC) / 1.5
