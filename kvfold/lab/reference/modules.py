"""Attention variants as torch modules of one layer's weights, with a cache of the tokens that they have seen.

Legend: convert/algebra/attention.py; B sequences, T new tokens, X tokens that are read, cached ones first, E
a head's columns, V value width, O outputs of a linear layer, I its inputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ...convert.algebra.attention import Attention, LatentAttention
from ...core.errors import InvalidInput


class TokenCache:
    """Rows that a module keeps of the tokens it has seen.

    Empty at first, and one for each module and batch.
    """

    def __init__(self) -> None:
        self._rows: tuple[Tensor, ...] = ()

    @property
    def tokens(self) -> int:
        """Return the number of tokens in the cache."""
        return self._rows[0].shape[-2] if self._rows else 0

    @property
    def elements(self) -> int:
        """Return the number of elements in the cache, of all sequences."""
        return sum(rows.numel() for rows in self._rows)

    def append(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Add the rows (..., T, width) of new tokens; returns those of all tokens (..., X, width)."""
        if self._rows:
            rows = tuple(torch.cat(pair, -2) for pair in zip(self._rows, rows, strict=True))
        self._rows = rows
        return rows


class MultiHeadAttention(nn.Module):
    """MHA (arXiv 1706.03762), GQA (arXiv 2305.13245) or MQA (arXiv 1911.02150), causal.

    q_n = R(t) W_Q,n x_t,  k_g = R(s) W_K,g x_s,  v_g = W_V,g x_s,  g = n // (N/K);
    y_t = Σ_n W_O,n Σ_s softmax_s(scale · q_n·k_g) v_g.

    Args:
        layer: the weights; their number of key/value heads decides which of them it is.
        frequencies: radians per token of a head's pairs; none: no rotation.

    Raises:
        InvalidInput: the layer has query or key norms.
    """

    def __init__(self, layer: Attention, frequencies: Sequence[float] = ()) -> None:
        super().__init__()
        if layer.q_norm_NH is not None or layer.k_norm_KH is not None:
            raise InvalidInput(
                "this attention has query or key norms, which this module lacks; give a source without them"
            )
        self.head_dim, self.scale, self.frequencies = layer.q_NHD.shape[1], layer.scale, frequencies
        self.q_proj = _linear(layer.q_NHD.flatten(0, 1), layer.q_NH)
        self.k_proj = _linear(layer.k_KHD.flatten(0, 1), layer.k_KH)
        self.v_proj = _linear(layer.v_KHD.flatten(0, 1), layer.v_KH)
        self.o_proj = _linear(layer.o_DNH.flatten(1), layer.o_D)

    def forward(self, input_BTD: Tensor, *, cache: TokenCache | None = None) -> Tensor:
        """Attend from new tokens to themselves and to those in the cache, (B, T, D)."""
        q_BNTH, k_BKXH, v_BKXH = self._rows(input_BTD, cache.tokens if cache else 0)
        if cache is not None:
            k_BKXH, v_BKXH = cache.append(k_BKXH, v_BKXH)
        mixed_BNTH = _attend(q_BNTH, k_BKXH, v_BKXH, self.scale)
        output_BTD: Tensor = self.o_proj(mixed_BNTH.transpose(1, 2).flatten(2))
        return output_BTD

    @torch.no_grad()
    def probabilities(self, input_BTD: Tensor) -> Tensor:
        """Return each token's attention to each other, (B, N, T, X); rows sum to one."""
        q_BNTH, k_BKXH, _ = self._rows(input_BTD, 0)
        score_BNTX = self.scale * q_BNTH @ k_BKXH.repeat_interleave(q_BNTH.shape[1] // k_BKXH.shape[1], 1).mT
        ahead_TX = torch.ones_like(score_BNTX[0, 0], dtype=torch.bool).triu(1)
        return score_BNTX.masked_fill(ahead_TX, -torch.inf).softmax(-1)

    def _rows(self, input_BTD: Tensor, past: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys of new tokens, which are rotated, and values; (B, heads, T, H)."""
        q, k, v = (
            project(input_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return _turned(q, past, self.frequencies), _turned(k, past, self.frequencies), v


class MultiHeadLatentAttention(nn.Module):
    """MLA (arXiv 2405.04434, section 2.1), causal: all keys and values come from one small cached latent.

    c = W_DKV x,  k_n = [W_UK,n c; R(s) W_KR x],  v_n = W_UV,n c,  q_n = [W_Q,n z; R(t) W_QR,n z],  z = x or
    W_DQ x; y_t = Σ_n W_O,n Σ_s softmax_s(scale · q_n·k_n) v_n.

    Absorbed, the same sums are taken in another order: q·(W_UK c) = (W_UKᵀ q)·c, and W_UV is applied after
    the sum over tokens. A score then costs C + R multiplications instead of P + R. That suits decoding, where
    expanding the cache costs more.

    Args:
        layer: the weights.
        frequencies: radians per token of the rotary slots; none: no rotation.
        absorbed: whether it attends in the latent and never expands it.
    """

    def __init__(
        self, layer: LatentAttention, frequencies: Sequence[float] = (), *, absorbed: bool = False
    ) -> None:
        super().__init__()
        self.scale, self.frequencies, self.absorbed = layer.scale, frequencies, absorbed
        (self.heads, self.nope, _), (self.rank, _) = layer.q_nope_NPA.shape, layer.down_CD.shape
        q_bias = k_bias = None
        if layer.q_nope_NP is not None and layer.q_rope_NR is not None:
            q_bias = torch.cat([layer.q_nope_NP, layer.q_rope_NR], 1)
        if layer.k_rope_R is not None:
            k_bias = torch.cat([layer.k_rope_R.new_zeros(self.rank), layer.k_rope_R])
        self.q_a_proj = nn.Identity() if layer.q_down_AD is None else _linear(layer.q_down_AD)
        self.q_b_proj = _linear(torch.cat([layer.q_nope_NPA, layer.q_rope_NRA], 1).flatten(0, 1), q_bias)
        self.kv_a_proj = _linear(torch.cat([layer.down_CD, layer.k_rope_RD]), k_bias)
        # Rows that expand the latent, those of a head together, keys first.
        self.kv_b_proj: nn.Module = _linear(torch.cat([layer.k_up_NPC, layer.v_up_NHC], 1).flatten(0, 1))
        self.o_proj = _linear(layer.o_DNH.flatten(1), layer.o_D)

    def forward(self, input_BTD: Tensor, *, cache: TokenCache | None = None) -> Tensor:
        """Attend from new tokens to themselves and to those in the cache, (B, T, D)."""
        past = cache.tokens if cache else 0
        rows_BNTE = self.q_b_proj(self.q_a_proj(input_BTD)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q_nope, q_rope = rows_BNTE.tensor_split([self.nope], -1)
        q_rope = _turned(q_rope, past, self.frequencies, interleaved=True)
        latent_BXC, k_rope = self.kv_a_proj(input_BTD).tensor_split([self.rank], -1)
        k_rope_BXR = _turned(k_rope[:, None], past, self.frequencies, interleaved=True)[:, 0]
        if cache is not None:
            latent_BXC, k_rope_BXR = cache.append(latent_BXC, k_rope_BXR)
        if self.absorbed:
            assert isinstance(self.kv_b_proj, nn.Linear)
            up_NEC = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
            k_up_NPC, v_up_NVC = up_NEC.tensor_split([self.nope], 1)
            q = torch.cat([q_nope @ k_up_NPC, q_rope], -1)
            k = torch.cat([latent_BXC, k_rope_BXR], -1)[:, None]
            mixed = _attend(q, k, latent_BXC[:, None], self.scale) @ v_up_NVC.mT
        else:
            up_BNXE = self.kv_b_proj(latent_BXC).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            k_nope, v = up_BNXE.tensor_split([self.nope], -1)
            k = torch.cat([k_nope, k_rope_BXR[:, None].expand(-1, self.heads, -1, -1)], -1)
            mixed = _attend(torch.cat([q_nope, q_rope], -1), k, v, self.scale)
        output_BTD: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output_BTD


def _linear(weight_OI: Tensor, bias: Tensor | None = None) -> nn.Linear:
    outputs, inputs = weight_OI.shape
    made = nn.Linear(inputs, outputs, bias is not None, weight_OI.device, weight_OI.dtype)
    with torch.no_grad():
        made.weight.copy_(weight_OI)
        if bias is not None:
            made.bias.copy_(bias.flatten())
    return made


def _turned(
    rows_BNTH: Tensor, past: int, frequencies: Sequence[float], *, interleaved: bool = False
) -> Tensor:
    """Apply RoPE (arXiv 2104.09864) behind cached tokens: turn every pair by frequency · position.

    The rows of a pair are half a head apart, or neighbours.
    """
    if not frequencies:
        return rows_BNTH
    # In float64: at far positions the rounding of an angle is what one sees of it.
    position_T = torch.arange(past, past + rows_BNTH.shape[2], dtype=torch.float64, device=rows_BNTH.device)
    angle_TF = position_T[:, None] * position_T.new_tensor(frequencies)
    cos, sin = angle_TF.cos().to(rows_BNTH.dtype), angle_TF.sin().to(rows_BNTH.dtype)
    real, imaginary = (rows_BNTH[..., ::2], rows_BNTH[..., 1::2]) if interleaved else rows_BNTH.chunk(2, -1)
    parts = real * cos - imaginary * sin, real * sin + imaginary * cos
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


def _attend(q_BNTH: Tensor, k_BKXH: Tensor, v_BKXH: Tensor, scale: float) -> Tensor:
    """Compute softmax(scale · q kᵀ) v over readable tokens (arXiv 1706.03762, equation 1), by fused kernels.

    Returns:
        (B, N, T, H).
    """
    new, seen, readers = q_BNTH.shape[2], k_BKXH.shape[2], q_BNTH.shape[1] // k_BKXH.shape[1]
    k_BNXH, v_BNXH = (
        rows[:, :, None].expand(-1, -1, readers, -1, -1).flatten(1, 2)  # one head for all takes no memory
        for rows in (k_BKXH, v_BKXH)
    )
    if new == seen:
        return scaled_dot_product_attention(q_BNTH, k_BNXH, v_BNXH, is_causal=True, scale=scale)
    readable = torch.ones(new, seen, dtype=torch.bool, device=q_BNTH.device).tril(seen - new)
    return scaled_dot_product_attention(q_BNTH, k_BNXH, v_BNXH, attn_mask=readable, scale=scale)
