"""The tensors of a layer with latent attention, in transformers' classes of DeepSeek's kind.

Sources that have it are read and written here; outputs in the stock class have the same names and shapes.

Legend: ../algebra/attention.py; W width of a query, P + R.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..algebra.attention import LatentAttention
from ..algebra.rotary import rope_parameters
from ..algebra.target import LatentGeometry


def latent_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's attention tensors by their names in it, from fields of config.json."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    compressed = config.get("q_lora_rank")
    query = heads * (nope + rope)
    shapes: dict[str, tuple[int, ...]] = {} if compressed else {"q_proj.weight": (query, hidden)}
    shapes |= {
        "kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + value), rank),
        "o_proj.weight": (hidden, heads * value),
    }
    if compressed:
        shapes |= {
            "q_a_proj.weight": (compressed, hidden),
            "q_a_layernorm.weight": (compressed,),
            "q_b_proj.weight": (query, compressed),
        }
    if config.get("attention_bias"):
        shapes |= {"q_a_proj.bias": (compressed,)} if compressed else {}
        shapes |= {"kv_a_proj_with_mqa.bias": (rank + rope,), "o_proj.bias": (hidden,)}
    return shapes


def read_latent(
    named: Mapping[str, Tensor], geometry: LatentGeometry, *, interleaved: bool, scale: float, factor: float
) -> LatentAttention:
    """Return a layer's tensors as latent attention whose norms are norms.

    Args:
        named: by the names of `latent_shapes`, float64.
        geometry: of the source.
        interleaved: whether the two rows of a rotary pair are neighbours; otherwise they are R/2 apart.
        scale: factor on the scores.
        factor: on the cosines and sines, which goes into the queries.
    """
    rank, rope = geometry.kv_lora_rank, geometry.qk_rope_head_dim
    heads, width = geometry.num_attention_heads, geometry.head_dim
    order_R = _pairs(rope, interleaved=interleaved)
    q = named.get("q_proj.weight", named.get("q_b_proj.weight"))
    assert q is not None, "every class projects queries"
    q_nope_NPA, q_rope_NRA = q.unflatten(0, (heads, width)).split([width - rope, rope], 1)
    down_CD, k_rope_RD = named["kv_a_proj_with_mqa.weight"].split([rank, rope])
    up = named["kv_b_proj.weight"].unflatten(0, (heads, -1))
    k_up_NPC, v_up_NHC = up.split([width - rope, geometry.v_head_dim], 1)
    return LatentAttention(
        q_nope_NPA=q_nope_NPA,
        q_rope_NRA=q_rope_NRA[:, order_R] * factor**2,
        down_CD=down_CD,
        k_up_NPC=k_up_NPC,
        v_up_NHC=v_up_NHC,
        k_rope_RD=k_rope_RD[order_R],
        o_DNH=named["o_proj.weight"].unflatten(1, (heads, -1)),
        q_down_AD=named.get("q_a_proj.weight"),
        query_norm=named.get("q_a_layernorm.weight"),
        latent_norm_C=named["kv_a_layernorm.weight"],
        scale=scale,
    )


def written_latent(attention: LatentAttention, *, interleaved: bool, factor: float) -> dict[str, Tensor]:
    """Return latent attention as tensors by the names of `latent_shapes`; the inverse of `read_latent`."""
    assert attention.latent_norm_C is not None
    native_R = _pairs(attention.k_rope_RD.shape[0], interleaved=interleaved).argsort()
    q_NWA = torch.cat([attention.q_nope_NPA, attention.q_rope_NRA[:, native_R] / factor**2], 1)
    up = torch.cat([attention.k_up_NPC, attention.v_up_NHC], 1)
    named = {
        "kv_a_proj_with_mqa.weight": torch.cat([attention.down_CD, attention.k_rope_RD[native_R]]),
        "kv_a_layernorm.weight": attention.latent_norm_C,
        "kv_b_proj.weight": up.flatten(0, 1),
        "o_proj.weight": attention.o_DNH.flatten(1),
    }
    if attention.q_down_AD is None:
        return named | {"q_proj.weight": q_NWA.flatten(0, 1)}
    assert isinstance(attention.query_norm, Tensor)
    return named | {
        "q_a_proj.weight": attention.q_down_AD,
        "q_a_layernorm.weight": attention.query_norm,
        "q_b_proj.weight": q_NWA.flatten(0, 1),
    }


def yarn_scale(config: Mapping[str, Any]) -> float:
    """Return the factor on queries and on keys by which YaRN sharpens attention (arXiv 2309.00071).

    It is in the scale of the scores where config.json gives mscale_all_dim.
    """
    rope = rope_parameters(dict(config))
    size = rope.get("mscale_all_dim") if rope["rope_type"] != "default" else None
    return 0.1 * size * math.log(rope["factor"]) + 1.0 if size and rope["factor"] > 1 else 1.0


def _pairs(width: int, *, interleaved: bool) -> Tensor:
    """Return, for each row of the interleaved layout, its row in the checkpoint, (R,)."""
    rows_R = torch.arange(width)
    return rows_R if interleaved else torch.stack(rows_R.chunk(2), -1).flatten()
