"""Layouts of heads in a checkpoint's tensors: fused, transposed, with rotary pairs in another order.

Both directions are exact.

Legend: attention.py; X rows of a projection, D its columns (none for a bias), R rotated dimensions of a head.
"""

from collections.abc import Iterator, Mapping, Set

import torch
from torch import Tensor

from ..algebra.attention import Attention
from ..algebra.target import Geometry
from .family import Family
from .layers.layer_shapes import LayerShape


def half_order(family: Family, head_dim: int, width: int) -> Tensor:
    """Return, for each row of a head in the half layout, its row in the checkpoint, (H,), int64.

    Dimensions that do not rotate are paired too, with frequency zero, after those that do.
    """
    turned_R = torch.arange(width)
    rest = torch.arange(width, head_dim)
    real, imaginary = (turned_R[::2], turned_R[1::2]) if family.rotary == "interleaved" else turned_R.chunk(2)
    if family.rotary == "reversed":
        real, imaginary = imaginary, real
    still_real, still_imaginary = rest.chunk(2) if len(rest) else (rest, rest)
    return torch.cat([real, still_real, imaginary, still_imaginary])


def shapes(family: Family, geometry: Geometry) -> dict[str, tuple[int, int]]:
    """Return the shape of each projection's weight."""
    query = geometry.num_attention_heads * geometry.head_dim
    key = geometry.num_key_value_heads * geometry.head_dim
    hidden = geometry.hidden_size
    every = {
        "q": (query * family.query_parts, hidden),
        "k": (key, hidden),
        "v": (key, hidden),
        "o": (hidden, query),
        "qkv": (query + 2 * key, hidden),
    }
    return {role: every[role][::-1] if family.transposed else every[role] for role in family.roles}


def outputs(family: Family, geometry: Geometry) -> dict[str, int]:
    """Return the number of outputs of each projection, which is the length of its bias."""
    return {role: shape[1 if family.transposed else 0] for role, shape in shapes(family, geometry).items()}


