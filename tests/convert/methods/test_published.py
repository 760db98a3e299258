"""Each peer's rule is what its paper says, against a plain version and by the identities that it promises."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.convert.algebra.attention import Attention
from kvfold.convert.algebra.metric import with_bias
from kvfold.convert.algebra.rotary import complex_rows, half_rows
from kvfold.convert.algebra.target import Geometry, LatentTarget
from kvfold.convert.calibration.statistics import LayerStatistics
from kvfold.convert.families.source import open_source
from kvfold.convert.formats.stock import Stock
from kvfold.convert.methods.published import PEERS, peer, with_few_queries
from kvfold.convert.methods.shared_key import CARE_DAMPING, DAMPING, POWER
from kvfold.core.errors import InvalidInput

from ...support import layers
from ...support.layers import FREQUENCIES_F, D, H, attend, latent_output, layer, output, rotate, turned_copies
from ...support.published_rules import DEMO, PER_HEAD, F, bands_of, folded_output, rule, statistics_of, tokens

MERGED = ["svd", "transmla", "care", "no-sqrt-care", "transmla-care", *PER_HEAD]
Trained = tuple[Tensor, list[Attention], list[LayerStatistics], list[Tensor]]


def widths(name: str, key_heads: int) -> tuple[int, int, int]:
    """Three rotary widths that a rule fills, the widest last."""
    heads = key_heads if PEERS[name].per_head else 1
    return 2 * heads, 4 * heads, H * heads


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("biases", [False, True])
def test_the_container_holds_it(name: str, key_heads: int, biases: bool) -> None:
    """Exactly the widths of the target, whatever the heads, at ranks below and above the hidden size."""
    a = layer(key_heads=key_heads, biases=biases)
    statistics = statistics_of(a, tokens())
    for rope_dim, rank in zip(widths(name, key_heads), (5, 2 * key_heads * H - 5, 3), strict=True):
        target = LatentTarget(kv_lora_rank=rank, qk_rope_head_dim=rope_dim)
        bands = bands_of(name, rope_dim, (a, statistics))
        assert sum(band.slots for band in bands) == rope_dim // 2
        geometry = Geometry(hidden_size=D, num_attention_heads=4, num_key_value_heads=key_heads, head_dim=H)
        stock = Stock(geometry=geometry, target=target, rope={}, biases=biases)
        written = stock.tensors(PEERS[name].fold(a, target, bands, statistics), 0)
        assert {key: tuple(tensor.shape) for key, tensor in written.items()} == {
            key: spec.shape for key, spec in stock.specs(0, torch.float64).items()
        }
        assert all(tensor.isfinite().all() for tensor in written.values())


@pytest.mark.parametrize("name", MERGED)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("width", [1, 2])
def test_full_rank_loses_rotation_alone(
    name: str, key_heads: int, biases: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nothing turns, slots and remainder add up to the source."""
    rope_dim = widths(name, key_heads)[width]
    monkeypatch.setattr(layers, "FREQUENCIES_F", torch.zeros_like(FREQUENCIES_F))
    a, x_XD = layer(key_heads=key_heads, biases=biases), tokens()
    target = LatentTarget(kv_lora_rank=2 * key_heads * H - rope_dim, qk_rope_head_dim=rope_dim)
    torch.testing.assert_close(folded_output(name, a, target, x_XD, x_XD[:20]), output(a, x_XD[:20]))


@pytest.mark.parametrize("biases", [False, True])
def test_xecomla_splits_a_single_head(biases: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "FREQUENCIES_F", torch.zeros_like(FREQUENCIES_F))
    a, x_XD = layer(key_heads=1, biases=biases), tokens()
    target = LatentTarget(kv_lora_rank=2 * H, qk_rope_head_dim=4)
    torch.testing.assert_close(folded_output("xecomla", a, target, x_XD, x_XD[:20]), output(a, x_XD[:20]))


