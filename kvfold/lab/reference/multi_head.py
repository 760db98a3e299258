"""Multi-head attention and its kin with fewer key/value heads, as one module. Legend: heads.py."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from ...convert.algebra.attention import Attention
from ...core.errors import InvalidInput
from .heads import TokenCache, attend, frequency_table, positions, turned


class MultiHeadAttention(nn.Module):
    """MHA (arXiv 1706.03762), GQA (arXiv 2305.13245) and MQA (arXiv 1911.02150).

    The number of key/value heads decides which of them it is.

    q_n = R(t) W_Q,n x_t,  k_g = R(s) W_K,g x_s,  v_g = W_V,g x_s,  g = n // (N/K);
    y_t = Σ_n W_O,n Σ_s softmax_s(scale · q_n·k_g) v_g.

    Args:
        d_model: hidden size D.
        num_heads: query heads N.
        num_kv_heads: key/value heads K, which divide N; N when None (MHA), 1 is MQA.
        head_dim: width H of a head; D / N when None.
        bias: whether the four projections have one.
        causal: whether a token reads only itself and those before it.
        rope_theta: base of the rotary table; None: no rotation.
        frequencies: the table itself, radians per token, H / 2 of them, instead of `rope_theta`.
        scale: of the scores; H^-½ when None.

    Raises:
        InvalidInput: heads that do not divide.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        causal: bool = True,
        rope_theta: float | None = None,
        frequencies: Sequence[float] | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None and d_model % num_heads:
            raise InvalidInput(
                f"a width of {d_model} does not divide into {num_heads} heads; give head_dim, or another "
                f"number"
            )
        if num_heads % (num_kv_heads or num_heads):
            raise InvalidInput(
                f"{num_heads} query heads do not divide into {num_kv_heads} key/value heads; choose a divisor"
            )
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, num_kv_heads or num_heads
        self.head_dim = head_dim or d_model // num_heads
        self.causal, self.scale = causal, self.head_dim**-0.5 if scale is None else scale
        self.frequencies = frequency_table(self.head_dim, rope_theta, frequencies)
        self.q_proj = nn.Linear(d_model, num_heads * self.head_dim, bias)
        self.k_proj = nn.Linear(d_model, self.num_kv_heads * self.head_dim, bias)
        self.v_proj = nn.Linear(d_model, self.num_kv_heads * self.head_dim, bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, d_model, bias)

    def forward(self, input_BTD: Tensor, *, cache: TokenCache | None = None) -> Tensor:
        """Attend from new tokens to themselves and to those in the cache, (B, T, D)."""
        position = positions(input_BTD, cache.tokens if cache else 0)
        q_BNTH = turned(self._heads(self.q_proj(input_BTD)), position, self.frequencies)
        k_BKXH = turned(self._heads(self.k_proj(input_BTD)), position, self.frequencies)
        v_BKXH = self._heads(self.v_proj(input_BTD))
        if cache is not None:
            k_BKXH, v_BKXH = cache.append(k_BKXH, v_BKXH)
        mixed = attend(q_BNTH, k_BKXH, v_BKXH, scale=self.scale, causal=self.causal)
        output_BTD: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output_BTD

    @torch.no_grad()
    def probabilities(self, input_BTD: Tensor) -> Tensor:
        """Return each token's attention to each other, (B, N, T, X); rows sum to one."""
        position = positions(input_BTD, 0)
        q_BNTH = turned(self._heads(self.q_proj(input_BTD)), position, self.frequencies)
        k_BKXH = turned(self._heads(self.k_proj(input_BTD)), position, self.frequencies)
        score_BNTX = self.scale * q_BNTH @ k_BKXH.repeat_interleave(self.num_heads // self.num_kv_heads, 1).mT
        if self.causal:
            ahead = torch.ones_like(score_BNTX[0, 0], dtype=torch.bool).triu(1)
            score_BNTX = score_BNTX.masked_fill(ahead, -torch.inf)
        map_BNTX: Tensor = score_BNTX.softmax(-1)
        return map_BNTX

    def weights(self) -> Attention:
        """Return the module as one layer's tensors, which share its memory."""
        heads = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        bias = self.q_proj.bias is not None
        rows = {name: getattr(self, f"{name}_proj") for name in heads}
        w = {name: rows[name].weight.detach().unflatten(0, (count, -1)) for name, count in heads.items()}
        b = {
            name: rows[name].bias.detach().view(count, -1) if bias else None for name, count in heads.items()
        }
        return Attention(
            q_NHD=w["q"],
            k_KHD=w["k"],
            v_KHD=w["v"],
            o_DNH=self.o_proj.weight.detach().unflatten(1, (self.num_heads, -1)),
            q_NH=b["q"],
            k_KH=b["k"],
            v_KH=b["v"],
            o_D=self.o_proj.bias.detach() if bias else None,
            scale=self.scale,
        )

    @classmethod
    def from_weights(
        cls, layer: Attention, frequencies: Sequence[float] = (), *, causal: bool = True
    ) -> Self:
        """Return a module with a copy of these weights, in their dtype.

        Where one bias is missing but another is not, it is zero.

        Raises:
            InvalidInput: the layer has query or key norms.
        """
        if layer.q_norm_NH is not None or layer.k_norm_KH is not None:
            raise InvalidInput(
                "this attention has query or key norms, which this module lacks; give a source without them"
            )
        heads, width, d_model = layer.q_NHD.shape
        biases = {"q": layer.q_NH, "k": layer.k_KH, "v": layer.v_KH, "o": layer.o_D}
        bias = any(value is not None for value in biases.values())
        made = cls(
            d_model,
            heads,
            len(layer.k_KHD),
            head_dim=width,
            bias=bias,
            causal=causal,
            frequencies=frequencies,
            scale=layer.scale,
        ).to(layer.q_NHD)
        weights = {"q": layer.q_NHD, "k": layer.k_KHD, "v": layer.v_KHD, "o": layer.o_DNH}
        with torch.no_grad():
            for name, weight in weights.items():
                linear = getattr(made, f"{name}_proj")
                linear.weight.copy_(weight.flatten(1) if name == "o" else weight.flatten(0, 1))
                value = biases[name]
                if bias:
                    linear.bias.copy_(torch.zeros_like(linear.bias) if value is None else value.flatten())
        return made

    def _heads(self, rows_BTD: Tensor) -> Tensor:
        heads_BNTH: Tensor = rows_BTD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads_BNTH
