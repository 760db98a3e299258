"""Compressed queries: exact, or best in the metric, and the same in every container."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvfold.checkpoints.directory import Checkpoint
from kvfold.convert.algebra.attention import Attention, IntactAttention, LatentAttention
from kvfold.convert.algebra.forward import attend
from kvfold.convert.algebra.metric import LayerMetric, weights_only
from kvfold.convert.algebra.subspaces import low_rank
from kvfold.convert.algebra.target import LatentTarget
from kvfold.convert.families.source import open_source
from kvfold.convert.methods.intact import fold_joint, to_intact
from kvfold.convert.methods.latent import to_mla
from kvfold.convert.methods.query_rank import compress, lost_by_queries, query_metric
from kvfold.convert.methods.refinement import LayerSample, refine
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.engines.rules.engine_rules import lint
from kvfold.engines.rules.rule_types import open_written
from kvfold.models.shipped.modeling_kvfold import KvfoldForCausalLM

from ...support.folds import LINEAR
from ...support.folds import fold_latent as convert
from ...support.layers import FREQUENCIES_F, OWN, D, H, layer, rotate
from ...support.tiny import make

TARGET = LatentTarget(kv_lora_rank=14, qk_rope_head_dim=H)
INTACT = LatentTarget(kv_lora_rank=14, qk_rope_head_dim=0, slots="none", rope="intact")
WEIGHTS = ("--to", "mla", "--calibration", "none")


def root(size: int, seed: int) -> Tensor:
    """A random square matrix far from orthogonal; times its transpose it is a moment."""
    rows = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows * torch.logspace(0, -1, size, dtype=torch.float64)


def metric_for(a: Attention) -> LayerMetric:
    """Moments of every direction unlike, of inputs with a mean."""
    input_EE = root(D + 1, 1) @ root(D + 1, 1).mT
    query_NHH = torch.stack(
        [root(H, 10 + head) @ root(H, 10 + head).mT * (1 + head) for head in range(len(a.q_NHD))]
    )
    return replace(weights_only(a, 64), input_EE=input_EE / input_EE[-1, -1], query_NHH=query_NHH)


def folds(a: Attention, metric: LayerMetric) -> list[LatentAttention | IntactAttention]:
    return [to_mla(a, TARGET, FREQUENCIES_F, OWN, metric), to_intact(a, INTACT, metric)]


def out(folded: LatentAttention | IntactAttention, x_TD: Tensor) -> Tensor:
    return attend(folded, x_TD[None], FREQUENCIES_F)


@pytest.fixture
def x_TD() -> Tensor:
    return torch.randn(20, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@pytest.mark.parametrize("heads", [4, 8])
def test_a_rank_that_keeps_everything_changes_nothing(heads: int, x_TD: Tensor) -> None:
    """32 rows of 40 columns and 64 of 40, with biases, in a metric that sees one head only."""
    a = layer(heads=heads, biases=True)
    metric = metric_for(a)
    blind = replace(metric, query_NHH=metric.query_NHH * (torch.arange(heads) == 0)[:, None, None])
    for folded in folds(a, metric):
        made = compress(folded, a, blind, min(D, heads * H))
        assert made.q_down_AD.shape == (min(D, heads * H), D)
        torch.testing.assert_close(out(made, x_TD), out(folded, x_TD))


def test_the_true_rank_is_enough(x_TD: Tensor) -> None:
    """Queries of rank 5, and gradients that vanish in all heads but one: no direction is free."""
    a = layer(biases=True)
    left, right, _ = torch.linalg.svd(a.q_NHD.flatten(0, 1), full_matrices=False)
    poor = replace(a, q_NHD=(left[:, :5] * right[:5] @ torch.linalg.qr(root(D, 3)).Q[:5]).view_as(a.q_NHD))
    metric = metric_for(poor)
    blind = replace(metric, query_NHH=metric.query_NHH * (torch.arange(4) == 0)[:, None, None])
    for folded in folds(poor, metric):
        torch.testing.assert_close(out(compress(folded, poor, blind, 5), x_TD), out(folded, x_TD))
        assert (out(compress(folded, poor, blind, 4), x_TD) - out(folded, x_TD)).abs().max() > 1e-4


def cost(error_XD: Tensor, metric: LayerMetric) -> float:
    """½ tr(G E C Eᵀ) by its definition."""
    error_NHD = error_XD.unflatten(0, (len(metric.query_NHH), -1))
    return 0.5 * float(
        torch.einsum("nhg,ngd,de,nhe->", metric.query_NHH, error_NHD, metric.input_EE[:-1, :-1], error_NHD)
    )


@pytest.mark.parametrize("rank", [1, 6, 20])
def test_what_is_kept_is_the_best_in_the_metric(rank: int) -> None:
    """As good as Eckart and Young allow, by Cholesky factors of both moments; the plain SVD is worse."""
    a = layer()
    metric = metric_for(a)
    made = compress(to_intact(a, INTACT, metric), a, metric, rank)
    rows_XD = a.q_NHD.flatten(0, 1)
    left = torch.block_diag(*torch.linalg.cholesky(metric.query_NHH))
    energy = torch.linalg.svdvals(
        left.mT @ rows_XD @ torch.linalg.cholesky(metric.input_EE[:-1, :-1])
    ).square()
    least = float(energy[rank:].sum()) / 2
    lost = cost(rows_XD - made.q_NHA.flatten(0, 1) @ made.q_down_AD, metric)
    assert lost == pytest.approx(least, rel=1e-3)  # the metric's ridge moves it by less
    assert lost_by_queries(a, metric, rank) == pytest.approx(least, rel=1e-2)
    down_AD, up_XA, _ = low_rank(rows_XD, torch.ones(len(rows_XD), 1, 1, dtype=torch.float64), None, rank)
    assert cost(rows_XD - up_XA @ down_AD, metric) > 1.05 * lost


def test_folded_queries_could_not_be_compressed_better(x_TD: Tensor) -> None:
    """In any metric G' of a map T of the source's queries, what G = Tᵀ G' T chose is best."""
    a = layer()
    metric = metric_for(a)
    folded = to_mla(a, TARGET, FREQUENCIES_F, OWN, metric)
    rows_NXD = torch.cat([folded.q_nope_NPA, folded.q_rope_NRA], 1)
    map_NXH = rows_NXD @ torch.linalg.pinv(a.q_NHD)
    torch.testing.assert_close(map_NXH @ a.q_NHD, rows_NXD)
    own = torch.stack([root(rows_NXD.shape[1], 30 + head) for head in range(4)])
    metric = replace(metric, query_NHH=map_NXH.mT @ own @ own.mT @ map_NXH)
    made = compress(folded, a, metric, 7)
    error_NXD = rows_NXD - torch.cat([made.q_nope_NPA, made.q_rope_NRA], 1) @ made.q_down_AD
    white = torch.linalg.cholesky(metric.input_EE[:-1, :-1])
    least = torch.linalg.svdvals((own.mT @ rows_NXD).flatten(0, 1) @ white)[7:].square().sum()
    torch.testing.assert_close((own.mT @ error_NXD @ white).square().sum(), least, rtol=1e-3, atol=0)


