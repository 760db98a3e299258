"""The cost of an error in a key or a value: the metric in which every subspace is chosen.

The loss is quadratic near the source: replacing W by W + E costs ½ tr(G E C Eᵀ) with C the second moment of
the input and G that of the gradient of the log likelihood at the output (K-FAC, arXiv 1503.05671). Keys and
values are then in one unit, nats. Without data the same form holds with the squared error of the attention's
output as unit, for an isotropic normed input.

Legend: attention.py; E = D, plus a column for the constant input 1; B diagonal blocks of S rows each, B·S =
K·H; T distances.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .attention import Attention, Tensors

SPAN = 4096  # distances that the prior over attention distances reaches, at most
# Exponent of that prior; of 1, 1.25, 1.5, 2 and 3 the least total loss on two models (docs/notes/metric.md).
DECAY = 1.5


@dataclass(frozen=True, kw_only=True)
class LayerMetric(Tensors):
    """One layer's metric, float64.

    Attributes:
        input_EE: C, second moment of the input with the constant 1 as its last entry; None: the identity.
        key_BSS: G at the pre-RoPE keys, diagonal blocks over rows (k, h) in the half layout.
        value_BSS: G at the values.
        query_NHH: G at the pre-RoPE queries of every head.
        distance_NT: how a query head's attention is spread over distances; rows sum to 1.
    """

    input_EE: Tensor | None
    key_BSS: Tensor
    value_BSS: Tensor
    query_NHH: Tensor
    distance_NT: Tensor

    def fidelity(self, frequency_F: Tensor) -> Tensor:
        """Return ρ(f) (N, F), each head's mean of e^(-i f Δ) over its attention distances.

        It is complex and at most 1 in magnitude.
        """
        distance_T = torch.arange(self.distance_NT.shape[1]).to(self.distance_NT)
        angle_TF = distance_T[:, None] * frequency_F
        return torch.complex(self.distance_NT @ angle_TF.cos(), -(self.distance_NT @ angle_TF.sin()))

    def moment(self, rows_KHE: Tensor) -> Tensor | None:
        """Return C at the width of some rows, with or without a bias column; None is the identity."""
        width = rows_KHE.shape[-1]
        return None if self.input_EE is None else self.input_EE[:width, :width]

    def of_queries(self, heads: slice) -> "LayerMetric":
        """Return the metric of the same layer for some query heads."""
        return replace(self, query_NHH=self.query_NHH[heads], distance_NT=self.distance_NT[heads])

    def value_blocks(self, heads: int, group: slice) -> Tensor:
        """Return G at the values of some key heads, as diagonal blocks.

        Each head has its own block, or they share one where G is one block.
        """
        if len(self.value_BSS) == heads:
            return self.value_BSS[group]
        width = self.value_BSS.shape[-1] // heads
        rows = slice(group.start * width, group.stop * width)
        return self.value_BSS[:, rows, rows]

    def value_pair(self, heads: int, one: int, other: int) -> Tensor:
        """Return G at the values of two key heads, (2H, 2H)."""
        if len(self.value_BSS) == heads:
            pair: Tensor = torch.block_diag(self.value_BSS[one], self.value_BSS[other])
            return pair
        rows = rows_of([one, other], self.value_BSS.shape[-1] // heads)
        return self.value_BSS[0, rows][:, rows]

    def reordered(self, keys: list[int], readers: list[int]) -> "LayerMetric":
        """Return the metric of the same layer with its key heads, and its query heads, in another order."""

        def moved(blocks_BSS: Tensor) -> Tensor:
            if len(blocks_BSS) == len(keys):
                return blocks_BSS[keys]
            rows = rows_of(keys, blocks_BSS.shape[-1] // len(keys))
            return blocks_BSS[:, rows][:, :, rows]

        return replace(
            self,
            key_BSS=moved(self.key_BSS),
            value_BSS=moved(self.value_BSS),
            query_NHH=self.query_NHH[readers],
            distance_NT=self.distance_NT[readers],
        )

    def pairs(self, heads: int) -> Tensor:
        """Return G at each rotary pair as a Hermitian matrix over the key heads, (F, K, K), complex."""
        blocks, size, _ = self.key_BSS.shape
        width = blocks * size // heads
        per_block = heads // blocks  # heads that share a block
        grid = self.key_BSS.view(blocks, per_block, 2, width // 2, per_block, 2, width // 2)
        same = torch.diagonal(grid, dim1=3, dim2=6)  # blocks, k, part, k', part', F
        real = same[:, :, 0, :, 0] + same[:, :, 1, :, 1]
        imaginary = same[:, :, 1, :, 0] - same[:, :, 0, :, 1]
        hermitian_FBKK = torch.complex(real, imaginary).permute(3, 0, 1, 2)
        out = hermitian_FBKK.new_zeros(width // 2, heads, heads)
        for block in range(blocks):
            part = slice(block * per_block, (block + 1) * per_block)
            out[:, part, part] = hermitian_FBKK[:, block]
        return out


def rows_of(heads: list[int], width: int) -> Tensor:
    """Return the numbers of the rows of heads of some width."""
    return torch.cat([torch.arange(head * width, (head + 1) * width) for head in heads])


UNWEIGHTED = LayerMetric(
    input_EE=None,
    key_BSS=torch.empty(0, 0, 0),
    value_BSS=torch.empty(0, 0, 0),
    query_NHH=torch.empty(0, 0, 0),
    distance_NT=torch.empty(0, 0),
)  # for methods that weigh nothing: working one out takes longer than their fold


def weights_only(attention: Attention, span: int) -> LayerMetric:
    """Return the metric without data: an isotropic input, and distances that follow a power law.

    A key error moves a score by scale · q·δ, a query error by scale · δ·k, and the score moves the output by
    the value it displaces. A value error reaches the output through W_O.

    Args:
        attention: the source's weights, float64.
        span: distances Δ = 0 ... span-1 that attention can reach (max_position_embeddings).
    """
    heads = len(attention.k_KHD)
    queries = len(attention.q_NHD) // len(attention.k_KHD)
    gram_NHH = torch.einsum("dnh,dng->nhg", attention.o_DNH, attention.o_DNH)
    value_NHH = (attention.v_KHD @ attention.v_KHD.mT).repeat_interleave(queries, 0)
    displaced_N = attention.scale**2 * (gram_NHH * value_NHH).sum((1, 2))
    q_NHE = with_bias(attention.q_NHD, attention.q_NH)
    k_NHE = with_bias(attention.k_KHD, attention.k_KH).repeat_interleave(queries, 0)
    key_NHH = displaced_N[:, None, None] * (q_NHE @ q_NHE.mT)
    weight_T = (torch.arange(min(span, SPAN), dtype=torch.float64) + 1) ** -DECAY
    return LayerMetric(
        input_EE=None,
        key_BSS=key_NHH.unflatten(0, (heads, queries)).sum(1),
        value_BSS=gram_NHH.unflatten(0, (heads, queries)).sum(1),
        query_NHH=displaced_N[:, None, None] * (k_NHE @ k_NHE.mT),
        distance_NT=(weight_T / weight_T.sum()).expand(heads * queries, -1),
    )


def with_bias(rows_KHD: Tensor, bias_KH: Tensor | None) -> Tensor:
    """Return rows with the bias as one more column, whose input is the constant 1."""
    return rows_KHD if bias_KH is None else torch.cat([rows_KHD, bias_KH[..., None]], -1)


def without_bias(rows_KHE: Tensor, bias_KH: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return rows and bias apart again; None where `with_bias` of the same bias added no column."""
    return (rows_KHE, None) if bias_KH is None else (rows_KHE[..., :-1], rows_KHE[..., -1])
