"""Modules of the laboratory with random weights, and inputs for them."""

from typing import Any

import torch
from torch import Tensor

from kvfold.convert.algebra.attention import Attention, LatentAttention
from kvfold.lab.reference import MultiHeadAttention, MultiHeadLatentAttention

D, N, H, T, B = 24, 4, 6, 7, 2
TABLE = tuple(100.0 ** (-pair / H) for pair in range(0, H, 2))


def inputs(tokens: int = T, seed: int = 0) -> Tensor:
    return torch.randn(B, tokens, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(
    kv_heads: int = 2, *, d_model: int = D, heads: int = N, width: int = H, bias: bool = True
) -> Attention:
    """Return a layer with random weights, float64."""
    generator = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {
        "q_NHD": (heads, width, d_model), "k_KHD": (kv_heads, width, d_model),
        "v_KHD": (kv_heads, width, d_model), "o_DNH": (d_model, heads, width),
    }  # fmt: skip
    if bias:
        shapes |= {"q_NH": (heads, width), "k_KH": (kv_heads, width), "v_KH": (kv_heads, width)}
        shapes |= {"o_D": (d_model,)}
    return Attention(**_random(shapes, d_model, generator), scale=width**-0.5)


def multi_head(kv_heads: int = 2) -> MultiHeadAttention:
    return MultiHeadAttention(attention(kv_heads), TABLE)


def latent_layer(
    q_rank: int | None = None,
    *,
    d_model: int = D,
    rank: int = 10,
    nope: int = 5,
    rope: int = 4,
    value: int = 3,
    bias: bool = True,
) -> LatentAttention:
    """Return a latent layer with random weights, float64."""
    generator = torch.Generator().manual_seed(2)
    read = d_model if q_rank is None else q_rank
    shapes: dict[str, tuple[int, ...]] = {
        "q_nope_NPA": (N, nope, read), "q_rope_NRA": (N, rope, read), "down_CD": (rank, d_model),
        "k_up_NPC": (N, nope, rank), "v_up_NHC": (N, value, rank), "k_rope_RD": (rope, d_model),
        "o_DNH": (d_model, N, value),
    }  # fmt: skip
    if q_rank is not None:
        shapes["q_down_AD"] = (q_rank, d_model)
    if bias:
        shapes |= {"q_nope_NP": (N, nope), "q_rope_NR": (N, rope), "k_rope_R": (rope,), "o_D": (d_model,)}
    return LatentAttention(**_random(shapes, d_model, generator), scale=(nope + rope) ** -0.5)


def latent(*, absorbed: bool = False, q_rank: int | None = None) -> MultiHeadLatentAttention:
    return MultiHeadLatentAttention(latent_layer(q_rank), (1.0, 0.1), absorbed=absorbed)


def _random(shapes: dict[str, tuple[int, ...]], d_model: int, generator: torch.Generator) -> dict[str, Any]:
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * d_model**-0.5
        for name, shape in shapes.items()
    }
