"""GQA and MQA in the source's own class, with fewer key/value heads."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.directory import without_code
from ...checkpoints.shards import TensorSpec
from ..algebra.attention import Attention
from ..algebra.target import GQA, Geometry
from ..families.packing import outputs, pack, shapes
from ..families.recognition import Family
from .copies import Copy, unchanged


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """One output in this format.

    Attributes:
        family: the source's row, for names and layout.
        geometry: the source's attention shape.
        target: key/value heads.
        biases: the projections that have one.
        rotary_width: how many of a head's dimensions rotate.
    """

    family: Family
    geometry: Geometry
    target: GQA
    biases: frozenset[str]
    rotary_width: int

    @property
    def architecture(self) -> str:
        """The class that loads the output."""
        return self.family.architecture

    @property
    def caches_queries(self) -> bool:
        """Whether transformers' class caches keys and values for every query head, folded or not."""
        return self.family.caches_queries

    def config(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of the output, from the source's."""
        return {**without_code(source), str(self.family.kv_heads): self.target.num_key_value_heads}

    def specs(self, layer: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Names, shapes and dtypes of one layer's attention tensors, known before any of them is."""
        folded = replace(self.geometry, num_key_value_heads=self.target.num_key_value_heads)
        weights, rows, specs = shapes(self.family, folded), outputs(self.family, folded), {}
        for role, name in self.family.projections(layer).items():
            specs[f"{name}.weight"] = TensorSpec(dtype, weights[role])
            if role in self.biases:
                specs[f"{name}.bias"] = TensorSpec(dtype, (rows[role],))
        norm = self.family.norm("k", layer)
        if norm is not None and self.family.norm_spans == "heads":
            specs[norm] = TensorSpec(dtype, (folded.num_key_value_heads * folded.head_dim,))
        return specs

    def tensors(self, attention: Attention, layer: int) -> dict[str, Tensor]:
        """One layer's attention under the names and in the layout of the class, in the dtype it has."""
        names = self.family.projections(layer)
        packed = pack(attention, self.family, self.rotary_width)
        norm, weight = self.family.norm("k", layer), packed.pop("k_norm", None)
        named = {
            f"{names[role]}.{part}": tensor
            for (role, part), tensor in ((n.split("."), t) for n, t in packed.items())
        }
        return named | ({norm: weight} if norm is not None and weight is not None else {})

    def copies(self, name: str, spec: TensorSpec) -> dict[str, Copy]:
        """What becomes of a tensor that is not attention: it passes through."""
        return unchanged(name, spec)
