"""One layer's attention as tensors, before and after a fold.

Legend: D hidden size, N query heads, K key/value heads, H head dim, F = H/2 rotary pairs, C latent rank, P width of the
un-rotated part of a latent query or key, S rotary slots, R = 2S. Linear maps act on column vectors: k = k_KHD x + k_KH.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor


class _Layer:
    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Self:
        """The same weights in another dtype, and on another device."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        cast = {name: value.to(device, dtype) for name, value in tensors.items() if isinstance(value, Tensor)}
        return replace(self, **cast)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True)
class Attention(_Layer):
    """Multi-head or grouped-query attention: score = scale · q·k, rotary rows in the half layout, biases optional.

    Query head n reads key/value head n // (N/K). Where there are norms, they stand between projection (with its bias) and
    rotation: RMSNorm of each head, or of all heads as one vector; their weights have a row a head, or one that heads share.
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
    scale: float


@dataclass(frozen=True, kw_only=True)
class LatentAttention(_Layer):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): c = down x, k = [k_up c; k_rope x], v = v_up c.

    score = scale · (q_nope·k_nope + q_rope·k_rope); rotary rows in the interleaved layout, one key for all heads.
    """

    q_nope_NPD: Tensor
    q_rope_NRD: Tensor
    down_CD: Tensor
    k_up_NPC: Tensor
    v_up_NHC: Tensor
    k_rope_RD: Tensor
    o_DNH: Tensor
    q_nope_NP: Tensor | None = None
    q_rope_NR: Tensor | None = None
    k_rope_R: Tensor | None = None
    o_D: Tensor | None = None
    scale: float


@dataclass(frozen=True, kw_only=True)
class IntactAttention(_Layer):
    """Attention whose keys and values are rebuilt from a latent, keys before rotation: k = k_up c + k_KH, v = v_up c + v_KH.

    c = down x, with E = D; or, where k_KHD and v_KHD are kept, c = down [norm(k); v], with E = 2KH and biases inside.
    Grouping, rotary layout and norms as in `Attention`.
    """

    q_NHD: Tensor
    down_CE: Tensor
    k_up_KHC: Tensor
    v_up_KHC: Tensor
    o_DNH: Tensor
    k_KHD: Tensor | None = None
    v_KHD: Tensor | None = None
    q_NH: Tensor | None = None
    k_KH: Tensor | None = None
    v_KH: Tensor | None = None
    o_D: Tensor | None = None
    q_norm_NH: Tensor | None = None
    k_norm_KH: Tensor | None = None
    scale: float
