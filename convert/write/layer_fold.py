"""One layer folded by a plan: the only place where weights meet a method."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.errors import InvalidInput
from ...core.system_calls import trim_memory
from ..algebra.attention import Attention, IntactAttention, LatentAttention
from ..algebra.input_scale import channel_scales, through_channels, with_channels
from ..algebra.metric import UNWEIGHTED, LayerMetric, metric_of
from ..algebra.spectrum import LatentSpectrum
from ..algebra.subspaces import decomposing
from ..algebra.target import GroupedTarget, LatentTarget
from ..calibration.statistics import LayerStatistics
from ..decide.plan import Plan
from ..methods import table as methods
from ..methods.biases import nearest_to_one, without_key_bias, without_query_bias, without_value_bias
from ..methods.features import features_of, with_features
from ..methods.grouping import GAIN, arrangements, heads_in, likest, reordered
from ..methods.head_norms import by_value, followed, merged, turned
from ..methods.intact import encoded, fold_joint
from ..methods.key_regression import regressed
from ..methods.latent import to_mla
from ..methods.layer_sample import sample_of
from ..methods.pooling import Pool, by_dimension
from ..methods.published import peer, with_few_queries
from ..methods.query_rank import Compressible, compress, query_metric
from ..methods.refinement import Layer, LayerSample, measure
from ..methods.slots import bands_of, slots_of
from .layer_finish import Finishing, Loss, finished


@dataclass(frozen=True)
class LayerFold:
    """A layer's output.

    Attributes:
        tensors: the tensors to write, float64, by name.
        loss: of the layer alone on held-back calibration inputs, in nats per token, by the closed form
            (`folded`) and as written (`refined`). For a quantised cache also with that cache (`stored`), and
            so the layer that is not prepared (`unprepared`), and for each of `Plan.formats`, by its name,
            what it loses in closed-form coordinates for that. None without such inputs, and where
            `forward.attend` does not compute the attention.
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
    """Fold one layer of a plan's source; return it before a container names its tensors, and its loss.

    Raises:
        InvalidInput: the statistics hold values that cannot be decomposed, such as those of a damaged file.
    """
    with decomposing(f"the statistics of layer {number}"):
        folded = _fold_attention(plan, number)
    trim_memory()
    return folded


def _fold_attention(
    plan: Plan, number: int
) -> tuple[Attention | LatentAttention | IntactAttention, Loss | None]:
    layer: Attention | LatentAttention | IntactAttention
    donor = plan.source.donor(number)
    if donor is not None:
        return _following(plan, number, donor), None
    if isinstance(plan.target, GroupedTarget):
        layer, loss = _pooled(plan, number, _own_target(plan, number))
    elif plan.container.folds_jointly:
        layer, loss = _joint(plan, number, plan.target)
    else:
        layer, loss = _latent(plan, number, plan.target)
    scale_D = _scales(plan, number)
    return layer if scale_D is None else with_channels(layer, 1 / scale_D), loss


def _scales(plan: Plan, number: int) -> Tensor | None:
    """Return the sizes of a layer's input channels, by which it is folded; None for methods of others."""
    if plan.statistics is None or plan.method != methods.OWN:
        return None
    return channel_scales(plan.statistics.layers[plan.source.attending.index(number)])


def _statistics(plan: Plan, number: int) -> LayerStatistics | None:
    if plan.statistics is None:
        return None
    taken, scale_D = plan.statistics.layers[plan.source.attending.index(number)], _scales(plan, number)
    return taken if scale_D is None else through_channels(taken, scale_D)


def _attention(plan: Plan, number: int, rotary_factor: float = 1.0) -> Attention:
    attention, scale_D = plan.source.attention(number, rotary_factor), _scales(plan, number)
    return attention if scale_D is None else with_channels(attention, scale_D)


def _joint(
    plan: Plan, number: int, target: LatentTarget
) -> tuple[IntactAttention | LatentAttention, Loss | None]:
    table_F, factor = plan.source.frequencies(number)
    attention = _attention(plan, number, factor)
    sample = _sample(plan, number, attention, table_F)
    seen = None if sample is None or attention.k_norm_KH is None else encoded(attention, table_F, sample)
    joint = fold_joint(attention, target, _statistics(plan, number), plan.source.positions, seen)
    joint = _compressed(plan, number, joint, attention, table_F)
    if isinstance(joint, IntactAttention):
        return _finished(plan, number, joint, attention, table_F, table_F, sample)
    return _finished(plan, number, joint, attention, table_F, table_F[:0], sample)


