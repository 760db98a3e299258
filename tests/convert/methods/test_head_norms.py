"""Pooling keys that a norm follows: lossless where possible, and no worse than the plain average."""

from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.algebra.attention import Attention
from kvfold.convert.algebra.forward import attend
from kvfold.convert.algebra.metric import weights_only
from kvfold.convert.algebra.target import GroupedTarget
from kvfold.convert.methods import pooling as pool
from kvfold.convert.methods.head_norms import by_value, keys

HEADS, KEYS, WIDTH, HIDDEN = 8, 4, 6, 24
FREQUENCIES = torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)


def attention(seed: int = 0) -> Attention:
    """Random, key heads unlike."""
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    return Attention(
        q_NHD=random(HEADS, WIDTH, HIDDEN),
        k_KHD=random(KEYS, WIDTH, HIDDEN),
        v_KHD=random(KEYS, WIDTH, HIDDEN),
        o_DNH=random(HIDDEN, HEADS, WIDTH),
        q_NH=random(HEADS, WIDTH),
        k_KH=random(KEYS, WIDTH),
        q_norm_NH=1 + 0.3 * random(1, WIDTH),
        k_norm_KH=1 + 0.3 * random(1, WIDTH),
        scale=WIDTH**-0.5,
    )


def like_heads(source: Attention) -> Attention:
    """The same, with key heads that differ by a length and by their pairs' signs."""
    sign_KF = torch.tensor([[1, 1, 1], [1, -1, 1], [-1, -1, 1], [-1, 1, -1]], dtype=torch.float64)
    turn_KH = torch.cat([sign_KF, sign_KF], -1) * torch.tensor([1.0, 2.0, 0.5, 3.0])[:, None]
    k_KHD, k_KH = turn_KH[..., None] * source.k_KHD[:1], turn_KH * source.k_KH[:1]
    return Attention(**{**vars(source), "k_KHD": k_KHD, "k_KH": k_KH})


def scores(layer: Attention) -> Tensor:
    """Rotated scores (N, T, T) of random inputs, by the definition."""
    x_TD = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9), dtype=torch.float64)

    def made(w: Tensor, bias: Tensor | None, norm: Tensor | None) -> Tensor:
        y = torch.einsum("td,nhd->nth", x_TD, w) + bias[:, None]
        y = y * y.square().mean(-1, keepdim=True).rsqrt() * norm[:, None]
        angle_TF = torch.arange(5)[:, None] * FREQUENCIES
        z = torch.complex(*y.chunk(2, -1)) * torch.polar(torch.ones_like(angle_TF), angle_TF)
        return torch.cat([z.real, z.imag], -1)

    q, k = made(layer.q_NHD, layer.q_NH, layer.q_norm_NH), made(layer.k_KHD, layer.k_KH, layer.k_norm_KH)
    return layer.scale * q @ k.repeat_interleave(len(q) // len(k), 0).mT


def test_signs_and_lengths_are_lossless() -> None:
    source = like_heads(attention())
    for groups in (1, 2):
        folded = keys(source, GroupedTarget(num_key_value_heads=groups))
        assert folded.k_KHD.shape[0] == groups
        torch.testing.assert_close(scores(folded), scores(source))


def test_norms_that_subtract_means_hide_them_and_lengths() -> None:
    """As Cohere's: key heads that differ by what such a norm takes away are merged without loss."""
    one = attention()
    plain = replace(one, q_norm_NH=one.q_NH, k_norm_KH=one.k_KH[:1].expand(KEYS, -1), centred=True)
    shift_KH = torch.randn(KEYS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)[
        :, :1
    ]
    factor_KH = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)[:, None]
    k_KHD = factor_KH[..., None] * plain.k_KHD[:1] + shift_KH[..., None]
    source = replace(plain, k_KHD=k_KHD, k_KH=factor_KH * plain.k_KH[:1] - shift_KH)
    x_BTD = torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for groups in (1, 2):
        target = GroupedTarget(num_key_value_heads=groups)
        folded = replace(keys(source, target), v_KHD=source.v_KHD[:groups], o_DNH=source.o_DNH)
        kept = replace(source, v_KHD=folded.v_KHD.repeat_interleave(KEYS // groups, 0))
        assert folded.k_norm_KH is not None
        assert len(folded.k_KHD) == len(folded.k_norm_KH) == groups
        torch.testing.assert_close(attend(folded, x_BTD, FREQUENCIES), attend(kept, x_BTD, FREQUENCIES))


def test_as_many_groups_as_heads_changes_nothing() -> None:
    source = attention()
    target, metric = GroupedTarget(num_key_value_heads=KEYS), weights_only(source, 16)
    assert by_value(pool.subspace)(source, target, metric, FREQUENCIES) is source


def test_no_worse_than_the_average() -> None:
    """Unlike heads: the error of the scores, over many draws."""
    target, ours, plain = GroupedTarget(num_key_value_heads=2), 0.0, 0.0
    for seed in range(20):
        source = attention(seed)
        metric = weights_only(source, 16)
        ours += float((scores(keys(source, target)) - scores(source)).square().mean())
        average = pool.mean(source, target, metric, FREQUENCIES)
        plain += float((scores(average) - scores(source)).square().mean())
    assert ours < 0.97 * plain


def test_values_are_the_method_s() -> None:
    source, target = attention(), GroupedTarget(num_key_value_heads=2)
    metric = weights_only(source, 16)
    folded, wanted = (
        method(source, target, metric, FREQUENCIES) for method in (by_value(pool.subspace), pool.subspace)
    )
    assert torch.equal(folded.v_KHD, wanted.v_KHD)
    assert torch.equal(folded.o_DNH, wanted.o_DNH)


def test_the_mean_is_plain() -> None:
    spanning = torch.rand(KEYS, WIDTH, dtype=torch.float64)
    source = Attention(**{**vars(attention()), "k_norm_KH": spanning})
    folded = pool.mean(source, GroupedTarget(num_key_value_heads=2), weights_only(source, 16), FREQUENCIES)
    for rows, wanted in (
        (folded.k_KHD, source.k_KHD),
        (folded.v_KHD, source.v_KHD),
        (folded.k_norm_KH, spanning),
    ):
        assert rows is not None
        torch.testing.assert_close(rows, (wanted[::2] + wanted[1::2]) / 2)


def test_a_norm_over_all_heads_is_averaged() -> None:
    spanning = torch.rand(KEYS, WIDTH, dtype=torch.float64)
    source = Attention(**{**vars(attention()), "k_norm_KH": spanning})
    folded = keys(source, GroupedTarget(num_key_value_heads=2))
    assert folded.k_norm_KH is not None
    torch.testing.assert_close(folded.k_norm_KH, (spanning[::2] + spanning[1::2]) / 2)
