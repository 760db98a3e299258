"""Random attention layers, and their outputs computed by definition."""

from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.algebra.attention import Attention, LatentAttention
from kvfold.convert.algebra.rotary import complex_rows, frequencies, half_rows
from kvfold.convert.methods import latent as factor

D, H = 40, 8
FREQUENCIES_F, _ = frequencies({"rope_type": "default", "rope_theta": 100.0}, H, 64)
OWN = factor.uniform_bands(FREQUENCIES_F, FREQUENCIES_F)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Numbers from a standard normal distribution, float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
    """Return what the layer adds to the residual stream, (T, D)."""
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
