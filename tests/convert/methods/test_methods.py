"""What each method does to weights, without any file: identities and orderings on random layers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvfold.convert.algebra.attention import Attention, LatentAttention
from kvfold.convert.algebra.metric import weights_only
from kvfold.convert.algebra.rotary import complex_rows, frequencies, half_rows
from kvfold.convert.algebra.subspaces import low_rank
from kvfold.convert.algebra.target import GroupedTarget, LatentTarget
from kvfold.convert.methods import latent as factor
from kvfold.convert.methods import pooling as pool
from kvfold.convert.methods.table import POOL

D, H = 40, 8
FREQUENCIES_F, _ = frequencies({"rope_type": "default", "rope_theta": 100.0}, H, 64)
OWN = factor.uniform_bands(FREQUENCIES_F, FREQUENCIES_F)


def layer(seed: int = 0, heads: int = 4, key_heads: int = 4, biases: bool = False) -> Attention:
    """A random layer, float64."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64) * 0.3

    return Attention(
        q_NHD=draw(heads, H, D),
        k_KHD=draw(key_heads, H, D),
        v_KHD=draw(key_heads, H, D),
        o_DNH=draw(D, heads, H),
        q_NH=draw(heads, H) if biases else None,
        k_KH=draw(key_heads, H) if biases else None,
        v_KH=draw(key_heads, H) if biases else None,
        scale=H**-0.5,
    )


def rotate(rows_BTH: Tensor, frequencies: Tensor, interleaved: bool) -> Tensor:
    """RoPE by its definition: pair l of position m turns by m f_l."""
    pairs = rows_BTH.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else rows_BTH.chunk(2, -1)
    angle_TF = torch.arange(rows_BTH.shape[-2], dtype=torch.float64)[:, None] * frequencies
    turned = torch.complex(*pairs) * torch.polar(torch.ones_like(angle_TF), angle_TF)
    return torch.cat([turned.real, turned.imag], -1)


def attend(q_NTH: Tensor, k_NTH: Tensor, v_NTH: Tensor, scale: float) -> Tensor:
    """Causal softmax attention, (N, T, H)."""
    scores = scale * q_NTH @ k_NTH.mT
    future = torch.ones_like(scores).triu(1).bool()
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v_NTH


