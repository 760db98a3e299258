"""A fold that is decided but not begun: every output tensor, the cache before and after, and the notices.

No weight is read.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import __version__
from ...checkpoints.quantised.unconverted import OutputModules
from ...checkpoints.shards import TensorSpec
from ..algebra.target import LatentTarget, Target, budget_notices
from ..calibration.statistics import Statistics
from ..calibration.text_length import at_context
from ..efforts import Effort
from ..families.source import Source, open_source
from ..formats.cache_size import cache_size, check_prepared_values
from ..formats.container import Container
from ..formats.copies import Copy
from ..formats.host_class import grouped_container
from ..methods import table as methods
from ..methods.latent import Band
from ..methods.query_rank import planned_losses, query_notices, query_parameters
from ..methods.slots import Division, choose_slots
from ..request import FoldRequest
from .engine_choice import choose_plan, engine_notices, format_notices
from .engines import SERVED, are_served, containers_for, read_engines
from .form import Form, latent_container, target_of, wanted_form
from .profile_choice import plan_profiles, served_notices
from .quantised_output import (
    output_modules,
    output_scheme,
    planned_copies,
    quantised_fields,
    quantised_notices,
    read_specs,
)
from .rope_choice import choose_rope
from .serving_shape import served_container, served_shape
from .stock_norm import LINEAR, LatentNorm, latent_norm, written_dtypes

_NOT_SIZES = {"container", "slots", "engine", "profile", "theta"}
CONTEXTS = (4096, 32768, 131072)  # tokens that cache sizes are shown for


@dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """One layer's attention.

    Attributes:
        number: of the layer, from 0.
        reads: names of the source's tensors.
        writes: names, shapes and dtypes of the output's tensors, which replace them.
    """

    number: int
    reads: tuple[str, ...]
    writes: dict[str, TensorSpec]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A fold that is decided but not begun.

    Attributes:
        source: the checkpoint that is read.
        target: the attention that it becomes.
        method: name of the method that folds the layers.
        container: the output format.
        bands: the rotary slots of MLA.
        statistics: of the source on calibration tokens; None where only its weights are used.
        predicted: expected loss of MLA's division of the cache, in nats per token; None without statistics.
        losses: the same by layer that attends and part: `slots` (rotation that the slots lose), `latent` and
            `queries`.
        widths: the rotary widths that width_choice.py has yet to choose from; empty: it is decided.
        thetas: the values of `rope_theta` that table_choice.py has yet to choose from, the present one first.
        refine: number of steps by which each layer is refined where there are statistics.
        effort: sequences in each of these steps, and draws for the weights of lengths.
        dtype: of the attention's tensors.
        copies: the other output tensors, and the source tensor that each is made of.
        layers: the attention of each layer that attends.
        notices: sentences for the user.
        request: what the user asked for, with the choices that were made for them.
        engines: that must run the output.
        latent_norm: role of the latent's norms: `fitted`, they are norms, and the latent is chosen to suit
            them; `linear`, its scale makes them linear in the stock class. None in other formats, and in
            kvfold's own code where its epsilon makes them linear.
        formats: number formats of the cache in which the losses of layers are measured too.
        inputs: second moments (E, E) of the inputs that layers have behind others that were changed, by
            layer, for rules that read these (write/layer_order.py); empty: the source's are taken.
    """

    source: Source
    target: Target
    method: str
    container: Container
    bands: tuple[Band, ...]
    statistics: Statistics | None
    predicted: float | None
    losses: tuple[dict[str, float] | None, ...]
    refine: int
    effort: Effort
    dtype: torch.dtype
    copies: dict[str, Copy]
    layers: tuple[PlannedLayer, ...]
    notices: tuple[str, ...]
    request: FoldRequest
    engines: tuple[str, ...] = ()
    latent_norm: LatentNorm | None = None
    formats: tuple[str, ...] = ()
    inputs: Mapping[int, Tensor] = field(default_factory=dict)
    widths: Mapping[int, Division] = field(default_factory=dict)
    thetas: tuple[float, ...] = ()

    @property
    def tokenizer(self) -> Path:
        """Return the directory of the tokenizer, which the output gets as it is."""
        return self.source.checkpoint.directory

    @property
    def solves(self) -> bool:
        """Return whether output projections are solved for; a closed form does so if it is its effort."""
        return self.effort.solve and (self.refine > 0 or self.effort.steps == 0)

    def fitted_ranks(self, *, norm: bool) -> dict[str, int | None]:
        """Return widths of a latent that is fitted to tokens, as `capacity.fold_bytes` takes them.

        Args:
            norm: whether a norm is fitted.
        """
        rank = self.target.kv_lora_rank if isinstance(self.target, LatentTarget) else None
        is_stored = self.request.cache_dtype != "bfloat16"
        return {"levelled": rank if norm else None, "stored": rank if is_stored else None}

    @property
    def folds_biases(self) -> bool:
        """Return whether biases must go into weights, because the output has no place for them."""
        return bool(self.source.biases) and not self.container.holds_biases

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Return the shape and dtype of every output tensor, in the order of the source.

        A layer's attention stands where its first tensor stood in the source.
        """
        layer_at = {layer.reads[0]: layer for layer in self.layers}
        copies_of: dict[str, dict[str, TensorSpec]] = {}
        for name, copy in self.copies.items():
            copies_of.setdefault(copy.source, {})[name] = copy.spec
        specs: dict[str, TensorSpec] = {}
        for name in self.source.checkpoint:
            if name in layer_at:
                specs |= layer_at[name].writes
            else:
                specs |= copies_of.get(name, {})
        return specs

    @property
    def read_specs(self) -> dict[str, TensorSpec]:
        """Return the shape and dtype of every output tensor as it is read: quantised weights whole."""
        return read_specs(self.source, self.copies, self.specs)

    @property
    def scheme(self) -> str:
        """Return the method by which weights of the output are quantised; empty where none are."""
        return output_scheme(self.source, self.modules)

    @property
    def config(self) -> dict[str, Any]:
        """Return config.json of the output."""
        source = self.source
        given = source.stored_config if self.container.keeps_source_config else source.config
        config = self.container.config(given)
        config.pop("torch_dtype", None)  # the older name of `dtype`
        return {
            "architectures": [self.container.architecture],
            **config,
            "dtype": str(self.dtype).removeprefix("torch."),
            **quantised_fields(source, self.modules),
        }

    @property
    def modules(self) -> OutputModules | None:
        """Return the modules of an output with quantised weights; None where it has none."""
        return output_modules(self.source, (layer.writes for layer in self.layers), self.copies)

    def cache(self) -> dict[str, Any]:
        """Return the size of the cache per token, before and after, in elements and in the output's dtype.

        Where some layers do not attend, sizes are those of the others, and `layers` counts both by kind.
        Where layers are unlike, elements per layer are the mean of those with a cache, and `kinds` has those
        of each kind.
        """
        return cache_size(self.source, self.container, self.dtype)

    def calibration(self) -> dict[str, Any] | None:
        """Return the text, tokens and seed of the statistics; None where only weights are used."""
        return None if self.statistics is None else self.statistics.origin()

    def fingerprint(self, shard_size: int) -> str:
        """Return a hash of the source and of everything that is decided here.

        A half-written output of a plan with another fingerprint is not resumed.

        Args:
            shard_size: most bytes per output file.
        """
        layout = [(name, str(spec.dtype), spec.shape) for name, spec in self.specs.items()]
        decided: list[Any] = [
            __version__,
            self.source.checkpoint.identity(),
            self.target.to_dict(),
            self.method,
            self.refine,
            asdict(self.effort),
            [asdict(band) for band in self.bands],
            self.config,
            layout,
            shard_size,
        ]
        decided += [self.latent_norm, self.statistics and self.statistics.fingerprint()]
        if self.request.cache_dtype != "bfloat16":
            decided.append(self.request.cache_dtype)
        return hashlib.sha256(json.dumps(decided).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for `--dry-run --json`."""
        cache = self.cache()
        per_token = [cache[side]["bytes_per_token"] for side in ("before", "after")]
        config = self.config
        return {
            "source": str(self.source.checkpoint.directory),
            "family": self.source.family.label,
            "target": self.target.to_dict(),
            "method": self.method,
            "calibration": self.calibration(),
            "planned_loss": self.predicted,
            "container": config["architectures"][0],
            "engines": list(self.engines),
            "latent_norm": self.latent_norm,
            "cache_dtype": self.request.cache_dtype,
            "dtype": config["dtype"],
            "layers": self.source.layers,
            "cache": cache,
            "cache_bytes_at": {str(tokens): [size * tokens for size in per_token] for tokens in CONTEXTS},
            "query_parameters": query_parameters(self.target, self.layers[0].writes),
            "output_bytes": sum(spec.nbytes for spec in self.specs.values()),
            "attention_of_layer_0": {name: list(spec.shape) for name, spec in self.layers[0].writes.items()},
            "notices": list(self.notices),
        }


