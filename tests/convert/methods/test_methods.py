"""Methods as functions of weights, without any file: identities and orderings on random layers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvfold.convert.algebra.metric import UNWEIGHTED, weights_only
from kvfold.convert.algebra.subspaces import low_rank
from kvfold.convert.algebra.target import GroupedTarget, LatentTarget
from kvfold.convert.methods import latent as factor
from kvfold.convert.methods import pooling as pool
from kvfold.convert.methods.grouping import heads_in, likest
from kvfold.convert.methods.table import POOLS

from ...support.layers import FREQUENCIES_F, OWN, D, H, latent_output, layer, output, turned_copies


@pytest.fixture
def x_TD() -> Tensor:
    return torch.randn(20, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@pytest.mark.parametrize("method", POOLS)
@pytest.mark.parametrize("biases", [False, True])
def test_equal_heads_pool_losslessly(method: str, biases: bool, x_TD: Tensor) -> None:
    a = layer(biases=biases, heads=8)
    equal = replace(
        a,
        **{
            name: getattr(a, name)[:1].expand_as(getattr(a, name)).clone()
            for name in ("k_KHD", "v_KHD", *(("k_KH", "v_KH") if biases else ()))
        },
    )
    pooled = POOLS[method](
        equal, GroupedTarget(num_key_value_heads=2), weights_only(equal, 64), FREQUENCIES_F
    )
    assert len(pooled.k_KHD) == 2
    torch.testing.assert_close(output(pooled, x_TD), output(equal, x_TD))


@pytest.mark.parametrize("method", ["aligned", "subspace"])
def test_heads_equal_up_to_phases_and_rotations_pool_losslessly(method: str, x_TD: Tensor) -> None:
    """The mean cannot do this: training leaves each head's phases and value basis arbitrary."""
    a = turned_copies(layer(heads=8), seed=3)
    # Procrustes stops when a sweep gains less than its tolerance; the subspace is a closed form.
    precision = {"rtol": 0.0, "atol": 1e-3 if method == "aligned" else 1e-9}
    target, metric = GroupedTarget(num_key_value_heads=1), weights_only(a, 64)
    folded = POOLS[method](a, target, metric, FREQUENCIES_F)
    torch.testing.assert_close(output(folded, x_TD), output(a, x_TD), **precision)
    lost = output(pool.mean(a, target, metric, FREQUENCIES_F), x_TD) - output(a, x_TD)
    assert lost.norm() > 0.1 * output(a, x_TD).norm()


