"""Targets, rotary slots and weights that bring a source into the stock latent class as other engines take it.

Changes that keep the function are made: padding, a residual stream scaled so that its norms have the required
epsilon, a head written out for engines that want one. Changes that lose something (slots of the default
table, biases) are approximated, and the measured loss includes them. Anything else is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...core.errors import InvalidInput
from ...engines.rules.engine_names import ENGINES
from ...engines.rules.output_kinds import takes_any_width
from ..algebra.target import LatentTarget, budget_elements, check_options, query_rank, share_of
from ..families.source import STILL, Source
from ..formats.blocks import CENTRED_EPSILON, FoldedBlock, folded_block
from ..formats.serving import find_places, nearest_bands, table, thetas
from ..formats.serving_widths import Profile, Served, choose_heads
from ..formats.stock import Stock
from ..methods.intact import full_rank
from ..methods.key_regression import NO_FULL_RANK
from ..methods.latent import Band, source_bands
from .plan import DraftOptions

_TYING = frozenset({"transformers", "llama.cpp"})  # run the stock class with its embeddings as its head


@dataclass(frozen=True, kw_only=True)
class ServedShape:
    """A target that is folded for a profile, and the rotary slots that it can have.

    Attributes:
        target: the target.
        bands: its slots by weights alone: those of the table that the source can use.
        table: frequencies of all slots of the class, of which statistics choose; None where nothing is to be
            chosen.
        thetas: values of `rope_theta` that such a table can be made with, the source's own first; empty where
            nothing is to be chosen.
    """

    target: LatentTarget
    bands: tuple[Band, ...]
    table: Tensor | None = None
    thetas: tuple[float, ...] = ()


def served_shape(source: Source, options: DraftOptions, profile: Profile) -> ServedShape:
    """Return the target that is folded for a profile, and its rotary slots.

    The latent is at most the profile's. The source is decoupled and held by the stock class.
    """
    sizes = options.sizes
    check_options("mla", sizes)
    for option, value, taken in (
        ("slots", options.slots, "uniform"),
        ("rope-dim", sizes.rope_dim, profile.rope),
    ):
        if value not in (None, taken):
            raise InvalidInput(
                f"--{option} {value} does not fit: the serving profile {profile} takes "
                f"{profile.rope} rotary dimensions on a table of rope_theta; leave it out"
            )
    budget, rank = sizes.kv_budget, sizes.rank
    queries = query_rank(source.geometry, sizes.q_lora_rank)
    if budget is not None and rank is not None:
        raise InvalidInput("--to mla takes either --rank N (or --rank full) or --kv-budget SHARE, not both")
    if rank == "full":
        target, bands = _whole(source, profile)
        return ServedShape(target=replace(target, q_lora_rank=queries), bands=bands)
    size = source.geometry.cache_elements
    if profile.cached >= size:
        raise saves_nothing(size, profile, options.engines)
    elements = profile.cached if budget is None else budget_elements(source.geometry, budget)
    if elements < profile.cached:
        raise InvalidInput(
            f"--kv-budget {budget} is {elements} elements per token and layer, but the narrowest serving "
            f"profile caches {profile}; the least would be {share_of(profile.cached, source.geometry)}"
        )
    number = profile.latent if rank is None else rank
    if not 1 <= number <= profile.latent:
        raise InvalidInput(
            f"--rank {rank} does not fit; the serving profile {profile} takes at most {profile.latent}"
        )
    known = thetas(source, profile)
    slots_S = table(profile, options.theta or known[0])
    bands = nearest_bands(source.slot_frequencies()[0], slots_S, STILL)
    target = LatentTarget(kv_lora_rank=number, qk_rope_head_dim=2 * len(bands), q_lora_rank=queries)
    if options.slots == "uniform":
        return ServedShape(target=target, bands=bands)
    return ServedShape(target=target, bands=bands, table=slots_S, thetas=known)


def saves_nothing(size: int, profile: Profile, engines: Sequence[str]) -> InvalidInput:
    """Return the refusal of a source that caches `size` elements, no more than the narrowest profile."""
    free = [engine for engine in ENGINES if takes_any_width(engine, everywhere=False)]
    if engines and set(engines) <= set(free):
        other = f"--kv-budget SHARE, such as 50%: {' and '.join(engines)} can run any width"
    else:
        other = f"--engine {', '.join(free[:-1])} or {free[-1]} with --kv-budget SHARE, such as 50%"
    return InvalidInput(
        f"MLA saves nothing in the serving profiles: they cache at least {profile} elements of a latent, and "
        f"the source's cache has only {size}; use --to gqa, or {other}"
    )


def _whole(source: Source, profile: Profile) -> tuple[LatentTarget, tuple[Band, ...]]:
    """Return the target that keeps everything, where the profile holds it."""
    heads = source.geometry.num_key_value_heads
    width = source.geometry.head_dim
    bands = source_bands(source.slot_frequencies()[0], heads)
    rank = (
        full_rank(source.geometry.hidden_size, 2 * heads * width, normed=False)
        if source.mixed
        else heads * width
    )
    if rank > profile.latent or _placed(source, bands, profile) is None:
        raise InvalidInput(
            f"--rank full needs a slot for each rotary pair of {heads} key/value heads of width "
            f"{width}, but the serving profile {profile} has one slot at each of "
            f"{profile.rope // 2} default frequencies; use --rank {profile.latent}"
        )
    return LatentTarget(kv_lora_rank=rank, qk_rope_head_dim=heads * width, slots="source"), bands


def _placed(
    source: Source, bands: tuple[Band, ...], profile: Profile
) -> tuple[float, tuple[int, ...]] | None:
    """Return the `rope_theta` whose table has all slots, and their places in it; None where none has."""
    slots = [band.frequency for band in bands for _ in range(band.slots)]
    for theta in thetas(source, profile):
        places = find_places(slots, table(profile, theta))
        if places is not None:
            return theta, places
    return None


def served_container(
    source: Source,
    target: LatentTarget,
    bands: tuple[Band, ...],
    *,
    engines: Sequence[str],
    profile: Profile,
) -> Stock:
    """Return the output format of a target from `served_shape`.

    For llama.cpp uncompressed queries are written in the class's compressed form, which computes the same.
    Where all engines take it, a tied head stays tied.

    Raises:
        InvalidInput: heads, biases or epsilon that the profile has no place for.
    """
    if source.norms and target.slots == "source":
        raise InvalidInput(NO_FULL_RANK)
    if "o" in source.biased:
        raise InvalidInput(
            "the source's attention output has a bias, which the latent class of engines other than "
            f"transformers cannot hold; use --to gqa, which keeps {source.family.architecture}"
        )
    nope = 0 if target.slots == "source" and not source.mixed else source.geometry.head_dim
    widths = choose_heads(profile, nope, source.geometry.head_dim)
    placed = _placed(source, bands, profile)
    assert placed is not None, "served_shape chose slots of a table"
    theta, places = placed
    block = folded_block(source.family, source.config)
    scale = stream_scale(source, block, profile)
    return Stock(
        geometry=source.geometry,
        target=target,
        rope={"rope_type": "default", "rope_theta": theta},
        biases=False,
        block=replace(block.scaled(scale), untied=not set(engines) <= _TYING),
        served=Served(
            profile=profile,
            nope=widths[0],
            value=widths[1],
            places=places,
            stream_scale=scale,
            compressed="llama.cpp" in engines and target.q_lora_rank is None,
        ),
        mixed=source.mixed,
        unread=source.norms,
    )


def stream_scale(source: Source, block: FoldedBlock, profile: Profile) -> float:
    """Return the factor on the residual stream that gives its norms the profile's epsilon.

    With the source's epsilon ε and the profile's ε', the factor s makes both norms equal: x / sqrt(mean(x²) +
    ε) = s x / sqrt(mean((s x)²) + s² ε), and s² ε = ε'.
    """
    epsilon = CENTRED_EPSILON if block.centred else source.config.get("rms_norm_eps") or 0.0
    if epsilon <= 0:
        raise InvalidInput(
            f"config.json has rms_norm_eps {epsilon!r}, which no scale turns into {profile.epsilon}; use "
            f"--to gqa"
        )
    scale = float((profile.epsilon / epsilon) ** 0.5)
    power = 2.0 ** round(math.log2(scale))
    return power if math.isclose(scale, power, rel_tol=1e-9) else scale
