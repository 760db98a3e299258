"""The length of a latent with which rounding its projections costs less."""

import dataclasses

import pytest
import torch

from kvfold.convert.algebra.attention import LatentAttention
from kvfold.convert.algebra.forward import attend
from kvfold.convert.methods.latent_norm import in_level_basis
from kvfold.convert.methods.length_form import whitening
from kvfold.convert.methods.refinement import LayerSample
from kvfold.convert.storage.rounded_length import (
    STEPS,
    LatentCosts,
    latent_costs,
    rounded_root,
    rounding_cost,
)

from ...support.layers import drawn

SHARE = 0.01
SLOTS_S = torch.tensor([0.3], dtype=torch.float64)


def levelled(mixed: bool = True) -> tuple[LatentAttention, LayerSample]:
    """A layer whose latent has directions of little energy; `mixed`: each feature has a part of each."""
    width, rank, heads, head = 16, 6, 2, 4
    shapes = {
        "q_nope_NPA": (heads, head, width), "q_rope_NRA": (heads, 2, width), "down_CD": (rank, width),
        "k_up_NPC": (heads, head, rank), "v_up_NHC": (heads, head, rank), "k_rope_RD": (2, width),
        "o_DNH": (width, heads, head),
    }  # fmt: skip
    weights = {name: drawn(*shape, seed=n) / 3 for n, (name, shape) in enumerate(shapes.items())}
    basis_DD = torch.linalg.qr(drawn(width, width, seed=21))[0] if mixed else torch.eye(width).double()
    raw_BTD = drawn(8, 24, width, seed=20) * torch.logspace(-1.3, 0, width, dtype=torch.float64) @ basis_DD
    input_BTD = raw_BTD / raw_BTD.square().mean(-1, keepdim=True).sqrt()
    weights["down_CD"] = basis_DD[::3]  # features all have some energy, directions of them have not
    root_DD = drawn(width, width, seed=12) / 4
    sample = LayerSample(input_BTD=input_BTD, output_BTD=input_BTD, fisher_DD=root_DD @ root_DD.mT)
    latent_XC = input_BTD.flatten(0, 1) @ weights["down_CD"].mT
    level_CC = whitening(latent_XC, torch.ones(len(latent_XC), dtype=torch.float64)) / rank**0.5
    return LatentAttention(**weights, scale=0.5, level_CC=level_CC), sample


def change(layer: LatentAttention, other: LatentAttention, sample: LayerSample) -> float:
    """Return the loss of one layer in the place of another, nats."""
    input_BTD = sample.input_BTD[sample.used]
    error_BTD = attend(layer, input_BTD, SLOTS_S) - attend(other, input_BTD, SLOTS_S)
    return float(((error_BTD @ sample.fisher_DD) * error_BTD).sum(-1).mean() / 2)


def rounded(layer: LatentAttention, sample: LayerSample, draws: int = 60) -> float:
    """Return what random errors of a share of each weight of the latent's projections cost, nats."""
    written = in_level_basis(layer, sample.input_BTD[sample.used], 0.2)
    total = 0.0
    for draw in range(draws):
        rows = {"down_CD": written.down_CD, "k_up_NPC": written.k_up_NPC, "v_up_NHC": written.v_up_NHC}
        noisy = {
            name: one * (1 + SHARE * drawn(*one.shape, seed=100 * draw + n))
            for n, (name, one) in enumerate(rows.items())
        }
        total += change(dataclasses.replace(written, **noisy), written, sample)
    return total / draws


def test_the_cost_of_rounding_is_as_predicted() -> None:
    layer, sample = levelled(mixed=False)
    costs = latent_costs(layer, SLOTS_S, sample, draws=100)
    found = rounding_cost(costs, torch.eye(6, dtype=torch.float64), SHARE)
    assert rounded(layer, sample) == pytest.approx(float(found), rel=0.2)


