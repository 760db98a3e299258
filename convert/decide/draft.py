"""From a request to a draft of its plan: the target, its form, slots and container, and what engines take.

No weight is written, and none is read but where statistics predict losses.
"""

from dataclasses import replace
from pathlib import Path

from ...core.errors import InvalidInput
from ..algebra.target import LatentTarget, budget_notices
from ..calibration.statistics import Statistics
from ..calibration.text_length import at_context
from ..families.source import Source, open_source
from ..formats.container import Container
from ..formats.host_class import grouped_container
from ..methods import table as methods
from ..methods.query_rank import planned_losses, query_notices
from ..methods.slots import choose_slots
from ..request import FoldRequest
from .engine_choice import SERVED, are_served, choose_plan, containers_for, engine_notices, format_notices
from .form import choose_form, choose_rope, latent_container, narrowed_container, target_of
from .plan import Draft, DraftOptions, Plan, PlannedLayer
from .profile_choice import plan_profiles, served_notices
from .quantised_output import planned_copies, quantised_notices
from .serving_shape import served_container, served_shape
from .stock_norm import LINEAR, latent_norm, written_dtypes


def make_draft(
    place: Path | Source,
    request: FoldRequest,
    statistics: Statistics | None = None,
    theta: float | None = None,
) -> Draft:
    """Decide everything about a fold that the user's request and predictions can decide.

    With statistics MLA's slots are allocated, and a budget is divided, by predicted loss. `theta` is the
    `rope_theta` of the stock class for engines; None: the source's own.

    Returns:
        The draft of the least lossy output format that the engines run.
    """
    source = place if isinstance(place, Source) else open_source(place)
    statistics = at_context(source, statistics, request.context)
    engines = tuple(dict.fromkeys(request.engines))
    to = "" if source.family.latent else request.to  # there is one format to write it in
    has_size = request.rank is not None or request.kv_budget is not None

    def make(container: str) -> Draft:
        options = DraftOptions(
            sizes=request.sizes, container=container, slots=request.slots, engines=engines, theta=theta
        )
        if to != "mla" or not are_served(engines) or (has_size and container != SERVED):
            return _in_form(source, request, options, statistics)
        return plan_profiles(source, options, lambda other: _in_form(source, request, other, statistics))

    draft = choose_plan(engines, containers_for(engines, to, request.container), make)
    plan = draft.plan
    told = served_notices(plan.target, source.geometry, plan.container.cached, engines)
    told += budget_notices(source.geometry, plan.target, request.kv_budget)
    told += engine_notices(plan, engines)
    told += format_notices(plan, engines, request.cache_dtype)
    return replace(draft, plan=replace(plan, engines=engines, notices=(*plan.notices, *told)))


def _in_form(
    source: Source, request: FoldRequest, options: DraftOptions, statistics: Statistics | None
) -> Draft:
    """Return the draft in one output format, in the form that loses less where the user leaves it open."""

    def make(rope: str | None) -> Draft:
        return _drafted(source, request, options.with_sizes(rope=rope), statistics)

    if request.to != "mla" or options.sizes.rope is not None or source.family.k_norm is None:
        return make(options.sizes.rope)
    return choose_rope(source, options, make)


def _drafted(
    source: Source, request: FoldRequest, options: DraftOptions, statistics: Statistics | None
) -> Draft:
    form = choose_form(source, request.to, options)
    profile = options.profile if options.container == SERVED else None
    served = None if profile is None else served_shape(source, options, profile)
    target = served.target if served else target_of(source, request.to, options.sizes, form)
    method = methods.check(target, request.method)
    if source.family.latent and method != methods.OWN:
        raise InvalidInput(
            f"--method {method} does not apply to {source.family.label}, whose attention is latent already; "
            "leave it out"
        )
    methods.check_prepared(target, method, request.cache_dtype, request.rank)
    if source.family.value_norm and request.cache_dtype != "bfloat16":
        raise InvalidInput(
            f"--cache-dtype {request.cache_dtype} does not apply to {source.family.label}, whose values are "
            "normalised before they are cached, so that no weight prepares them; leave it out"
        )
    division = choose_slots(
        source,
        target,
        statistics,
        method,
        options.sizes,
        slots=options.slots,
        in_stock=options.container in {"stock", SERVED},
        fixed=served.bands if served else (),
        table_S=served.table if served else None,
    )
    target, bands = division.target, division.bands
    norm = latent_norm(source, form, target, request.latent_norm, request.dtype)
    written, notices = written_dtypes(source, norm, request.dtype, dequantize=request.dequantize)
    kind = written[source.reads(source.attending[0])[0]]
    losses = planned_losses(source, target, statistics, division.losses)
    container: Container
    if not isinstance(target, LatentTarget):
        container = grouped_container(source, target)
    elif source.family.latent:
        container = narrowed_container(source, target)
    elif profile is not None:
        container = served_container(source, target, bands, engines=options.engines, profile=profile)
    else:
        assert form is not None, "MLA has a form"
        container = latent_container(source, target, bands, form, fitted=norm is not None)
    layers = tuple(
        PlannedLayer(number=n, reads=(*source.reads(n), *container.norms(n)), writes=container.specs(n, kind))
        for n in source.folded
    )
    predicted = None
    if losses and "latent" in losses[0]:
        predicted = sum(sum(loss.values()) for loss in losses)
    notices += container.notices(source, None if form is None else form.why)
    notices += [LINEAR] if norm == "linear" else []
    notices += query_notices(target, layers[0].writes)
    reads = {name for layer in layers for name in layer.reads}
    copies = planned_copies(source, container, reads, written, keeps=not request.dequantize)
    notices += quantised_notices(source, copies, kind, dequantize=request.dequantize)
    taken = request.taken
    refine = taken.steps if method == methods.OWN else 0
    chosen = {
        "method": method,
        "sequences": taken.sequences,
        "refine": None if statistics is None else refine,
    }
    thetas = () if served is None or statistics is None else served.thetas
    plan = Plan(
        source=source,
        target=target,
        method=method,
        container=container,
        bands=bands,
        statistics=statistics,
        predicted=predicted,
        losses=losses or (None,) * len(layers),
        refine=refine,
        effort=taken,
        dtype=kind,
        copies=copies,
        layers=layers,
        notices=tuple(notices),
        request=request.model_copy(update=chosen),
        latent_norm=norm,
    )
    return Draft(plan=plan, widths=division.widths, thetas=thetas)
