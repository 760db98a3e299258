"""Modules of the laboratory with random weights, and inputs for them."""

import torch
from torch import Tensor

from kvfold.lab.reference import MultiHeadAttention, MultiHeadLatentAttention

D, N, H, T, B = 24, 4, 6, 7, 2


def inputs(tokens: int = T, seed: int = 0) -> Tensor:
    return torch.randn(B, tokens, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def multi_head(
    kv_heads: int = 2, *, causal: bool = True, theta: float | None = 100.0, bias: bool = True
) -> MultiHeadAttention:
    torch.manual_seed(1)
    return MultiHeadAttention(D, N, kv_heads, bias=bias, causal=causal, rope_theta=theta).double()


def latent(*, causal: bool = True, q_rank: int | None = None) -> MultiHeadLatentAttention:
    torch.manual_seed(2)
    sizes = {"qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 3}
    return MultiHeadLatentAttention(D, N, 10, q_rank, **sizes, bias=True, causal=causal).double()
