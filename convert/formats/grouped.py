"""GQA and MQA in the source's own class, with fewer key/value heads."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checkpoints.directory import without_code
from ...checkpoints.shards import TensorSpec
from ..algebra.attention import Attention
from ..algebra.forward import AnyAttention
from ..algebra.target import Geometry, GroupedTarget
from ..families.config_fields import former_rope
from ..families.family import Family
from ..families.layers.layer_shapes import LayerShape, with_fewer_heads
from ..families.packing import attention_shapes, pack
from ..families.source import Source
from .container import Container


@dataclass(frozen=True, kw_only=True)
class FewerHeads(Container):
    """One output with fewer key/value heads.

    Attributes:
        family: the source's row, for names and layout.
        geometry: the source's attention shape.
        target: key/value heads, of layers that have as many as the geometry.
    """

    family: Family
    geometry: Geometry
    target: GroupedTarget

    @property
    def cached(self) -> tuple[int, int]:
        """Return the widths of the keys and of the values."""
        width = self.target.num_key_value_heads * self.geometry.head_dim
        return width, width

    @property
    def heads(self) -> tuple[int, int]:
        """Return the widths of one head's key and of its value."""
        return self.geometry.head_dim, self.geometry.head_dim


@dataclass(frozen=True, kw_only=True)
class Grouped(FewerHeads):
    """One output in the source's own class.

    Attributes:
        biases: the projections that have one.
        layers: the shape of each layer that is changed, in the source.
    """

    kind: ClassVar[str] = "grouped"
    keeps_source_config: ClassVar[bool] = True

    biases: frozenset[str]
    layers: Mapping[int, LayerShape]

    @property
    def architecture(self) -> str:
        """Return the name of the class that loads the output."""
        return self.family.architecture

    def elements(self, layer: int) -> int:
        """Return how many elements a layer caches per token."""
        own = self.layers[layer]
        return own.folded(self._share).cache_elements if own.family.k or own.family.qkv else 0

    @property
    def _share(self) -> tuple[int, int]:
        """Return the share of key/value heads that stay: each kind of layer is folded by the same factor."""
        return self.target.num_key_value_heads, self.geometry.num_key_value_heads

    def config(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json of the output, made from the source's."""
        made = {**without_code(source), str(self.family.kv_heads): self.target.num_key_value_heads}
        made |= former_rope(made)
        return with_fewer_heads(made, self._share) if self.family.unlike else made

    def _folded(self, layer: int) -> LayerShape:
        own = self.layers[layer]
        return replace(own, geometry=own.folded(self._share))

    def specs(self, layer: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Return names, shapes and dtypes of one layer's attention tensors."""
        own = self._folded(layer)
        found = dict(attention_shapes(own, layer, self.biases))
        passing = {*own.family.norms("q", layer, own.geometry)}  # norms that do not change with the heads
        if own.family.norm_spans == "head":
            passing |= {*own.family.norms("k", layer, own.geometry)}
        return {name: TensorSpec(dtype, shape) for name, shape in found.items() if name not in passing}

    def tensors(self, attention: AnyAttention, layer: int) -> dict[str, Tensor]:
        """Return one folded layer's attention under the names and in the layout of the class."""
        assert isinstance(attention, Attention)
        own = self._folded(layer)
        names = own.family.projections(layer)
        packed = pack(attention, own.family, own.rotary_width)
        norms = own.family.norms("k", layer, own.geometry)
        weight = packed.pop("k_norm", None)
        named = {
            f"{names[role]}.{part}": tensor
            for (role, part), tensor in ((n.split("."), t) for n, t in packed.items())
        }
        if weight is None:
            return named
        parts = zip(norms.items(), weight.chunk(len(norms)), strict=True)
        return named | {name: part.view(shape) for (name, shape), part in parts}

    def notices(self, source: Source, why: str | None) -> list[str]:
        """Return a warning where transformers' class caches every query head, folded or not."""
        return cached_queries(self.family)


def cached_queries(family: Family) -> list[str]:
    """Return a warning where transformers' class of a family caches keys and values for every query head."""
    if not family.caches_queries:
        return []
    return [
        f"transformers' {family.architecture} caches every query head's keys and values; vLLM caches only "
        "the folded ones"
    ]
