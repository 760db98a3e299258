"""The choice between the serving profiles: 512+64 and 256+64, or the user's widths where engines take any.

An engine that takes any width on only some of its hardware gets a profile if one is small enough, because all
of its hardware runs that.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...core.errors import InvalidInput
from ...engines.rules.output_kinds import HARDWARE, takes_any_width
from ..algebra.target import Geometry, LatentTarget, Sizes, Target, budget_elements, from_options
from ..families.source import Source
from ..formats.serving_widths import NARROW, NORM_EPSILON, PROFILES, SERVING, Profile
from .per_rank import rank_notices
from .plan import Draft, DraftOptions
from .serving_shape import saves_nothing

# Nats per token by which the narrow profile may be predicted to lose more than the wide one, whose cache is
# 1.8 times as large: a tenth of what `kvfold plan --speed` tolerates.
NARROW_COST = 0.01


def profiles_for(source: Source, options: DraftOptions) -> tuple[Profile, ...]:
    """Return the profiles that the options and the source's cache leave, the widest first."""
    rank, budget, engines = options.sizes.rank, options.sizes.kv_budget, options.engines
    size = source.geometry.cache_elements
    if rank == "full":
        return (SERVING,)
    has_size = (rank is None) != (budget is None)
    if has_size and all(map(takes_any_width, engines)):
        return (_own(source, options.sizes),)
    smaller = [profile for profile in PROFILES if profile.cached < size]
    if budget is not None:
        smaller = [one for one in smaller if one.cached <= budget_elements(source.geometry, budget)][:1]
    elif rank is not None:
        smaller = [profile for profile in smaller if rank <= profile.latent][-1:]
    is_free = all(takes_any_width(engine, everywhere=False) for engine in engines)
    if has_size and is_free and not any(options.sizes.rope_dim in (None, one.rope) for one in smaller):
        return (_own(source, options.sizes),)
    return tuple(smaller) or (NARROW if (rank or 0) <= NARROW.latent else SERVING,)  # refused with the reason


def _own(source: Source, sizes: Sizes) -> Profile:
    """Return the widths that the user asks for as a profile."""
    asked = replace(sizes, kv_heads=None, q_lora_rank=None, rope=None)
    target = from_options(source.geometry, "mla", asked, rotary_width=source.rotary_width)
    assert isinstance(target, LatentTarget)
    width = source.geometry.head_dim
    return Profile(
        latent=target.kv_lora_rank,
        rope=target.qk_rope_head_dim,
        heads=((width, width),),
        epsilon=NORM_EPSILON,
    )


def choose_profile(profiles: Sequence[Profile], make: Callable[[Profile], Draft]) -> tuple[Draft, str]:
    """Draft each profile, and return the draft to take, and the reason.

    The narrow one is taken where it is predicted to cost at most NARROW_COST more; without a prediction the
    wide one is.
    """
    made: list[tuple[Draft, Profile]] = []
    refusal: InvalidInput | None = None
    for profile in profiles:
        try:
            made.append((make(profile), profile))
        except InvalidInput as reason:
            refusal = refusal or reason
    if not made:
        assert refusal is not None, "there is at least one profile"
        raise refusal
    wide, narrow = made[0], made[-1]
    if wide is narrow:
        return wide[0], ""
    losses = wide[0].plan.predicted, narrow[0].plan.predicted
    if losses[0] is None or losses[1] is None:
        why = (
            f"{wide[1]} was taken without a prediction of losses; --rank {narrow[1].latent} takes "
            f"{narrow[1]}, whose cache is smaller"
        )
        return wide[0], why
    told = f"predicted losses are {losses[0]:.4f} nats with {wide[1]} and {losses[1]:.4f} with {narrow[1]}"
    if losses[1] <= losses[0] + NARROW_COST:
        return narrow[0], f"{told}: {narrow[1]} was taken; --rank {wide[1].latent} takes {wide[1]}"
    return wide[0], f"{told}: {wide[1]} was taken; --rank {narrow[1].latent} takes {narrow[1]}"


def plan_profiles(source: Source, options: DraftOptions, make: Callable[[DraftOptions], Draft]) -> Draft:
    """Draft the profiles that fit, and return the draft to take, with the reason if there was a choice.

    `make` returns the draft of options with a profile, and with its rank where they have no size.
    """
    sizes, engines = options.sizes, options.engines
    has_size, rope = sizes.rank is not None or sizes.kv_budget is not None, sizes.rope_dim
    if not has_size and rope not in (None, *(profile.rope for profile in PROFILES)):
        remedy = "leave it out"
        if all(takes_any_width(engine, everywhere=False) for engine in engines):
            remedy = f"add --rank N or --kv-budget SHARE, or {remedy}"
        raise InvalidInput(
            f"--rope-dim {rope} does not fit the serving profiles, {' and '.join(map(str, PROFILES))}, of "
            f"which {', '.join(engines)} gets one where no size is given; {remedy}"
        )
    if not has_size and NARROW.cached >= source.geometry.cache_elements:
        raise saves_nothing(source.geometry.cache_elements, NARROW, engines)

    def in_profile(profile: Profile) -> Draft:
        asked = options if has_size else options.with_sizes(rank=profile.latent)
        return make(replace(asked, profile=profile))

    draft, reason = choose_profile(profiles_for(source, options), in_profile)
    return draft.telling(reason) if reason else draft


def served_notices(
    target: Target, geometry: Geometry, cached: tuple[int, int], engines: Sequence[str]
) -> tuple[str, ...]:
    """Say how ranks and hardware of the named engines take a latent; nothing of other targets.

    Not all hardware has kernels for 256+64, and less for widths of no profile.
    """
    if not isinstance(target, LatentTarget):
        return ()
    told = rank_notices(target, geometry, sum(cached), engines)
    rows = [row for row in HARDWARE if row.engine in engines]
    if cached == (NARROW.latent, NARROW.rope):
        words = "; ".join(f"{row.engine} on {row.hardware}: {row.narrow} ({row.evidence})" for row in rows)
        return (*told, f"kernels for {NARROW}: {words}") if rows else told
    if cached == (SERVING.latent, SERVING.rope):
        return told
    return told + tuple(
        f"{row.engine} on {row.hardware} has {row.wide} and {row.narrow} ({row.evidence}), and no kernel for "
        f"{cached[0]}+{cached[1]}"
        for row in rows
        if not row.takes_any_width and takes_any_width(row.engine, everywhere=False)
    )