def _latent(plan: Plan, number: int, target: LatentTarget) -> tuple[LatentAttention, Loss | None]:
    if plan.source.mixed and number not in plan.source.rotating:
        return _still(plan, number, target)
    table_F, factor = plan.source.frequencies(number)
    attention = _attention(plan, number, factor)
    bands, slots_S = bands_of(plan.source, plan.bands, number), slots_of(plan.source, plan.bands, number)
    statistics = _statistics(plan, number)
    if attention.k_norm_KH is not None:
        fold_normed = _over_features if plan.container.kind == "remote" else _regressed
        return fold_normed(plan, number, target, attention, table_F)
    rule = peer(plan.method)
    if rule is not None and target.slots == "rule":
        latent = with_few_queries(rule, attention, target, bands, statistics, plan.inputs.get(number))
    else:
        metric = metric_of(statistics, attention, plan.source.positions)
        one_D = _one(plan, metric.input_EE)
        latent = to_mla(without_value_bias(attention, one_D), target, table_F, bands, metric)
        latent = without_key_bias(latent, one_D)
        latent = _compressed(plan, number, latent, without_query_bias(attention, one_D), table_F)
    sample = _sample(plan, number, attention, table_F)
    return _finished(plan, number, latent, attention, table_F, slots_S, sample)


def _over_features(
    plan: Plan, number: int, target: LatentTarget, attention: Attention, table_F: Tensor
) -> tuple[LatentAttention, Loss | None]:
    """Fold a layer with key norms, whose latent and slots are computed from its features."""
    statistics = _statistics(plan, number)
    featured, metric = features_of(plan.source, number, attention, table_F, statistics)
    bands, slots_S = bands_of(plan.source, plan.bands, number), slots_of(plan.source, plan.bands, number)
    folded = to_mla(featured, target, table_F, bands, metric)
    latent = _compressed(plan, number, with_features(folded, attention), attention, table_F)
    sample = _sample(plan, number, attention, table_F)
    return _finished(plan, number, latent, attention, table_F, slots_S, sample)


def _regressed(
    plan: Plan, number: int, target: LatentTarget, attention: Attention, table_F: Tensor
) -> tuple[LatentAttention, Loss | None]:
    """Fold a layer with key norms for a class that has none."""
    statistics = _statistics(plan, number)
    assert statistics is not None, "rewrite asked for statistics"
    plain, metric = regressed(plan.source, number, attention, table_F, statistics)
    one_D = _one(plan, statistics.input_EE)
    latent = to_mla(without_value_bias(plain, one_D), target, table_F, plan.bands, metric)
    latent = _compressed(plan, number, without_key_bias(latent, one_D), plain, table_F)
    sample = _sample(plan, number, attention, table_F)
    return _finished(
        plan, number, latent, attention, table_F, slots_of(plan.source, plan.bands, number), sample, plain
    )


def _still(plan: Plan, number: int, target: LatentTarget) -> tuple[LatentAttention, Loss | None]:
    """Fold a layer that rotates nothing, among others that do.

    Its keys are in the latent, and the rotary key stays empty.
    """
    attention = _attention(plan, number)
    statistics = _statistics(plan, number)
    one_D = _one(plan, None if statistics is None else statistics.input_EE)
    valued = without_value_bias(attention, one_D)
    latent = fold_joint(valued, replace(target, rope="decoupled"), statistics, plan.source.positions)
    assert isinstance(latent, LatentAttention)
    table_F, _ = plan.source.frequencies(number)
    latent = _compressed(
        plan, number, without_key_bias(latent, one_D), without_query_bias(attention, one_D), table_F
    )
    sample = _sample(plan, number, attention, table_F)
    return _finished(plan, number, latent, attention, table_F, table_F[:0], sample)


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


def _own_target(plan: Plan, number: int) -> GroupedTarget:
    """Return the key/value heads of one layer."""
    assert isinstance(plan.target, GroupedTarget)
    share = plan.target.num_key_value_heads, plan.source.geometry.num_key_value_heads
    return GroupedTarget(num_key_value_heads=plan.source.shape(number).folded(share).num_key_value_heads)


def _following(plan: Plan, number: int, donor: int) -> Attention:
    """Return a layer that reads a donor's folded keys and values, with its own queries and outputs.

    The donor's heads are merged again, by the same weights to the same turns.
    """
    attention = plan.source.attention(number)
    if plan.method == "mean":
        return attention
    pooled, turns = merged(
        _attention(plan, donor), _own_target(plan, donor), key_values=plan.source.keys_are_values(donor)
    )
    return followed(pooled, attention, turns)


