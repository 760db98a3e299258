"""One layer folded: the only place where weights meet a method."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from ...core.errors import InvalidInput
from ...core.system_calls import trim_memory
from ..algebra.attention import Attention, IntactAttention, LatentAttention
from ..algebra.forward import AnyAttention
from ..algebra.input_scale import channel_scales, with_channels
from ..algebra.metric import UNWEIGHTED, LayerMetric
from ..algebra.spectrum import LatentSpectrum
from ..algebra.subspaces import decomposing
from ..algebra.target import GroupedTarget, LatentTarget, Target
from ..calibration.layer_metric import metric_of
from ..calibration.statistics import LayerStatistics
from ..methods import table as methods
from ..methods.biases import nearest_to_one, without_key_bias, without_query_bias, without_value_bias
from ..methods.features import features_of, with_features
from ..methods.grouping import GAIN, arrangements, heads_in, likest, reordered
from ..methods.head_norms import by_value, followed, merged, turned
from ..methods.intact import encoded, fold_joint
from ..methods.key_regression import regressed
from ..methods.latent import to_mla
from ..methods.layer_sample import sample_of
from ..methods.narrowing import latent_metric, narrowed, source_latents
from ..methods.pooling import Pool, by_dimension
from ..methods.published import peer, with_few_queries
from ..methods.query_rank import Compressible, compress, query_metric
from ..methods.refinement import LayerSample, measure
from ..methods.slots import bands_of, slots_of
from .finish import Finishing, Loss, finished
from .fold_inputs import Folding


@dataclass(frozen=True)
class LayerFold:
    """A layer's output.

    Attributes:
        tensors: the tensors to write, float64, by name.
        loss: of the layer alone on held-back calibration inputs, in nats per token, by the closed form
            (`folded`) and as written (`refined`). For a quantised cache also with that cache (`stored`), and
            so the layer that is not prepared (`unprepared`), and for each of `Folding.formats`, by its name,
            what it loses in closed-form coordinates for that. None without such inputs, and where
            `forward.attend` does not compute the attention.
        spectrum: the spectrum that its latent was cut from; None where there is no latent.
    """

    tensors: dict[str, Tensor]
    loss: Loss | None
    spectrum: LatentSpectrum | None


def fold(folding: Folding, number: int) -> LayerFold:
    """Fold one layer of a source."""
    layer, loss = fold_attention(folding, number)
    tensors = folding.container.tensors(layer, number)
    return LayerFold(tensors, loss, None if isinstance(layer, Attention) else layer.spectrum)


def fold_attention(folding: Folding, number: int) -> tuple[AnyAttention, Loss | None]:
    """Fold one layer of a source; return it before a container names its tensors, and its loss.

    Raises:
        InvalidInput: the statistics hold values that cannot be decomposed, such as those of a damaged file.
    """
    its = _Layer(folding=folding, number=number)
    with decomposing(f"the statistics of layer {number}"):
        donor = folding.source.donor(number)
        if donor is not None:
            return _following(its, _Layer(folding=folding, number=donor)), None
        layer: Any
        if folding.source.family.latent:
            layer, finishing = _narrower(its, folding.target)
        elif isinstance(folding.target, GroupedTarget):
            layer, finishing = _pooled(its)
        elif folding.container.folds_jointly:
            layer, finishing = _joint(its, folding.target)
        else:
            layer, finishing = _latent(its, folding.target)
        layer, loss = finished(finishing, layer)
        if its.scale_D is not None:
            layer = with_channels(layer, 1 / its.scale_D)
    trim_memory()
    return layer, loss


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer of a source, with channels of its input scaled to about equal size for kvfold's own method."""

    folding: Folding
    number: int

    @cached_property
    def _taken(self) -> LayerStatistics | None:
        """The statistics of the layer for channels as they are; None where there are none."""
        taken = self.folding.statistics
        return None if taken is None else taken.layers[self.folding.source.attending.index(self.number)]

    @cached_property
    def scale_D(self) -> Tensor | None:
        """The sizes of the input's channels, which scale it; None for published methods."""
        if self._taken is None or self.folding.method != methods.OWN:
            return None
        return channel_scales(self._taken.input_EE)

    @cached_property
    def statistics(self) -> LayerStatistics | None:
        """The statistics of the layer; None where weights alone decide."""
        if self._taken is None or self.scale_D is None:
            return self._taken
        return self._taken.through_channels(self.scale_D)

    @property
    def slots_S(self) -> Tensor:
        """The frequencies of the layer's rotary slots."""
        return slots_of(self.folding.source, self.folding.bands, self.number)

    def attention(self, rotary_factor: float = 1.0) -> Attention:
        attention = self.folding.source.attention(self.number, rotary_factor)
        return attention if self.scale_D is None else with_channels(attention, self.scale_D)

    def sample(
        self, attention: AnyAttention, table_F: Tensor, rotary_factor: float = 1.0
    ) -> LayerSample | None:
        """Return the sample that the layer is measured and refined on; None where there is none."""
        source = self.folding.source
        return sample_of(source, self.statistics, self.number, attention, table_F, rotary_factor)

    def metric(self, attention: Attention) -> LayerMetric:
        return metric_of(self.statistics, attention, self.folding.source.positions)

    def one(self, input_EE: Tensor | None) -> Tensor | None:
        """Return the linear function of the input that replaces the constant of biases; None if they stay."""
        if not self.folding.folds_biases:
            return None
        assert input_EE is not None, "check_calibrated asked for statistics"
        return nearest_to_one(input_EE)

    def compressed(self, layer: Compressible, attention: Attention, table_F: Tensor) -> Compressible:
        """Compress the queries of the layer, where the target asks for it."""
        target = self.folding.target
        if not isinstance(target, LatentTarget) or target.q_lora_rank is None:
            return layer
        metric = query_metric(attention, self.statistics, self.folding.source.positions, table_F)
        return compress(layer, attention, metric, target.q_lora_rank)

    def finishing(
        self,
        attention: Attention | LatentAttention,
        table_F: Tensor,
        slots_S: Tensor,
        sample: LayerSample | None,
        plain: Attention | None = None,
    ) -> Finishing:
        return Finishing(
            folding=self.folding,
            number=self.number,
            statistics=self.statistics,
            attention=attention,
            table_F=table_F,
            slots_S=slots_S,
            sample=sample,
            plain=attention if plain is None else plain,
            is_shared=bool(self.folding.source.followers(self.number)),
        )


