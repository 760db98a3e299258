"""Targets of a fold (GQA, MQA or MLA), checked against the source's attention geometry. No torch here.

Cache sizes are in elements per token per layer; multiply by layers and by the bytes of the cache's dtype.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

from ...core.errors import InvalidInput
from ...core.units import read_share

Rank = int | Literal["full"]  # of a latent; `full` keeps everything
NAMES = ("gqa", "mqa", "mla")
# The width that DeepSeek-V2 found sufficient (arXiv 2405.04434), and that MLA kernels are built for.
ROPE_DIM = 64
# Most of a budget's elements that the rotary part gets without statistics (docs/notes/metric.md).
ROPE_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The attention shape that every layer of a checkpoint shares.

    Attributes:
        hidden_size: width of the residual stream.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads; divides num_attention_heads.
        head_dim: width of one head.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    @property
    def cache_elements(self) -> int:
        """Return the number of elements cached per token and layer."""
        return 2 * self.num_key_value_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Return the width of what keys are made of: all key heads."""
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class LatentGeometry(Geometry):
    """The attention shape of a checkpoint that has latent attention already (arXiv 2405.04434).

    All query heads share what is cached, so there is one key/value head; `head_dim` is that of a query.

    Attributes:
        kv_lora_rank: width of the latent.
        qk_rope_head_dim: width of the rotary key.
        v_head_dim: width of one head's value.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def cache_elements(self) -> int:
        """Return the number of elements cached per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def key_width(self) -> int:
        """Return the width of what keys are made of: the latent."""
        return self.kv_lora_rank


