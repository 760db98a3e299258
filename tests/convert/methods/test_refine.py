"""Steps after the closed form: fitted queries, heads grouped by loss, layers refined alone."""

from dataclasses import fields, replace
from itertools import permutations

import pytest
import torch
from torch import Tensor

from kvfold.convert.algebra.attention import Attention, IntactAttention, LatentAttention
from kvfold.convert.algebra.forward import Scoring, attend
from kvfold.convert.algebra.metric import weights_only
from kvfold.convert.algebra.queries import fit_queries
from kvfold.convert.algebra.rotary import complex_rows, interleaved_rows
from kvfold.convert.algebra.target import GroupedTarget, LatentTarget
from kvfold.convert.calibration.layer_metric import from_statistics
from kvfold.convert.calibration.statistics import LayerStatistics
from kvfold.convert.methods import latent as factor
from kvfold.convert.methods import pooling as pool
from kvfold.convert.methods import refinement
from kvfold.convert.methods.grouping import arrange, arrangements, merge_costs, reordered
from kvfold.convert.methods.intact import to_intact
from kvfold.convert.methods.refinement import HELD_BACK, LayerSample, agrees, measure, refine

from ...support.layers import FREQUENCIES_F, OWN, D, H, latent_output, layer, output, rotate
from ...support.refined_layers import normed, sample, scattered, teacher


@pytest.mark.parametrize("biases", [False, True])
def test_forward_is_the_definition(biases: bool) -> None:
    a, x_BTD = layer(heads=8, biases=biases), normed(2, 11)
    torch.testing.assert_close(
        attend(a, x_BTD, FREQUENCIES_F), torch.stack([output(a, x_TD) for x_TD in x_BTD])
    )
    latent = factor.to_mla(
        a, LatentTarget(kv_lora_rank=9, qk_rope_head_dim=H), FREQUENCIES_F, OWN, weights_only(a, 64)
    )
    intact = to_intact(
        a, LatentTarget(kv_lora_rank=D, qk_rope_head_dim=0, slots="none", rope="intact"), weights_only(a, 64)
    )
    torch.testing.assert_close(attend(intact, x_BTD, FREQUENCIES_F), attend(a, x_BTD, FREQUENCIES_F))
    expected = torch.stack([latent_output(latent, FREQUENCIES_F, x_TD) for x_TD in x_BTD])
    torch.testing.assert_close(attend(latent, x_BTD, FREQUENCIES_F), expected)


def moment(biased: bool) -> Tensor:
    """A second moment of inputs that is far from the identity."""
    x_XD = normed(1, 200, seed=2)[0] * torch.linspace(0.2, 2, D, dtype=torch.float64)
    return x_XD.mT @ x_XD / 200 if not biased else torch.eye(D + 1, dtype=torch.float64)