def _joint(its: _Layer, target: LatentTarget) -> tuple[IntactAttention | LatentAttention, Finishing]:
    source = its.folding.source
    table_F, factor = source.frequencies(its.number)
    attention = its.attention(factor)
    sample = its.sample(attention, table_F)
    seen = None if sample is None or attention.k_norm_KH is None else encoded(attention, table_F, sample)
    joint = fold_joint(attention, target, its.statistics, source.positions, seen)
    slots_S = table_F if isinstance(joint, IntactAttention) else table_F[:0]
    return its.compressed(joint, attention, table_F), its.finishing(attention, table_F, slots_S, sample)


def _latent(its: _Layer, target: LatentTarget) -> tuple[LatentAttention, Finishing]:
    folding = its.folding
    if folding.source.mixed and its.number not in folding.source.rotating:
        return _still(its, target)
    table_F, factor = folding.source.frequencies(its.number)
    attention, bands = its.attention(factor), bands_of(folding.source, folding.bands, its.number)
    rule = peer(folding.method)
    plain: Attention | None = None
    if attention.k_norm_KH is not None and folding.container.kind == "remote":
        # The latent and the slots are computed from the layer's features.
        featured, metric = features_of(folding.source, its.number, attention, table_F, its.statistics)
        latent: LatentAttention = with_features(to_mla(featured, target, table_F, bands, metric), attention)
        latent = its.compressed(latent, attention, table_F)
    elif attention.k_norm_KH is not None:  # in a class that has no such norms
        assert its.statistics is not None, "rewrite asked for statistics"
        plain, metric = regressed(folding.source, its.number, attention, table_F, its.statistics)
        one_D = its.one(its.statistics.input_EE)
        # The bands of all layers: this class cannot hold sources with several rotary tables.
        latent = to_mla(without_value_bias(plain, one_D), target, table_F, folding.bands, metric)
        latent = its.compressed(without_key_bias(latent, one_D), plain, table_F)
    elif rule is not None and target.slots == "rule":
        latent = with_few_queries(
            rule, attention, target, bands, its.statistics, folding.inputs.get(its.number)
        )
    else:
        metric = its.metric(attention)
        one_D = its.one(metric.input_EE)
        latent = to_mla(without_value_bias(attention, one_D), target, table_F, bands, metric)
        latent = its.compressed(
            without_key_bias(latent, one_D), without_query_bias(attention, one_D), table_F
        )
    return latent, its.finishing(attention, table_F, its.slots_S, its.sample(attention, table_F), plain)


