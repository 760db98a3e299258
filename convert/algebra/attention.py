"""One layer's attention as tensors, before and after a fold.

Legend: D hidden size, N query heads, K key/value heads, H head dim, F = H/2 rotary pairs, C latent rank, P
width of the un-rotated part of a latent query or key, S rotary slots, R = 2S, A width of what queries are
projected from: D, or less where they are compressed, E = 2KH features of a token. Linear maps act on column
vectors: k = k_KHD x + k_KH.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from .spectrum import LatentSpectrum

# Of the norms in latent attention: fixed in transformers' class, whatever rms_norm_eps says.
LATENT_EPSILON = 1e-6


class Tensors:
    """A dataclass of tensors, which move together."""

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Self:
        """Return the same weights in another dtype, and on another device."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        cast = {name: value.to(device, dtype) for name, value in tensors.items() if isinstance(value, Tensor)}
        return replace(self, **cast)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True)
class Attention(Tensors):
    """Multi-head or grouped-query attention: score = scale · q·k, rotary rows in the half layout.

    Biases are optional. Query head n reads key/value head n // (N/K). Where there are norms, they stand
    between projection (with its bias) and rotation. They are RMSNorm of each head, with a weight that heads
    share, or of all heads as one vector, with a row of the weight per head. Where `centred`, they are
    LayerNorm without bias of each head, with a row of the weight per head.

    Where there is a gate, the sigmoid of gate_NHD x + gate_NH multiplies each head's output before `o`: each
    dimension, or all of a head where the gate has one row per head.
    """

    q_NHD: Tensor
    k_KHD: Tensor
    v_KHD: Tensor
    o_DNH: Tensor
    q_NH: Tensor | None = None
    k_KH: Tensor | None = None
    v_KH: Tensor | None = None
    o_D: Tensor | None = None
    q_norm_NH: Tensor | None = None
    k_norm_KH: Tensor | None = None
    centred: bool = False
    gate_NHD: Tensor | None = None
    gate_NH: Tensor | None = None
    scale: float

    def without_means(self) -> Self:
        """Return the same function with projections that already have no mean for the norms to subtract."""
        if not self.centred:
            return self
        names = ("q_NHD", "k_KHD", "q_NH", "k_KH")
        rows = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(self, **{name: row - row.mean(1, keepdim=True) for name, row in rows.items()})


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Tensors):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1).

    c = down x, k = [k_up c; k_rope x], v = v_up c. score = scale · (q_nope·k_nope + q_rope·k_rope); rotary
    rows in the interleaved layout, one key for all heads. Queries are projected from x, or from q_down x +
    q_down_A (equation 12 there) where that is given. `spectrum` is the spectrum that the latent was cut from.
    Where `latent_norm_C` is given, c is divided by its root mean square and multiplied by that weight;
    `query_norm`, one for all features or one for each, does the same to what queries are projected from. The
    gate is that of `Attention`. While a layer is made, `level_CC` is A of c / |A c| in the place of c.
    """

    q_nope_NPA: Tensor
    q_rope_NRA: Tensor
    down_CD: Tensor
    k_up_NPC: Tensor
    v_up_NHC: Tensor
    k_rope_RD: Tensor
    o_DNH: Tensor
    q_down_AD: Tensor | None = None
    q_down_A: Tensor | None = None
    q_nope_NP: Tensor | None = None
    q_rope_NR: Tensor | None = None
    k_rope_R: Tensor | None = None
    o_D: Tensor | None = None
    gate_NHD: Tensor | None = None
    gate_NH: Tensor | None = None
    scale: float
    level_CC: Tensor | None = None
    latent_norm_C: Tensor | None = None
    query_norm: Tensor | float | None = None
    spectrum: LatentSpectrum | None = None

    def widened(self, latent: int, rope: int, nope: int, value: int, slots: Sequence[int]) -> Self:
        """Return the same function in other widths, none of them smaller, padded with zeros.

        Args:
            latent: the width C.
            rope: the width R.
            nope: the width P.
            value: the width H.
            slots: for each of this layer's rotary slots its number among the R/2; superfluous entries are
                ignored.
        """

        def placed(rows: Tensor, dim: int) -> Tensor:
            pairs = rows.unflatten(dim, (-1, 2))
            shape = list(pairs.shape)
            count, shape[dim] = shape[dim], rope // 2
            chosen = torch.tensor(slots[:count], dtype=torch.int64)
            rows_of_all: Tensor = pairs.new_zeros(shape).index_copy(dim, chosen, pairs).flatten(dim, dim + 1)
            return rows_of_all

        # A norm's mean is over the zeros too.
        norm_C, less = self.latent_norm_C, 1.0
        if norm_C is not None:
            norm_C, less = pad(norm_C, (0, latent - len(norm_C)), value=1.0), (len(norm_C) / latent) ** 0.5
        return replace(
            self,
            q_nope_NPA=_filled(self.q_nope_NPA, 1, nope),
            q_nope_NP=None if self.q_nope_NP is None else _filled(self.q_nope_NP, 1, nope),
            q_rope_NRA=placed(self.q_rope_NRA, 1),
            q_rope_NR=None if self.q_rope_NR is None else placed(self.q_rope_NR, 1),
            down_CD=_filled(self.down_CD, 0, latent),
            k_up_NPC=_filled(_filled(self.k_up_NPC * less, 1, nope), 2, latent),
            v_up_NHC=_filled(_filled(self.v_up_NHC * less, 1, value), 2, latent),
            k_rope_RD=placed(self.k_rope_RD, 0),
            k_rope_R=None if self.k_rope_R is None else placed(self.k_rope_R, 0),
            o_DNH=_filled(self.o_DNH, 2, value),
            latent_norm_C=norm_C,
        )


def _filled(tensor: Tensor, dim: int, width: int) -> Tensor:
    return pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, width - tensor.shape[dim]))


@dataclass(frozen=True, kw_only=True)
class NormedLatentAttention(LatentAttention):
    """Latent attention of a layer that normalises its queries and keys.

    Keys are no linear functions of x there, but they are linear functions of the features f = [norm(k); v] of
    their token, with k = k_KHD x + k_KH, v = v_KHD x and the un-rotated norm(k). So `down_CD` and `k_rope_RD`
    read f, with D = E = 2KH. Queries are q_nope_NPA q' and q_rope_NRA q', with A = H and q' = norm(q_NHA x +
    q_NH) of their head; where `q_down_AD` is given, q_down_AD x stands for x in this.
    """

    q_NHA: Tensor
    k_KHD: Tensor
    v_KHD: Tensor
    q_NH: Tensor | None = None
    k_KH: Tensor | None = None
    q_norm_NH: Tensor | None = None
    k_norm_KH: Tensor | None = None
    centred: bool = False


@dataclass(frozen=True, kw_only=True)
class IntactAttention(Tensors):
    """Attention whose keys and values are rebuilt from a latent, keys before rotation.

    k = k_up c + k_KH and v = v_up c + v_KH. c = down x, with E = D; or, where k_KHD and v_KHD are kept, c =
    down [norm(k); v], with E = 2KH and biases inside. Grouping, rotary layout, norms and the gate are those
    of `Attention`. Queries are projected from x, or from q_down x where that is given.
    """

    q_NHA: Tensor
    down_CE: Tensor
    k_up_KHC: Tensor
    v_up_KHC: Tensor
    o_DNH: Tensor
    k_KHD: Tensor | None = None
    v_KHD: Tensor | None = None
    q_down_AD: Tensor | None = None
    q_NH: Tensor | None = None
    k_KH: Tensor | None = None
    v_KH: Tensor | None = None
    o_D: Tensor | None = None
    q_norm_NH: Tensor | None = None
    k_norm_KH: Tensor | None = None
    centred: bool = False
    gate_NHD: Tensor | None = None
    gate_NH: Tensor | None = None
    scale: float
    spectrum: LatentSpectrum | None = None
