"""A fold that is decided and not begun: every output tensor, the cache before and after, and the notices."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint
from ...checkpoints.quantised.unconverted import OutputModules
from ...checkpoints.shards import TensorSpec
from ...core.version import __version__
from ..algebra.target import Sizes
from ..formats.container import Copy
from ..formats.serving_widths import Profile
from ..layer.fold_inputs import Folding
from ..methods.query_rank import query_parameters
from ..methods.slots import Division
from .quantised_output import output_modules, read_specs

CONTEXTS = (4096, 32768, 131072)  # tokens that cache sizes are shown for


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """The user's sizes and form for one draft, with the choices that were made for them.

    Attributes:
        sizes: of the target.
        container: one of `engines.containers_for`.
        slots: the kind of rotary slots; None: open.
        engines: that must run the output.
        profile: the widths that they take; None where they take any.
        theta: `rope_theta` of their table of slots; None: the source's own.
    """

    sizes: Sizes
    container: str
    slots: str | None = None
    engines: tuple[str, ...] = ()
    profile: Profile | None = None
    theta: float | None = None

    def with_sizes(self, **changed: Any) -> "DraftOptions":
        """Return the same with other sizes or another form."""
        return replace(self, sizes=replace(self.sizes, **changed))


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
class Plan(Folding):
    """A fold that is decided and not begun. Nothing in it is open.

    Attributes:
        predicted: expected loss of MLA's division of the cache, in nats per token; None without statistics.
        losses: the same by layer that attends and part: `slots` (rotation that the slots lose), `latent` and
            `queries`.
        dtype: of the attention's tensors.
        copies: the other output tensors, and the source tensor that each is made of.
        layers: the attention of each layer that attends.
        notices: sentences for the user.
        engines: that must run the output.
    """

    predicted: float | None
    losses: tuple[dict[str, float] | None, ...]
    dtype: torch.dtype
    copies: dict[str, Copy]
    layers: tuple[PlannedLayer, ...]
    notices: tuple[str, ...]
    engines: tuple[str, ...] = ()

    @property
    def tokenizer(self) -> Path:
        """Return the directory of the tokenizer, which the output gets as it is."""
        return self.source.checkpoint.directory

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
        """Return the quantisation method of the output's weights; empty where none are quantised."""
        checkpoint = self.source.checkpoint
        if self.modules is None or not isinstance(checkpoint, QuantisedCheckpoint):
            return ""
        return checkpoint.method

    @property
    def config(self) -> dict[str, Any]:
        """Return config.json of the output."""
        source = self.source
        given = source.stored_config if self.container.keeps_source_config else source.config
        config = self.container.config(given)
        config.pop("torch_dtype", None)  # the older name of `dtype`
        config = {
            "architectures": [self.container.architecture],
            **config,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        checkpoint, modules = source.checkpoint, self.modules
        if modules is None or not isinstance(checkpoint, QuantisedCheckpoint):
            return config
        if checkpoint.stored.config.get("quantization_config"):  # or it stands in a file of its own
            config["quantization_config"] = checkpoint.quantization_for(modules)
        return config

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
        source, attending = self.source, self.source.attending
        before = [source.shape(layer).geometry.cache_elements for layer in attending]
        after = [self.container.elements(layer) for layer in attending]

        def size(elements: list[int]) -> dict[str, int | float]:
            mean = sum(elements) / len(elements)
            return {
                "elements_per_token_per_layer": int(mean) if mean.is_integer() else mean,
                "bytes_per_token": sum(elements) * self.dtype.itemsize,
            }

        more: dict[str, Any] = {"layers": source.kinds} if source.kinds else {}
        if source.family.unlike:
            kinds: dict[str, dict[str, int]] = {}
            for layer, old, new in zip(attending, before, after, strict=True):
                name = str(source.config["layer_types"][layer])
                kinds.setdefault(name, {"layers": 0, "before": old, "after": new})["layers"] += 1
            more["kinds"] = kinds
        return {"before": size(before), "after": size(after), "ratio": sum(after) / sum(before), **more}

    def calibration(self) -> dict[str, Any] | None:
        """Return the text, tokens and seed of the statistics; None where only weights are used."""
        return None if self.statistics is None else self.statistics.origin()

    def fingerprint(self, shard_size: int) -> str:
        """Return a hash of the source, of everything that is decided here, and of the shards' size.

        A half-written output of a plan with another fingerprint is not resumed.
        """
        layout = [(name, str(spec.dtype), spec.shape) for name, spec in self.specs.items()]
        decided: list[Any] = [
            __version__,
            self.source.checkpoint.identity(),
            self.target.to_dict(),
            self.method,
            self.refine,
            sorted(self.quarters.items()),
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


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A plan, and the choices in it that are left open until they are measured (`settle`).

    Attributes:
        plan: what is decided, and what predictions choose of the rest.
        widths: the rotary widths to choose from; one or none: it is decided.
        thetas: the values of `rope_theta` to choose from, the source's own first.
    """

    plan: Plan
    widths: Mapping[int, Division] = field(default_factory=dict)
    thetas: tuple[float, ...] = ()

    def telling(self, *sentences: str) -> "Draft":
        """Return the same with more notices."""
        return replace(self, plan=replace(self.plan, notices=(*self.plan.notices, *sentences)))
