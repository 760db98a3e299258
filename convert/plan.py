"""What a conversion would do, known before a tensor is read: every output tensor, the cache before and after, the cost."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from . import methods
from .containers.grouped import Grouped
from .containers.stock import NORM_EPSILON, Stock
from .factor import Band
from .shards import TensorSpec
from .slots import choose_slots, slot_rope
from .source import Source, open_source
from .statistics import Statistics
from .target import MLA, Target, from_options

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
        predicted: the loss that the division of MLA's cache is expected to cost, nats a token; None without statistics.
        dtype: of the attention's tensors.
        copies: tensors that pass through, as they will be written.
        layers: the attention of each layer.
        notices: what the user should know.
    """

    source: Source
    target: Target
    method: str
    container: Grouped | Stock
    bands: tuple[Band, ...]
    statistics: Statistics | None
    predicted: float | None
    dtype: torch.dtype
    copies: dict[str, TensorSpec]
    layers: tuple[Layer, ...]
    notices: tuple[str, ...]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Every output tensor in the order of the source, a layer's attention where its first tensor stood."""
        first = {layer.reads[0]: layer for layer in self.layers}
        specs: dict[str, TensorSpec] = {}
        for name in self.source.checkpoint:
            if name in self.copies:
                specs[name] = self.copies[name]
            elif name in first:
                specs |= first[name].writes
        return specs

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the output."""
        source = self.source
        config = self.container.config(source.checkpoint.config if isinstance(self.container, Grouped) else source.config)
        config.pop("torch_dtype", None)
        return {"architectures": [source.family.architecture], **config, "dtype": str(self.dtype).removeprefix("torch.")}

    def cache(self) -> dict[str, Any]:
        """Elements and bytes that the cache takes per token, before and after, in the output's dtype."""
        count = len(self.layers)

        def size(elements: int) -> dict[str, int]:
            total = elements * count
            return {"elements_per_token_per_layer": elements, "bytes_per_token": total * self.dtype.itemsize}

        before, after = self.source.geometry.cache_elements, self.target.cache_elements(self.source.geometry)
        return {"before": size(before), "after": size(after), "ratio": after / before}

    def calibration(self) -> dict[str, Any] | None:
        """What the statistics were taken on; None when only weights are used."""
        taken = self.statistics
        return None if taken is None else {"text": taken.calibration, "tokens": taken.tokens, "seed": taken.seed}

    def fingerprint(self, shard_size: int) -> str:
        """Changes when the source or anything decided here does: a half-written output of another plan is not resumed."""
        layout = [(name, str(spec.dtype), spec.shape) for name, spec in self.specs.items()]
        decided: list[Any] = [
            __version__,
            self.source.checkpoint.identity(),
            self.target.to_dict(),
            self.method,
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
            "predicted_loss": self.predicted,
            "container": self.config["architectures"][0],
            "dtype": self.config["dtype"],
            "layers": len(self.layers),
            "cache": cache,
            "cache_bytes_at": {str(n): [cache[side]["bytes_per_token"] * n for side in ("before", "after")] for n in CONTEXTS},
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
) -> Plan:
    """Decide a conversion from what the user asked for.

    Args:
        directory: the source checkpoint.
        to: `gqa`, `mqa` or `mla`.
        options: the size options of `target.from_options`.
        method: name of a method of the target; None takes the default.
        dtype: `auto` (the source's), `float32` or `bfloat16`.
        statistics: of the source; with them MLA's slots are allocated, and a budget is divided, by predicted loss.

    Raises:
        InvalidInput: the source cannot be folded, or not to this target.
    """
    source = open_source(directory)
    target = from_options(source.geometry, to, **options)
    method = methods.check(target, method)
    written, notices = _written_dtypes(source, target, dtype)
    kind = written[f"{source.family.q.format(layer=0)}.weight"]
    target, bands, predicted = choose_slots(source, target, statistics, options)
    container = _container(source, target, bands)
    if isinstance(container, Stock):
        notices += _stock_notices(container, source.config)
    layers = tuple(
        Layer(number=layer, reads=source.reads(layer), writes=container.specs(layer, kind)) for layer in range(source.layers)
    )
    attention = {name for layer in layers for name in layer.reads}
    specs = {name: TensorSpec(written[name], source.checkpoint.spec(name).shape) for name in source.checkpoint}
    return Plan(
        source=source,
        target=target,
        method=method,
        container=container,
        bands=bands,
        statistics=statistics,
        predicted=predicted,
        dtype=kind,
        copies={name: spec for name, spec in specs.items() if name not in attention},
        layers=layers,
        notices=tuple(notices),
    )


def _container(source: Source, target: Target, bands: tuple[Band, ...]) -> Grouped | Stock:
    """The output format: the stock latent class for MLA, the source's own class otherwise."""
    if isinstance(target, MLA):
        rope = slot_rope(source, bands)
        return Stock(geometry=source.geometry, target=target, rope=rope, biases=bool(source.biases))
    return Grouped(family=source.family, geometry=source.geometry, target=target, biases=source.biases)


def _written_dtypes(source: Source, target: Target, dtype: str) -> tuple[dict[str, torch.dtype], list[str]]:
    """The dtype that each source tensor is written in: its own, except where the user or the container wants another."""
    own = {name: source.checkpoint.spec(name).dtype for name in source.checkpoint}
    if dtype != "auto":
        return dict.fromkeys(own, _DTYPES[dtype]), []
    if isinstance(target, MLA) and torch.float16 in own.values():
        written = {name: torch.bfloat16 if kind == torch.float16 else kind for name, kind in own.items()}
        return written, ["float16 cannot hold the small scale of a linearised latent, so the output is bfloat16"]
    return own, []


def _stock_notices(container: Stock, config: Mapping[str, Any]) -> list[str]:
    """Why an output is for transformers only, where it is (formats.md: what other engines silently drop or misread)."""
    reasons = []
    if container.biases:
        reasons.append("it has attention biases")
    if container.rope["rope_type"] != "default":
        reasons.append("its rotary slots have a frequency table of their own")
    if config.get("tie_word_embeddings"):
        reasons.append("its head is tied to the embedding")
    if config.get("rms_norm_eps") != NORM_EPSILON:
        reasons.append(f"its rms_norm_eps is {config.get('rms_norm_eps')}, not {NORM_EPSILON}")
    widths = (container.target.kv_lora_rank, container.target.qk_rope_head_dim)
    if widths != (512, 64):
        reasons.append(f"its latent is {widths[0]}+{widths[1]} wide, not 512+64")
    because = ", ".join(reasons)
    return [f"load the output in transformers; vLLM and SGLang would not run it right, because {because}"] if reasons else []