def test_a_direction_of_little_energy_gets_less_of_the_length() -> None:
    """Its row, 20 times as large as others for as large a part of the length, falls to half or less."""
    raw_XC = drawn(600, 8, seed=3)
    size_C = torch.tensor([1.0] * 7 + [400.0], dtype=torch.float64)
    worth_C = torch.tensor([1.0] * 7 + [0.05], dtype=torch.float64)
    costs = LatentCosts(
        unit_XC=raw_XC / raw_XC.norm(dim=-1, keepdim=True),
        weight_X=torch.full((600,), 2.0, dtype=torch.float64),
        error_CC=size_C.diag(),
        curvature_CC=worth_C.diag(),
    )
    root_CC = rounded_root(costs, 0.02, STEPS)
    rows_C, columns_C = root_CC.norm(dim=0), torch.linalg.inv(root_CC).norm(dim=1)
    assert rows_C[-1] < 0.5 * rows_C[0]
    before = size_C.sum() * worth_C.sum()
    after = (size_C * rows_C.square()).sum() * (worth_C * columns_C.square()).sum()
    assert after < before / 4
    lengths = (2 * (1 / (costs.unit_XC @ root_CC.mT).norm(dim=-1) - 1).square()).mean() / 2
    assert lengths < 0.1 * 0.02**2 / 2 * (before - after)


def test_a_token_without_a_latent_has_no_say() -> None:
    layer, sample = levelled()
    costs = latent_costs(layer, SLOTS_S, sample, draws=2)
    unit_XC = torch.cat([costs.unit_XC, torch.zeros(1, 6, dtype=torch.float64)])
    weight_X = torch.cat([costs.weight_X, torch.zeros(1, dtype=torch.float64)])
    padded = dataclasses.replace(costs, unit_XC=unit_XC, weight_X=weight_X)
    torch.testing.assert_close(rounded_root(padded, SHARE, STEPS), rounded_root(costs, SHARE, STEPS))


def test_lengths_that_cost_much_stay() -> None:
    layer, sample = levelled()
    costs = latent_costs(layer, SLOTS_S, sample, draws=4)
    dear = dataclasses.replace(costs, weight_X=1e6 * costs.weight_X)
    length_X = (dear.unit_XC @ rounded_root(dear, SHARE, STEPS).mT).norm(dim=-1)
    torch.testing.assert_close(length_X, torch.ones_like(length_X), rtol=0.01, atol=0)
    cheap_X = (costs.unit_XC @ rounded_root(costs, SHARE, STEPS).mT).norm(dim=-1)
    assert float((cheap_X - 1).abs().max()) > 0.02


def test_weights_without_errors_keep_their_length() -> None:
    layer, sample = levelled()
    costs = latent_costs(layer, SLOTS_S, sample, draws=1)
    eye_CC = torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(rounded_root(costs, 0.0, STEPS), eye_CC)
    idle = dataclasses.replace(costs, curvature_CC=torch.zeros(6, 6, dtype=torch.float64))
    torch.testing.assert_close(rounded_root(idle, SHARE, STEPS), eye_CC)


def test_where_lengths_cost_nothing_the_basis_is_balanced() -> None:
    """Then tr(B S Bᵀ) tr(B⁻ᵀ K B⁻¹) has its least, the square of the nuclear norm of K^½ S^½."""
    layer, sample = levelled()
    costs = latent_costs(layer, SLOTS_S, sample, draws=4)
    costs = dataclasses.replace(costs, weight_X=torch.zeros_like(costs.weight_X))
    root_CC = rounded_root(costs, SHARE, steps=300)
    value_CC = costs.error_CC + costs.unit_XC.mT @ costs.unit_XC / len(costs.unit_XC)
    back_CC = torch.linalg.inv(root_CC)
    found = (root_CC @ value_CC @ root_CC.mT).trace() * (back_CC.mT @ costs.curvature_CC @ back_CC).trace()
    least = torch.linalg.eigvals(costs.curvature_CC @ value_CC).real.clamp(min=0).sqrt().sum() ** 2
    assert float(found) == pytest.approx(float(least), rel=0.01)