def test_xecomla_rotates_the_mean_head() -> None:
    a = layer()
    target = LatentTarget(kv_lora_rank=9, qk_rope_head_dim=4)
    latent = PEERS["xecomla"].fold(a, target, bands_of("xecomla", 4), None)
    torch.testing.assert_close(latent.k_rope_RD, a.k_KHD.mean(0)[-4:])
    torch.testing.assert_close(latent.q_rope_NRA, a.q_NHD[:, -4:])
    whole_CD = torch.cat([a.k_KHD, a.v_KHD]).flatten(0, 1)
    u, s, vt = torch.linalg.svd(whole_CD)
    best_CD = (u[:, :9] * s[:9] @ vt[:9]).unflatten(0, (2, 4, H))
    torch.testing.assert_close(latent.v_up_NHC @ latent.down_CD, best_CD[1])
    torch.testing.assert_close((latent.k_up_NPC @ latent.down_CD)[:, :-4], best_CD[0, :, :-4])
    assert not latent.k_up_NPC[:, -4:].any()


@pytest.mark.parametrize("name", ["svd", "transmla", "care"])
@pytest.mark.parametrize("biases", [False, True])
def test_heads_equal_up_to_real_factors_need_the_cache_of_one(name: str, biases: bool) -> None:
    """The ability and the limit of a real basis: heads whose keys differ in phase besides."""
    a = layer(biases=biases)
    copies = turned_copies(a, seed=6)
    factors_KF = torch.linspace(-2, 1.5, len(a.k_KHD) * F, dtype=torch.float64).view(-1, F)
    z_FE = complex_rows(with_bias(a.k_KHD, a.k_KH))[0]
    k_KHE = half_rows(factors_KF[..., None] * z_FE)
    real = replace(copies, k_KHD=k_KHE[..., :D], k_KH=k_KHE[..., D] if biases else None, v_KH=None)
    target, x_XD = LatentTarget(kv_lora_rank=H, qk_rope_head_dim=H), tokens()
    torch.testing.assert_close(folded_output(name, real, target, x_XD, x_XD[:20]), output(real, x_XD[:20]))
    phased = replace(copies, k_KH=None, v_KH=None)
    lost = folded_output(name, phased, target, x_XD, x_XD[:20]) - output(phased, x_XD[:20])
    assert lost.norm() > 0.02 * output(phased, x_XD[:20]).norm()


def pca(z_XB: Tensor, ratio: float, keys: int, rank: int) -> Tensor:
    """TransMLA's map on balanced activations: onto their leading directions."""
    basis_BC = torch.linalg.svd(z_XB, full_matrices=False)[2][:rank].mT
    return basis_BC @ basis_BC.mT


def covariance_svd(z_XB: Tensor, ratio: float, keys: int, rank: int) -> Tensor:
    """CARE's map on balanced activations: W ≈ V S Uᵀ C^-½, seen behind W, which undoes the balance."""
    moment_BB = z_XB.mT @ z_XB
    moment_BB += CARE_DAMPING * moment_BB.diagonal().mean() * torch.eye(len(moment_BB), dtype=torch.float64)
    values, vectors = torch.linalg.eigh(moment_BB)
    root_BB, inverse_BB = vectors * values.sqrt() @ vectors.mT, vectors * values.rsqrt() @ vectors.mT
    w_BB = torch.diag(torch.tensor([ratio] * keys + [1.0] * (z_XB.shape[1] - keys), dtype=torch.float64))
    u, s, vt = torch.linalg.svd(root_BB @ w_BB)
    return torch.linalg.inv(w_BB) @ vt[:rank].mT @ torch.diag(s[:rank]) @ u[:, :rank].mT @ inverse_BB


def whole_covariance(z_XB: Tensor, ratio: float, keys: int, rank: int) -> Tensor:
    """The map of no-sqrt-care: C in the place of its root."""
    moment_BB = shrunken(z_XB)
    w_BB = torch.diag(torch.tensor([ratio] * keys + [1.0] * (z_XB.shape[1] - keys), dtype=torch.float64))
    u, s, vt = torch.linalg.svd(moment_BB @ w_BB)
    down_RB = torch.diag(s[:rank]) @ u[:, :rank].mT @ torch.linalg.inv(moment_BB)
    return torch.linalg.inv(w_BB) @ vt[:rank].mT @ down_RB