def attention_shapes(
    layer: LayerShape, number: int, biases: Set[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return the names of a layer's attention tensors, and the shapes that they should have."""
    family, geometry = layer.family, layer.geometry
    weights = shapes(family, geometry)
    rows = outputs(family, geometry)
    for role, name in family.projections(number).items():
        yield f"{name}.weight", weights[role]
        if role in biases:
            yield f"{name}.bias", (rows[role],)
    yield from family.norms("q", number, geometry).items()
    yield from family.norms("k", number, geometry).items()


def split(rows_XD: Tensor, family: Family, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of a fused projection as heads: (N, H, D), (K, H, D) and (K, H, D).

    For a bias the shapes lack D.
    """
    heads = geometry.num_attention_heads
    keys = geometry.num_key_value_heads
    width = geometry.head_dim
    rows = rows_XD.unflatten(0, (-1, width))
    if family.fused == "stacked":
        q, k, v = rows.split([heads, keys, keys])
        return q, k, v
    grid = rows.unflatten(0, (keys, heads // keys + 2))
    return grid[:, :-2].flatten(0, 1), grid[:, -2], grid[:, -1]


def join(q: Tensor, k: Tensor, v: Tensor, family: Family) -> Tensor:
    """Fuse heads into one projection; the inverse of `split`."""
    if family.fused == "stacked":
        return torch.cat([q, k, v]).flatten(0, 1)
    grid = torch.cat([q.unflatten(0, (len(k), -1)), k[:, None], v[:, None]], 1)
    return grid.flatten(0, 2)


def split_queries(rows_QX: Tensor, family: Family, geometry: Geometry) -> tuple[Tensor, Tensor | None]:
    """Return the rows of the query projection as heads, (N, H, D), and those of its gate, or None.

    For a bias the shapes lack D.
    """
    rows_NQX = rows_QX.unflatten(0, (geometry.num_attention_heads, -1))
    return rows_NQX[:, : geometry.head_dim], (
        rows_NQX[:, geometry.head_dim :] if family.gate == "q" else None
    )


def unpack(
    named: Mapping[str, Tensor], family: Family, geometry: Geometry, width: int, scale: float
) -> Attention:
    """Return a layer's tensors as attention.

    Args:
        named: by role and part, `q.weight`, `qkv.bias`, `k_norm` and so on; the norms and a gate are
            optional.
        family: the row that describes their layout.
        geometry: their attention shape.
        width: rotated dimensions of a head.
        scale: factor on the scores.
    """
    head_dim = geometry.head_dim
    order_H = half_order(family, geometry.head_dim, width)

    def heads(part: str) -> tuple[Tensor | None, ...]:
        if family.qkv is None:
            found = {role: named.get(f"{role}.{part}") for role in "qkv"}
            if found["q"] is not None:
                found["q"] = split_queries(found["q"], family, geometry)[0].flatten(0, 1)
            return tuple(
                None if rows is None else rows.unflatten(0, (-1, head_dim)) for rows in found.values()
            )
        rows = named.get(f"qkv.{part}")
        if rows is None:
            return None, None, None
        return split(rows.mT if family.transposed and part == "weight" else rows, family, geometry)

    def ordered(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else _reordered(rows, order_H)

    def norm(name: str) -> Tensor | None:
        weight = named.get(name)
        return None if weight is None else ordered(weight.reshape(-1, head_dim) + family.norm_shift)

    q, k, v = heads("weight")
    q_bias, k_bias, v_bias = heads("bias")
    if v is None:  # of a layer whose values are its keys
        v, v_bias = k, k_bias
    assert q is not None
    assert k is not None
    assert v is not None
    o = named["o.weight"]
    return Attention(
        q_NHD=_reordered(q, order_H),
        k_KHD=_reordered(k, order_H),
        v_KHD=v,
        o_DNH=(o.mT if family.transposed else o).unflatten(1, (-1, head_dim)),
        q_NH=ordered(q_bias),
        k_KH=ordered(k_bias),
        v_KH=v_bias,
        o_D=named.get("o.bias"),
        q_norm_NH=norm("q_norm"),
        k_norm_KH=norm("k_norm"),
        centred=family.norm_spans == "each",
        gate_NHD=_gate(named, "weight", family, geometry),
        gate_NH=_gate(named, "bias", family, geometry),
        scale=scale,
    )


def _gate(named: Mapping[str, Tensor], part: str, family: Family, geometry: Geometry) -> Tensor | None:
    rows = named.get(f"{'q' if family.gate == 'q' else 'gate'}.{part}")
    if family.gate is None or rows is None:
        return None
    if family.gate == "q":
        return split_queries(rows, family, geometry)[1]
    own: Tensor = rows.unflatten(0, (geometry.num_attention_heads, -1))
    return own


def pack(attention: Attention, family: Family, width: int) -> dict[str, Tensor]:
    """Return attention as tensors by role and part; the inverse of `unpack`.

    Of the norms only that of keys is returned, where its weight has a row for each head.
    """
    order_H = half_order(family, attention.q_NHD.shape[1], width)
    native_H = torch.empty_like(order_H)
    native_H[order_H] = torch.arange(len(order_H))

    def native(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else _reordered(rows, native_H)

    o = attention.o_DNH.flatten(1)
    packed: dict[str, Tensor | None] = {"o.weight": o.mT if family.transposed else o, "o.bias": attention.o_D}
    weights = {"q": native(attention.q_NHD), "k": native(attention.k_KHD), "v": attention.v_KHD}
    biases = {"q": native(attention.q_NH), "k": native(attention.k_KH), "v": attention.v_KH}
    if family.gate == "q":
        for parts, gate in ((weights, attention.gate_NHD), (biases, attention.gate_NH)):
            if parts["q"] is not None and gate is not None:
                parts["q"] = torch.cat([parts["q"], gate], 1)
    for part, (q, k, v) in (("weight", weights.values()), ("bias", biases.values())):
        if family.qkv is None:
            rows_of = zip("qkv", (q, k, v), strict=True)
            packed |= {f"{role}.{part}": _flat(rows) for role, rows in rows_of if role in family.roles}
        elif q is not None and k is not None and v is not None:
            rows = join(q, k, v, family)
            packed[f"qkv.{part}"] = rows.mT if family.transposed and part == "weight" else rows
    if family.norm_spans != "head" and attention.k_norm_KH is not None:
        packed["k_norm"] = _flat(native(attention.k_norm_KH - family.norm_shift))
    return {name: tensor for name, tensor in packed.items() if tensor is not None}


def _reordered(rows_IHX: Tensor, order_H: Tensor) -> Tensor:
    """Return the rows of every head in another order.

    They are not copied where that is their own order, since a copy takes as long as reading.
    """
    return rows_IHX if torch.equal(order_H, torch.arange(len(order_H))) else rows_IHX[:, order_H]


def _flat(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else rows.flatten(0, 1)
