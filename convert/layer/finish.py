"""A layer after its closed form: norms fitted, weights refined, its cache prepared for a format."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import Tensor

from ...core.cache_dtypes import CacheDtype, cache_dtype
from ...core.system_calls import trim_memory
from ..algebra.attention import Attention, LatentAttention, NormedLatentAttention
from ..algebra.forward import AnyAttention, Caches
from ..calibration.statistics import LayerStatistics
from ..methods.latent_norm import (
    LEAST_PARTS,
    LatentTokens,
    NormBasis,
    in_level_basis,
    length_weights,
    level_basis,
    turned_like,
    with_latent_norm,
    with_least_parts,
    with_query_norm,
)
from ..methods.layer_sample import drawn_inputs
from ..methods.refinement import (
    HELD_BACK,
    Layer,
    LayerSample,
    Refined,
    fitting_device,
    measure,
    refine,
)
from ..methods.table import OWN
from ..storage.cache_basis import caches_of, fit_basis, in_basis
from ..storage.cache_moments import sampled_moments, weights_moments
from ..storage.head_basis import with_balanced_heads
from ..storage.rounded_length import FEW_STEPS, SHARE, STEPS, latent_costs, rounded_root, rounding_cost
from .fold_inputs import Folding

Loss = dict[str, float]
RISE = 0.03  # of a refined layer's loss, for weights that are rounded at less cost


@dataclass(frozen=True, kw_only=True)
class Finishing:
    """One layer's folding, source and sample.

    Attributes:
        folding: with `latent_norm`.
        number: of the layer.
        statistics: of the layer.
        attention: the source's, with its angular frequencies `table_F`.
        slots_S: angular frequencies of the folded layer's slots or pairs.
        sample: of the source's inputs; None: nothing is refined or measured.
        plain: attention without norms whose projections say how large the output's are.
        is_shared: other layers read its keys and values.
        latent_BTr: the latents of a source whose attention is latent already, float64; None for others.
        reduction_Cr: from these to the latents of the fold.
    """

    folding: Folding
    number: int
    statistics: LayerStatistics | None
    attention: Attention | LatentAttention
    table_F: Tensor
    slots_S: Tensor
    sample: LayerSample | None
    plain: Attention | LatentAttention
    is_shared: bool = False
    latent_BTr: Tensor | None = None
    reduction_Cr: Tensor | None = None

    @cached_property
    def input_BTD(self) -> Tensor:
        """The inputs of the layer that a norm is fitted on."""
        if self.statistics is None:
            return drawn_inputs(self.folding.source, self.number)
        return self.statistics.input_BTD

    @property
    def size(self) -> float:
        """The root mean square of what the source makes keys and values of its input with."""
        made = self.plain
        if isinstance(made, LatentAttention):
            return float(made.down_CD.square().mean().sqrt())
        return float(torch.cat([made.k_KHD.flatten(), made.v_KHD.flatten()]).square().mean().sqrt())

    def loss(self, layer: AnyAttention, sample: LayerSample, cache: Caches | None = None) -> float:
        """Return the loss of a folded layer on what is held back."""
        return measure(layer, self.slots_S, self.attention, self.table_F, sample, cache)


def finished(its: Finishing, layer: Layer) -> tuple[Layer, Loss | None]:
    """Refine a layer with the norms that its output will have; return it as it is written, with its loss."""
    made: Any = layer
    if isinstance(layer, LatentAttention):
        made = _levelled(its, layer)
        trim_memory()
    made, loss = _refined(its, made)
    trim_memory()
    made, loss = _with_all_parts(its, made, loss)
    dtype = cache_dtype(its.folding.request.cache_dtype)
    if dtype.bits < 16:
        return _prepared(its, made, loss, dtype)
    if loss is not None and its.sample is not None and its.folding.formats:
        loss = {**loss, **_stored_losses(its, made, its.sample)}
    return _as_written(its, made), loss


def _stored_losses(its: Finishing, layer: Layer, sample: LayerSample) -> Loss:
    """Return the loss with the cache in each of the formats, in closed-form coordinates or as it is.

    It takes a small part of the time of a fit to the format, which finds better ones.
    """
    # Without numbers of tokens nothing is fitted.
    moments = tuple(replace(each, rows_KXW=None) for each in sampled_moments(layer, its.slots_S, sample))
    written, found = _as_written(its, layer), {}
    for name in its.folding.formats:
        dtype = cache_dtype(name)
        found[name] = its.loss(written, sample, dtype.stored)
        if dtype.bits < 16:
            basis = fit_basis(layer, its.slots_S, moments, dtype)
            prepared = _as_written(its, in_basis(layer, basis), basis.norm)
            found[name] = min(found[name], its.loss(prepared, sample, dtype.stored))
    return found


def _prepared(
    its: Finishing, layer: Layer, loss: Loss | None, dtype: CacheDtype
) -> tuple[Layer, Loss | None]:
    """Return a layer in coordinates for a quantised cache, and refined through its rounding.

    What loses least with its cache in the format is returned: that, the same without the second refinement,
    or the layer as it would be without a format.
    """
    if its.sample is None:
        is_levelled = isinstance(layer, LatentAttention) and layer.level_CC is not None
        if is_levelled:
            return _as_written(its, layer), None
        return in_basis(layer, fit_basis(layer, its.slots_S, weights_moments(layer), dtype)), None
    assert loss is not None
    basis = fit_basis(layer, its.slots_S, sampled_moments(layer, its.slots_S, its.sample), dtype)
    ways: list[Any] = [_as_written(its, layer), _as_written(its, in_basis(layer, basis), basis.norm)]
    if its.folding.method == OWN and its.folding.refine:
        caches = caches_of(dtype, basis)
        refined, _ = _with_all_parts(its, _fitted(its, layer, its.sample, caches).layer, loss, caches)
        ways.append(_as_written(its, in_basis(refined, basis), basis.norm))
    losses = [its.loss(way, its.sample, dtype.stored) for way in ways]
    chosen = losses.index(min(losses))
    found = {**loss, "stored": losses[chosen], "unprepared": losses[0]}
    if chosen:
        found["refined"] = its.loss(ways[chosen], its.sample)
    return ways[chosen], found


def _levelled(its: Finishing, layer: LatentAttention) -> LatentAttention:
    """Return the layer with real norms, where they are fitted."""
    folding = its.folding
    if folding.latent_norm != "fitted":
        return layer
    if its.latent_BTr is not None:
        return _levelled_latent(its, layer)
    weight_BT = None
    if its.sample is not None:
        weight_BT = length_weights(layer, its.slots_S, its.sample, folding.effort.draws)
    tokens = _tokens(its.input_BTD, weight_BT)
    layer = with_latent_norm(layer.to(torch.float64, fitting_device()), tokens)
    if folding.container.query_rank is not None:
        assert isinstance(its.plain, Attention)
        size = float(its.plain.q_NHD.square().mean().sqrt())
        given = tokens.input_XD.shape[1] if layer.q_down_AD is None else len(layer.q_down_AD)
        # One more number than there are is a constant, in the place of biases.
        biased = folding.container.query_rank > given
        layer = with_query_norm(layer, tokens.unweighted(), size, biased=biased)
    return layer.to(torch.float64, "cpu")


def _levelled_latent(its: Finishing, layer: LatentAttention) -> LatentAttention:
    """Return the fold of a layer that has a latent already, with a real norm of its own.

    An error in the length of its latent costs what it costs in the source's.
    """
    assert its.latent_BTr is not None
    assert its.reduction_Cr is not None
    assert isinstance(its.attention, LatentAttention)
    weight_BT = None
    if its.sample is not None:
        weight_BT = length_weights(its.attention, its.table_F, its.sample, its.folding.effort.draws)
    tokens = _tokens(its.latent_BTr, weight_BT)
    level_CC = level_basis(tokens, its.reduction_Cr.to(fitting_device()))
    return replace(layer, level_CC=level_CC.to("cpu"))


def _tokens(input_BTD: Tensor, weight_BT: Tensor | None) -> LatentTokens:
    """Return a layer's inputs as tokens to fit a norm on, with as many held back as in refinement."""
    sequences = len(input_BTD)
    held = max(1, sequences // HELD_BACK) if sequences > 1 else 0

    def parts(rows: Tensor) -> list[Tensor]:
        rows = rows.to(fitting_device(), torch.float64)
        split = rows.split([sequences - held, held]) if held else (rows, rows)
        return [part.flatten(0, 1) for part in split]

    return LatentTokens.of(*parts(input_BTD), *([] if weight_BT is None else parts(weight_BT)))


def _refined(its: Finishing, layer: Layer) -> tuple[Layer, Loss | None]:
    """Refine a layer where that is possible, and return it with its loss."""
    if its.sample is None:
        return layer, None
    start, folded = _with_rounded_length(its, layer, its.sample, STEPS)
    found = _fitted(its, start, its.sample)
    if folded is None:
        folded = found.folded
    rate = {"quarters": found.quarters} if its.folding.refine else {}
    if found.refined > folded:
        return layer, {"folded": folded, "refined": folded, **rate}
    # Large rates of refinement take back part of what the length before it had saved
    # (docs/notes/latent-norm.md).
    refined, _ = _with_rounded_length(its, found.layer, its.sample, FEW_STEPS, RISE)
    return refined, {"folded": folded, "refined": found.refined, **rate}


def _with_rounded_length(
    its: Finishing, layer: Layer, sample: LayerSample, steps: int, rise: float = inf
) -> tuple[Layer, float | None]:
    """Return a layer to be refined, or refined, with a latent length that makes rounding its weights cheaper.

    It is kept where the loss of held-back sequences rises by less than the predicted cost of rounding falls.
    Refinement recovers most of that rise (docs/notes/latent-norm.md); a closed form that stays one would
    not, and keeps its own.

    The loss may rise by the share `rise` at most: nothing recovers what is lost after refinement, and tokens
    whose latent is nearly zero make the predicted cost of rounding as large as any number.

    Returns:
        The layer, and its loss before; None where there is no length: only a latent behind a norm has one.
    """
    if not isinstance(layer, LatentAttention) or isinstance(layer, NormedLatentAttention):
        return layer, None
    if layer.level_CC is None or its.folding.method != OWN or not its.folding.refine:
        return layer, None
    costs = latent_costs(layer, its.slots_S, sample)
    trim_memory()
    root_CC = rounded_root(costs, SHARE, steps)
    made: Any = layer
    made = replace(made, level_CC=root_CC.to(layer.level_CC) @ layer.level_CC)
    same_CC = torch.eye(len(root_CC)).to(root_CC)
    saved = float(rounding_cost(costs, same_CC, SHARE) - rounding_cost(costs, root_CC, SHARE))
    folded = its.loss(layer, sample)
    return (made if its.loss(made, sample) - folded < min(saved, rise * folded) else layer), folded


def _fitted(
    its: Finishing, layer: Layer, sample: LayerSample, caches: Caches | None = None
) -> Refined[Layer]:
    """Refine the weights that are written; the loss is measured through `caches`."""
    folding = its.folding
    is_refined = folding.method == OWN
    # A norm that heads share serves any number of them, and is passed on; so is that of queries, whose number
    # stays.
    passes = folding.source.family.norm_spans == "head"
    fixed = {"q_norm_NH", "gate_NHD", "gate_NH"} | ({"k_norm_KH"} if passes else set())
    if its.is_shared:
        fixed |= {"k_KHD", "k_KH", "v_KHD", "v_KH"}
    if its.latent_BTr is not None:
        fixed |= {"query_norm"}
    if isinstance(layer, NormedLatentAttention):
        fixed |= {"q_nope_NPA"}  # the identity, which is not written
    if isinstance(layer, LatentAttention) and layer.query_norm is not None and layer.q_down_AD is not None:
        # A rescaled input is no projection to learn.
        fixed |= (
            {"q_down_AD", "q_down_A"} if layer.q_down_AD.shape[1] <= len(layer.q_down_AD) else {"q_down_A"}
        )
    return refine(
        layer,
        its.slots_S,
        its.attention,
        its.table_F,
        sample,
        fixed=fixed,
        steps=folding.refine if is_refined else 0,
        batch=folding.effort.batch,
        momentum=folding.effort.momentum,
        passes=folding.effort.passes,
        solve=is_refined and folding.solves,
        quarters=folding.quarters.get(its.number),
        cache=caches,
    )


def _with_all_parts(
    its: Finishing, layer: Layer, loss: Loss | None, caches: Caches | None = None
) -> tuple[Layer, Loss | None]:
    """Return the layer with a length that leaves no direction out, as refinement may; and its loss."""
    if its.sample is None or loss is None:
        return layer, loss
    if not isinstance(layer, LatentAttention) or layer.level_CC is None:
        return layer, loss
    input_BTD = its.sample.input_BTD[its.sample.used]
    ways: list[Any] = [with_least_parts(layer, input_BTD, least) for least in LEAST_PARTS]
    if caches is not None:  # coordinates of the cache are relative to this root
        ways = [replace(way, level_CC=turned_like(way.level_CC, layer.level_CC)) for way in ways]
    losses = [its.loss(way, its.sample, caches) for way in ways]
    return ways[losses.index(min(losses))], {**loss, "refined": min(losses)}


def _as_written(its: Finishing, layer: Layer, basis: NormBasis | None = None) -> Layer:
    """Return the layer as its class has it; behind a norm, with projections as large as the source's."""
    if not isinstance(layer, LatentAttention) or layer.level_CC is None:
        return layer
    # Of 32 heads this takes a CPU seconds, as long as a fifth of the refinement on a GPU
    # (docs/notes/time-and-memory.md).
    balanced = with_balanced_heads(layer.to(torch.float64, fitting_device()), its.input_BTD)
    made: Any = in_level_basis(balanced.to(torch.float64, "cpu"), its.input_BTD, its.size, basis)
    written: Layer = made
    return written