def make_plan(
    place: Path | Source,
    request: FoldRequest,
    statistics: Statistics | None = None,
    theta: float | None = None,
) -> Plan:
    """Decide a fold from what the user asked for.

    Args:
        place: the source checkpoint, which the request names.
        request: the target with its sizes and form, the method, the dtype and the steps of refinement.
        statistics: of the source; with them MLA's slots are allocated, and a budget is divided, by predicted
            loss.
        theta: `rope_theta` of the stock class for engines; None: the source's own.

    Returns:
        The plan of the least lossy output format that the engines run.

    Raises:
        InvalidInput: the source cannot be folded, or not to this target.
    """
    source = place if isinstance(place, Source) else open_source(place)
    statistics = at_context(source, statistics, request.context)
    options = {**request.sizes(), "theta": theta}
    engines = read_engines(options["engine"])
    has_size = request.rank is not None or request.kv_budget is not None

    def make(container: str) -> Plan:
        def planned(chosen: Mapping[str, Any]) -> Plan:
            return _plan(source, request, {**chosen, "container": container}, statistics)

        if request.to != "mla" or not are_served(engines) or (has_size and container != SERVED):
            return planned(options)
        plan, reason = plan_profiles(source, options, engines, planned)
        return replace(plan, notices=(*plan.notices, *reason))

    choice = choose_plan(engines, containers_for(engines, request.to, request.container), make)
    told = served_notices(choice.plan.target, source.geometry, choice.plan.container.cached, engines)
    told += budget_notices(source.geometry, choice.plan.target, request.kv_budget)
    told += engine_notices(choice.plan, engines)
    told += format_notices(choice.plan, engines, request.cache_dtype)
    notices = (*choice.reasons, *choice.plan.notices, *choice.unsaved, *told)
    return replace(choice.plan, engines=engines, notices=notices)


