"""Predicted losses of planned folds: every layer is folded in memory and measured alone.

It is done the same way for every target. With statistics the measure is that of kvfold.json: ½ E[(ô - o)ᵀ G
(ô - o)] at the attention's output on held-back calibration inputs, in nats per token, summed over layers. By
weights alone it is the squared error of that output as a share of its square, on inputs drawn from a normal
distribution, mean over layers. That only ranks, and has no unit of loss, and is of linear latent norms.

The loss with the cache in a number format is the same measure of a fold in closed-form coordinates for the
format, where they lose less. `kvfold convert --cache-dtype` begins there, fits them further and refines
through the rounding, which takes many times as long. What a layer caches is rounded on the way. The layers
before it are exact, so it is of one layer's rounding at a time, summed. The source is measured as it is.

Legend: attention.py; B sequences, T tokens, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..convert.algebra.attention import Attention, LatentAttention
from ..convert.algebra.forward import AnyAttention, attend
from ..convert.algebra.target import LatentTarget
from ..convert.decide.plan import Plan
from ..convert.layer.fold import fold_attention
from ..convert.methods.layer_sample import sample_of
from ..convert.methods.refinement import measure
from ..convert.methods.slots import slots_of
from ..convert.storage.cache_basis import fit_basis, in_basis
from ..convert.storage.cache_moments import weights_moments
from ..core.cache_dtypes import CacheDtype
from ..core.memory import enough_memory

# Of the drawn inputs: on so many, a share of two squares is steady to a few percent.
SEQUENCES, LENGTH = 2, 256


# By the name of the format of the cache, None for no format.
Losses = dict[str | None, float | None]


@dataclass
class PredictedLosses:
    """Predicted losses of plans; what is folded alike, whatever it is written as, is folded once.

    Attributes:
        kinds: number formats of the cache that are measured too.
        known: what was predicted.
    """

    kinds: tuple[CacheDtype, ...] = ()
    known: dict[Any, Losses] = field(default_factory=dict)

    def of(self, plan: Plan, kind: CacheDtype | None = None) -> float | None:
        """Return the loss of a plan, with its cache in one of `kinds`; None where it cannot be measured.

        It is in nats per token where the plan has statistics, else a share. The plan's `refine` says what is
        predicted: the closed form, or what refinement leaves.
        """
        if plan.latent_norm == "linear" or (plan.statistics is None and not plan.source.family.latent):
            plan = replace(plan, latent_norm=None)  # a linear norm computes what none does
        # Without slots, what is folded depends on the container too (layer/fold.py).
        form = None if plan.bands else plan.container.architecture
        how = (plan.method, plan.bands, form, plan.latent_norm, plan.folds_biases, plan.refine)
        key = (str(plan.target.to_dict()), *how)
        if key not in self.known:
            self.known[key] = _predict(plan, self.kinds)
        return self.known[key][None if kind is None else kind.name]


def source_loss(plan: Plan, kind: CacheDtype) -> float | None:
    """Return the loss of a plan's source, unfolded, with its cache in a number format."""
    measured = [_with_cache(plan, number, kind) for number in plan.source.attending]
    known = [each for each in measured if each is not None]
    if len(known) < len(measured):
        return None
    return sum(known) if plan.statistics is not None else sum(known) / len(known)


@enough_memory("measure layers on fewer or shorter sequences with --sequences or --length")
def _predict(plan: Plan, kinds: Sequence[CacheDtype]) -> Losses:
    nothing: Losses = dict.fromkeys([None, *(kind.name for kind in kinds)])
    regresses = plan.container.kind == "stock" and plan.source.family.k_norm is not None
    if plan.statistics is None and (plan.folds_biases or regresses):
        return nothing  # biases and key norms go into weights by statistics only
    plan = replace(plan, formats=tuple(kind.name for kind in kinds))
    losses: dict[str | None, list[float]] = {name: [] for name in nothing}
    for number in plan.source.attending:
        layer, loss = fold_attention(plan, number)
        if plan.statistics is None:
            losses[None].append(_share(plan, number, layer))
            for kind in kinds:
                losses[kind.name].append(_share(plan, number, _prepared(plan, number, layer, kind), kind))
        elif loss is None:
            return nothing  # `forward.attend` does not compute its attention
        else:
            for name, found in losses.items():
                found.append(loss["refined" if name is None else name])
    count = 1 if plan.statistics is not None else len(plan.source.attending)
    return {name: sum(each) / count for name, each in losses.items()}


def _prepared(plan: Plan, number: int, layer: AnyAttention, kind: CacheDtype) -> AnyAttention:
    """Return a layer that was folded by its weights alone in the coordinates for a format."""
    if kind.bits >= 16:
        return layer
    made: Any = layer
    slots_S = _turning(plan, number, layer, _source(plan, number)[1])
    written: AnyAttention = in_basis(made, fit_basis(layer, slots_S, weights_moments(layer), kind))
    return written


def _with_cache(plan: Plan, number: int, kind: CacheDtype) -> float | None:
    """Return the loss of one of the source's layers with its cache in a format, in the unit of its plan's.

    It is None where `forward.attend` does not compute the source's attention.
    """
    source, table_F, factor = _source(plan, number)
    if plan.statistics is None:
        return _share(plan, number, source, kind)
    taken = plan.statistics.layers[plan.source.attending.index(number)]
    sample = sample_of(plan.source, taken, number, source, table_F, factor)
    return None if sample is None else measure(source, table_F, source, table_F, sample, kind.stored)


def _share(plan: Plan, number: int, layer: AnyAttention, kind: CacheDtype | None = None) -> float:
    """Return the squared error of one layer's output over its square."""
    source, table_F, factor = _source(plan, number)
    scoring = plan.source.scoring(number, factor).to(torch.float32)
    slots_S = _turning(plan, number, layer, table_F)
    generator = torch.Generator().manual_seed(number)
    input_BTD = torch.randn(SEQUENCES, LENGTH, plan.source.geometry.hidden_size, generator=generator)
    cache = None if kind is None else kind.stored
    with torch.no_grad():
        wanted_BTD = attend(source.to(torch.float32), input_BTD, table_F, scoring)
        given_BTD = attend(layer.to(torch.float32), input_BTD, slots_S, scoring, cache=cache)
    return float((given_BTD - wanted_BTD).square().sum() / wanted_BTD.square().sum())


def _source(plan: Plan, number: int) -> tuple[Attention | LatentAttention, Tensor, float]:
    """Return the source's layer, the frequencies of its pairs, and the factor that is left to its scoring.

    They are taken as layer/fold.py takes them.
    """
    if plan.source.family.latent:
        return plan.source.latent_attention(number), plan.source.latent_frequencies(number), 1.0
    if isinstance(plan.target, LatentTarget):
        table_F, factor = plan.source.frequencies(number)
        return plan.source.attention(number, factor), table_F, 1.0
    table_F, factor = plan.source.nominal_frequencies(number)
    return plan.source.attention(number), table_F, factor


def _turning(plan: Plan, number: int, layer: AnyAttention, table_F: Tensor) -> Tensor:
    """Return the frequencies at which a folded layer's pairs, or its slots, turn."""
    if not isinstance(layer, LatentAttention) or plan.source.family.latent:
        return table_F
    if plan.source.mixed and number not in plan.source.rotating:
        return table_F[:0]
    return slots_of(plan.source, plan.bands, number)