@dataclass(frozen=True, kw_only=True)
class GroupedTarget:
    """Grouped-query attention (arXiv 2305.13245): neighbouring key/value heads become one."""

    name: ClassVar[str] = "gqa"
    num_key_value_heads: int

    def cache_elements(self, source: Geometry) -> int:
        """Return the number of elements cached per token and layer."""
        return 2 * self.num_key_value_heads * source.head_dim

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, with the target's name, for JSON."""
        return {"name": "mqa" if self.num_key_value_heads == 1 else "gqa", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class LatentTarget:
    """Multi-head latent attention (arXiv 2405.04434): one latent, and one rotary key for all heads.

    Attributes:
        kv_lora_rank: width of the latent.
        qk_rope_head_dim: width of the shared rotary key; half as many complex slots. At most all key heads'
            width.
        slots: `uniform` puts slot i at theta^(-2i/qk_rope_head_dim), as stock configurations do; `allocated`
            puts slots at those source frequencies where they save most; `source` gives every key head's every
            rotary pair its own slot, which saves nothing and is exact; `rule` leaves them to a published rule
            (published.py); `none` is for forms without.
        rope: `decoupled`, a rotary key of its own next to the latent; `intact`, keys are rebuilt from the
            latent and then rotated, which takes no rotary key.
        q_lora_rank: width of the one projection that the queries of all heads are made from; None where they
            are made from the layer's input. It is no part of the cache.
    """

    name: ClassVar[str] = "mla"
    kv_lora_rank: int
    qk_rope_head_dim: int
    slots: Literal["uniform", "allocated", "source", "rule", "none"] = "uniform"
    rope: Literal["decoupled", "intact"] = "decoupled"
    q_lora_rank: int | None = None

    def cache_elements(self, source: Geometry) -> int:
        """Return the number of elements cached per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, with the target's name, for JSON.

        `q_lora_rank` is left out where queries are not compressed.
        """
        fields = asdict(self)
        if self.q_lora_rank is None:
            del fields["q_lora_rank"]
        return {"name": self.name, **fields}


Target = GroupedTarget | LatentTarget


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes and the form of a target as a user asks for them; None: left open.

    Attributes:
        kv_heads: key/value heads of GQA.
        rank: kv_lora_rank of MLA, or `full`.
        rope_dim: qk_rope_head_dim of MLA, at most all key heads' width.
        kv_budget: cache after the fold as a share of the source's, e.g. `25%` or `0.25`; both parts of MLA
            count.
        q_lora_rank: of MLA, or `full`; None leaves queries as they are.
        rope: form of MLA; None is decoupled.
    """

    kv_heads: int | None = None
    rank: Rank | None = None
    rope_dim: int | None = None
    kv_budget: str | None = None
    q_lora_rank: Rank | None = None
    rope: Literal["decoupled", "intact"] | None = None


def from_options(
    source: Geometry, to: str, sizes: Sizes, *, rotary_width: int | None = None, normed: bool = False
) -> Target:
    """Return the target that sizes ask for, with every number filled in.

    Args:
        source: geometry of the source checkpoint.
        to: `gqa`, `mqa` or `mla`.
        sizes: what the user asks for.
        rotary_width: how many of a head's dimensions the source rotates; None is all of them.
        normed: whether it normalises them, so that a latent must hold the normed ones.

    Raises:
        InvalidInput: a size does not belong to the target, or its value does not fit the source.
    """
    check_options(to, sizes)
    elements = None if sizes.kv_budget is None else budget_elements(source, sizes.kv_budget)
    if isinstance(source, LatentGeometry):
        return _narrower(source, to, sizes, elements)
    if to == "mla":
        _check_one(sizes.rank, elements, "mla", "--rank N (or --rank full)")
        if sizes.rope == "intact" or rotary_width == 0:
            latent = _joint(source, sizes, elements, normed)
        else:
            latent = _mla(source, sizes, elements, rotary_width or source.head_dim)
        return replace(latent, q_lora_rank=query_rank(source, sizes.q_lora_rank))
    return _gqa(source, 1 if to == "mqa" else sizes.kv_heads, elements)


def check_options(to: str, sizes: Sizes) -> None:
    """Refuse a size that a target does not have."""
    latent = {"rank", "rope_dim", "kv_budget", "rope", "q_lora_rank"}
    taken = {"gqa": {"kv_heads", "kv_budget"}, "mqa": set[str](), "mla": latent}[to]
    for option, value in vars(sizes).items():
        if value is not None and option not in taken:
            takes = " and ".join(sorted(f"--{name.replace('_', '-')}" for name in taken)) or "no size"
            raise InvalidInput(f"--{option.replace('_', '-')} does not apply to --to {to}; it takes {takes}")


def _check_one(size: Rank | None, elements: int | None, to: str, option: str) -> None:
    """Check that there is either a size or a budget."""
    if (size is None) == (elements is None):
        said = "and neither is given" if elements is None else "not both"
        raise InvalidInput(f"--to {to} takes either {option} or --kv-budget SHARE, {said}")


def _gqa(source: Geometry, kv_heads: int | None, elements: int | None) -> GroupedTarget:
    heads = source.num_key_value_heads
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    _check_one(kv_heads, elements, "gqa", "--kv-heads N")
    if elements is not None:
        least = 2 * source.head_dim
        if elements < least:
            raise InvalidInput(
                f"a budget of {elements} elements per token and layer is below one key/value head, which "
                f"takes {least} ({share_of(least, source)} of the source's cache)"
            )
        kv_heads = max(n for n in divisors if n * least <= elements)
    if kv_heads not in divisors:
        fitting = ", ".join(map(str, divisors))
        raise InvalidInput(f"{heads} key/value heads do not fold into {kv_heads}; choose from {fitting}")
    return GroupedTarget(num_key_value_heads=kv_heads)


def budget_notices(source: Geometry, target: Target, budget: str | None) -> tuple[str, ...]:
    """Say what a budget of GQA leaves unused, since it keeps a divisor of the source's heads."""
    if budget is None or not isinstance(target, GroupedTarget):
        return ()
    heads, kept, elements = source.num_key_value_heads, target.num_key_value_heads, 2 * source.head_dim
    if kept * elements == budget_elements(source, budget):
        return ()
    more = next(n for n in range(kept + 1, heads + 1) if heads % n == 0)
    return (
        f"--kv-budget {budget} keeps {kept} of {heads} key/value heads, {share_of(kept * elements, source)} "
        f"of the source's cache; the next possible number is {more}, {share_of(more * elements, source)}",
    )


def _mla(source: Geometry, sizes: Sizes, elements: int | None, rotary_width: int) -> LatentTarget:
    rank, rope_dim = sizes.rank, sizes.rope_dim
    full = source.num_key_value_heads * source.head_dim
    if rank == "full":
        if rope_dim is not None:
            raise InvalidInput(f"--rank full keeps all {full} rotary dimensions; leave --rope-dim out")
        return LatentTarget(kv_lora_rank=full, qk_rope_head_dim=full, slots="source")
    widths = range(2, full + 1, 2)
    if rope_dim is None:
        limit = min(ROPE_DIM, rotary_width)
        rope_dim = limit if elements is None else _halvings(limit, int(elements * ROPE_SHARE))
    if rope_dim not in widths:
        raise InvalidInput(f"--rope-dim {rope_dim} does not fit; choose an even number from 2 to {full}")
    if elements is not None and elements <= rope_dim:
        raise InvalidInput(
            f"a budget of {elements} elements per token and layer leaves no room for a latent next to "
            f"--rope-dim {rope_dim}; the least would be {share_of(rope_dim + 1, source)}"
        )
    kv_lora_rank = (rank or 0) if elements is None else elements - rope_dim
    most = source.cache_elements - rope_dim - 1
    if not 1 <= kv_lora_rank <= most:
        raise InvalidInput(
            f"--rank {rank} does not fit: with a rotary part of {rope_dim}, ranks from 1 to {most} "
            f"make the cache smaller than the source's {source.cache_elements} elements per token and "
            "layer, and --rank full keeps everything"
        )
    return LatentTarget(kv_lora_rank=kv_lora_rank, qk_rope_head_dim=rope_dim)


def _joint(source: Geometry, sizes: Sizes, elements: int | None, normed: bool) -> LatentTarget:
    """Return MLA whose latent is all that is cached."""
    rank, rope = sizes.rank, sizes.rope or "decoupled"
    if sizes.rope_dim is not None:
        raise InvalidInput(
            "--rope-dim does not apply here: there is no rotary key next to the latent; leave it out"
        )
    full = source.cache_elements if normed else min(source.cache_elements, source.hidden_size)
    if rank == "full":
        return LatentTarget(kv_lora_rank=full, qk_rope_head_dim=0, slots="source", rope=rope)
    if elements is None:
        elements = rank or 0
        if not 1 <= elements <= full:
            raise InvalidInput(
                f"--rank {rank} does not fit; choose a rank from 1 to {full}, or --rank full, which keeps "
                "everything"
            )
    if elements < 1:
        raise InvalidInput(f"this budget is less than one element; the least would be {share_of(1, source)}")
    return LatentTarget(kv_lora_rank=min(elements, full), qk_rope_head_dim=0, slots="none", rope=rope)


def _narrower(source: LatentGeometry, to: str, sizes: Sizes, elements: int | None) -> LatentTarget:
    """Return latent attention with a narrower latent; the rotary key and the queries stay as they are."""
    full, rope = source.kv_lora_rank, source.qk_rope_head_dim
    if to != "mla":
        raise InvalidInput(
            f"--to {to} cannot hold this source: its attention is latent already, and caches {full}+{rope} "
            "numbers; use --to mla with a smaller --rank"
        )
    _check_one(sizes.rank, elements, "mla", "--rank N (or --rank full)")
    if sizes.rope_dim not in (None, rope):
        raise InvalidInput(
            f"--rope-dim {sizes.rope_dim} does not fit: the source's rotary key of {rope} numbers stays"
        )
    if sizes.rope is not None or sizes.q_lora_rank is not None:
        option = "--rope" if sizes.rope is not None else "--q-lora-rank"
        raise InvalidInput(f"{option} does not apply: the source's attention is latent already; leave it out")
    if sizes.rank == "full":
        return LatentTarget(kv_lora_rank=full, qk_rope_head_dim=rope, slots="source")
    if elements is not None and elements < rope + 2:
        raise InvalidInput(
            f"a budget of {elements} elements per token and layer leaves no room for a latent next to the "
            f"rotary key of {rope}; the least would be {share_of(rope + 2, source)}"
        )
    # transformers' DeepSeek-V2 views the rotary key behind the latent as complex numbers, so it must be even.
    rank = int(sizes.rank or 0) if elements is None else (elements - rope) // 2 * 2
    if rank not in range(2, full, 2):
        raise InvalidInput(
            f"--rank {rank} does not fit: the source's latent has {full} numbers; choose an even rank from 2 "
            f"to {full - 2}, or --rank full, which keeps everything"
        )
    return LatentTarget(kv_lora_rank=rank, qk_rope_head_dim=rope)


def query_rank(source: Geometry, wanted: Rank | None) -> int | None:
    """Return q_lora_rank as a number; `full` is the least rank that keeps every query.

    Raises:
        InvalidInput: it is more than keeps everything, or no rank.
    """
    full = min(source.hidden_size, source.num_attention_heads * source.head_dim)
    rank = full if wanted == "full" else wanted
    if rank is not None and not 1 <= rank <= full:
        raise InvalidInput(
            f"--q-lora-rank {wanted} does not fit; choose a rank from 1 to {full}, or --q-lora-rank "
            "full, which keeps every query"
        )
    return rank


def _halvings(width: int, limit: int) -> int:
    """Halve `width` until it is at most `limit`, but even and at least 2."""
    while width > max(2, limit):
        width = max(2, width // 4 * 2)
    return width


def budget_elements(source: Geometry, budget: str) -> int:
    """Return the elements per token and layer that a share of the source's cache amounts to, rounded down."""
    return int(source.cache_elements * read_share(budget, "--kv-budget"))


def share_of(elements: int, source: Geometry) -> str:
    """Return a share of the source's cache in percent, rounded up, so that as a budget it is enough."""
    return f"{-(-elements * 10**5 // source.cache_elements) / 1e3:g}%"
