"""Numbers of a few bits that are packed in bytes and in 32-bit words.

Legend: R rows, C columns, W words.
"""

import torch
from torch import Tensor

# The sixteen values of a four-bit float with two bits of exponent and one of mantissa (E2M1).
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
WORD = 32  # bits
WIDTHS = (2, 4, 8)  # bits of a number that words hold without a remainder


def nibbles(bytes_X: Tensor, *, high_first: bool = False) -> Tensor:
    """Return the two four-bit numbers of each byte along the last dimension, uint8."""
    low, high = bytes_X & 0xF, bytes_X >> 4
    pair = (high, low) if high_first else (low, high)
    return torch.stack(pair, -1).flatten(-2)


def fp4(bytes_X: Tensor) -> Tensor:
    """Return the two E2M1 numbers of each byte, low bits first, float32."""
    return torch.tensor(FP4_VALUES)[nibbles(bytes_X).int()]


def fields(words: Tensor, bits: int, dimension: int) -> Tensor:
    """Return the unsigned numbers of each 32-bit word, lowest bits first, along a dimension, int32.

    Words have two dimensions, int32; `bits` divides 32.
    """
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    if dimension == 0:
        spread: Tensor = words[:, None, :] >> shifts[None, :, None]
    else:
        spread = words[:, :, None] >> shifts
    return spread.bitwise_and_(2**bits - 1).flatten(dimension, dimension + 1)
