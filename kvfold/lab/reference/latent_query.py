"""Latent-query attention: a fixed number of learned latents read an input of any length.

Legend: heads.py; L latents, I input width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...core.errors import InvalidInput
from .heads import attend
from .multi_head import MultiHeadAttention


@dataclass(frozen=True)
class LatentCache:
    """The state of latents that have read an input; its size does not depend on the input's length.

    Attributes:
        mean_BNLH: softmax-weighted mean of the values.
        log_BNL: log of the sum of exp(score), minus infinity before anything is read.
    """

    mean_BNLH: Tensor
    log_BNL: Tensor

    @property
    def elements(self) -> int:
        """Return the number of elements in the cache, of all sequences."""
        return self.mean_BNLH.numel() + self.log_BNL.numel()


class LatentQueryAttention(nn.Module):
    """Cross-attention of learned latents to an input (Perceiver, arXiv 2103.03206, section 3.1).

    It takes O(T·L), not O(T²).

    z' = z + Σ_n W_O,n softmax(scale · W_Q,n z (W_K,n x)ᵀ) W_V,n x;  with `self_attention`, z'' = z' +
    MHA(z').

    There is no causal form, for every latent reads all of the input. What can be cached instead are the
    latents: an input that comes in pieces is read piece by piece (`read`, then `result`), exactly, by the
    running softmax of arXiv 1805.02867.

    Args:
        d_model: width D of the latents and of the output.
        num_heads: heads N, which divide D.
        num_latents: latents L.
        d_input: width I of the input; D when None.
        self_attention: whether the latents then attend to each other.

    Raises:
        InvalidInput: heads that do not divide.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_latents: int,
        d_input: int | None = None,
        *,
        self_attention: bool = False,
    ) -> None:
        super().__init__()
        if d_model % num_heads:
            raise InvalidInput(
                f"a width of {d_model} does not divide into {num_heads} heads; choose a divisor"
            )
        self.d_model, self.num_heads, self.num_latents, self.d_input = (
            d_model,
            num_heads,
            num_latents,
            d_input or d_model,
        )
        self.head_dim = d_model // num_heads
        self.latent_LD = nn.Parameter(torch.randn(num_latents, d_model) / math.sqrt(d_model))
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(self.d_input, d_model, bias=False)
        self.v_proj = nn.Linear(self.d_input, d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)
        self.self_attention = MultiHeadAttention(d_model, num_heads, causal=False) if self_attention else None

    def forward(
        self, input_BXI: Tensor, *, mask: Tensor | None = None, valid_BX: Tensor | None = None
    ) -> Tensor:
        """Return the latents after reading, (B, L, D).

        Args:
            input_BXI: the input.
            mask: boolean, True where a latent may read: (L, X), (B, 1, L, X) or (B, N, L, X).
            valid_BX: boolean, False at padding.
        """
        q_BNLH, k_BNXH, v_BNXH = self._rows(input_BXI)
        mixed = attend(q_BNLH, k_BNXH, v_BNXH, scale=self._scale, causal=False, mask=mask, valid_BX=valid_BX)
        return self._output(mixed)

    def read(
        self, input_BXI: Tensor, cache: LatentCache | None = None, *, valid_BX: Tensor | None = None
    ) -> LatentCache:
        """Read one more piece of the input, and return the new state; `valid_BX` is False at its padding."""
        q_BNLH, k_BNXH, v_BNXH = self._rows(input_BXI)
        score_BNLX = self._scale * q_BNLH @ k_BNXH.mT
        if valid_BX is not None:
            score_BNLX = score_BNLX.masked_fill(~valid_BX[:, None, None, :].bool(), -math.inf)
        log_BNL = score_BNLX.logsumexp(-1)
        # A piece of padding alone weighs nothing.
        share_BNLX = (score_BNLX - log_BNL.clamp(min=torch.finfo(log_BNL.dtype).min)[..., None]).exp()
        mean_BNLH = share_BNLX @ v_BNXH
        if cache is None:
            return LatentCache(mean_BNLH, log_BNL)
        total_BNL = torch.logaddexp(cache.log_BNL, log_BNL)
        floor_BNL = total_BNL.clamp(min=torch.finfo(log_BNL.dtype).min)
        old, new = ((log - floor_BNL).exp()[..., None] for log in (cache.log_BNL, log_BNL))
        return LatentCache(old * cache.mean_BNLH + new * mean_BNLH, total_BNL)

    def result(self, cache: LatentCache) -> Tensor:
        """Return the latents after all that was read, (B, L, D)."""
        return self._output(cache.mean_BNLH)

    def cache_size(self) -> int:
        """Return the elements cached per sequence, however long it is: L·N·(H + 1)."""
        return self.num_latents * self.num_heads * (self.head_dim + 1)

    @property
    def _scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    def _rows(self, input_BXI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_NLH = self.q_proj(self.latent_LD).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
        k_BNXH, v_BNXH = (
            linear(input_BXI).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.k_proj, self.v_proj)
        )
        return q_NLH.expand(len(input_BXI), -1, -1, -1), k_BNXH, v_BNXH

    def _output(self, mixed_BNLH: Tensor) -> Tensor:
        latent_BLD: Tensor = self.latent_LD + self.o_proj(mixed_BNLH.transpose(1, 2).flatten(2))
        return latent_BLD if self.self_attention is None else latent_BLD + self.self_attention(latent_BLD)