def powered(z_XB: Tensor, ratio: float, keys: int, rank: int) -> Tensor:
    """The projection of transmla-care."""
    moment_BB = shrunken(z_XB)
    w_BB = torch.diag(torch.tensor([ratio] * keys + [1.0] * (z_XB.shape[1] - keys), dtype=torch.float64))
    basis_BR = torch.linalg.svd(torch.linalg.matrix_power(moment_BB, POWER) @ w_BB)[0][:, :rank]
    return basis_BR @ basis_BR.mT


def shrunken(z_XB: Tensor) -> Tensor:
    moment_BB = z_XB.mT @ z_XB
    return moment_BB + DAMPING * moment_BB.diagonal().mean() * torch.eye(len(moment_BB), dtype=torch.float64)


def plain(
    a: Attention,
    rope_dim: int,
    rank: int,
    x_XD: Tensor,
    x_TD: Tensor,
    latent_map: Any,
    multiple: int = 1,
    weight: float = 1.0,
    seen_XD: Tensor | None = None,
) -> Tensor:
    """TransMLA's steps on activations: keys are turned by `x_XD`, balanced and decomposed by `seen_XD` or these.

    A group of `multiple` times the pairs of a slot keeps as many components, at its pairs' frequencies.
    """
    heads, step = len(a.k_KHD), H // rope_dim
    fold = step * multiple

    def rows(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        return torch.einsum("khd,td->tkh", weight, x) + (0 if bias is None else bias)

    rope, nope = [], []  # (heads, pairs folded) -> component, of real parts and imaginary parts
    for first in range(0, F, fold):
        parts = rows(a.k_KHD, a.k_KH, x_XD).unflatten(-1, (2, F))[..., first : first + fold]
        stacked = parts.permute(2, 0, 1, 3).flatten(0, 1).flatten(1)  # real rows above imaginary rows
        basis = torch.linalg.svd(stacked, full_matrices=True)[2].mT.unflatten(0, (heads, fold))
        place = torch.zeros(heads, F, basis.shape[-1], dtype=torch.float64)
        place[:, first : first + fold] = basis
        rope += list(place.unbind(-1)[:multiple])
        nope += list(place.unbind(-1)[multiple:])

    def turned(x: Tensor, basis: list[Tensor]) -> Tensor:
        """Keys in a basis: (T, 2, components)."""
        keys = rows(a.k_KHD, a.k_KH, x).unflatten(-1, (2, F))
        return torch.einsum("tkaf,mkf->tam", keys, torch.stack(basis))

    def latent(x: Tensor) -> Tensor:
        values = rows(a.v_KHD, a.v_KH, x).flatten(1)
        return torch.cat([turned(x, nope).flatten(1), values], 1)

    keys, seen_XB = 2 * len(nope), latent(x_XD if seen_XD is None else seen_XD)
    norms = seen_XB.norm(dim=0)
    ratio = float(norms[:keys].mean() / norms[keys:].mean()) / weight
    scale = torch.ones(keys + heads * H, dtype=torch.float64)
    scale[:keys] = 1 / ratio
    kept = latent(x_TD) * scale @ latent_map(seen_XB * scale, ratio, keys, rank).mT / scale
    q_TNAF = rows(a.q_NHD, a.q_NH, x_TD).unflatten(-1, (2, F))
    group = len(a.q_NHD) // heads
    q = {}
    for part, basis in (("rope", rope), ("nope", nope)):
        basis_MNF = torch.stack(basis).repeat_interleave(group, 1)
        q[part] = torch.einsum("tnaf,mnf->ntam", q_TNAF, basis_MNF).flatten(2)
    k_rope = rotate(turned(x_TD, rope).flatten(1), FREQUENCIES_F[::step], interleaved=False)
    q_all = torch.cat([q["nope"], rotate(q["rope"], FREQUENCIES_F[::step], interleaved=False)], -1)
    k_all = torch.cat([kept[:, :keys], k_rope], 1).expand(len(q_all), -1, -1)
    v = kept[:, keys:].unflatten(1, (heads, H)).transpose(0, 1).repeat_interleave(group, 0)
    return torch.einsum("dnh,nth->td", a.o_DNH, attend(q_all, k_all, v, a.scale))


MAPS = [
    ("transmla", pca), ("care", covariance_svd), ("no-sqrt-care", whole_covariance),
    ("transmla-care", powered),
]  # fmt: skip


@pytest.mark.parametrize(("name", "latent_map"), MAPS)
@pytest.mark.parametrize("rope_dim", [4, 8])
@pytest.mark.parametrize("biases", [False, True])
def test_by_the_paper_on_activations(name: str, latent_map: Any, rope_dim: int, biases: bool) -> None:
    a, x_XD = layer(key_heads=2, biases=biases), tokens()
    expected = plain(a, rope_dim, 7, x_XD, x_XD[:20], latent_map)
    folded = folded_output(name, a, LatentTarget(kv_lora_rank=7, qk_rope_head_dim=rope_dim), x_XD, x_XD[:20])
    torch.testing.assert_close(folded, expected)
    # The rank is one at which something is lost.
    assert (folded - output(a, x_XD[:20])).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize(("name", "latent_map"), MAPS)
def test_by_the_code_behind_changed_layers(name: str, latent_map: Any) -> None:
    """The rotation comes from the source's activations, balance and decomposition from those that are met."""
    a, x_XD, seen_XD = layer(key_heads=2, biases=True), tokens(), tokens(seed=10) * 0.7 - 0.2
    target = LatentTarget(kv_lora_rank=7, qk_rope_head_dim=4)
    expected = plain(a, 4, 7, x_XD, x_XD[:20], latent_map, seen_XD=seen_XD)
    folded = folded_output(name, a, target, x_XD, x_XD[:20], seen_XD)
    torch.testing.assert_close(folded, expected)
    usual = folded_output(name, a, target, x_XD, x_XD[:20])
    assert (folded - usual).norm() > 0.01 * usual.norm()


@pytest.mark.parametrize(("multiple", "weight"), [(2, 1.0), (1, 0.5), (2, 4.0)])
def test_settings_of_merged_heads(multiple: int, weight: float) -> None:
    """FreqFold over more pairs, and another balance of keys and values."""
    a, x_XD = layer(key_heads=2), tokens()
    target = LatentTarget(kv_lora_rank=7, qk_rope_head_dim=4)
    expected = plain(a, 4, 7, x_XD, x_XD[:20], pca, multiple, weight)
    folded = folded_output(f"transmla:fold{multiple}:balance{weight:g}", a, target, x_XD, x_XD[:20])
    torch.testing.assert_close(folded, expected)
    usual = folded_output("transmla", a, target, x_XD, x_XD[:20])
    assert (folded - usual).norm() > 0.01 * usual.norm()


@pytest.mark.parametrize(("name", "sentence"), [
    ("transmla:fold3", "takes :foldN"),
    ("care:balance0", "takes :foldN"),
    ("transmla:fold2:fold4", "takes :foldN"),
    ("mha2mla:fold2", "takes :high"),
    ("xecomla:fold2", "it has none"),
])  # fmt: skip
def test_settings_that_a_rule_does_not_have(name: str, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        peer(name)


@pytest.mark.parametrize("name", ["transmla", "xecomla"])
@pytest.mark.parametrize("biases", [False, True])
def test_queries_of_full_rank_change_nothing_and_fewer_are_the_best(name: str, biases: bool) -> None:
    a, x_XD = layer(key_heads=2, biases=biases), tokens()
    statistics, rank = statistics_of(a, x_XD), 4
    bands = bands_of(name, 4, (a, statistics))

    def queries(count: int | None) -> Tensor:
        target = LatentTarget(kv_lora_rank=9, qk_rope_head_dim=4, q_lora_rank=count)
        folded = with_few_queries(rule(name), a, target, bands, statistics)
        x_XA = x_XD if folded.q_down_AD is None else x_XD @ folded.q_down_AD.mT
        return torch.einsum("npa,xa->xnp", folded.q_nope_NPA, x_XA)

    torch.testing.assert_close(queries(len(a.q_NHD) * H), queries(None))
    if name == "transmla" and not biases:
        lost = float((queries(rank) - queries(None)).square().sum())
        energies = torch.linalg.svdvals(queries(None).flatten(1)).square()
        assert lost == pytest.approx(float(energies[rank:].sum()))


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if not peer.needs_statistics])
def test_rules_of_weights_alone_read_no_statistics(name: str) -> None:
    a, target = layer(key_heads=2, biases=True), LatentTarget(kv_lora_rank=5, qk_rope_head_dim=4)
    statistics = (statistics_of(a, tokens()), None)
    given, none = (PEERS[name].fold(a, target, bands_of(name, 4, (a, s)), s) for s in statistics)
    assert all(
        torch.equal(one, other)
        for one, other in zip(vars(given).values(), vars(none).values(), strict=True)
        if isinstance(one, Tensor)
    )


