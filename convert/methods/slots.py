"""The frequencies of the rotary slots of MLA, and what a target is predicted to lose with them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ...core.errors import InvalidInput
from ..algebra.attention import Attention
from ..algebra.metric import LayerMetric
from ..algebra.rotary import frequencies, rope_parameters
from ..algebra.subspaces import low_rank_energy
from ..algebra.target import LatentTarget, Sizes, Target
from ..calibration.layer_metric import metric_of
from ..calibration.statistics import LayerStatistics, Statistics
from ..families.layers.layer_rotation import layer_rope
from ..families.source import Source
from .allocation import Layers, allocate, assign, least, losses_by_width, rotary_widths, saved, unslotted
from .allocation import Losses as LossesByWidth
from .features import features_of, lost_intact
from .key_regression import regressed
from .latent import Band, lost_by_slots, source_bands, uniform_bands
from .published import Peer, peer

Losses = tuple[dict[str, float], ...]  # predicted, of every layer; empty where nothing is predicted
SlotsByWidth = dict[int, tuple[Band, ...]]  # of one rotary table, by qk_rope_head_dim
SlotLosses = dict[int, list[float]]  # of the layers of one table, by qk_rope_head_dim, without the latent's


@dataclass(frozen=True, kw_only=True)
class Division:
    """A target with its cache divided into rotary slots and latent.

    Attributes:
        target: with its rank and rotary width.
        bands: the rotary slots.
        losses: predicted with them.
        widths: the same with every rotary width that the cache could have, by width, without losses; empty
            where the width was given.
    """

    target: Target
    bands: tuple[Band, ...] = ()
    losses: Losses = ()
    widths: "Mapping[int, Division]" = field(default_factory=dict)


def choose_slots(
    source: Source,
    target: Target,
    statistics: Statistics | None,
    method: str,
    sizes: Sizes,
    *,
    slots: str | None,
    in_stock: bool,
    fixed: tuple[Band, ...] = (),
    table_S: Tensor | None = None,
) -> Division:
    """Choose the rotary slots of an MLA target, and predict their losses.

    Statistics may divide the cache anew. A budget can leave a latent, next to a rotary key, that is wider
    than all keys and values need. The excess is not spent: their rank is at most the hidden size.

    Args:
        source: the checkpoint.
        target: the target, as the sizes say.
        statistics: of the source; None where only its weights are used.
        method: name of the method.
        sizes: what the user asks for.
        slots: the kind that the user asks for.
        in_stock: whether the output is in the stock class, which has no key norms.
        fixed: slots that are given, because an engine has no others.
        table_S: frequencies of the slots that an engine can have, of which statistics choose others.

    Raises:
        InvalidInput: the options ask for slots that the source or the method does not have.
    """
    rule = peer(method)
    if isinstance(target, LatentTarget) and fixed:
        if rule is not None:
            raise InvalidInput(
                f"--method {method} has slots of its own, but engines other than transformers have a "
                "fixed table; choose another method"
            )
        if statistics is None:
            return Division(target=target, bands=fixed)
        return _divided(source, target, statistics, sizes, slots, in_stock, fixed, table_S)
    if not isinstance(target, LatentTarget) or not target.qk_rope_head_dim:
        return _without_slots(source, target, statistics, slots, method)
    if rule is not None and source.family.k_norm is not None:
        raise InvalidInput(
            f"--method {method} has no place for the key norms of {source.family.label}; leave it out"
        )
    if target.slots == "source":
        return Division(target=target, bands=_fixed_bands(source, target))
    is_wide = target.qk_rope_head_dim > source.rotary_width
    if rule is not None:
        chosen = _by_rule(source, target, statistics, sizes, slots, method, rule)
    elif slots == "uniform" and is_wide:
        raise InvalidInput(
            f"--rope-dim {target.qk_rope_head_dim} does not fit --slots uniform: {source.rotary_width} "
            f"dimensions of a head rotate; choose at most {source.rotary_width}, or leave --slots out"
        )
    elif statistics is not None:
        chosen = _divided(source, target, statistics, sizes, slots, in_stock)
    elif slots == "uniform" or (slots is None and not is_wide):
        chosen = Division(target=target, bands=_fixed_bands(source, target))
    else:  # statistics will allocate them; until then any slots of the right number do
        chosen = Division(target=replace(target, slots="allocated"), bands=_any_bands(source, target))
    if sizes.kv_budget is None:
        return chosen
    widths = {width: _filled(source, each) for width, each in chosen.widths.items()}
    return replace(_filled(source, chosen), widths=widths)


def _filled(source: Source, division: Division) -> Division:
    """Return a division whose latent next to a rotary key is no wider than keys and values can fill."""
    target, most = division.target, source.geometry.hidden_size + bool(source.biased & {"k", "v"})
    if not isinstance(target, LatentTarget) or not target.qk_rope_head_dim or target.kv_lora_rank <= most:
        return division
    return replace(division, target=replace(target, kv_lora_rank=most))


def _without_slots(
    source: Source, target: Target, statistics: Statistics | None, wanted: str | None, method: str
) -> Division:
    """Return a target without rotary slots: GQA, MQA, or MLA whose latent has all of the keys.

    Args:
        source: the checkpoint.
        target: the target.
        statistics: of the source; None where only its weights are used.
        wanted: the kind of slots that the user asks for.
        method: name of the method.

    Raises:
        InvalidInput: the options ask for slots.
    """
    if wanted is not None:
        raise InvalidInput(
            f"--slots {wanted} does not apply here: there is no rotary part to divide; leave it out"
        )
    if not isinstance(target, LatentTarget):
        return Division(target=target)
    if peer(method) is not None:
        raise InvalidInput(
            f"--method {method} decouples the rotary part, and here there is none; leave it out"
        )
    if statistics is not None and target.slots == "none":
        return Division(target=target, losses=_lost_intact(source, statistics, target.kv_lora_rank))
    return Division(target=target)


def _lost_intact(source: Source, statistics: Statistics, rank: int) -> Losses:
    """Predict the loss of latents behind key norms whose rotation is left intact.

    Nothing is predicted for other sources.
    """
    if source.family.k_norm is None:
        return ()
    losses = []
    for layer, taken in zip(source.attending, statistics.layers, strict=True):
        table_F, factor = source.frequencies(layer)
        features = features_of(source, layer, source.attention(layer, factor), table_F, taken)
        losses.append({"slots": 0.0, "latent": lost_intact(*features, rank)})
    return tuple(losses)


def _divided(
    source: Source,
    target: LatentTarget,
    statistics: Statistics,
    sizes: Sizes,
    wanted: str | None,
    in_stock: bool,
    fixed: tuple[Band, ...] = (),
    table_S: Tensor | None = None,
) -> Division:
    """Return a target whose slots are allocated by predicted loss.

    The rotary width is chosen too, where the user left both widths open. It is one for all layers; layers of
    different rotary tables have their own slots.
    """
    statistics_of = dict(zip(source.attending, statistics.layers, strict=True))
    if fixed:
        table_F, _ = source.slot_frequencies()  # which refuses different tables
        layers = _layers_of(source, source.rotating, statistics_of, in_stock)
        fixed = fixed if table_S is None else assign(layers, table_F, table_S)
        target = replace(target, qk_rope_head_dim=2 * len(fixed))
    elements = target.kv_lora_rank + target.qk_rope_head_dim
    kind: Literal["uniform", "allocated"] = "uniform" if fixed or wanted == "uniform" else "allocated"
    widths = [target.qk_rope_head_dim]
    if kind == "allocated" and sizes.kv_budget is not None and sizes.rope_dim is None:
        widths = [width for width in rotary_widths(source.geometry, elements) if width < elements]
    slots: list[SlotsByWidth] = []
    lost: list[LossesByWidth] = []
    for number, group in enumerate(source.layers_by_table):
        layers = _layers_of(source, group, statistics_of, in_stock)
        table_F, _ = source.frequencies(group[0])
        if kind == "uniform":
            uniform = fixed or _uniform(source, target, group[0], number)
            found = _given_slots(layers, table_F, widths[0], uniform)
        else:
            found = _allocated_slots(layers, table_F, widths, number)
        slots.append(found[0])
        lost.append(losses_by_width(layers, table_F, elements, *found))
    best = least(lost)
    divisions = {
        width: Division(
            target=replace(target, kv_lora_rank=elements - width, qk_rope_head_dim=width, slots=kind),
            bands=tuple(band for of_table in slots for band in of_table[width]),
        )
        for width in widths
    }
    rotating: dict[int, dict[str, float]] = {}
    for group, by_width in zip(source.layers_by_table, lost, strict=True):
        rotating |= zip(group, by_width[best], strict=True)
    losses = (
        rotating.get(layer) or _lost_without_slots(source, statistics_of[layer], layer, elements - best)
        for layer in source.attending
    )
    return replace(divisions[best], losses=tuple(losses), widths=divisions if len(divisions) > 1 else {})


def _given_slots(
    layers: Layers, table_F: Tensor, width: int, bands: tuple[Band, ...]
) -> tuple[SlotsByWidth, SlotLosses]:
    """Return given slots of one rotary table by their only width, and what each layer loses with them."""
    losses = [lost_by_slots(attention, table_F, bands, metric) for attention, metric in layers()]
    return {width: bands}, {width: losses}


def _allocated_slots(
    layers: Layers, table_F: Tensor, widths: Sequence[int], number: int
) -> tuple[SlotsByWidth, SlotLosses]:
    """Return the slots that save most loss in the layers of a table, by width, and what each layer loses."""
    saved_LFK = saved(layers, table_F)
    saved_FK = saved_LFK.sum(0)
    slots = {width: _of_table(allocate(saved_FK, table_F, width // 2), number) for width in widths}
    losses = {width: [unslotted(own_FK, bands) for own_FK in saved_LFK] for width, bands in slots.items()}
    return slots, losses


def _layers_of(
    source: Source, group: tuple[int, ...], statistics_of: Mapping[int, LayerStatistics], in_stock: bool
) -> Layers:
    """Return what gives attention and metric of the layers of one rotary table, each time anew."""
    table_F, factor = source.frequencies(group[0])

    def layers() -> Iterator[tuple[Attention, LayerMetric]]:
        for layer in group:
            attention, taken = source.attention(layer, factor), statistics_of[layer]
            if attention.k_norm_KH is not None and in_stock:
                yield regressed(source, layer, attention, table_F, taken)
            elif attention.k_norm_KH is None:
                yield attention, metric_of(taken, attention, source.positions)
            else:
                yield features_of(source, layer, attention, table_F, taken)

    return layers


def _of_table(bands: tuple[Band, ...], number: int) -> tuple[Band, ...]:
    """Return bands with the number of their rotary table."""
    return tuple(replace(band, table=number) for band in bands)


def _lost_without_slots(source: Source, taken: LayerStatistics, layer: int, rank: int) -> dict[str, float]:
    """Predict the loss of a layer that rotates nothing, which is what its latent drops."""
    attention = source.attention(layer)
    metric = metric_of(taken, attention, source.positions)
    rows_CD = torch.cat([attention.k_KHD, attention.v_KHD]).flatten(0, 1)
    energy = low_rank_energy(
        rows_CD, torch.cat([metric.key_BSS, metric.value_BSS]), metric.moment(attention.k_KHD)
    )
    return {"slots": 0.0, "latent": float(energy[rank:].sum()) / 2}


def _by_rule(
    source: Source,
    target: LatentTarget,
    statistics: Statistics | None,
    sizes: Sizes,
    slots: str | None,
    method: str,
    rule: Peer,
) -> Division:
    """Return the slots of a published rule, with its own rotary width where the user left that open."""
    if slots is not None:
        raise InvalidInput(f"--slots does not apply to --method {method}, which has a rule of its own")
    if sizes.rope_dim is None:
        target = _own_width(source, target, rule, budgeted=sizes.kv_budget is not None)
    target = replace(target, slots="rule")
    if rule.needs_statistics and statistics is None:
        # A plan before its statistics are there: slots of the right number.
        bands = _any_bands(source, target) if rule.per_head else _fixed_bands(source, target)
        return Division(target=target, bands=bands)
    table_F, factor = source.frequencies()

    def layers() -> Iterator[tuple[Attention, LayerStatistics | None]]:
        for number, layer in enumerate(source.attending):
            yield source.attention(layer, factor), None if statistics is None else statistics.layers[number]

    stock_S, _ = frequencies(rope_parameters(source.config), target.qk_rope_head_dim, source.positions)
    return Division(target=target, bands=rule.bands(layers, table_F, stock_S))


def _any_bands(source: Source, target: LatentTarget) -> tuple[Band, ...]:
    """Return as many slots as a target has, at the fastest frequencies.

    Each frequency has at most one for every key head.
    """
    bands: tuple[Band, ...] = ()
    for number, group in enumerate(source.layers_by_table):
        table_F, _ = source.frequencies(group[0])
        alike_FK = torch.ones(len(table_F), source.geometry.num_key_value_heads)
        bands += _of_table(allocate(alike_FK, table_F, target.qk_rope_head_dim // 2), number)
    return bands


def _own_width(source: Source, target: LatentTarget, rule: Peer, *, budgeted: bool) -> LatentTarget:
    """Return a target whose rotary part has a rule's own width.

    The rank is what a budget leaves next to it, or does not change.
    """
    elements = target.kv_lora_rank + target.qk_rope_head_dim
    if rule.per_head:
        heads = source.geometry.num_key_value_heads
        half = (
            elements // 2
            if budgeted
            else min(target.kv_lora_rank, source.geometry.cache_elements - target.kv_lora_rank - 1)
        )
        width = min(half // (2 * heads), source.rotary_width // 2) * 2 * heads
        if not width:  # less than a pair for each head: unequal shares, which only some rules have
            width = max(2, half // 2 * 2)
    else:
        width = min(target.qk_rope_head_dim, int(rule.rope_share * source.geometry.head_dim) // 2 * 2)
    return replace(
        target, kv_lora_rank=elements - width if budgeted else target.kv_lora_rank, qk_rope_head_dim=width
    )


def _fixed_bands(source: Source, target: LatentTarget) -> tuple[Band, ...]:
    """Return the rotary slots of a target, of every rotary table that layers have.

    They are the source's own kind of table at the target's width, or a slot for every key.
    """
    bands: tuple[Band, ...] = ()
    for number, group in enumerate(source.layers_by_table):
        if target.slots == "source":
            table_F, _ = source.frequencies(group[0])
            bands += _of_table(source_bands(table_F, source.geometry.num_key_value_heads), number)
        else:
            bands += _uniform(source, target, group[0], number)
    return bands


def _uniform(source: Source, target: LatentTarget, layer: int, number: int) -> tuple[Band, ...]:
    """Return slots at the frequencies that a layer's own kind of table has at the target's width.

    Raises:
        InvalidInput: fewer dimensions rotate.
    """
    if target.qk_rope_head_dim > source.rotary_width:
        raise InvalidInput(
            f"--rope-dim {target.qk_rope_head_dim} does not fit: {source.rotary_width} dimensions of "
            f"a head rotate; choose at most {source.rotary_width}"
        )
    table_F, _ = source.frequencies(layer)
    rope = layer_rope(source.config, layer)
    uniform_S, _ = frequencies(rope, target.qk_rope_head_dim, source.positions)
    # What does not rotate needs no slot.
    return _of_table(uniform_bands(table_F[: source.rotary_width // 2], uniform_S), number)


def bands_of(source: Source, bands: Iterable[Band], layer: int) -> tuple[Band, ...]:
    """Return those of some bands that belong to a layer's rotary table."""
    groups = source.layers_by_table
    table = next((number for number, group in enumerate(groups) if layer in group), 0)
    return tuple(band for band in bands if band.table == table)


def slots_of(source: Source, bands: Iterable[Band], layer: int) -> Tensor:
    """Return the frequencies of a layer's rotary slots, (S,), float64."""
    own = bands_of(source, bands, layer)
    return torch.tensor([band.frequency for band in own for _ in range(band.slots)], dtype=torch.float64)
