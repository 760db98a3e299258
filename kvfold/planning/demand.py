"""Demands of a planned output: memory at a context and batch, and bytes and FLOPs per decoded token.

They are estimates from shapes, so that targets can be compared; a server adds its own buffers. Every token of
the context is in the cache of every sequence, except in layers with a sliding window. The formulas for
attention are those of lab/reference/costs.py.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ..checkpoints.shards import TensorSpec
from ..convert.algebra.target import GroupedTarget, LatentTarget
from ..convert.decide.per_rank import Ranks, rank_elements
from ..convert.decide.plan import Plan
from ..convert.families.source import Source
from ..core.cache_dtypes import CacheDtype
from ..lab.reference import costs

CHUNK = 2048  # tokens of a prompt that are computed at once at most
_LOGIT = 4  # bytes
ALONE = Ranks()


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Bytes of device memory.

    Attributes:
        weights: all tensors of the output.
        cache: of all sequences at their full length.
        activations: everything else that is alive at once: a chunk of a prompt in the widest layer, a step's
            logits, and one layer's keys and values where they are expanded from a latent.
    """

    weights: int
    cache: int
    activations: int

    @property
    def total(self) -> int:
        """Return the sum of all three."""
        return self.weights + self.cache + self.activations


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The limits that a target must fit.

    Attributes:
        context: tokens of a sequence.
        batch: sequences at once.
        memory: bytes for weights, cache and activations, of each rank; None: any.
        ranks: that serve the model.
    """

    context: int
    batch: int
    memory: int | None = None
    ranks: Ranks = ALONE

    def hold(self, needed: Demand) -> bool:
        """Return whether a demand is within the memory."""
        return self.memory is None or needed.total <= self.memory


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """One more token of one sequence, behind a full context.

    Attributes:
        form: `grouped`; of MLA `absorbed` (attention in the latent) or `expanded` (keys and values are
            rebuilt each step).
        bytes: that are moved: the sequence's cache, its share of the weights, which a batch reads together (a
            mixture's experts all of them), and keys and values that are rebuilt, written once and read once.
        attention_flops: of attention in all layers; the rest of the model is the same for every target.
    """

    form: str
    bytes: int
    attention_flops: int


def demand(
    plan: Plan, bounds: Bounds, engines: Collection[str] = (), kind: CacheDtype | None = None
) -> Demand:
    """Return the memory that a planned output takes on one rank.

    Weights are divided over the ranks, activations are not; per_rank.py says what each holds of the cache. Of
    the engines that may run it, one that does not expand a latent is taken; `kind` None is the output's
    dtype.
    """
    size, context, batch = plan.dtype.itemsize, bounds.context, bounds.batch
    config, geometry = plan.source.config, plan.source.geometry
    hidden = geometry.hidden_size
    heads = geometry.num_attention_heads * geometry.head_dim
    feed_forward = config.get("intermediate_size") or 4 * hidden
    rows = max(batch, min(context, CHUNK))
    alive = (
        rows * (4 * hidden + 2 * heads + 3 * feed_forward) * size + batch * int(config["vocab_size"]) * _LOGIT
    )
    return Demand(
        weights=sum(spec.nbytes for spec in plan.specs.values()) // bounds.ranks.tensor,
        cache=round(batch * token_bytes(plan, bounds.ranks, kind) * sum(_kept(plan.source, context))),
        activations=alive + batch * context * rebuilt(plan, engines) * size,
    )


def decoding(
    plan: Plan, bounds: Bounds, engines: Collection[str] = (), kind: CacheDtype | None = None
) -> Decoding:
    """Return the cost of a decoded token; arguments are those of `demand`.

    Bytes are those of one rank, arithmetic is that of all.
    """
    kept, expanded = _kept(plan.source, bounds.context), rebuilt(plan, engines)
    token = token_bytes(plan, bounds.ranks, kind) + 2 * expanded * plan.dtype.itemsize
    # Of the input embeddings a step reads only a row, unless they are tied to the head.
    source = plan.source
    shape = source.checkpoint.spec(source.family.prefix + source.family.embedding).shape
    tables = [spec.nbytes for spec in plan.specs.values() if spec.shape == shape]
    read = sum(spec.nbytes for spec in plan.specs.values()) - (tables[0] if len(tables) > 1 else 0)
    form = "expanded" if expanded else "absorbed"
    cost = _costs(plan, is_absorbed=expanded == 0)
    return Decoding(
        form="grouped" if isinstance(plan.target, GroupedTarget) else form,
        bytes=round(sum(kept) * token) + read // (bounds.batch * bounds.ranks.tensor),
        attention_flops=sum(cost.decode(tokens) for tokens in kept),
    )


def rebuilt(plan: Plan, engines: Collection[str]) -> int:
    """Return the elements of keys and values that one layer rebuilds per cached token.

    It is 0 where one of the engines decodes from the latent, without expanding it.
    """
    absorbs = plan.container.is_absorbable and any(engine != "transformers" for engine in engines)
    return 0 if absorbs else plan.container.rebuilt


def _kept(source: Source, context: int) -> list[int]:
    """Return the number of tokens that each layer that attends keeps of a sequence."""
    return [min(context, source.window(layer) or context) for layer in source.attending]


def held(plan: Plan, ranks: Ranks = ALONE) -> int:
    """Return the elements per token and layer that one rank holds of an output's cache."""
    cached = int(plan.cache()["after"]["elements_per_token_per_layer"])
    return rank_elements(plan.target, plan.source.geometry, cached, ranks)


def token_bytes(plan: Plan, ranks: Ranks = ALONE, kind: CacheDtype | None = None) -> float:
    """Return the bytes per token and layer that one rank holds of an output's cache, with scales."""
    elements = held(plan, ranks)
    if kind is None:
        return elements * plan.dtype.itemsize
    row = plan.source.geometry.head_dim
    # Engines with ranks cache the keys and values of intact rotation whole; see per_rank.py.
    if isinstance(plan.target, LatentTarget) and not (plan.target.rope == "intact" and ranks.tensor > 1):
        row = sum(plan.container.cached)
    return elements / row * kind.bytes(row)


def _costs(plan: Plan, *, is_absorbed: bool) -> costs.Costs:
    geometry, target = plan.source.geometry, plan.target
    hidden, heads, width = geometry.hidden_size, geometry.num_attention_heads, geometry.head_dim
    if isinstance(target, GroupedTarget):
        return costs.multi_head(hidden, heads, target.num_key_value_heads, width)
    rank, queries = target.kv_lora_rank, target.q_lora_rank
    if target.rope == "intact":
        return costs.intact(hidden, heads, geometry.num_key_value_heads, width, rank, queries)
    rank, rope = plan.container.cached
    nope, value = plan.container.heads
    return costs.latent(hidden, heads, rank, queries, nope=nope, rope=rope, value=value, absorbed=is_absorbed)


def parameters(specs: Iterable[TensorSpec]) -> int:
    """Return the number of elements in all tensors of an output."""
    return sum(math.prod(spec.shape) for spec in specs)
