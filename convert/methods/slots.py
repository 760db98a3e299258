"""The frequencies of the rotary slots of MLA, and what a target is predicted to lose with them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ...core.errors import InvalidInput
from ..algebra.attention import Attention
from ..algebra.metric import LayerMetric
from ..algebra.rotary import frequencies, rope_parameters
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
from .narrowing import latent_metric, source_latents
from .published import Peer, peer

Losses = tuple[dict[str, float], ...]  # predicted, of every layer; empty where nothing is predicted


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
    if isinstance(target, LatentTarget) and source.family.latent:
        return Division(target=target, losses=_lost_of_latents(source, target, statistics))
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
        if slots is not None:
            raise InvalidInput(
                f"--slots {slots} does not apply here: there is no rotary part to divide; leave it out"
            )
        if isinstance(target, LatentTarget) and rule is not None:
            raise InvalidInput(
                f"--method {method} decouples the rotary part, and here there is none; leave it out"
            )
        return Division(target=target, losses=_lost_behind_norms(source, target, statistics))
    if rule is not None and source.family.k_norm is not None:
        raise InvalidInput(
            f"--method {method} has no place for the key norms of {source.family.label}; leave it out"
        )
    if target.slots == "source":
        return Division(target=target, bands=_bands_of_tables(source, target, "source"))
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
        chosen = Division(target=target, bands=_bands_of_tables(source, target, "uniform"))
    else:  # statistics will allocate them; until then any slots of the right number do
        any_slots = _bands_of_tables(source, target, "any")
        chosen = Division(target=replace(target, slots="allocated"), bands=any_slots)
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


def _lost_of_latents(source: Source, target: LatentTarget, statistics: Statistics | None) -> Losses:
    """Predict the loss of narrower latents."""
    if statistics is None or target.slots == "source":
        return ()
    losses = []
    for layer, taken in zip(source.attending, statistics.layers, strict=True):
        attention = source.latent_attention(layer)
        metric = latent_metric(attention, source_latents(attention, taken.input_BTD), taken)
        losses.append({"slots": 0.0, "latent": metric.lost(target.kv_lora_rank)})
    return tuple(losses)


def _lost_behind_norms(source: Source, target: Target, statistics: Statistics | None) -> Losses:
    """Predict the loss of latents behind key norms whose rotation is left intact, and of no others."""
    if not isinstance(target, LatentTarget) or target.slots != "none" or statistics is None:
        return ()
    if source.family.k_norm is None:
        return ()
    losses = []
    for layer, taken in zip(source.attending, statistics.layers, strict=True):
        table_F, factor = source.frequencies(layer)
        features = features_of(source, layer, source.attention(layer, factor), table_F, taken)
        losses.append({"slots": 0.0, "latent": lost_intact(*features, target.kv_lora_rank)})
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
    bands: dict[int, tuple[Band, ...]] = dict.fromkeys(widths, ())
    lost: list[LossesByWidth] = []
    for number, group in enumerate(source.layers_by_table):
        layers = _layers_of(source, group, statistics_of, in_stock)
        table_F, _ = source.frequencies(group[0])
        if kind == "uniform":
            slots = {widths[0]: fixed or _uniform(source, target, group[0], number)}
            given = [lost_by_slots(each, table_F, slots[widths[0]], metric) for each, metric in layers()]
            by_slots = {widths[0]: given}
        else:
            saved_LFK = saved(layers, table_F)
            saved_FK = saved_LFK.sum(0)
            slots = {width: allocate(saved_FK, table_F, width // 2, number) for width in widths}
            by_slots = {
                width: [unslotted(own_FK, each) for own_FK in saved_LFK] for width, each in slots.items()
            }
        bands = {width: bands[width] + slots[width] for width in widths}
        lost.append(losses_by_width(layers, table_F, elements, slots, by_slots))
    best = least(lost)
    divisions = {
        width: Division(
            target=replace(target, kv_lora_rank=elements - width, qk_rope_head_dim=width, slots=kind),
            bands=bands[width],
        )
        for width in widths
    }
    losses_of: dict[int, dict[str, float]] = {}
    for group, by_width in zip(source.layers_by_table, lost, strict=True):
        losses_of |= zip(group, by_width[best], strict=True)
    for layer in source.attending:
        if layer not in losses_of:  # it rotates nothing, and loses what its latent drops
            attention = source.attention(layer)
            metric = metric_of(statistics_of[layer], attention, source.positions)
            losses_of[layer] = {"slots": 0.0, "latent": lost_intact(attention, metric, elements - best)}
    losses = tuple(losses_of[layer] for layer in source.attending)
    return replace(divisions[best], losses=losses, widths=divisions if len(divisions) > 1 else {})


def _layers_of(
    source: Source, group: tuple[int, ...], statistics_of: Mapping[int, LayerStatistics], in_stock: bool
) -> Layers:
    """Return what gives attention and metric of the layers of one rotary table, each time anew."""
    table_F, factor = source.frequencies(group[0])

    def layers() -> Iterator[tuple[Attention, LayerMetric]]:
        for layer in group:
            attention, taken = source.attention(layer, factor), statistics_of[layer]
            if attention.k_norm_KH is None:
                yield attention, metric_of(taken, attention, source.positions)
            else:
                without_norms = regressed if in_stock else features_of
                yield without_norms(source, layer, attention, table_F, taken)

    return layers


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
        bands = _bands_of_tables(source, target, "any" if rule.per_head else "uniform")
        return Division(target=target, bands=bands)
    table_F, factor = source.frequencies()

    def layers() -> Iterator[tuple[Attention, LayerStatistics | None]]:
        for number, layer in enumerate(source.attending):
            yield source.attention(layer, factor), None if statistics is None else statistics.layers[number]

    stock_S, _ = frequencies(rope_parameters(source.config), target.qk_rope_head_dim, source.positions)
    return Division(target=target, bands=rule.bands(layers, table_F, stock_S))


def _own_width(source: Source, target: LatentTarget, rule: Peer, *, budgeted: bool) -> LatentTarget:
    """Return a target whose rotary part has a rule's own width.

    The rank is what a budget leaves next to it, or does not change.
    """
    rank, elements = target.kv_lora_rank, target.kv_lora_rank + target.qk_rope_head_dim
    if rule.per_head:
        heads = source.geometry.num_key_value_heads
        half = elements // 2 if budgeted else min(rank, source.geometry.cache_elements - rank - 1)
        width = min(half // (2 * heads), source.rotary_width // 2) * 2 * heads
        if not width:  # less than a pair for each head: unequal shares, which only some rules have
            width = max(2, half // 2 * 2)
    else:
        width = min(target.qk_rope_head_dim, int(rule.rope_share * source.geometry.head_dim) // 2 * 2)
    return replace(target, kv_lora_rank=elements - width if budgeted else rank, qk_rope_head_dim=width)


def _bands_of_tables(
    source: Source, target: LatentTarget, kind: Literal["source", "uniform", "any"]
) -> tuple[Band, ...]:
    """Return the rotary slots of a target, of every rotary table that layers have.

    They are a slot for every key, the source's own kind of table at the target's width, or as many as the
    target has at the fastest frequencies, each of which has at most one for every key head.
    """
    heads, bands = source.geometry.num_key_value_heads, list[Band]()
    for number, group in enumerate(source.layers_by_table):
        table_F, _ = source.frequencies(group[0])
        if kind == "source":
            bands += source_bands(table_F, heads, number)
        elif kind == "uniform":
            bands += _uniform(source, target, group[0], number)
        else:
            alike_FK = torch.ones(len(table_F), heads)
            bands += allocate(alike_FK, table_F, target.qk_rope_head_dim // 2, number)
    return tuple(bands)


def _uniform(source: Source, target: LatentTarget, layer: int, number: int) -> tuple[Band, ...]:
    """Return slots at the frequencies that a layer's own kind of table has at the target's width."""
    if target.qk_rope_head_dim > source.rotary_width:
        raise InvalidInput(
            f"--rope-dim {target.qk_rope_head_dim} does not fit: {source.rotary_width} dimensions of "
            f"a head rotate; choose at most {source.rotary_width}"
        )
    table_F, _ = source.frequencies(layer)
    rope = layer_rope(source.config, layer)
    uniform_S, _ = frequencies(rope, target.qk_rope_head_dim, source.positions)
    # What does not rotate needs no slot.
    return uniform_bands(table_F[: source.rotary_width // 2], uniform_S, number)


def bands_of(source: Source, bands: Iterable[Band], layer: int) -> tuple[Band, ...]:
    """Return those of some bands that belong to a layer's rotary table."""
    groups = source.layers_by_table
    table = next((number for number, group in enumerate(groups) if layer in group), 0)
    return tuple(band for band in bands if band.table == table)


def slots_of(source: Source, bands: Iterable[Band], layer: int) -> Tensor:
    """Return the frequencies of a layer's rotary slots, (S,), float64."""
    own = bands_of(source, bands, layer)
    return torch.tensor([band.frequency for band in own for _ in range(band.slots)], dtype=torch.float64)