def _pooled(plan: Plan, number: int, target: GroupedTarget) -> tuple[Attention, Loss | None]:
    """Fold a layer to GQA or MQA; where heads may change places, in the order that loses least."""
    attention, (table_F, factor) = _attention(plan, number), plan.source.nominal_frequencies(number)
    pool = _pool_of(plan, number, attention)
    metric = UNWEIGHTED
    if methods.reads_statistics(plan.method):
        metric = metric_of(_statistics(plan, number), attention, plan.source.positions)
    sample = _sample(plan, number, attention, table_F, factor)
    if plan.method == "aligned:grouped":
        if not _is_movable(plan, number, attention, sample):
            raise InvalidInput(
                f"--method {plan.method} puts heads in another order, which the query and key norms or sinks "
                "of this source forbid; use --method aligned"
            )
        attention = heads_in(likest(attention, target.num_key_value_heads), attention)
    if plan.method == methods.OWN and _is_movable(plan, number, attention, sample):
        pooled = _in_best_order(pool, attention, target, metric, table_F, sample)
    else:
        pooled = pool(attention, target, metric, table_F)
    return _finished(plan, number, pooled, attention, table_F, table_F, sample)


def _pool_of(plan: Plan, number: int, attention: Attention) -> Pool:
    """Return the plan's method, changed for the parts of a layer that no method knows.

    `mean` is not changed. Of any other, a source with key norms takes the values alone, one with a gate for
    each dimension the keys alone, and one with norms of values nothing: head_norms.py and `by_dimension`
    merge the rest.
    """
    pool = methods.POOLS[plan.method]
    if plan.method == "mean":
        return pool
    if plan.source.family.value_norm:
        return turned(key_values=plan.source.keys_are_values(number))
    if attention.k_norm_KH is not None:
        pool = by_value(pool)
    if attention.gate_NHD is not None and attention.gate_NHD.shape[1] > 1:
        pool = by_dimension(pool)
    return pool


def _in_best_order(
    pool: Pool,
    attention: Attention,
    target: GroupedTarget,
    metric: LayerMetric,
    table_F: Tensor,
    sample: LayerSample | None,
) -> Attention:
    """Return the pooled heads of a layer, in the order of its heads that loses least.

    The predicted gain of an order is of second order and by pairs: where a sample measures it, that decides.
    """
    orders = arrangements(attention, metric, target.num_key_value_heads)
    if sample is None:
        order, gain = orders[0]
        if gain > GAIN:
            attention, metric = reordered(attention, metric, order)
        return pool(attention, target, metric, table_F)
    ways = (reordered(attention, metric, order) for order, _ in orders)
    folds = [pool(moved, target, its_metric, table_F) for moved, its_metric in ways]
    if len(folds) == 1:
        return folds[0]
    return min(folds, key=lambda fold: measure(fold, table_F, attention, table_F, sample))


def _is_movable(plan: Plan, number: int, attention: Attention, sample: LayerSample | None) -> bool:
    """Return whether heads may be put in another order.

    Sinks, own gates and some norms belong to one query head and are not written. For heads with norms a
    merge's loss is estimated too roughly to trust an order that cannot be measured.
    """
    if plan.source.family.sinks is not None or plan.source.family.gate not in {None, "q"}:
        return False
    if plan.source.followers(number):  # which read the heads in the source's order
        return False
    return attention.q_norm_NH is None or (len(attention.q_norm_NH) == 1 and sample is not None)


def _sample(
    plan: Plan, number: int, attention: Attention, table_F: Tensor, rotary_factor: float = 1.0
) -> LayerSample | None:
    """Return the sample that a layer is measured and refined on; None where there is none."""
    return sample_of(plan.source, _statistics(plan, number), number, attention, table_F, rotary_factor)


def _finished(
    plan: Plan,
    number: int,
    layer: Layer,
    attention: Attention,
    table_F: Tensor,
    slots_S: Tensor,
    sample: LayerSample | None,
    plain: Attention | None = None,
) -> tuple[Layer, Loss | None]:
    """Refine a layer's closed form; return it as it will be written, with its loss.

    Args:
        plan: for which it is folded.
        number: of the layer.
        layer: the closed form.
        attention: the source's.
        table_F: the source's angular frequencies.
        slots_S: angular frequencies of the layer's slots or pairs.
        sample: of the source's inputs.
        plain: attention without norms whose projections say how large the output's are; by default the
            source's.
    """
    finishing = Finishing(
        plan=plan,
        number=number,
        statistics=_statistics(plan, number),
        attention=attention,
        table_F=table_F,
        slots_S=slots_S,
        sample=sample,
        plain=attention if plain is None else plain,
        is_shared=bool(plan.source.followers(number)),
    )
    return finished(finishing, layer)
