"""Published conversion rules of others under their own names, to be measured next to kvfold's.

All give a few rotary slots to the keys and one latent to the rest of the keys and the values. They differ in
both:

| name | a slot carries | the latent of [un-rotated keys; values] |
|---|---|---|
| svd | first real principal component of its pairs' weights | truncated SVD of the weights |
| transmla | the same of its pairs' activations | PCA of activations, keys scaled like values |
| mha2mla | one pair of one key head, unchanged | truncated SVD of the weights, jointly or of each alone |
| care, no-sqrt-care, transmla-care | as transmla | shared_key.py |
| xecomla | mean over heads of the last rows of W_K | truncated SVD of the weights, rotated rows included |

One container holds them: one slot table and one rank for all layers, no norm on the latent.
Where a rule has more, its docstring says what is left out. None damps what it does not rotate. Statistics are
the source's, unless a rule has `InOrder`.

`mha2mla` has settings, which follow its name behind colons: `:high`, `:low` or `:uniform` choose its rotary
pairs by frequency instead of by norm, and `:split` decomposes keys and values apart. `mha2mla:high:split` is
an example.

Legend: latent.py; E = D + 1, the last column is the bias (zero where there is none), whose input is the
constant 1; M = K·F pairs of all heads, T = M - S of them without a slot; B = 2T + K·H rows of un-rotated
keys, then values.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ...core.errors import InvalidInput
from ..algebra.attention import Attention, LatentAttention
from ..algebra.rotary import complex_rows
from ..algebra.target import LatentTarget
from ..calibration.statistics import LayerStatistics
from ..families.source import STILL
from .allocation import allocate
from .latent import Band, uniform_bands
from .shared_key import (
    DECOMPOSITIONS,
    Compressed,
    affine,
    assemble,
    components,
    folded_bands,
    merged_heads,
    split,
    truncated,
    whole,
    written,
)

Fold = Callable[[Attention, LatentTarget, tuple[Band, ...], LayerStatistics | None], LatentAttention]
Refold = Callable[
    [Attention, LatentTarget, tuple[Band, ...], LayerStatistics | None, Tensor], LatentAttention
]
Layers = Callable[[], Iterable[tuple[Attention, LayerStatistics | None]]]


@dataclass(frozen=True)
class InOrder:
    """Folds of a rule that reads the activations behind layers that it has changed before.

    Attributes:
        fold: one layer, as `Peer.fold`, and the second moment of its input (E, E) behind those layers.
        between: the same, of the layer that the next layers read through; None: the folded layer itself.
    """

    fold: Refold
    between: Refold | None = None


@dataclass(frozen=True)
class Peer:
    """A peer's rule.

    Attributes:
        bands: the slots of all layers, from `layers`, the source's frequencies (F,) and the stock table at
            the target's width (S,); `layers` gives every layer's weights and statistics, one at a time, and a
            rule that ranks pairs reads all.
        fold: one layer, from its weights in float64, the widths, the slots and the layer's statistics.
        needs_statistics: without them it cannot be computed.
        rope_share: how much of a head's width it rotates at most, as published; for callers that choose
            qk_rope_head_dim.
        per_head: every key head caches rotary pairs of its own, so that the rotary part is up to all key
            heads wide. Callers that choose qk_rope_head_dim give it half of the cache, and every head the
            same number of pairs.
        queries: on what `q_lora_rank` of them is decomposed, a truncated SVD of W_Q or a PCA of its outputs;
            None where the rule leaves them as they are.
        in_order: of a rule that reads other activations than the source's; `fold` is the same rule on the
            source's.
    """

    bands: Callable[[Layers, Tensor, Tensor], tuple[Band, ...]]
    fold: Fold
    needs_statistics: bool
    rope_share: float = 1.0
    per_head: bool = False
    queries: Literal["weights", "activations"] | None = None
    in_order: InOrder | None = None


def stock_bands(layers: Layers, frequencies_F: Tensor, stock_S: Tensor) -> tuple[Band, ...]:
    """Return a slot at each frequency of the stock table.

    Each serves the same number of neighbouring pairs of the source.
    """
    if len(stock_S) > len(frequencies_F):
        raise InvalidInput(
            f"{2 * len(stock_S)} rotary dimensions exceed the head dimension, {2 * len(frequencies_F)}; "
            "make --rope-dim smaller"
        )
    return uniform_bands(frequencies_F, stock_S)


def ranked_bands(layers: Layers, frequencies_F: Tensor, stock_S: Tensor) -> tuple[Band, ...]:
    """Return the slots of `mha2mla` by 2-norm, at the source's frequencies.

    At each frequency a layer's heads are ordered by their contribution there. Those of the first, second, ...
    head are summed over the layers, and the largest sums get the slots. Pairs that do not rotate come last.
    """
    ranked = [_contributions(*layer).T.sort(-1, descending=True).values for layer in layers()]
    total_FK = torch.stack(ranked).sum(0) * (frequencies_F > STILL)[:, None]
    return allocate(total_FK, frequencies_F, len(stock_S))


def placed_bands(
    place: Callable[[int, int], Iterable[int]], layers: Layers, frequencies_F: Tensor, stock_S: Tensor
) -> tuple[Band, ...]:
    """Return the slots of `mha2mla` by frequency.

    They are the same pairs of every key head, chosen by `place` of `PLACES`.

    Raises:
        InvalidInput: the key heads cannot have equal shares of the slots, or there are more slots than pairs
            that rotate.
    """
    heads = len(next(iter(layers()))[0].k_KHD)
    each, rest = divmod(len(stock_S), heads)
    pairs = int((frequencies_F > STILL).sum())
    if rest or not 1 <= each <= pairs:
        raise InvalidInput(
            f"--rope-dim {2 * len(stock_S)} does not give {heads} key heads the same number of rotary pairs; "
            f"choose a multiple of {2 * heads}, at most {2 * heads * pairs}"
        )
    return tuple(
        Band(frequency=float(frequencies_F[pair]), pairs=(pair,), slots=heads) for pair in place(each, pairs)
    )


def svd(
    attention: Attention, target: LatentTarget, bands: tuple[Band, ...], statistics: LayerStatistics | None
) -> LatentAttention:
    """Fold by truncated real SVDs of weights: of the keys near each slot, then of the rest of [W_K; W_V].

    This is the naive rule.
    """
    rotation_KFM = components(attention, bands, None)
    return assemble(attention, rotation_KFM, target, lambda rows_BE: truncated(rows_BE, target.kv_lora_rank))


def mha2mla(
    attention: Attention,
    target: LatentTarget,
    bands: tuple[Band, ...],
    statistics: LayerStatistics | None,
    *,
    apart: bool = False,
) -> LatentAttention:
    """Fold by MHA2MLA (arXiv 2502.14837, section 3): partial RoPE on pairs of each key head, SVD of the rest.

    Every key head caches its own kept pairs, and only its queries read them; the other pairs stop rotating.
    The latent is a truncated SVD of the weights [W_K; W_V] without the kept rows; biases stay exact.

    The 2-norm choice ranks pairs by the mean norm of query times that of key, summed over a group's query
    heads. In the paper every head of every layer keeps its own pairs, the same number in each. Here all
    layers share a table: contributions summed over layers decide how many slots a frequency has
    (`ranked_bands`), and in each layer the heads that contribute most there take them, so heads may keep
    unequal numbers. Norms are root mean squares, which second moments give. The other choices keep the same
    pairs in all heads and layers, as published.

    Args:
        attention: of the source.
        target: widths of the latent and the rotary key.
        bands: the slots, each for one pair.
        statistics: of the layer, for the choice of pairs.
        apart: decompose keys and values apart, each into half of the latent (SVD_split), not jointly
            (SVD_joint).
    """
    heads = len(attention.k_KHD)
    pairs = attention.k_KHD.shape[1] // 2
    chosen = any(band.slots < heads for band in bands)
    best_KF = _contributions(attention, statistics) if chosen else torch.zeros(heads, pairs)
    rotates_KF = torch.zeros(heads, pairs, dtype=torch.bool)
    order = []
    for band in bands:
        (pair,) = band.pairs
        owners = best_KF[:, pair].argsort(descending=True, stable=True)[: band.slots]
        rotates_KF[owners, pair] = True
        order += [head * pairs + pair for head in owners.tolist()]
    order += (~rotates_KF).flatten().nonzero().flatten().tolist()
    rotation_KFM = torch.eye(heads * pairs, dtype=attention.k_KHD.dtype)[:, order].unflatten(
        0, (heads, pairs)
    )
    values = attention.v_KHD[..., 0].numel()

    def compress(rows_BE: Tensor) -> Compressed:
        return (
            split(rows_BE, values, target.kv_lora_rank) if apart else truncated(rows_BE, target.kv_lora_rank)
        )

    return assemble(attention, rotation_KFM, target, compress)


def xecomla(
    attention: Attention, target: LatentTarget, bands: tuple[Band, ...], statistics: LayerStatistics | None
) -> LatentAttention:
    """Fold by X-EcoMLA (arXiv 2503.11132): joint SVD of [W_K; W_V], mean head as rotary key.

    This is its SVD initialisation. A head's first H - R rows are its un-rotated part, its last R rows its
    rotary part, in queries and keys; the shared rotary key is the mean of the latter over key heads.
    Published recipes have R = H/2. As in the published code, neighbouring rows turn together at the stock
    table, whatever they did in the source: the rule counts on training. Repeating a grouped source's heads,
    as published, does not change the SVD. Biases, which the paper's sources do not have, go with their rows.

    Left out: the SVD of W_Q, and ranks by energy, which differ by layer. The container's un-rotated part is H
    wide: what the rule does not use of it is zero in queries and keys, and stays so in training.
    """
    heads, width, _ = attention.k_KHD.shape
    kept = width - target.qk_rope_head_dim
    unused_P1 = (torch.arange(width) >= kept)[:, None]
    q_NHE = affine(attention.q_NHD, attention.q_NH)
    k_KHE = affine(attention.k_KHD, attention.k_KH)
    rows_BE = torch.cat([k_KHE, affine(attention.v_KHD, attention.v_KH)]).flatten(0, 1)
    down_CD, up_BC, constant_B = truncated(rows_BE, target.kv_lora_rank)
    k_up_KPC, v_up_KHC = up_BC.unflatten(0, (2, heads, width))
    return written(
        attention,
        (q_NHE.masked_fill(unused_P1, 0), q_NHE[:, kept:]),
        k_KHE.mean(0)[kept:],
        down_CD,
        (k_up_KPC.masked_fill(unused_P1, 0), v_up_KHC),
        constant_B.unflatten(0, (2, heads, width))[1],
    )


def _merged_heads(name: str, multiple: int = 1, weight: float = 1.0) -> Peer:
    """Return a rule of shared_key.py with its settings."""

    def bands(layers: Layers, frequencies_F: Tensor, stock_S: Tensor) -> tuple[Band, ...]:
        return folded_bands(frequencies_F, len(stock_S), multiple)

    fold = partial(merged_heads, decompose=DECOMPOSITIONS[name], weight=weight)
    # CARE's code decomposes layer by layer; its form of TransMLA's projection goes as TransMLA's does.
    between = None if name in ("care", "no-sqrt-care") else partial(merged_heads, decompose=whole)
    in_order = InOrder(fold, between)
    return Peer(bands, fold, needs_statistics=True, queries="activations", in_order=in_order)


# The pairs of a head that rotate, numbered from the fastest, given how many do and how many there are.
PLACES: dict[str, Callable[[int, int], Iterable[int]]] = {
    "high": lambda each, pairs: range(each),
    "low": lambda each, pairs: range(pairs - each, pairs),
    "uniform": lambda each, pairs: [number * pairs // each for number in range(each)],
}


def _mha2mla() -> dict[str, Peer]:
    """Return the settings of `mha2mla` by name: choice of pairs times decomposition."""
    rules = {}
    for apart in (False, True):
        fold = partial(mha2mla, apart=apart)
        ending = ":split" if apart else ""
        rules[f"mha2mla{ending}"] = Peer(ranked_bands, fold, needs_statistics=True, per_head=True)
        for name, place in PLACES.items():
            bands = partial(placed_bands, place)
            rules[f"mha2mla:{name}{ending}"] = Peer(bands, fold, needs_statistics=False, per_head=True)
    return rules


PEERS: dict[str, Peer] = {
    "svd": Peer(stock_bands, svd, needs_statistics=False),
    **{name: _merged_heads(name) for name in DECOMPOSITIONS},
    **_mha2mla(),
    "xecomla": Peer(stock_bands, xecomla, needs_statistics=False, rope_share=0.5, queries="weights"),
}
_SETTING = re.compile(r"(fold|balance)(\d{1,3}(?:\.\d{1,3})?)")


def peer(method: str) -> Peer | None:
    """Return the rule of a name with its settings; None where the name is of no published rule.

    Args:
        method: a name of `PEERS`, or one of `DECOMPOSITIONS` with settings: `transmla:fold2:balance0.5`.

    Raises:
        InvalidInput: a rule that has no such setting.
    """
    if method in PEERS:
        return PEERS[method]
    name, *settings = method.split(":")
    if name not in PEERS:
        return None
    found = {part[1]: float(part[2]) for part in map(_SETTING.fullmatch, settings) if part is not None}
    multiple, weight = found.get("fold", 1.0), found.get("balance", 1.0)
    is_known = name in DECOMPOSITIONS and len(found) == len(settings)
    if not is_known or multiple not in (1, 2, 4, 8, 16, 32, 64) or not weight > 0:
        takes = {"mha2mla": "mha2mla takes :high, :low or :uniform, then :split"}
        if name in DECOMPOSITIONS:
            takes[name] = f"{name} takes :foldN with N 1, 2, 4, ... 64, and :balanceR, R > 0"
        raise InvalidInput(
            f"--method {method} is no setting of {name}; {takes.get(name, 'it has none: leave it out')}"
        )
    return _merged_heads(name, int(multiple), weight)


def _contributions(attention: Attention, statistics: LayerStatistics | None) -> Tensor:
    """Return the root mean square norms of query times key at every key head and pair (K, F).

    They are summed over the group's query heads.
    """
    assert statistics is not None
    z_KFE = complex_rows(affine(attention.k_KHD, attention.k_KH))
    key_KF = ((z_KFE @ statistics.input_EE.to(z_KFE.dtype)) * z_KFE.conj()).sum(-1).real.clamp(min=0).sqrt()
    real_NF, imaginary_NF = statistics.query_NHH.diagonal(dim1=1, dim2=2).chunk(2, -1)
    contribution_KF: Tensor = key_KF * (real_NF + imaginary_NF).sqrt().unflatten(0, (len(key_KF), -1)).sum(1)
    return contribution_KF


def with_few_queries(
    rule: Peer,
    attention: Attention,
    target: LatentTarget,
    bands: tuple[Band, ...],
    statistics: LayerStatistics | None,
    input_EE: Tensor | None = None,
) -> LatentAttention:
    """Fold one layer by a rule, its queries by `target.q_lora_rank`, where the target has one.

    Queries are projected onto a basis: the leading eigenvectors of their second moment over all heads
    (TransMLA), or the leading left singular vectors of W_Q (X-EcoMLA). Biases stay exact. A rule that goes in
    order reads the moment `input_EE` (E, E) of the layer's input; None: the source's.
    """

    def fold(attention: Attention) -> LatentAttention:
        if input_EE is None or rule.in_order is None:
            return rule.fold(attention, target, bands, statistics)
        return rule.in_order.fold(attention, target, bands, statistics, input_EE)

    rank = target.q_lora_rank
    if rank is None:
        return fold(attention)
    rows_BD = attention.q_NHD.flatten(0, 1)
    moment_BB = rows_BD @ rows_BD.mT
    if rule.queries == "activations":
        assert statistics is not None
        rows_BE = affine(attention.q_NHD, attention.q_NH).flatten(0, 1)
        moment_BB = rows_BE @ (statistics.input_EE if input_EE is None else input_EE) @ rows_BE.mT
    basis_BA = torch.linalg.eigh(moment_BB)[1].flip(-1)[:, :rank]
    through = replace(attention, q_NHD=basis_BA.unflatten(0, attention.q_NHD.shape[:2]))
    return replace(fold(through), q_down_AD=basis_BA.mT @ rows_BD)