def test_widths_that_a_rule_cannot_fill() -> None:
    for name, width, sentence in (
        ("transmla", 6, r"6 rotary dimensions do not divide the head dimension 8 .*--rope-dim 2, 4, 8"),
        ("xecomla", 10, "10 rotary dimensions exceed the head dimension, 8"),
    ):
        with pytest.raises(InvalidInput, match=sentence):
            bands_of(name, width)


@pytest.fixture(scope="module")
def trained() -> Trained:
    """Frequencies of the bundled checkpoint, its layers, statistics and inputs, whose last row is not used."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = Path(json.__file__).read_text()[:10000]
    ids = AutoTokenizer.from_pretrained(DEMO, model_max_length=10000)(text, return_tensors="pt").input_ids
    model, source = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float64).eval(), open_source(DEMO)
    seen: list[Tensor] = []
    for block in model.model.layers:
        block.self_attn.q_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    model(input_ids=ids[:, :2048].view(8, 256))
    attention = [source.attention(n) for n in range(source.layers)]
    statistics = [
        statistics_of(a, x_BTD[:-1].flatten(0, 1)) for a, x_BTD in zip(attention, seen, strict=True)
    ]
    return source.frequencies()[0], attention, statistics, seen


def lost_by(name: str, rope_dim: int, rank: int, trained: Trained) -> float:
    """The mean relative error of the layers' outputs."""
    table_F, attention, statistics, seen = trained
    peer, target = PEERS[name], LatentTarget(kv_lora_rank=rank, qk_rope_head_dim=rope_dim)
    # Of the first kind only the length is read.
    stock_S = table_F.new_zeros(rope_dim // 2) if peer.per_head else table_F
    bands = peer.bands(lambda: zip(attention, statistics, strict=True), table_F, stock_S)
    slots_S = torch.tensor([band.frequency for band in bands for _ in range(band.slots)], dtype=torch.float64)
    errors = []
    for a, s, x_BTD in zip(attention, statistics, seen, strict=True):
        wanted_TD = output(a, x_BTD[-1])
        error_TD = latent_output(peer.fold(a, target, bands, s), slots_S, x_BTD[-1]) - wanted_TD
        errors.append(float(error_TD.norm() / wanted_TD.norm()))
    return sum(errors) / len(errors)


def test_on_a_trained_model_they_rank_as_published(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the bundled checkpoint at half and at a quarter of its cache, each rule with its own division."""
    monkeypatch.setattr(layers, "FREQUENCIES_F", trained[0])
    half, quarter = (
        {
            name: lost_by(name, *(of_heads if peer.per_head else shared), trained)
            for name, peer in PEERS.items()
        }
        for of_heads, shared in (((64, 64), (16, 112)), ((32, 32), (16, 48)))
    )
    assert half["mha2mla"] < half["transmla"] < half["svd"] < half["xecomla"]
    assert quarter["transmla"] < quarter["svd"] < quarter["mha2mla"] < quarter["xecomla"]
    for lost in (half, quarter):
        assert lost["care"] < lost["svd"]
        assert lost["mha2mla"] < lost["mha2mla:uniform"] < lost["mha2mla:high"] < lost["mha2mla:low"]
        assert lost["mha2mla"] < lost["mha2mla:split"]
