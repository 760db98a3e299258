"""One layer folded by a plan: the only place where weights meet a method."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..algebra.attention import Attention, IntactAttention, LatentAttention
from ..algebra.metric import UNWEIGHTED, metric_of
from ..algebra.spectrum import LatentSpectrum
from ..algebra.target import GroupedTarget, LatentTarget
from ..calibration.statistics import LayerStatistics
from ..decide.plan import Plan
from ..methods import key_norms as normed
from ..methods import table as methods
from ..methods.biases import nearest_to_one, without_key_bias, without_query_bias, without_value_bias
from ..methods.grouping import GAIN, grouped
from ..methods.intact import encoded, fold_joint
from ..methods.latent_norm import in_level_basis, with_latent_norm, with_query_norm
from ..methods.published import PEERS
from ..methods.query_rank import Compressible, compress, query_metric
from ..methods.refinement import (
    HELD_BACK,
    Layer,
    LayerSample,
    agrees,
    fitting_device,
    measure,
    refine,
)

Loss = dict[str, float]


@dataclass(frozen=True)
class LayerFold:
    """A layer's output.

    Attributes:
        tensors: the tensors to write, float64, by name.
        loss: of the layer alone on held-back calibration inputs, in nats per token, by the closed form
            (`folded`) and as written (`refined`). None without such inputs, and where `forward.attend` does
            not compute the attention.
        spectrum: the spectrum that its latent was cut from; None where there is no latent.
    """

    tensors: dict[str, Tensor]
    loss: Loss | None
    spectrum: LatentSpectrum | None


def fold(plan: Plan, number: int) -> LayerFold:
    """Fold one layer of a plan's source."""
    layer, loss = fold_attention(plan, number)
    tensors = plan.container.tensors(layer, number)
    return LayerFold(tensors, loss, None if isinstance(layer, Attention) else layer.spectrum)


def fold_attention(
    plan: Plan, number: int
) -> tuple[Attention | LatentAttention | IntactAttention, Loss | None]:
    """Fold one layer of a plan's source; return it before a container names its tensors, and its loss."""
    if isinstance(plan.target, GroupedTarget):
        return _pooled(plan, number, plan.target)
    if plan.container.folds_jointly:
        return _joint(plan, number, plan.target)
    return _latent(plan, number, plan.target)


def _statistics(plan: Plan, number: int) -> LayerStatistics | None:
    return None if plan.statistics is None else plan.statistics.layers[number]


def _joint(
    plan: Plan, number: int, target: LatentTarget
) -> tuple[IntactAttention | LatentAttention, Loss | None]:
    table_F, factor = plan.source.frequencies(number)
    attention = plan.source.attention(number, factor)
    sample = _sample(plan, number, attention, table_F)
    seen = None if sample is None or attention.k_norm_KH is None else encoded(attention, table_F, sample)
    joint = fold_joint(attention, target, _statistics(plan, number), plan.source.positions, seen)
    joint = _compressed(plan, number, joint, attention, table_F)
    if isinstance(joint, IntactAttention):
        return _refined(plan, attention, table_F, joint, table_F, sample)
    return _refined(plan, attention, table_F, joint, table_F[:0], sample)


def _latent(plan: Plan, number: int, target: LatentTarget) -> tuple[LatentAttention, Loss | None]:
    if plan.source.mixed and number not in plan.source.rotating:
        return _still(plan, number, target)
    table_F, factor = plan.source.slot_frequencies()
    attention = plan.source.attention(number, factor)
    statistics = _statistics(plan, number)
    slots_S = torch.tensor(
        [band.frequency for band in plan.bands for _ in range(band.slots)], dtype=torch.float64
    )
    if target.slots == "rule":
        latent = PEERS[plan.method].fold(attention, target, plan.bands, statistics)
    else:
        metric = metric_of(statistics, attention, plan.source.positions)
        one_D = _one(plan, metric.input_EE)
        latent = methods.FACTOR["subspace"](
            without_value_bias(attention, one_D), target, table_F, plan.bands, metric
        )
        latent = without_key_bias(latent, one_D)
        latent = _compressed(plan, number, latent, without_query_bias(attention, one_D), table_F)
    latent = _levelled(plan, number, latent, attention)
    latent, loss = _refined(
        plan, attention, table_F, latent, slots_S, _sample(plan, number, attention, table_F)
    )
    return _in_level_basis(latent, attention), loss


def _still(plan: Plan, number: int, target: LatentTarget) -> tuple[LatentAttention, Loss | None]:
    """Fold a layer that rotates nothing, among others that do.

    Its keys are in the latent, and the rotary key stays empty.
    """
    attention = plan.source.attention(number)
    statistics = _statistics(plan, number)
    one_D = _one(plan, None if statistics is None else statistics.input_EE)
    valued = without_value_bias(attention, one_D)
    latent = fold_joint(valued, replace(target, rope="decoupled"), statistics, plan.source.positions)
    assert isinstance(latent, LatentAttention)
    table_F, _ = plan.source.frequencies(number)
    latent = _compressed(
        plan, number, without_key_bias(latent, one_D), without_query_bias(attention, one_D), table_F
    )
    latent = _levelled(plan, number, latent, attention)
    latent, loss = _refined(
        plan, attention, table_F, latent, table_F[:0], _sample(plan, number, attention, table_F)
    )
    return _in_level_basis(latent, attention), loss