def output(a: Attention, x_TD: Tensor) -> Tensor:
    """What the layer adds to the residual stream, (T, D)."""
    queries = len(a.q_NHD) // len(a.k_KHD)

    def rows(weight: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.einsum("nhd,td->nth", weight, x_TD)
        return out if bias is None else out + bias[:, None]

    q = rotate(rows(a.q_NHD, a.q_NH), FREQUENCIES_F, interleaved=False)
    k = rotate(rows(a.k_KHD, a.k_KH), FREQUENCIES_F, interleaved=False).repeat_interleave(queries, 0)
    out = torch.einsum(
        "dnh,nth->td", a.o_DNH, attend(q, k, rows(a.v_KHD, a.v_KH).repeat_interleave(queries, 0), a.scale)
    )
    return out if a.o_D is None else out + a.o_D


def latent_output(a: LatentAttention, slots_S: Tensor, x_TD: Tensor) -> Tensor:
    """The same of latent attention, by its definition."""
    q_nope = torch.einsum("npd,td->ntp", a.q_nope_NPA, x_TD) + (
        0 if a.q_nope_NP is None else a.q_nope_NP[:, None]
    )
    q_rope = torch.einsum("nrd,td->ntr", a.q_rope_NRA, x_TD) + (
        0 if a.q_rope_NR is None else a.q_rope_NR[:, None]
    )
    k_rope = x_TD @ a.k_rope_RD.mT + (0 if a.k_rope_R is None else a.k_rope_R)
    latent_TC = x_TD @ a.down_CD.mT
    q = torch.cat([q_nope, rotate(q_rope, slots_S, interleaved=True)], -1)
    shared = rotate(k_rope, slots_S, interleaved=True).expand(len(q), -1, -1)
    k = torch.cat([torch.einsum("npc,tc->ntp", a.k_up_NPC, latent_TC), shared], -1)
    out = torch.einsum(
        "dnh,nth->td", a.o_DNH, attend(q, k, torch.einsum("nhc,tc->nth", a.v_up_NHC, latent_TC), a.scale)
    )
    return out if a.o_D is None else out + a.o_D


@pytest.fixture
def x_TD() -> Tensor:
    return torch.randn(20, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def turned_copies(a: Attention, seed: int) -> Attention:
    """The first key/value head in every place, each time turned by other phases and another rotation."""
    random = torch.Generator().manual_seed(seed)
    keys, values = [], []
    for _ in a.k_KHD:
        angle_F = torch.rand(H // 2, generator=random, dtype=torch.float64) * 6
        keys.append(
            half_rows(torch.polar(torch.ones_like(angle_F), angle_F)[:, None] * complex_rows(a.k_KHD[0]))
        )
        rotation_HH = torch.linalg.qr(torch.randn(H, H, generator=random, dtype=torch.float64))[0]
        values.append(rotation_HH @ a.v_KHD[0])
    return replace(a, k_KHD=torch.stack(keys), v_KHD=torch.stack(values))


@pytest.mark.parametrize("method", POOL)
@pytest.mark.parametrize("biases", [False, True])
def test_equal_heads_pool_losslessly(method: str, biases: bool, x_TD: Tensor) -> None:
    a = layer(biases=biases, heads=8)
    equal = replace(
        a,
        k_KHD=a.k_KHD[:1].expand_as(a.k_KHD).clone(),
        v_KHD=a.v_KHD[:1].expand_as(a.v_KHD).clone(),
        k_KH=None if a.k_KH is None else a.k_KH[:1].expand_as(a.k_KH).clone(),
        v_KH=None if a.v_KH is None else a.v_KH[:1].expand_as(a.v_KH).clone(),
    )
    pooled = POOL[method](equal, GroupedTarget(num_key_value_heads=2), weights_only(equal, 64), FREQUENCIES_F)
    assert len(pooled.k_KHD) == 2
    torch.testing.assert_close(output(pooled, x_TD), output(equal, x_TD))


@pytest.mark.parametrize("method", ["aligned", "subspace"])
def test_heads_equal_up_to_phases_and_rotations_pool_losslessly(method: str, x_TD: Tensor) -> None:
    """What the mean cannot do: training leaves each head's phases and value basis arbitrary."""
    a = turned_copies(layer(heads=8), seed=3)
    # Procrustes stops when a sweep gains less than its tolerance; the subspace is a closed form.
    precision = {"rtol": 0.0, "atol": 1e-3 if method == "aligned" else 1e-9}
    torch.testing.assert_close(
        output(
            POOL[method](a, GroupedTarget(num_key_value_heads=1), weights_only(a, 64), FREQUENCIES_F), x_TD
        ),
        output(a, x_TD),
        **precision,
    )
    lost = output(
        pool.mean(a, GroupedTarget(num_key_value_heads=1), weights_only(a, 64), FREQUENCIES_F), x_TD
    ) - output(a, x_TD)
    assert lost.norm() > 0.1 * output(a, x_TD).norm()


def test_methods_rank_as_published(x_TD: Tensor) -> None:
    """On heads that are turned copies plus noise: subspace loses least, then aligned, then the mean."""
    copies = turned_copies(layer(heads=8), seed=4)
    noise = layer(seed=5)
    a = replace(copies, k_KHD=copies.k_KHD + 0.3 * noise.k_KHD, v_KHD=copies.v_KHD + 0.3 * noise.v_KHD)
    lost = {
        name: float(
            (
                output(
                    fold(a, GroupedTarget(num_key_value_heads=1), weights_only(a, 64), FREQUENCIES_F), x_TD
                )
                - output(a, x_TD)
            ).norm()
        )
        for name, fold in POOL.items()
    }
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
def test_one_key_head_is_exact_in_its_own_slots(biases: bool, x_TD: Tensor) -> None:
    """MQA needs no more than one slot a frequency and a latent as wide as the values."""
    a = layer(key_heads=1, biases=biases)
    latent = factor.to_mla(
        a, LatentTarget(kv_lora_rank=H, qk_rope_head_dim=H), FREQUENCIES_F, OWN, weights_only(a, 64)
    )
    torch.testing.assert_close(latent_output(latent, FREQUENCIES_F, x_TD), output(a, x_TD))


def test_heads_equal_up_to_phases_need_the_cache_of_one(x_TD: Tensor) -> None:
    """The slots take every head's phase into the query, the latent every head's rotation into the output."""
    a = turned_copies(layer(), seed=6)
    latent = factor.to_mla(
        a, LatentTarget(kv_lora_rank=H, qk_rope_head_dim=H), FREQUENCIES_F, OWN, weights_only(a, 64)
    )
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
    """Eckart-Young.

    No rank-r factors have a smaller weighted error, whichever side the Gram matrix is taken on.
    """
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
    latent = factor.to_mla(
        equal,
        LatentTarget(kv_lora_rank=rank, qk_rope_head_dim=H),
        FREQUENCIES_F,
        OWN,
        weights_only(equal, 64),
    )
    torch.testing.assert_close(latent_output(latent, FREQUENCIES_F, x_TD), output(equal, x_TD))
