"""What a conversion would do, known before a tensor is read.

Every output tensor, the cache before and after, the cost.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...checkpoints.shards import TensorSpec
from ...core.errors import InvalidInput
from ..algebra.target import MLA, Target, from_options
from ..calibration.statistics import Statistics
from ..families.source import Source, open_source
from ..formats.copies import Copy
from ..formats.grouped import Grouped
from ..formats.host_class import Rehosted, grouped_container
from ..formats.remote import Remote
from ..formats.serving import SERVING
from ..formats.stock import Stock
from ..methods import table as methods
from ..methods.intact import full_rank
from ..methods.latent import Band
from ..methods.query_rank import planned_losses, query_notices, query_parameters
from ..methods.refinement import STEPS
from ..methods.slots import choose_slots
from .engine_choice import SERVED, are_served, choose_plan, containers_for, read_engines
from .form import Form, choose_form, latent_container
from .notices import notices_of
from .serving_shape import served_container, served_target

CONTEXTS = (4096, 32768, 131072)  # tokens that cache sizes are shown for
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer's attention: the tensors that are read for it and those that take their place."""

    number: int
    reads: tuple[str, ...]
    writes: dict[str, TensorSpec]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A conversion, decided but not begun.

    Attributes:
        source: the checkpoint that is read.
        target, method, container: what it becomes.
        bands: the rotary slots of MLA.
        statistics: of the source on calibration tokens; None when only its weights are used.
        predicted: the loss that the division of MLA's cache is expected to cost, nats a token; None without
            statistics.
        losses: the same layer by layer and step by step: `slots`, what the slots lose of the rotation,
            `latent` and `queries`.
        refine: steps by which layers are refined where there are statistics.
        dtype: of the attention's tensors.
        copies: the other output tensors, and what each is made of.
        layers: the attention of each layer.
        notices: what the user should know.
        engines: that the user wants to run it in.
    """

    source: Source
    target: Target
    method: str
    container: Grouped | Rehosted | Stock | Remote
    bands: tuple[Band, ...]
    statistics: Statistics | None
    predicted: float | None
    losses: tuple[dict[str, float] | None, ...]
    refine: int
    dtype: torch.dtype
    copies: dict[str, Copy]
    layers: tuple[Layer, ...]
    notices: tuple[str, ...]
    engines: tuple[str, ...] = ()

    @property
    def folds_biases(self) -> bool:
        """Whether biases must go into weights, because the output has no place for them."""
        return isinstance(self.container, Stock) and bool(self.source.biases) and not self.container.biases

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Every output tensor in the order of the source, a layer's attention where its first tensor
        stood.
        """
        first = {layer.reads[0]: layer for layer in self.layers}
        specs: dict[str, TensorSpec] = {}
        made: dict[str, dict[str, TensorSpec]] = {}
        for name, copy in self.copies.items():
            made.setdefault(copy.source, {})[name] = copy.spec
        for name in self.source.checkpoint:
            specs |= first[name].writes if name in first else made.get(name, {})
        return specs

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the output."""
        source = self.source
        own = isinstance(self.container, Grouped | Remote)  # the source's own fields
        config = self.container.config(source.stored_config if own else source.config)
        config.pop("torch_dtype", None)
        return {
            "architectures": [self.container.architecture],
            **config,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def cache(self) -> dict[str, Any]:
        """Elements and bytes that the cache takes per token, before and after, in the output's dtype."""
        count = len(self.layers)

        def size(elements: int) -> dict[str, int]:
            total = elements * count
            return {"elements_per_token_per_layer": elements, "bytes_per_token": total * self.dtype.itemsize}

        before, after = self.source.geometry.cache_elements, self.target.cache_elements(self.source.geometry)
        if isinstance(self.container, Stock):
            after = sum(self.container.cached)
        return {"before": size(before), "after": size(after), "ratio": after / before}

    def calibration(self) -> dict[str, Any] | None:
        """What the statistics were taken on; None when only weights are used."""
        taken = self.statistics
        return (
            None if taken is None else {"text": taken.calibration, "tokens": taken.tokens, "seed": taken.seed}
        )

    def fingerprint(self, shard_size: int) -> str:
        """Changes when the source or anything decided here does.

        A half-written output of another plan is not resumed.
        """
        layout = [(name, str(spec.dtype), spec.shape) for name, spec in self.specs.items()]
        decided: list[Any] = [
            __version__,
            self.source.checkpoint.identity(),
            self.target.to_dict(),
            self.method,
            self.refine,
            [asdict(band) for band in self.bands],
            self.config,
            layout,
            shard_size,
        ]
        decided.append(self.statistics and self.statistics.fingerprint())
        return hashlib.sha256(json.dumps(decided).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for `--dry-run --json`."""
        cache = self.cache()
        return {
            "source": str(self.source.checkpoint.directory),
            "family": self.source.family.label,
            "target": self.target.to_dict(),
            "method": self.method,
            "calibration": self.calibration(),
            "planned_loss": self.predicted,
            "container": self.config["architectures"][0],
            "engines": list(self.engines),
            "dtype": self.config["dtype"],
            "layers": len(self.layers),
            "cache": cache,
            "cache_bytes_at": {
                str(n): [cache[side]["bytes_per_token"] * n for side in ("before", "after")] for n in CONTEXTS
            },
            "query_parameters": query_parameters(self.target, self.layers[0].writes),
            "output_bytes": sum(spec.nbytes for spec in self.specs.values()),
            "attention_of_layer_0": {name: list(spec.shape) for name, spec in self.layers[0].writes.items()},
            "notices": list(self.notices),
        }


def make_plan(
    directory: Path,
    to: str,
    options: Mapping[str, Any],
    method: str | None,
    dtype: str,
    statistics: Statistics | None = None,
    refine: int = STEPS,
) -> Plan:
    """Decide a conversion from what the user asked for.

    Args:
        directory: the source checkpoint.
        to: `gqa`, `mqa` or `mla`.
        options: the size options of `target.from_options`; for MLA also `rope`, `slots` and `container`; and
            `engine`, a list with commas of those that must run the output.
        method: name of a method of the target; None takes the default.
        dtype: `auto` (the source's), `float32` or `bfloat16`.
        statistics: of the source; with them MLA's slots are allocated, and a budget is divided, by predicted
            loss.
        refine: steps by which each layer is refined where there are statistics; 0 for the closed form.

    Raises:
        InvalidInput: the source cannot be folded, or not to this target.
    """
    source, engines = open_source(directory), read_engines(options.get("engine"))
    if to == "mla" and are_served(engines) and options.get("rank") is options.get("kv_budget") is None:
        options = {**options, "rank": str(SERVING.latent)}  # the one size that every kernel is built for
    candidates = containers_for(engines, to, options.get("container"))

    def make(container: str) -> Plan:
        return _plan(source, to, {**options, "container": container}, method, dtype, statistics, refine)

    return choose_plan(engines, candidates, make)


def _plan(
    source: Source,
    to: str,
    options: Mapping[str, Any],
    method: str | None,
    dtype: str,
    statistics: Statistics | None,
    refine: int,
) -> Plan:
    """The plan of one output format; `container` may be SERVED."""
    sizes = {key: value for key, value in options.items() if key not in {"container", "slots", "engine"}}
    served = options["container"] == SERVED
    form = _form(
        source, to, sizes.get("rope"), "stock" if served else options["container"], options.get("slots")
    )
    target, fixed = served_target(source, options) if served else (_target(source, to, sizes, form), ())
    method = methods.check(target, method)
    written, notices = _written_dtypes(source, form, dtype)
    kind = written[source.reads(0)[0]]
    target, bands, losses = choose_slots(source, target, statistics, options, method, fixed)
    losses = planned_losses(source, target, statistics, losses)
    container = _container(source, target, bands, form, options)
    layers = tuple(
        Layer(number=layer, reads=source.reads(layer), writes=container.specs(layer, kind))
        for layer in range(source.layers)
    )
    return Plan(
        source=source,
        target=target,
        method=method,
        container=container,
        bands=bands,
        statistics=statistics,
        predicted=sum(sum(loss.values()) for loss in losses) if losses and "latent" in losses[0] else None,
        losses=losses or (None,) * source.layers,
        refine=refine if method == "subspace" else 0,
        dtype=kind,
        copies=_copies(source, container, layers, written),
        layers=layers,
        notices=(*notices, *notices_of(container, form, source), *query_notices(target, layers[0].writes)),
    )


def _copies(
    source: Source,
    container: Grouped | Rehosted | Stock | Remote,
    layers: tuple[Layer, ...],
    written: Mapping[str, torch.dtype],
) -> dict[str, Copy]:
    """The output tensors that no method makes."""
    attention = {name for layer in layers for name in layer.reads}
    copies: dict[str, Copy] = {}
    for name in source.checkpoint:
        if name not in attention:
            copies |= container.copies(name, TensorSpec(written[name], source.checkpoint.spec(name).shape))
    return copies


def _form(source: Source, to: str, rope: str | None, container: str | None, slots: str | None) -> Form | None:
    """The form of MLA; None for other targets, which have none."""
    if to == "mla":
        return choose_form(source, rope, container or "auto")
    if slots is not None:
        raise InvalidInput(f"--slots {slots} does not apply to --to {to}, which has no rotary slots")
    if container not in {None, "auto"}:
        raise InvalidInput(
            f"--container {container} does not apply to --to {to}, which is written in the source's own class"
        )
    return None


def _target(source: Source, to: str, sizes: Mapping[str, Any], form: Form | None) -> Target:
    """What the user asked for, in the form that the source takes."""
    if form is None:
        return from_options(source.geometry, to, **sizes)
    geometry, normed = source.geometry, source.family.k_norm is not None
    target = from_options(
        geometry, to, **{**sizes, "rope": form.rope}, rotary_width=source.rotary_width, normed=normed
    )
    if source.mixed and isinstance(target, MLA) and target.slots == "source" and target.qk_rope_head_dim:
        # Layers without rotation have no use for slots: their keys need the latent.
        return replace(
            target, kv_lora_rank=full_rank(geometry.hidden_size, geometry.cache_elements, normed=False)
        )
    return target


def _container(
    source: Source, target: Target, bands: tuple[Band, ...], form: Form | None, options: Mapping[str, Any]
) -> Grouped | Rehosted | Stock | Remote:
    """The output format: the stock latent class for MLA, the source's own class otherwise."""
    if isinstance(target, MLA) and options["container"] == SERVED:
        return served_container(
            source, target, bands, compressed="llama.cpp" in read_engines(options["engine"])
        )
    if isinstance(target, MLA) and form is not None:
        return latent_container(source, target, bands, form.remote)
    assert not isinstance(target, MLA)
    return grouped_container(source, target)


def _written_dtypes(
    source: Source, form: Form | None, dtype: str
) -> tuple[dict[str, torch.dtype], list[str]]:
    """The dtype that each source tensor is written in.

    Its own, except where the user or the container wants another.
    """
    own = {name: source.checkpoint.spec(name).dtype for name in source.checkpoint}
    if dtype != "auto":
        return dict.fromkeys(own, _DTYPES[dtype]), []
    if form is not None and not form.remote and torch.float16 in own.values():
        written = {name: torch.bfloat16 if kind == torch.float16 else kind for name, kind in own.items()}
        return written, [
            "float16 cannot hold the small scale of a linearised latent, so the output is bfloat16"
        ]
    return own, []
