"""Multi-head latent attention as a module, expanded or absorbed.

Legend: heads.py; V value width, E a head's columns.
"""

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from ...convert.algebra.attention import LatentAttention
from .heads import TokenCache, attend, frequency_table, positions, turned


class MultiHeadLatentAttention(nn.Module):
    """MLA (arXiv 2405.04434, section 2.1): keys and values of all heads come from one small cached latent.

    c = W_DKV x,  k_n = [W_UK,n c; R(s) W_KR x],  v_n = W_UV,n c,  q_n = [W_Q,n z; R(t) W_QR,n z],  z = x or
    W_DQ x; y_t = Σ_n W_O,n Σ_s softmax_s(scale · q_n·k_n) v_n.

    Absorbed, the same sums are taken in another order: q·(W_UK c) = (W_UKᵀ q)·c, and W_UV is applied after
    the sum over tokens.

    Args:
        d_model: hidden size D.
        num_heads: heads N.
        kv_lora_rank: width C of the latent.
        q_lora_rank: width of the queries' latent; None: queries are read from x.
        qk_nope_head_dim: width P of a head's un-rotated part.
        qk_rope_head_dim: width R of the rotary part, even; one key for all heads; 0 leaves it out.
        v_head_dim: width V of a head's values.
        rope_theta: base of the rotary table; None: no rotation.
        frequencies: the table itself, radians per token, R / 2 of them, instead of `rope_theta`.
        bias: on the queries, the latent with the rotary key, and the output.
        causal: whether a token reads only itself and those before it.
        scale: of the scores; (P + R)^-½ when None.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        kv_lora_rank: int,
        q_lora_rank: int | None = None,
        *,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        rope_theta: float | None = 10000.0,
        frequencies: Sequence[float] | None = None,
        bias: bool = False,
        causal: bool = True,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        nope, rope = qk_nope_head_dim, qk_rope_head_dim
        self.num_heads, self.kv_lora_rank = num_heads, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = nope, rope, v_head_dim
        self.frequencies = frequency_table(rope, rope_theta, frequencies)
        self.scale = (nope + rope) ** -0.5 if scale is None else scale
        self.causal, self.absorbed = causal, False
        self.q_a_proj = None if q_lora_rank is None else nn.Linear(d_model, q_lora_rank, bias=False)
        self.q_b_proj = nn.Linear(
            d_model if q_lora_rank is None else q_lora_rank, num_heads * (nope + rope), bias
        )
        self.kv_a_proj = nn.Linear(d_model, kv_lora_rank + rope, bias)
        self.kv_b_proj: nn.Module = nn.Linear(kv_lora_rank, num_heads * (nope + v_head_dim), bias=False)
        self.o_proj = nn.Linear(num_heads * v_head_dim, d_model, bias)

    def forward(self, input_BTD: Tensor, *, cache: TokenCache | None = None) -> Tensor:
        """Attend from new tokens to themselves and to those in the cache, (B, T, D)."""
        position = positions(input_BTD, cache.tokens if cache else 0)
        asked_BTA = input_BTD if self.q_a_proj is None else self.q_a_proj(input_BTD)
        rows_BNTE = self.q_b_proj(asked_BTA).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q_nope, q_rope = rows_BNTE.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        q_rope = turned(q_rope, position, self.frequencies, interleaved=True)
        latent_BXC, k_rope_BTR = self.kv_a_proj(input_BTD).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], -1
        )
        k_rope_BXR = turned(k_rope_BTR[:, None], position, self.frequencies, interleaved=True)[:, 0]
        if cache is not None:
            latent_BXC, k_rope_BXR = cache.append(latent_BXC, k_rope_BXR)
        if self.absorbed:
            up_NEC = self.up_weight().unflatten(0, (self.num_heads, -1))
            k_up_NPC, v_up_NVC = up_NEC.split([self.qk_nope_head_dim, self.v_head_dim], 1)
            q = torch.cat([q_nope @ k_up_NPC, q_rope], -1)
            k = torch.cat([latent_BXC, k_rope_BXR], -1)[:, None]
            v = latent_BXC[:, None]
        else:
            up_BNXE = self.kv_b_proj(latent_BXC).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            k_nope, v = up_BNXE.split([self.qk_nope_head_dim, self.v_head_dim], -1)
            shared = k_rope_BXR[:, None].expand(-1, self.num_heads, -1, -1)
            q = torch.cat([q_nope, q_rope], -1)
            k = torch.cat([k_nope, shared], -1)
        mixed = attend(q, k, v, scale=self.scale, causal=self.causal)
        if self.absorbed:
            mixed = mixed @ v_up_NVC.mT
        output_BTD: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output_BTD

    def absorb(self) -> Self:
        """Return an equal module, of copied weights, that attends in the latent and never expands it.

        A score then costs C + R multiplications instead of P + R. That suits decoding, where expanding the
        cache costs more.
        """
        made = copy.deepcopy(self)
        made.absorbed = True
        return made

    @classmethod
    def from_weights(
        cls, layer: LatentAttention, frequencies: Sequence[float] = (), *, causal: bool = True
    ) -> Self:
        """Return a module with a copy of these weights, in their dtype."""
        heads, nope, _ = layer.q_nope_NPA.shape
        rope, (rank, d_model) = len(layer.k_rope_RD), layer.down_CD.shape
        biases = layer.q_nope_NP, layer.q_rope_NR, layer.k_rope_R, layer.o_D
        made = cls(
            d_model,
            heads,
            rank,
            q_lora_rank=None if layer.q_down_AD is None else len(layer.q_down_AD),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            v_head_dim=layer.v_up_NHC.shape[1],
            frequencies=frequencies,
            bias=any(bias is not None for bias in biases),
            causal=causal,
            scale=layer.scale,
        ).to(layer.down_CD)
        with torch.no_grad():
            if made.q_a_proj is not None and layer.q_down_AD is not None:
                made.q_a_proj.weight.copy_(layer.q_down_AD)
            made.q_b_proj.weight.copy_(torch.cat([layer.q_nope_NPA, layer.q_rope_NRA], 1).flatten(0, 1))
            made.kv_a_proj.weight.copy_(torch.cat([layer.down_CD, layer.k_rope_RD]))
            made.up_weight().copy_(torch.cat([layer.k_up_NPC, layer.v_up_NHC], 1).flatten(0, 1))
            made.o_proj.weight.copy_(layer.o_DNH.flatten(1))
            for linear in (made.q_b_proj, made.kv_a_proj, made.o_proj):
                if linear.bias is not None:
                    linear.bias.zero_()
            if layer.q_nope_NP is not None and layer.q_rope_NR is not None:
                made.q_b_proj.bias.copy_(torch.cat([layer.q_nope_NP, layer.q_rope_NR], 1).flatten())
            if layer.k_rope_R is not None:
                made.kv_a_proj.bias[rank:].copy_(layer.k_rope_R)
            if layer.o_D is not None:
                made.o_proj.bias.copy_(layer.o_D)
        return made

    def up_weight(self) -> Tensor:
        """Return rows (N(P+V), C) that expand the latent, those of a head together, keys first."""
        assert isinstance(self.kv_b_proj, nn.Linear)
        return self.kv_b_proj.weight