def test_by_weights_alone_queries_cost_what_the_keys_that_they_meet_say() -> None:
    """The mean over distances of turned keys' second moment times what their scores displace."""
    a = layer(key_heads=2, biases=True)
    metric, plain = query_metric(a, None, 9, FREQUENCIES_F), weights_only(a, 9)
    keys_KED = torch.cat([a.k_KHD, a.k_KH[..., None]], -1).mT if a.k_KH is not None else a.k_KHD.mT
    for head in range(4):
        met_HH = torch.zeros(H, H, dtype=torch.float64)
        for distance, weight in enumerate(plain.distance_NT[head]):
            keys_THD = rotate(
                keys_KED[head // 2][:, None].expand(-1, distance + 1, -1), -FREQUENCIES_F, interleaved=False
            )
            met_HH += weight * keys_THD[:, distance].mT @ keys_THD[:, distance]
        displaced = plain.query_NHH[head].trace() / keys_KED[head // 2].square().sum()
        torch.testing.assert_close(metric.query_NHH[head], displaced * met_HH)


def expected(source: Path, options: dict[str, str]) -> tuple[list[Any], Tensor]:
    """A fold's layers, made step by step, and the frequencies of their pairs."""
    plan = make_plan(source, fold_request({"model": str(source), "to": "mla", **options}))
    opened, target = open_source(source), plan.target
    assert isinstance(target, LatentTarget)
    assert target.q_lora_rank is not None
    table_F, factor = opened.slot_frequencies()
    layers, slots = [], [band.frequency for band in plan.bands for _ in range(band.slots)]
    for number in range(2):
        a = opened.attention(number, factor)
        if target.rope == "intact":
            folded = fold_joint(a, target, None, opened.positions)
        else:
            folded = to_mla(a, target, table_F, plan.bands, weights_only(a, opened.positions))
        layers.append(
            compress(folded, a, query_metric(a, None, opened.positions, table_F), target.q_lora_rank)
        )
    return layers, torch.tensor(slots, dtype=torch.float64) if slots else table_F


FORMS = {
    "stock": {"container": "stock", "latent_norm": "linear"},
    "remote": {"container": "remote"},
    "intact": {"rope": "intact"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("family", "hidden"), [("llama", 32), ("qwen2", 32), ("llama", 128)])
def test_containers_compute_what_the_weights_say(tmp_path: Path, family: str, hidden: int, form: str) -> None:
    """Every layer's attention in transformers against `attend` on the same inputs."""
    source = make(tmp_path / "source", family, num_key_value_heads=4, hidden_size=hidden)
    options = {"kv_budget": "50%", "q_lora_rank": "12", **FORMS[form]}
    made = convert(
        source, *(word for name, value in options.items() for word in ("--" + name.replace("_", "-"), value))
    )
    assert json.loads((made / "kvfold.json").read_text())["target"]["q_lora_rank"] == 12
    loads = AutoModelForCausalLM if form == "stock" else KvfoldForCausalLM
    model, information = loads.from_pretrained(made, dtype=torch.float32, output_loading_info=True)
    assert not information["missing_keys"] | information["unexpected_keys"]
    layers, slots_F = expected(source, options)
    seen: list[tuple[Tensor, Tensor]] = []
    for block in model.model.layers:
        block.self_attn.register_forward_hook(
            lambda _, args, named, output: seen.append((named.get("hidden_states", *args[:1]), output[0])),
            with_kwargs=True,
        )
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(60).reshape(2, 30) ** 2 % 97)
    for folded, (given_BTD, got_BTD) in zip(layers, seen, strict=True):
        wanted_BTD = attend(folded.to(torch.float32), given_BTD, slots_F)
        assert wanted_BTD.std() > 0.05
        torch.testing.assert_close(got_BTD, wanted_BTD, atol=1e-4 * float(wanted_BTD.abs().max()), rtol=0)


def test_queries_behind_a_norm(tmp_path: Path) -> None:
    """Qwen3: full rank is the source, and a smaller one has queries of that rank."""
    source = make(tmp_path / "source", "qwen3", num_key_value_heads=4)
    ids = torch.arange(60).reshape(2, 30) ** 2 % 97
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(source).eval()(input_ids=ids).logits
        off = []
        for rank in ("full", "12"):
            made = convert(source, "--rank", "full", "--q-lora-rank", rank)
            off.append(
                (KvfoldForCausalLM.from_pretrained(made).eval()(input_ids=ids).logits - wanted).abs().max()
            )
    assert off[0] < 5e-5
    assert off[1] > 1e-3
    assert Checkpoint(made).spec("model.layers.0.self_attn.q_a_proj.weight").shape == (12, 32)


def test_engines_take_it(tmp_path: Path) -> None:
    """The serving widths with a compressed query, which llama.cpp then needs no identity for."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}
    source = make(tmp_path / "source", rms_norm_eps=1e-6, **sizes)
    options = ("--engine", "vllm,sglang,llama.cpp", "--container", "stock", "--q-lora-rank", "48")
    made = convert(source, *options, *LINEAR)
    assert [str(finding) for finding in lint(made, ("vllm", "sglang", "llama.cpp")) if finding.fails] == []
    assert open_written(made).config["q_lora_rank"] == 48
    assert "pass an identity" not in (made / "kvfold.json").read_text()


@pytest.mark.parametrize("form", [0, 1])
def test_refinement_trains_both_matrices(form: int) -> None:
    a, random = layer(), torch.Generator().manual_seed(4)
    input_BTD = torch.randn(24, 20, D, generator=random)
    output_BTD = attend(a.to(torch.float32), input_BTD, FREQUENCIES_F)
    sample = LayerSample(
        input_BTD=input_BTD, output_BTD=output_BTD, fisher_DD=torch.eye(D, dtype=torch.float64)
    )
    metric = weights_only(a, 64)
    closed = compress(folds(a, metric)[form], a, metric, 8)
    fitted = refine(closed, FREQUENCIES_F, a, FREQUENCIES_F, sample, steps=30)
    assert fitted.refined < 0.97 * fitted.folded
    for name in ("q_down_AD", "q_NHA" if form else "q_nope_NPA"):
        before, after = getattr(closed, name), getattr(fitted.layer, name)
        assert (after - before).norm() > 1e-2 * before.norm()