def _narrower(its: _Layer, target: Target) -> tuple[LatentAttention, Finishing]:
    """Fold a layer whose attention is latent already."""
    assert isinstance(target, LatentTarget)
    source = its.folding.source
    attention, table_F = source.latent_attention(its.number), source.latent_frequencies(its.number)
    attention = attention if its.scale_D is None else with_channels(attention, its.scale_D)
    finishing = its.finishing(attention, table_F, table_F, its.sample(attention, table_F))
    if target.slots == "source":
        return attention, replace(finishing, sample=None)
    latent_BTr = source_latents(attention, finishing.input_BTD)
    metric = latent_metric(attention, latent_BTr, its.statistics)
    layer, reduction_Cr = narrowed(attention, metric, target.kv_lora_rank)
    return layer, replace(finishing, latent_BTr=latent_BTr, reduction_Cr=reduction_Cr)


def _still(its: _Layer, target: LatentTarget) -> tuple[LatentAttention, Finishing]:
    """Fold a layer that rotates nothing, among others that do: the rotary key of its fold stays empty."""
    source, attention = its.folding.source, its.attention()
    one_D = its.one(None if its.statistics is None else its.statistics.input_EE)
    valued = without_value_bias(attention, one_D)
    latent = fold_joint(valued, replace(target, rope="decoupled"), its.statistics, source.positions)
    assert isinstance(latent, LatentAttention)
    table_F, _ = source.frequencies(its.number)
    latent = its.compressed(without_key_bias(latent, one_D), without_query_bias(attention, one_D), table_F)
    return latent, its.finishing(attention, table_F, table_F[:0], its.sample(attention, table_F))


def _own_target(its: _Layer) -> GroupedTarget:
    source, target = its.folding.source, its.folding.target
    assert isinstance(target, GroupedTarget)
    share = target.num_key_value_heads, source.geometry.num_key_value_heads
    return GroupedTarget(num_key_value_heads=source.shape(its.number).folded(share).num_key_value_heads)


def _following(its: _Layer, donor: _Layer) -> Attention:
    """Return a layer that reads a donor's folded keys and values, with its own queries and outputs.

    The donor's heads are merged again, by the same weights to the same turns.
    """
    source = its.folding.source
    attention = source.attention(its.number)
    if its.folding.method == "mean":
        return attention
    key_values = source.keys_are_values(donor.number)
    pooled, turns = merged(donor.attention(), _own_target(donor), key_values=key_values)
    return followed(pooled, attention, turns)


def _pooled(its: _Layer) -> tuple[Attention, Finishing]:
    """Fold a layer to GQA or MQA; where heads may change places, in the order that loses least."""
    folding, target = its.folding, _own_target(its)
    attention, (table_F, factor) = its.attention(), folding.source.nominal_frequencies(its.number)
    pool = _pool_of(folding, its.number, attention)
    metric = its.metric(attention) if methods.reads_statistics(folding.method) else UNWEIGHTED
    sample = its.sample(attention, table_F, factor)
    is_movable = _is_movable(folding, its.number, attention, sample)
    if folding.method == "aligned:grouped":
        if not is_movable:
            raise InvalidInput(
                f"--method {folding.method} puts heads in another order, which the query and key norms or "
                "sinks of this source forbid; use --method aligned"
            )
        attention = heads_in(likest(attention, target.num_key_value_heads), attention)
    if folding.method == methods.OWN and is_movable:
        pooled = _in_best_order(pool, attention, target, metric, table_F, sample)
    else:
        pooled = pool(attention, target, metric, table_F)
    return pooled, its.finishing(attention, table_F, table_F, sample)


def _pool_of(folding: Folding, number: int, attention: Attention) -> Pool:
    """Return the method, changed for the parts of a layer that no method knows.

    `mean` is not changed. Of any other, a source with key norms takes the values alone, one with a gate for
    each dimension the keys alone, and one with norms of values nothing: head_norms.py and `by_dimension`
    merge the rest. A source that bounds each number of keys and values is merged in its own basis, as near as
    `aligned` stays to it: the subspace of values has another one, with larger numbers.
    """
    is_bounded = folding.source.bound is not None and folding.method == methods.OWN
    pool = methods.POOLS["aligned" if is_bounded else folding.method]
    if folding.method == "mean":
        return pool
    if folding.source.family.value_norm:
        return turned(key_values=folding.source.keys_are_values(number))
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


def _is_movable(folding: Folding, number: int, attention: Attention, sample: LayerSample | None) -> bool:
    """Return whether heads may be put in another order.

    Sinks, own gates and some norms belong to one query head and are not written. For heads with norms a
    merge's loss is estimated too roughly to trust an order that cannot be measured.
    """
    if folding.source.family.sinks is not None or folding.source.family.gate not in {None, "q"}:
        return False
    if folding.source.followers(number):  # which read the heads in the source's order
        return False
    return attention.q_norm_NH is None or (len(attention.q_norm_NH) == 1 and sample is not None)
