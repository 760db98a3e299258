"""Parts that the modules share: rotation, masks, softmax and cache.

Legend: ../attention.py; B sequences, T tokens whose output is wanted, X tokens that are read, cached ones
first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

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


def frequency_table(
    width: int, rope_theta: float | None, frequencies: Sequence[float] | None
) -> tuple[float, ...]:
    """Return radians per token of the pairs of a rotary width.

    They are those given, or theta^(-2i/width) (arXiv 2104.09864), or none.

    Raises:
        InvalidInput: the width is odd, or the table is not half as long.
    """
    if frequencies is None and rope_theta is None:
        return ()
    if width % 2:
        raise InvalidInput(f"a rotary width of {width} is odd; it must be even")
    if frequencies is None:
        assert rope_theta is not None
        return tuple(rope_theta ** (-pair / width) for pair in range(0, width, 2))
    if len(frequencies) not in (0, width // 2):
        raise InvalidInput(
            f"{len(frequencies)} frequencies do not fit a rotary width of {width}; give {width // 2}"
        )
    return tuple(float(frequency) for frequency in frequencies)


def positions(input_BTD: Tensor, past: int) -> Tensor:
    """Return the positions (1, T) of new tokens behind cached ones."""
    return torch.arange(past, past + input_BTD.shape[1], device=input_BTD.device)[None]


def turned(
    rows_BNTH: Tensor, position_BT: Tensor, frequencies: Sequence[float], *, interleaved: bool = False
) -> Tensor:
    """Apply RoPE (arXiv 2104.09864): turn every pair by frequency · position.

    The rows of a pair are half a head apart, or neighbours.
    """
    if not frequencies:
        return rows_BNTH
    # In float64: at far positions the rounding of an angle is what one sees of it.
    table_F = torch.tensor(frequencies, dtype=torch.float64, device=rows_BNTH.device)
    angle_B1TF = (position_BT[..., None].double() * table_F)[:, None]
    cos = angle_B1TF.cos().to(rows_BNTH.dtype)
    sin = angle_B1TF.sin().to(rows_BNTH.dtype)
    real, imaginary = (rows_BNTH[..., ::2], rows_BNTH[..., 1::2]) if interleaved else rows_BNTH.chunk(2, -1)
    parts = real * cos - imaginary * sin, real * sin + imaginary * cos
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


def attend(q_BNTH: Tensor, k_BNXH: Tensor, v_BNXH: Tensor, *, scale: float, causal: bool) -> Tensor:
    """Compute softmax(scale · q kᵀ) v over readable tokens (arXiv 1706.03762, equation 1), by fused kernels.

    Returns:
        (B, N, T, H).
    """
    new, seen = q_BNTH.shape[-2], k_BNXH.shape[-2]
    readers = q_BNTH.shape[1] // k_BNXH.shape[1]
    if readers > 1:
        k_BNXH, v_BNXH = _repeated(k_BNXH, readers), _repeated(v_BNXH, readers)
    if not causal or new == seen:
        return scaled_dot_product_attention(q_BNTH, k_BNXH, v_BNXH, is_causal=causal, scale=scale)
    readable = torch.ones(new, seen, dtype=torch.bool, device=q_BNTH.device).tril(seen - new)
    return scaled_dot_product_attention(q_BNTH, k_BNXH, v_BNXH, attn_mask=readable, scale=scale)


def _repeated(rows_BKXH: Tensor, readers: int) -> Tensor:
    """Repeat each key/value head for all query heads that read it; one head for all takes no memory."""
    if rows_BKXH.shape[1] == 1:
        return rows_BKXH.expand(-1, readers, -1, -1)
    return rows_BKXH.repeat_interleave(readers, 1)
