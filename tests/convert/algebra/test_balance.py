"""Coordinates in which numbers are as large as errors in them cost."""

import torch

from kvfold.convert.algebra.balance import balanced, cosine


def test_balanced_numbers_cost_as_much_as_they_are_large() -> None:
    random = torch.Generator().manual_seed(0)
    roots = torch.randn(2, 6, 6, generator=random, dtype=torch.float64)
    value_WW, cost_WW = roots @ roots.mT
    basis_WW = balanced(value_WW, cost_WW)
    back_WW = torch.linalg.inv(basis_WW)
    spread_WW = basis_WW @ value_WW @ basis_WW.mT
    torch.testing.assert_close(spread_WW, back_WW.mT @ cost_WW @ back_WW, atol=1e-5, rtol=1e-5)
    for other_WW in (torch.eye(6, dtype=torch.float64), cosine(6), roots[0]):
        other = (other_WW @ value_WW @ other_WW.mT).trace()
        other_back_WW = torch.linalg.inv(other_WW)
        assert spread_WW.trace() ** 2 < other * (other_back_WW.mT @ cost_WW @ other_back_WW).trace()