def _plan(
    source: Source, request: FoldRequest, options: Mapping[str, Any], statistics: Statistics | None
) -> Plan:
    """Return the plan of one output format: `options["container"]`, of `containers_for`."""

    def make(rope: str | None) -> Plan:
        return _plan_of_form(source, request, {**options, "rope": rope}, statistics)

    if request.to != "mla" or options.get("rope") is not None or source.family.k_norm is None:
        return make(options.get("rope"))
    return choose_rope(source, options, make)


def _plan_of_form(
    source: Source, request: FoldRequest, options: Mapping[str, Any], statistics: Statistics | None
) -> Plan:
    """Return the plan of one output format and form; arguments are those of `_plan`."""
    to = request.to
    sizes = {key: options[key] for key in options.keys() - _NOT_SIZES}
    is_served = options["container"] == SERVED
    container_name = "stock" if is_served else options["container"]
    form = wanted_form(source, to, sizes.get("rope"), container_name, options.get("slots"))
    target: Target
    served = served_shape(source, options, options["profile"]) if is_served else None
    target = target_of(source, to, sizes, form) if served is None else served.target
    method = _method(source, target, request)
    fixed, table_S = ((), None) if served is None else (served.bands, served.table)
    division = choose_slots(source, target, statistics, options, method, fixed, table_S)
    target, bands = division.target, division.bands
    norm = latent_norm(source, form, target, request.latent_norm, request.dtype)
    written, notices = written_dtypes(source, norm, request.dtype, dequantize=request.dequantize)
    kind = written[source.reads(source.attending[0])[0]]
    losses = planned_losses(source, target, statistics, division.losses)
    form = form and replace(form, norm=norm)
    container = _container(source, target, bands, form, options)
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
    steps = None if statistics is None else refine
    chosen = {"method": method, "sequences": taken.sequences, "refine": steps}
    return Plan(
        source=source,
        target=target,
        method=method,
        container=container,
        bands=bands,
        statistics=statistics,
        predicted=predicted,
        losses=losses or (None,) * len(layers),
        widths=division.widths,
        thetas=() if served is None or statistics is None else served.thetas,
        refine=refine,
        effort=taken,
        dtype=kind,
        copies=copies,
        layers=layers,
        notices=tuple(notices),
        request=request.model_copy(update=chosen),
        latent_norm=norm,
    )


def _method(source: Source, target: Target, request: FoldRequest) -> str:
    """Return the method to use, one that can do what is asked."""
    method = methods.check(target, request.method)
    methods.check_prepared(target, method, request.cache_dtype, request.rank)
    check_prepared_values(source, request.cache_dtype)
    return method


def _container(
    source: Source, target: Target, bands: tuple[Band, ...], form: Form | None, options: Mapping[str, Any]
) -> Container:
    """Return the output format of a target.

    MLA is written in the stock latent class or with kvfold's own code; GQA and MQA in the source's own class,
    or in its host.
    """
    if not isinstance(target, LatentTarget):
        return grouped_container(source, target)
    if options["container"] == SERVED:
        engines = read_engines(options["engine"])
        return served_container(source, target, bands, engines=engines, profile=options["profile"])
    assert form is not None
    return latent_container(source, target, bands, form)