def test_aligned_groups_find_heads_that_are_turned_copies(x_TD: Tensor) -> None:
    """Copies of two heads in an order in which neighbours are strangers."""
    one, other = (turned_copies(layer(heads=4), seed=seed) for seed in (3, 7))
    mixed = [0, 4, 5, 1, 2, 6, 3, 7]
    a = replace(
        one,
        **{
            name: torch.cat([getattr(one, name), getattr(other, name) * 2], dim)[
                (slice(None),) * dim + (mixed,)
            ]
            for name, dim in (("q_NHD", 0), ("k_KHD", 0), ("v_KHD", 0), ("o_DNH", 1))
        },
    )
    order = likest(a, 2)
    assert {frozenset(mixed[head] // 4 for head in part) for part in (order[:4], order[4:])} == {
        frozenset([0]), frozenset([1]),
    }  # fmt: skip
    moved = heads_in(order, a)
    torch.testing.assert_close(output(moved, x_TD), output(a, x_TD))
    target = GroupedTarget(num_key_value_heads=2)
    neighbours, grouped = (
        output(pool.aligned(each, target, UNWEIGHTED, FREQUENCIES_F), x_TD) - output(a, x_TD)
        for each in (a, moved)
    )
    assert grouped.norm() < 1e-2 * neighbours.norm()


def test_methods_rank_as_published(x_TD: Tensor) -> None:
    """On heads that are turned copies plus noise: subspace loses least, then aligned, then the mean."""
    copies = turned_copies(layer(heads=8), seed=4)
    noise = layer(seed=5)
    a = replace(copies, k_KHD=copies.k_KHD + 0.3 * noise.k_KHD, v_KHD=copies.v_KHD + 0.3 * noise.v_KHD)
    target, metric = GroupedTarget(num_key_value_heads=1), weights_only(a, 64)
    folds = {name: output(fold(a, target, metric, FREQUENCIES_F), x_TD) for name, fold in POOLS.items()}
    lost = {name: float((given - output(a, x_TD)).norm()) for name, given in folds.items()}
    assert lost["subspace"] < lost["aligned"] < lost["mean"]


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("biases", [False, True])
def test_a_slot_for_every_pair_is_exact(key_heads: int, biases: bool, x_TD: Tensor) -> None:
    a = layer(key_heads=key_heads, biases=biases)
    full = key_heads * H
    target = LatentTarget(kv_lora_rank=full, qk_rope_head_dim=full, slots="source")
    slots_S = FREQUENCIES_F.repeat_interleave(key_heads)
    latent = factor.to_mla(a, target, FREQUENCIES_F, (), weights_only(a, 64))
    torch.testing.assert_close(latent_output(latent, slots_S, x_TD), output(a, x_TD))


@pytest.mark.parametrize("biases", [False, True])
def test_heads_equal_up_to_phases_need_the_cache_of_one(biases: bool, x_TD: Tensor) -> None:
    """Slots take each head's phase into the query, the latent its rotation into the output."""
    target = LatentTarget(kv_lora_rank=H, qk_rope_head_dim=H)
    for a in (layer(key_heads=1, biases=biases), turned_copies(layer(), seed=6)):
        latent = factor.to_mla(a, target, FREQUENCIES_F, OWN, weights_only(a, 64))
        torch.testing.assert_close(latent_output(latent, FREQUENCIES_F, x_TD), output(a, x_TD))


def test_more_rank_loses_less(x_TD: Tensor) -> None:
    a = layer()
    lost = []
    for rank in (4, 16, 32, 56):
        latent = factor.to_mla(
            a, LatentTarget(kv_lora_rank=rank, qk_rope_head_dim=H), FREQUENCIES_F, OWN, weights_only(a, 64)
        )
        lost.append(float((latent_output(latent, FREQUENCIES_F, x_TD) - output(a, x_TD)).norm()))
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] < 0.75 * lost[0]  # the rest is rotation that no latent holds


@pytest.mark.parametrize("width", [12, 200])
def test_low_rank_is_the_truncated_svd_in_its_metric(width: int) -> None:
    """Eckart-Young: no rank-r factors have a smaller weighted error, on either side of the Gram matrix."""
    random = torch.Generator().manual_seed(1)
    stack = torch.randn(3, 8, width, generator=random, dtype=torch.float64)
    half = torch.randn(3, 8, 8, generator=random, dtype=torch.float64)
    metric = half @ half.mT
    down, up, energy = low_rank(stack.flatten(0, 1), metric, None, 5)
    assert down.shape == (5, width)
    assert up.shape == (24, 5)
    error = stack - (up @ down).view_as(stack)
    lost = torch.einsum("bhe,bhg,bge->", error, metric, error)
    root = torch.linalg.cholesky(metric)
    best = torch.linalg.svdvals((root.mT @ stack).flatten(0, 1))[5:].square().sum()
    torch.testing.assert_close(lost, best)
    torch.testing.assert_close(energy[5:].sum(), best)


def test_fidelity_is_one_for_what_does_not_turn() -> None:
    rho_F = weights_only(layer(), 512).fidelity(torch.tensor([0.0, 1e-4, 0.1, 1.0], dtype=torch.float64))[0]
    assert abs(rho_F[0] - 1) < 1e-12
    assert list(rho_F.abs()) == sorted(rho_F.abs(), reverse=True)


@pytest.mark.parametrize("rank", [H, H + 1, 2 * H, 4 * H])
def test_rank_beyond_what_is_there_changes_nothing(rank: int, x_TD: Tensor) -> None:
    """Directions of no energy are rounding; they must not be scaled up to keys and values."""
    a = layer()
    equal = replace(
        a, k_KHD=a.k_KHD[:1].expand_as(a.k_KHD).clone(), v_KHD=a.v_KHD[:1].expand_as(a.v_KHD).clone()
    )
    target = LatentTarget(kv_lora_rank=rank, qk_rope_head_dim=H)
    latent = factor.to_mla(equal, target, FREQUENCIES_F, OWN, weights_only(equal, 64))
    torch.testing.assert_close(latent_output(latent, FREQUENCIES_F, x_TD), output(equal, x_TD))
