"""Mixes of rotary slots of one frequency: the same scores, and errors shared among the slots."""

import pytest
import torch

from kvfold.convert.algebra.attention import LatentAttention
from kvfold.convert.algebra.forward import attend
from kvfold.convert.storage.cache_basis import fit_basis, in_basis, slot_mix
from kvfold.convert.storage.cache_moments import sampled_moments
from kvfold.core.cache_dtypes import cache_dtype

from ...support.refined_layers import normed, sample

SLOTS_S = torch.tensor([1.0, 0.1, 1.0, 1.0], dtype=torch.float64)


def _turn(angle_S: torch.Tensor) -> torch.Tensor:
    """Return the rotation (R, R) of interleaved slots."""
    turns = zip(angle_S.cos(), angle_S.sin(), strict=True)
    return torch.block_diag(*(torch.tensor([[c, -s], [s, c]]) for c, s in turns)).to(torch.float64)


def test_a_mix_turns_with_the_position() -> None:
    root_PRR = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value_RR, cost_RR = root_PRR @ root_PRR.mT
    mix_RR = slot_mix(value_RR, cost_RR, SLOTS_S)
    for position in (1, 7, 300):
        turn_RR = _turn(position * SLOTS_S)
        torch.testing.assert_close(mix_RR @ turn_RR, turn_RR @ mix_RR)
    assert (mix_RR[2:4, [0, 1, 4, 5, 6, 7]] == 0).all()  # between unlike frequencies


def test_numbers_of_a_frequency_are_as_large_as_errors_in_them_cost_and_all_alike() -> None:
    """One slot of a hundred times the energy of another shares it."""
    energy_R, cost_R = (
        torch.tensor(x, dtype=torch.float64).repeat_interleave(2) for x in ([100.0, 1], [4.0, 1])
    )
    mix_RR = slot_mix(energy_R.diag(), cost_R.diag(), torch.ones(2, dtype=torch.float64))
    back_RR = torch.linalg.inv(mix_RR)
    value_R = (mix_RR @ energy_R.diag() @ mix_RR.mT).diagonal()
    rounded_R = (back_RR.mT @ cost_R.diag() @ back_RR).diagonal()
    torch.testing.assert_close(value_R, rounded_R)
    torch.testing.assert_close(value_R, value_R[:1].expand(4))
    apart = float((energy_R * cost_R).sum())
    # Of two pairs: 2 * (21 / 2)^2 * 2.
    assert float((value_R * rounded_R).sum()) == pytest.approx((20 + 1) ** 2)
    assert float((value_R * rounded_R).sum()) < 0.6 * apart


def test_slots_of_one_frequency_are_written_mixed_and_lose_less() -> None:
    """Of a layer whose first slot is far larger than the second of its frequency."""
    random = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64) / shape[-1] ** 0.5

    found = sample(normed(8, 16))
    width = found.input_BTD.shape[-1]
    size_R = torch.tensor([8.0, 8, 0.5, 0.5], dtype=torch.float64)
    layer = LatentAttention(
        q_nope_NPA=drawn(2, 4, width),
        q_rope_NRA=drawn(2, 4, width),
        down_CD=drawn(6, width),
        k_up_NPC=drawn(2, 4, 6),
        v_up_NHC=drawn(2, 4, 6),
        k_rope_RD=drawn(4, width) * size_R[:, None],
        o_DNH=drawn(width, 2, 4),
        scale=0.5,
    )
    slots_S, dtype = torch.full((2,), 0.3, dtype=torch.float64), cache_dtype("fp8_e4m3")
    moments = sampled_moments(layer, slots_S, found)
    wanted_BTD = attend(layer, found.input_BTD.double(), slots_S)
    lost = []
    for frequencies_S in (slots_S, slots_S * torch.tensor([1.0, 2.0])):  # mixed, and each alone
        written = in_basis(layer, fit_basis(layer, frequencies_S, moments, dtype))
        torch.testing.assert_close(attend(written, found.input_BTD.double(), slots_S), wanted_BTD)
        given_BTD = attend(written, found.input_BTD.double(), slots_S, cache=dtype.stored)
        lost.append(float((given_BTD - wanted_BTD).square().mean()))
    assert lost[0] < 0.8 * lost[1]
