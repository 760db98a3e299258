"""The form and the container of MLA.

Sources that the stock class cannot hold need kvfold's own attention.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ...core.errors import InvalidInput
from ..algebra.target import LatentGeometry, LatentTarget, Sizes, Target, from_options
from ..families.recognition import BEHIND_ROTATION, UNLIKE, intact_reason, latent_obstacle, never_latent
from ..families.source import Source
from ..families.support import LIMIT
from ..formats.blocks import folded_block
from ..formats.container import Container
from ..formats.narrowed import Narrowed
from ..formats.remote import Remote
from ..formats.serving import slot_rope
from ..formats.stock import Stock
from ..methods.intact import full_rank
from ..methods.key_regression import NO_FULL_RANK
from ..methods.latent import Band
from ..methods.slots import slots_of
from .engine_choice import SERVED, are_served
from .plan import Draft, DraftOptions

CHOSEN = "rotation is "  # how the notice of a choice between the forms begins

_AND = {
    BEHIND_ROTATION: ", and no output format rebuilds such keys",
    UNLIKE: ", and one latent serves all",
}


@dataclass(frozen=True)
class Form:
    """The form of a source's latent, and the way it is written.

    Attributes:
        rope: `decoupled`, a rotary key next to the latent; `intact`, keys rotated after they are rebuilt.
        remote: whether the output needs the code that is shipped with it.
        why: the reason, where it was not the user's choice.
    """

    rope: Literal["decoupled", "intact"]
    remote: bool
    why: str | None = None


def choose_form(source: Source, to: str, options: DraftOptions) -> Form | None:
    """Choose the form and the container of MLA; return None for other targets, which have none.

    The user's choice comes first. Otherwise the form is decoupled and the class is stock, where these hold
    the source.

    Raises:
        InvalidInput: the user's choice cannot hold the source, or there is one for another target.
    """
    rope, container, label = options.sizes.rope, options.container, source.family.label
    if to != "mla" or source.family.latent:
        if options.slots is not None:
            why = (
                f"--to {to}, which has no rotary slots" if to != "mla" else f"{label}, whose rotary key stays"
            )
            raise InvalidInput(f"--slots {options.slots} does not apply to {why}")
        if container != "auto":
            what = f"--to {to}, which" if to != "mla" else f"{label}: its attention is latent already, and"
            raise InvalidInput(
                f"--container {container} does not apply to {what} is written in the source's own class"
            )
        return None
    container = "stock" if container == SERVED else container
    never = never_latent(source.family)
    if never is not None:
        raise InvalidInput(f"--to mla cannot hold {label}: {never}{_AND.get(never, '')}; use --to gqa")
    if source.family.k_norm is not None and not source.rotary_width:
        raise InvalidInput(
            f"--to mla cannot hold {label} without rotation: its keys are normalised, and no output format "
            "has such keys without rotation; use --to gqa"
        )
    # Layers without rotation would leave a rotary key empty. Only the stock class, which offers nothing else,
    # is worth that waste. It has one rotary table; kvfold's own code has several.
    unlike = len(source.layers_by_table) > 1 if container == "stock" else source.mixed
    unlike = unlike and source.rotary_width > 0
    forced = intact_reason(source.family, biased=bool(source.biases), unlike=unlike)
    if rope == "decoupled" and forced is not None:
        raise InvalidInput(f"--rope decoupled cannot hold {label}: {forced}; use --rope intact")
    if rope == "intact" and not source.rotary_width:
        raise InvalidInput(
            f"--rope intact needs a source with rotary embeddings, and {label} has none; leave it out"
        )
    intact = rope == "intact" or forced is not None
    obstacle = "rotation is left intact" if intact else _stock_obstacle(source, container)
    if container == "stock" and obstacle is not None:
        raise InvalidInput(f"--container stock cannot hold this source: {obstacle}; use --container remote")
    remote = container == "remote" or obstacle is not None
    return Form(
        "intact" if intact else "decoupled", remote, None if container == "remote" else forced or obstacle
    )


def _stock_obstacle(source: Source, container: str) -> str | None:
    """Return why the stock class cannot hold a source; None when it can.

    Key norms are regressed on the layer's input where the user names the class, or an engine takes no other.
    """
    if source.rotary_width and len(source.layers_by_table) > 1:
        return "its layers have unlike rotary embeddings"
    obstacle = latent_obstacle(source.config, regressed=container == "stock")
    return None if obstacle is None else obstacle.partition("; use --to")[0]


def target_of(source: Source, to: str, sizes: Sizes, form: Form | None) -> Target:
    """Return the target that the user asked for, in the form that the source takes."""
    if form is None:
        return from_options(source.geometry, to, sizes)
    geometry = source.geometry
    target = from_options(
        geometry,
        to,
        replace(sizes, rope=form.rope),
        rotary_width=source.rotary_width,
        normed=source.family.k_norm is not None,
    )
    if (
        source.mixed
        and isinstance(target, LatentTarget)
        and target.slots == "source"
        and target.qk_rope_head_dim
    ):
        # Layers without rotation cannot use slots, so their keys need room in the latent.
        rank = full_rank(geometry.hidden_size, geometry.cache_elements, normed=False)
        return replace(target, kv_lora_rank=rank)
    return target


def narrowed_container(source: Source, target: LatentTarget) -> Container:
    """Return the output format of a source whose attention is latent already."""
    assert isinstance(source.geometry, LatentGeometry)
    return Narrowed(
        family=source.family,
        geometry=source.geometry,
        target=target,
        settings=source.config,
        factor=source.nominal_frequencies(source.attending[0])[1],
        places={layer: source.latent_place(layer) for layer in source.attending},
    )


def latent_container(
    source: Source, target: LatentTarget, bands: tuple[Band, ...], form: Form, *, fitted: bool
) -> Container:
    """Return the output format of a target in its form, with its rotary slots.

    `fitted` says that the norms of kvfold's own code are real.

    Raises:
        InvalidInput: the stock class cannot hold all of a source that normalises its heads.
    """
    if not form.remote:
        if source.norms and target.slots == "source":
            raise InvalidInput(NO_FULL_RANK)
        return Stock(
            geometry=source.geometry,
            target=target,
            rope=slot_rope(source, bands),
            biases=bool(source.biases),
            block=folded_block(source.family, source.config),
            mixed=source.mixed,
            unread=source.norms,
        )
    first = source.attending[0]
    scales = [source.scale(layer) * source.frequencies(layer)[1] ** 2 for layer in source.attending]
    if target.rope == "intact":
        every = {layer: tuple(source.frequencies(layer)[0].tolist()) for layer in source.attending}
    else:
        every = {layer: tuple(slots_of(source, bands, layer).tolist()) for layer in source.attending}
    frequencies = tuple(dict.fromkeys(every.values()))
    of_all = (frequencies.index(every.get(layer, every[first])) for layer in range(source.layers))
    tables = tuple(of_all) if len(frequencies) > 1 else ()
    return Remote(
        family=source.family,
        geometry=source.geometry,
        target=target,
        frequencies=frequencies,
        tables=tables,
        scale=scales[0],
        scaled=len(set(scales)) > 1,
        nope_width=0 if bands and target.slots == "source" else source.geometry.head_dim,
        biases=source.biases | (frozenset("qkv") if "qkv" in source.biases else frozenset()),
        fitted=fitted,
        reordered=source.reordered,
        layers=source.attending if source.kinds else (),
    )


def choose_rope(source: Source, options: DraftOptions, make: Callable[[str | None], Draft]) -> Draft:
    """Return the draft of one of the two forms of a source with key norms, where the user leaves it open.

    Both hold it. Intact rotation loses less and decodes more slowly: every step rebuilds all keys, and
    engines such as vLLM then cache keys and values whole. A notice says which was taken, and why.
    `make` returns the draft of a form, or raises InvalidInput.
    """
    if options.sizes.rope_dim is not None or options.slots is not None:
        return make("decoupled")
    if options.container == "stock":
        return make(None)
    if are_served(options.engines):
        # The latent attention of vLLM has neither windows nor bounded scores.
        cap = source.family.soft_cap
        windows = any(source.window(layer) is not None for layer in source.attending)
        is_limited = windows or (cap is not None and source.config[cap] is not None)
        return make("intact" if is_limited else "decoupled")
    intact = make("intact")
    if intact.plan.predicted is None:
        return intact
    try:
        decoupled = make("decoupled")
    except InvalidInput:  # its layers have unlike tables, or its slots have no place in the budget
        return intact
    assert decoupled.plan.predicted is not None, "both have statistics"
    cost = decoupled.plan.predicted - intact.plan.predicted
    forms = ("decoupled", "intact") if cost <= LIMIT else ("intact", "decoupled")
    sentence = (
        f"{CHOSEN}{forms[0]}: decoupled is predicted to lose {cost:.4f} nats per token more than intact, and "
        f"the limit is {LIMIT}; --rope {forms[1]} takes the other"
    )
    return (decoupled if cost <= LIMIT else intact).telling(sentence)
