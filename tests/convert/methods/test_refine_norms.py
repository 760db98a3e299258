"""Layers that normalise queries and keys: refined through their norms, and folded by what is behind them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfold.convert.algebra.attention import Attention, IntactAttention
from kvfold.convert.algebra.forward import Scoring, attend, attend_to, keys_and_values
from kvfold.convert.algebra.metric import weights_only
from kvfold.convert.algebra.target import GroupedTarget, LatentTarget
from kvfold.convert.calibration import layer_metric
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source
from kvfold.convert.layer.fold import fold_attention
from kvfold.convert.methods import pooling as pool
from kvfold.convert.methods.grouping import arrangements, reordered
from kvfold.convert.methods.head_norms import by_value
from kvfold.convert.methods.intact import encoded, fold_joint, linearised, to_intact
from kvfold.convert.methods.layer_sample import sample_of
from kvfold.convert.methods.refinement import LayerSample, agrees, measure, refine
from kvfold.convert.request import FoldRequest, fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite
from kvfold.planning.prediction import PredictedLosses

from ...support.layers import FREQUENCIES_F, H
from ...support.refined_layers import normed, sample, scattered, teacher
from ...support.tiny import make


def normalising(spans: str) -> tuple[Attention, LayerSample]:
    """The teacher with norms of every head or of all, and a sample whose inputs have unlike lengths."""
    rows = 1 if spans == "head" else 4
    draw = torch.Generator().manual_seed(3)
    q_norm, k_norm = (1 + 0.3 * torch.randn(rows, H, generator=draw, dtype=torch.float64) for _ in range(2))
    a, scoring = replace(teacher(), q_norm_NH=q_norm, k_norm_KH=k_norm), Scoring(norm_epsilon=1e-6)
    x_BTD = normed(64, 24, dims=6) * (0.4 * torch.randn(64, 24, 1, generator=draw, dtype=torch.float64)).exp()
    x_BTD[..., 1] += 2
    plain = sample(x_BTD)
    return a, replace(plain, output_BTD=attend(a, x_BTD[:1], FREQUENCIES_F, scoring), scoring=scoring)


@pytest.mark.parametrize("form", ["grouped", "intact"])
@pytest.mark.parametrize("spans", ["head", "heads"])
def test_norms_are_refined_through_and_stay_where_they_are_not_written(form: str, spans: str) -> None:
    a, taken = normalising(spans)
    assert agrees(a, FREQUENCIES_F, taken)
    fixed = {"q_norm_NH", "k_norm_KH"} if spans == "head" else {"q_norm_NH"}
    folded: Attention | IntactAttention
    if form == "intact":
        target = LatentTarget(kv_lora_rank=24, qk_rope_head_dim=0, slots="none", rope="intact")
        folded = to_intact(a, target, weights_only(a, 64))
    else:
        folded = by_value(pool.subspace)(
            a, GroupedTarget(num_key_value_heads=2), weights_only(a, 64), FREQUENCIES_F
        )
    result = refine(folded, FREQUENCIES_F, a, FREQUENCIES_F, taken, fixed=fixed, steps=40)
    assert result.refined == pytest.approx(measure(result.layer, FREQUENCIES_F, a, FREQUENCIES_F, taken))
    assert result.refined < 0.8 * result.folded
    for name in ("q_norm_NH", "k_norm_KH"):
        assert getattr(result.layer, name).float().equal(getattr(folded, name).float()) == (name in fixed)


@pytest.mark.parametrize("spans", ["head", "heads"])
def test_what_a_latent_encodes_is_read_behind_the_norm(spans: str) -> None:
    """Its moment by definition, and its costs against small errors drawn for every token."""
    a, taken = normalising(spans)
    x_BTD = taken.input_BTD[taken.used]
    k_BKTH, v_BKTH = keys_and_values(a, x_BTD, 1e-6)
    rows_XE = torch.cat([rows.transpose(1, 2).flatten(2).flatten(0, 1) for rows in (k_BKTH, v_BKTH)], 1)
    found = encoded(a, FREQUENCIES_F, taken)
    torch.testing.assert_close(found.moment_EE, rows_XE.mT @ rows_XE / len(rows_XE), rtol=1e-4, atol=1e-4)
    draw = torch.Generator().manual_seed(5)
    for which, costs_BSS in ((0, found.key_BSS), (1, found.value_BSS)):
        lost, size = 0.0, 1e-3
        for _ in range(8):
            given = [k_BKTH, v_BKTH]
            noise = torch.randn(k_BKTH.shape, generator=draw, dtype=torch.float64)
            given[which] = given[which] + size * noise
            wanted_BTD = attend(a, x_BTD, FREQUENCIES_F, taken.scoring)
            e = attend_to(a, x_BTD, *given, FREQUENCIES_F, taken.scoring) - wanted_BTD
            lost += float(torch.einsum("btd,de,bte->bt", e, taken.fisher_DD, e).mean()) / size**2 / 8
        assert lost == pytest.approx(float(costs_BSS.diagonal(dim1=1, dim2=2).sum()), rel=0.05)


def test_first_tokens_count_apart_where_they_are_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a norm too: errors cost what they do at other tokens, and first tokens count as often as needed."""
    a, taken = normalising("head")
    monkeypatch.setattr(layer_metric, "SINK", float("inf"))
    alike = encoded(a, FREQUENCIES_F, taken)
    monkeypatch.setattr(layer_metric, "SINK", 1e-9)
    apart = encoded(a, FREQUENCIES_F, taken)

    x_BTD = taken.input_BTD[taken.used]
    length, width = x_BTD.shape[1], alike.key_BSS.shape[-1]
    k_BKTH, v_BKTH = keys_and_values(a, x_BTD, 1e-6)
    first_XE = torch.cat([rows[:, :, 0].flatten(1) for rows in (k_BKTH, v_BKTH)], 1)
    first_EE = first_XE.mT @ first_XE / (len(x_BTD) * length)
    firsts = [(getattr(alike, name) - getattr(apart, name))[0].double() for name in ("key_BSS", "value_BSS")]
    rests = [apart.key_BSS[0].double(), apart.value_BSS[0].double()]
    energies = [alike.moment_EE[:width, :width], alike.moment_EE[width:, width:]]
    for first_SS in firsts:  # a part of the whole
        assert torch.linalg.eigvalsh(first_SS).min() > -1e-6 * first_SS.trace()
    factor = length * float(sum((f * e).sum() for f, e in zip(firsts, energies, strict=True)))
    factor /= float(sum((r * e).sum() for r, e in zip(rests, energies, strict=True)))
    expected_EE = alike.moment_EE + (factor - 1) * first_EE
    torch.testing.assert_close(apart.moment_EE, expected_EE, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(apart.moment_EE, alike.moment_EE, rtol=1e-2)


@pytest.mark.parametrize("spans", ["head", "heads"])
def test_the_moment_behind_a_norm_loses_less_than_a_linear_norm_s(spans: str) -> None:
    a, taken = normalising(spans)
    x_XE = torch.nn.functional.pad(taken.input_BTD.flatten(0, 1), (0, 1), value=1)
    found = encoded(a, FREQUENCIES_F, taken)
    input_EE = x_XE.mT @ x_XE / len(x_XE)
    costs = {"key_BSS": found.key_BSS, "value_BSS": found.value_BSS}
    weighed = replace(weights_only(a, 64), input_EE=input_EE, **costs)
    for rank, share in ((2 * 4 * H, 0.0), (40, 0.5), (24, 0.9)):
        target = LatentTarget(kv_lora_rank=rank, qk_rope_head_dim=0, slots="none", rope="intact")
        behind, linear = (
            measure(to_intact(a, target, weighed, moment_EE), FREQUENCIES_F, a, FREQUENCIES_F, taken)
            for moment_EE in (found.moment_EE, None)
        )
        assert behind < max(1e-8, share * linear), (rank, behind, linear)


@pytest.mark.parametrize("spans", ["head", "heads"])
def test_a_linear_norm_keeps_the_mean_square_biases_included(spans: str) -> None:
    a, taken = normalising(spans)
    a = replace(a, q_NH=torch.full_like(a.q_NHD[..., 0], 0.7), k_KH=torch.full_like(a.k_KHD[..., 0], -0.4))
    x_XD = taken.input_BTD.flatten(0, 1)
    x_XE = torch.nn.functional.pad(x_XD, (0, 1), value=1)
    linear = linearised(a, x_XE.mT @ x_XE / len(x_XE))
    for rows, bias, weight in (
        (linear.q_NHD, linear.q_NH, a.q_norm_NH),
        (linear.k_KHD, linear.k_KH, a.k_norm_KH),
    ):
        square_NH = ((torch.einsum("xd,nhd->xnh", x_XD, rows) + bias) / weight).square().mean(0)
        means = square_NH.mean(1) if spans == "head" else square_NH.mean()[None]
        torch.testing.assert_close(means, torch.ones_like(means))


def test_heads_with_norms_are_grouped() -> None:
    """The first and last key differ by a length alone, which a norm hides, and so do the two between them."""
    plain, _ = scattered()
    factors_K11 = torch.tensor([1.0, 1.0, 5.0, 0.2], dtype=torch.float64)[:, None, None]
    one = torch.ones(1, H, dtype=torch.float64)
    keys_KHD = plain.k_KHD[[0, 1, 1, 0]] * factors_K11
    a = replace(plain, k_KHD=keys_KHD, v_KHD=plain.v_KHD[[0, 1, 1, 0]], q_norm_NH=one, k_norm_KH=one)
    x_BTD, target = normed(2, 12), GroupedTarget(num_key_value_heads=2)
    order, gain = arrangements(a, weights_only(a, 64), 2)[0]
    moved, its_metric = reordered(a, weights_only(a, 64), order)
    assert gain == pytest.approx(1)
    torch.testing.assert_close(attend(moved, x_BTD, FREQUENCIES_F), attend(a, x_BTD, FREQUENCIES_F))
    pooled = by_value(pool.subspace)(moved, target, its_metric, FREQUENCIES_F)
    torch.testing.assert_close(attend(pooled, x_BTD, FREQUENCIES_F), attend(a, x_BTD, FREQUENCIES_F))


@pytest.mark.parametrize("family", ["qwen3", "olmo2", "cohere"])
@pytest.mark.parametrize(
    ("to", "sizes"), [("gqa", {"kv_heads": 2}), ("mla", {"kv_budget": "25%", "rope": "intact"})]
)
def test_folds_are_refined_and_say_so(tmp_path: Path, family: str, to: str, sizes: dict[str, Any]) -> None:
    source = make(tmp_path / "source", family, num_key_value_heads=4)
    statistics = study(open_source(source), "self", sequences=16, length=24, seed=0)
    request = fold_request({"model": str(source), "to": to, "refine": 10, **sizes})
    plan = make_plan(source, request, statistics)
    closed, _ = fold_attention(replace(plan, refine=0), 0)
    assert isinstance(closed, Attention | IntactAttention)
    if isinstance(closed, IntactAttention):
        assert isinstance(plan.target, LatentTarget)
        taken, (table_F, _) = statistics.layers[0], plan.source.frequencies(0)
        part = sample_of(plan.source, taken, 0, plan.source.attention(0), table_F)
        assert part is not None
        seen = encoded(plan.source.attention(0), table_F, part)
        wanted = fold_joint(plan.source.attention(0), plan.target, taken, 512, seen)
        torch.testing.assert_close(closed.k_up_KHC @ closed.down_CE, wanted.k_up_KHC @ wanted.down_CE)
    fitted, _ = fold_attention(plan, 0)
    if isinstance(fitted, Attention):
        # Norms that heads share are passed on by the writer; those with a row per key are written.
        before, after = closed.k_norm_KH, fitted.k_norm_KH
        assert after.float().equal(before.float()) == (family == "qwen3")
    record = rewrite(plan, tmp_path / "out")
    losses = [layer["measured"] for layer in record["layers"]]
    assert all(0 < loss["refined"] <= loss["folded"] for loss in losses)
    assert any(loss["refined"] < loss["folded"] for loss in losses)
    assert record["predicted_loss"] == pytest.approx(sum(loss["refined"] for loss in losses))
    predicted = PredictedLosses().of(replace(plan, refine=0))
    assert predicted == pytest.approx(sum(loss["folded"] for loss in losses))


def test_a_fold_finds_the_heads_that_belong_together(tmp_path: Path) -> None:
    """In the checkpoint the first and last key/value head are equal, and so are the two between them."""
    file = make(tmp_path / "source", "qwen3", num_key_value_heads=4) / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.split(".")[-2] in {"k_proj", "v_proj"}:
            tensors[name] = tensors[name].unflatten(0, (4, -1))[[0, 1, 1, 0]].flatten(0, 1)
    save_file(tensors, file, {"format": "pt"})
    source = open_source(file.parent)
    request = FoldRequest(model=str(file.parent), to="gqa", kv_heads=2, refine=0)
    plan = make_plan(file.parent, request, study(source, "self", sequences=8, length=24, seed=0))
    for number in range(source.layers):
        _, loss = fold_attention(plan, number)
        assert loss["folded"] < 1e-9