@pytest.mark.parametrize("rank", [6, 7])
def test_fitted_queries_have_the_least_error_over_all_distances(rank: int) -> None:
    """Against brute force: scores at every distance, summed with its weight, and a least-squares solver."""
    a, random = layer(heads=4, key_heads=2), torch.Generator().manual_seed(1)
    weight_NT = torch.rand(4, 12, generator=random, dtype=torch.float64)
    metric = replace(
        weights_only(a, 12), input_EE=torch.block_diag(moment(False), torch.ones(1, 1, dtype=torch.float64)),
        distance_NT=weight_NT / weight_NT.sum(-1, keepdim=True),
    )  # fmt: skip
    slots_RD = torch.randn(4, D, generator=random, dtype=torch.float64)
    latent_CD = torch.randn(rank, D, generator=random, dtype=torch.float64)
    slots_S = torch.tensor([0.7, 0.1], dtype=torch.float64)
    slots_NRH, latent_NCH = fit_queries(a.k_KHD, FREQUENCIES_F, slots_RD, slots_S, latent_CD, 2, metric)
    root_DD = torch.linalg.cholesky(moment(False))
    for head in range(4):
        features, targets = [], []
        for distance, weight in enumerate(metric.distance_NT[head]):
            at = torch.full((1, 1), distance, dtype=torch.float64)
            turned = [_turn_back(rows, table, at, root_DD, cut) for rows, table, cut in
                      ((slots_RD, slots_S, True), (a.k_KHD[head // 2], FREQUENCIES_F, False))]  # fmt: skip
            features.append(weight.sqrt() * torch.cat([turned[0], latent_CD @ root_DD]).mT)
            targets.append(weight.sqrt() * turned[1].mT)
        best = torch.linalg.lstsq(torch.cat(features), torch.cat(targets)).solution
        torch.testing.assert_close(torch.cat([slots_NRH[head], latent_NCH[head]]), best, rtol=1e-5, atol=1e-6)


def _turn_back(rows_HD: Tensor, table_F: Tensor, at: Tensor, root_DD: Tensor, interleaved: bool) -> Tensor:
    """Key rows as a query sees them from a distance: turned by minus the distance."""
    angle = -at * table_F
    seen = rows_HD @ root_DD
    pairs = (seen[::2], seen[1::2]) if interleaved else tuple(seen.chunk(2))
    cos, sin = angle.cos().T, angle.sin().T
    turned = pairs[0] * cos - pairs[1] * sin, pairs[0] * sin + pairs[1] * cos
    return torch.stack(turned, 1).flatten(0, 1) if interleaved else torch.cat(turned)


def test_queries_find_their_own_keys_again() -> None:
    """If the slots hold a head's keys in another complex basis, nothing is lost and the latent is not read."""
    a = layer(heads=2, key_heads=1)
    z_FE = complex_rows(a.k_KHD[0])
    slots_RD = interleaved_rows(z_FE * torch.polar(torch.tensor(2.0), torch.tensor(0.9)).to(torch.complex128))
    slots_NRH, latent_NCH = fit_queries(
        a.k_KHD, FREQUENCIES_F, slots_RD, FREQUENCIES_F, a.v_KHD[0], 2, weights_only(a, 64)
    )
    assert latent_NCH.abs().max() < 1e-6
    x_TD = normed(1, 9)[0]
    query_NTH = torch.einsum("nrh,nhd,td->ntr", slots_NRH, a.q_NHD, x_TD)
    scores = rotate(query_NTH, FREQUENCIES_F, True) @ rotate(x_TD @ slots_RD.mT, FREQUENCIES_F, True).mT
    own = rotate(torch.einsum("nhd,td->nth", a.q_NHD, x_TD), FREQUENCIES_F, False)
    torch.testing.assert_close(scores, own @ rotate(x_TD @ a.k_KHD[0].mT, FREQUENCIES_F, False).mT)


def test_heads_that_belong_together_are_grouped_wherever_they_are() -> None:
    a, order = scattered()
    metric, x_BTD = weights_only(a, 64), normed(2, 12)
    assert arrange(merge_costs(a, metric), 2)[0] == order
    best, gain = arrangements(a, metric, 2)[0]
    assert best == order
    assert gain == pytest.approx(1)
    moved, its_metric = reordered(a, metric, order)
    torch.testing.assert_close(attend(moved, x_BTD, FREQUENCIES_F), attend(a, x_BTD, FREQUENCIES_F))
    target = GroupedTarget(num_key_value_heads=2)
    pooled = pool.subspace(moved, target, its_metric, FREQUENCIES_F)
    torch.testing.assert_close(attend(pooled, x_BTD, FREQUENCIES_F), attend(a, x_BTD, FREQUENCIES_F))
    in_place = attend(pool.subspace(a, target, metric, FREQUENCIES_F), x_BTD, FREQUENCIES_F)
    assert (in_place - attend(a, x_BTD, FREQUENCIES_F)).norm() > 0.1 * in_place.norm()


def test_a_reordered_metric_is_the_metric_of_the_reordered_layer() -> None:
    a, order = scattered()
    moved, its_metric = reordered(a, weights_only(a, 64), order)
    torch.testing.assert_close(its_metric.key_BSS, weights_only(moved, 64).key_BSS)
    torch.testing.assert_close(its_metric.value_BSS, weights_only(moved, 64).value_BSS)


def test_one_block_and_a_block_a_head_give_the_same_costs() -> None:
    """Statistics give G as one block over all heads, weights a block for each."""
    a = layer(heads=8)
    blocks = weights_only(a, 64)
    whole = replace(
        blocks,
        key_BSS=torch.block_diag(*blocks.key_BSS)[None],
        value_BSS=torch.block_diag(*blocks.value_BSS)[None],
    )
    torch.testing.assert_close(merge_costs(a, whole), merge_costs(a, blocks))
    ours, theirs = (
        pool.subspace(a, GroupedTarget(num_key_value_heads=2), metric, FREQUENCIES_F)
        for metric in (whole, blocks)
    )
    torch.testing.assert_close(ours.k_KHD.abs(), theirs.k_KHD.abs())


def test_swaps_find_the_best_order_of_few_heads() -> None:
    random = torch.Generator().manual_seed(0)
    costs_KK = torch.rand(6, 6, generator=random, dtype=torch.float64)
    costs_KK = costs_KK + costs_KK.mT

    def cost(order: tuple[int, ...]) -> float:
        return sum(float(costs_KK[order[i], order[i + 1]]) for i in range(0, 6, 2))

    found = [cost(tuple(order)) for order in arrange(costs_KK, 3)]
    assert found[0] == pytest.approx(min(map(cost, permutations(range(6)))))
    assert found == sorted(found)
    assert arrange(torch.zeros(6, 6, dtype=torch.float64), 3)[0] == list(range(6))


def test_the_best_groups_do_not_depend_on_the_order_of_the_heads() -> None:
    costs_KK = torch.rand(12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    costs_KK = costs_KK + costs_KK.mT
    moved = torch.randperm(12, generator=torch.Generator().manual_seed(2))

    def groups(order: list[int]) -> set[frozenset[int]]:
        return {frozenset(order[first : first + 3]) for first in range(0, 12, 3)}

    before = [groups(order) for order in arrange(costs_KK, 4)]
    after = [groups([int(moved[head]) for head in order]) for order in arrange(costs_KK[moved][:, moved], 4)]
    assert len(before) > 1
    assert after == before


def error(folded: Attention | LatentAttention | IntactAttention, taken: LayerSample) -> float:
    """½ E[eᵀ G e] on the sequences that are held back."""
    x_BTD = taken.input_BTD[-max(1, len(taken.input_BTD) // HELD_BACK) :]
    e = attend(folded, x_BTD, FREQUENCIES_F) - attend(teacher(), x_BTD, FREQUENCIES_F)
    return float(torch.einsum("btd,de,bte->bt", e, taken.fisher_DD, e).mean() / 2)


@pytest.mark.parametrize("form", ["grouped", "latent", "intact"])
def test_refining_lowers_the_loss_that_it_reports(form: str) -> None:
    a, taken = teacher(), sample(normed(96, 24, dims=6))
    folded: Attention | LatentAttention | IntactAttention
    if form == "latent":
        folded = factor.to_mla(
            a, LatentTarget(kv_lora_rank=16, qk_rope_head_dim=H), FREQUENCIES_F, OWN, weights_only(a, 64)
        )
    elif form == "intact":
        target = LatentTarget(kv_lora_rank=12, qk_rope_head_dim=0, slots="none", rope="intact")
        folded = to_intact(a, target, weights_only(a, 64))
    else:
        folded = pool.subspace(a, GroupedTarget(num_key_value_heads=2), weights_only(a, 64), FREQUENCIES_F)
    result = refine(folded, FREQUENCIES_F, a, FREQUENCIES_F, taken, steps=60)
    assert result.folded == pytest.approx(error(folded, taken), rel=1e-4)
    assert result.refined == pytest.approx(error(result.layer, taken), rel=1e-4)
    assert result.refined < 0.8 * result.folded
    again = refine(folded, FREQUENCIES_F, a, FREQUENCIES_F, taken, steps=60)
    assert again.layer.o_DNH.equal(result.layer.o_DNH)
    assert result.layer.o_DNH.dtype == torch.float64


def test_a_rate_that_is_too_large_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    a, taken = teacher(), sample(normed(16, 24))
    pooled = pool.mean(a, GroupedTarget(num_key_value_heads=2), weights_only(a, 64), FREQUENCIES_F)
    how = {"steps": 60, "solve": False}
    usual = refine(pooled, FREQUENCIES_F, a, FREQUENCIES_F, taken, **how)
    monkeypatch.setattr(refinement, "RATE", 64 * refinement.RATE)
    found = refine(pooled, FREQUENCIES_F, a, FREQUENCIES_F, taken, **how)
    assert found.folded - found.refined > 0.8 * (usual.folded - usual.refined) > 0
    monkeypatch.setattr(refinement, "RATE", float("nan"))
    assert refine(pooled, FREQUENCIES_F, a, FREQUENCIES_F, taken, **how).layer is pooled
    monkeypatch.undo()
    monkeypatch.setattr(refinement, "RATE", 64 * refinement.RATE)
    monkeypatch.setattr(refinement, "QUARTERS", 0)
    assert refine(pooled, FREQUENCIES_F, a, FREQUENCIES_F, taken, **how).layer is pooled


def test_what_cannot_be_improved_stays() -> None:
    a, taken = teacher(), sample(normed(2, 24))
    result = refine(a, FREQUENCIES_F, a, FREQUENCIES_F, taken, steps=3)
    assert result.refined <= result.folded < 1e-9
    result = refine(a, FREQUENCIES_F, a, FREQUENCIES_F, taken, steps=3, solve=False)
    assert result.layer is a
    assert result.folded == result.refined < 1e-9
    pooled = pool.mean(a, GroupedTarget(num_key_value_heads=1), weights_only(a, 64), FREQUENCIES_F)
    assert measure(pooled, FREQUENCIES_F, a, FREQUENCIES_F, taken) == pytest.approx(
        error(pooled, taken), rel=1e-4
    )
    measured = refine(pooled, FREQUENCIES_F, a, FREQUENCIES_F, taken, steps=0, solve=False)
    assert measured.layer is pooled
    assert measured.refined == measured.folded == pytest.approx(error(pooled, taken), rel=1e-4)


@pytest.mark.parametrize("biased", [False, True])
def test_the_output_projection_is_solved_for(biased: bool) -> None:
    """Where only it is wrong it is found again; elsewhere it has the error of a solver, but for the ridge."""
    a, taken = teacher(), sample(normed(16, 24))
    if biased:
        taken = replace(taken, output_BTD=taken.output_BTD + 1)
        a = replace(a, o_D=torch.ones(D, dtype=torch.float64))
    noise = torch.randn(a.o_DNH.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wrong = replace(a, o_DNH=a.o_DNH + 0.3 * noise)
    result = refine(wrong, FREQUENCIES_F, a, FREQUENCIES_F, taken, steps=0)
    assert result.refined < 1e-4 * result.folded
    pooled = pool.mean(a, GroupedTarget(num_key_value_heads=2), weights_only(a, 64), FREQUENCIES_F)
    solved = refine(pooled, FREQUENCIES_F, a, FREQUENCIES_F, taken, steps=0).layer
    width = a.o_DNH[0].numel()
    unit = replace(
        pooled, o_DNH=torch.eye(width, dtype=torch.float64).view(width, *a.o_DNH.shape[1:]), o_D=None
    )
    used_BTD = taken.input_BTD[taken.used]
    mixed_XW = attend(unit, used_BTD, FREQUENCIES_F).flatten(0, 1)
    wanted_XD = attend(replace(a, o_D=None), used_BTD, FREQUENCIES_F).flatten(0, 1)
    best_WD = torch.linalg.lstsq(mixed_XW, wanted_XD).solution

    def left(o_WD: Tensor) -> float:
        return float((mixed_XW @ o_WD - wanted_XD).square().sum())

    assert left(best_WD) <= left(solved.o_DNH.flatten(1).mT) < 1.1 * left(best_WD)
    assert left(solved.o_DNH.flatten(1).mT) < 0.9 * left(pooled.o_DNH.flatten(1).mT)


def test_only_attention_that_the_forward_computes_is_refined() -> None:
    a, taken = teacher(), sample(normed(2, 24))
    assert agrees(a, FREQUENCIES_F, taken)
    unlike = replace(
        taken, output_BTD=torch.cat([taken.output_BTD[:, :12], taken.output_BTD[:, 12:] * 1.1], 1)
    )
    assert not agrees(a, FREQUENCIES_F, unlike)
    assert not agrees(replace(a, k_norm_KH=torch.ones(1, H, dtype=torch.float64)), FREQUENCIES_F, taken)
    windowed = replace(taken, scoring=Scoring(window=3))
    assert not agrees(a, FREQUENCIES_F, windowed)
    assert agrees(
        a,
        FREQUENCIES_F,
        replace(windowed, output_BTD=attend(a, taken.input_BTD[:1], FREQUENCIES_F, Scoring(window=3))),
    )


def test_directions_that_calibration_never_took_are_not_free() -> None:
    """Statistics of few inputs are singular; a fold by them must not send other inputs astray."""
    a, x_XD = layer(), normed(1, 30, dims=6)[0] @ torch.diag((torch.arange(D) < 6).double())
    x_XE = torch.cat([x_XD, torch.ones(30, 1, dtype=torch.float64)], 1)
    ones = torch.eye(4 * H, dtype=torch.float64)
    nothing = torch.zeros(0, dtype=torch.float64)
    read = {"input_EE": x_XE.mT @ x_XE / 30, "key_fisher": ones, "value_fisher": ones}
    read |= {"distance_NT": torch.ones(4, 1, dtype=torch.float64)}
    taken = LayerStatistics(
        **dict.fromkeys((field.name for field in fields(LayerStatistics)), nothing) | read
    )
    target = LatentTarget(kv_lora_rank=30, qk_rope_head_dim=0, slots="none", rope="intact")
    for metric in (from_statistics(taken), weights_only(a, 64)):
        folded = to_intact(a, target, metric)
        kept = torch.cat([folded.k_up_KHC, folded.v_up_KHC]) @ folded.down_CE
        wanted = torch.cat([a.k_KHD, a.v_KHD])
        assert (kept - wanted).norm() < 0.5 * wanted.norm()