def _levelled(plan: Plan, number: int, layer: LatentAttention, attention: Attention) -> LatentAttention:
    """Return the layer with the norms of the stock class, where the plan has them fitted."""
    taken = _statistics(plan, number)
    if plan.latent_norm != "fitted":
        return layer
    assert taken is not None, "make_plan asked for statistics"
    device, sequences = fitting_device(), len(taken.input_BTD)
    input_BTD = held_BTD = taken.input_BTD
    if sequences > 1:
        held = max(1, sequences // HELD_BACK)
        input_BTD, held_BTD = taken.input_BTD.split([sequences - held, held])
    input_XD, held_XD = (rows.flatten(0, 1).to(device, torch.float64) for rows in (input_BTD, held_BTD))
    layer = with_latent_norm(layer.to(torch.float64, device), input_XD, held_XD)
    if plan.container.query_rank is not None:
        size = float(attention.q_NHD.square().mean().sqrt())
        layer = with_query_norm(layer, input_XD, held_XD, size, biased=plan.container.holds_biases)
    return layer.to(torch.float64, "cpu")


def _in_level_basis(layer: LatentAttention, attention: Attention) -> LatentAttention:
    """Return the layer as the stock class has it, with projections as large as the source's."""
    if layer.level_CC is None:
        return layer
    size = float(torch.cat([attention.k_KHD.flatten(), attention.v_KHD.flatten()]).square().mean().sqrt())
    return in_level_basis(layer, size)


def _compressed(
    plan: Plan, number: int, layer: Compressible, attention: Attention, table_F: Tensor
) -> Compressible:
    """Compress the queries of a layer, where the target asks for it."""
    rank = plan.target.q_lora_rank if isinstance(plan.target, LatentTarget) else None
    if rank is None:
        return layer
    metric = query_metric(attention, _statistics(plan, number), plan.source.positions, table_F)
    return compress(layer, attention, metric, rank)


def _one(plan: Plan, input_EE: torch.Tensor | None) -> torch.Tensor | None:
    """Return the linear function of the input that replaces the constant of biases.

    The result is None where biases need not go into weights.
    """
    if not plan.folds_biases:
        return None
    assert input_EE is not None, "check_calibrated asked for statistics"
    return nearest_to_one(input_EE)


def _pooled(plan: Plan, number: int, target: GroupedTarget) -> tuple[Attention, Loss | None]:
    attention, (table_F, factor) = plan.source.attention(number), plan.source.nominal_frequencies(number)
    pool = methods.POOL[plan.method]
    weighs = methods.reads_statistics(plan.method)
    metric = metric_of(_statistics(plan, number), attention, plan.source.positions) if weighs else UNWEIGHTED
    if attention.k_norm_KH is not None and plan.method != "mean":
        pool = normed.by_value(pool)
    sample = _sample(plan, number, attention, table_F, factor)
    pooled = pool(attention, target, metric, table_F)
    if plan.method == "subspace" and _is_movable(plan, attention, sample):
        moved, its_metric, gain = grouped(attention, metric, target.num_key_value_heads)
        if gain > (0 if sample else GAIN):
            other = pool(moved, target, its_metric, table_F)
            # The predicted gain is of second order and by pairs: where it can be measured, that decides.
            if sample is None or _loss(other, attention, table_F, sample) < _loss(
                pooled, attention, table_F, sample
            ):
                pooled = other
    return _refined(plan, attention, table_F, pooled, table_F, sample)


def _is_movable(plan: Plan, attention: Attention, sample: LayerSample | None) -> bool:
    """Return whether heads may be put in another order.

    Sinks and some norms belong to one query head each and are not written. For heads with norms the loss of a
    merge is estimated too roughly to trust an order that cannot be measured.
    """
    if plan.source.family.sinks is not None:
        return False
    return attention.q_norm_NH is None or (len(attention.q_norm_NH) == 1 and sample is not None)


def _loss(pooled: Attention, attention: Attention, table_F: Tensor, sample: LayerSample) -> float:
    return measure(pooled, table_F, attention, table_F, sample)


def _sample(
    plan: Plan, number: int, attention: Attention, table_F: Tensor, rotary_factor: float = 1.0
) -> LayerSample | None:
    """Return the sample that a layer is measured and refined on.

    The result is None where this package's forward pass does not compute what the source does.
    """
    taken = _statistics(plan, number)
    if taken is None:
        return None
    sample = LayerSample(
        input_BTD=taken.input_BTD,
        output_BTD=taken.output_BTD,
        fisher_DD=taken.output_fisher,
        scoring=plan.source.scoring(number, rotary_factor),
    )
    return sample if agrees(attention, table_F, sample) else None


def _refined(
    plan: Plan,
    attention: Attention,
    table_F: Tensor,
    layer: Layer,
    slots_S: Tensor,
    sample: LayerSample | None,
) -> tuple[Layer, Loss | None]:
    """Refine a layer where that is possible, and return it with its loss."""
    if sample is None:
        return layer, None
    steps = plan.refine if plan.method == "subspace" else 0
    # A norm of single heads serves as many as there are, and is passed on; so is one of all queries, whose
    # number stays.
    fixed = {"q_norm_NH"} if plan.source.family.norm_spans == "heads" else {"q_norm_NH", "k_norm_KH"}
    if isinstance(layer, LatentAttention) and layer.query_norm is not None and layer.q_down_AD is not None:
        # A rescaled input is no projection to learn.
        fixed |= (
            {"q_down_AD", "q_down_A"} if layer.q_down_AD.shape[1] <= len(layer.q_down_AD) else {"q_down_A"}
        )
    result = refine(layer, slots_S, attention, table_F, sample, fixed=fixed, steps=steps)
    return result.layer, {"folded": result.folded, "refined": result.refined}
