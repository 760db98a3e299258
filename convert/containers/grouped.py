"""GQA and MQA in the source's own class, with a smaller `num_key_value_heads`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention import Attention
from ..families import Family
from ..shards import TensorSpec
from ..target import GQA, Geometry


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """One output in this format.

    Attributes:
        family: the source's row, for the names.
        geometry: the source's attention shape.
        target: key/value heads.
        biases: the roles (of q, k, v, o) that have one.
    """

    family: Family
    geometry: Geometry
    target: GQA
    biases: frozenset[str]

    def config(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of the output, from the source's."""
        return {**source, "num_key_value_heads": self.target.num_key_value_heads}

    def specs(self, layer: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Names, shapes and dtypes of one layer's attention tensors, known before any of them is."""
        hidden = self.geometry.hidden_size
        query = self.geometry.num_attention_heads * self.geometry.head_dim
        key = self.target.num_key_value_heads * self.geometry.head_dim
        shapes = {"q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, query)}
        specs = {}
        for role, name in self.family.projections(layer).items():
            specs[f"{name}.weight"] = TensorSpec(dtype, shapes[role])
            if role in self.biases:
                specs[f"{name}.bias"] = TensorSpec(dtype, shapes[role][:1])
        return specs

    def tensors(self, attention: Attention, layer: int) -> dict[str, Tensor]:
        """One layer's attention under the names and in the layout of the class, in the dtype it has."""
        weights = {"q": attention.q_NHD, "k": attention.k_KHD, "v": attention.v_KHD, "o": attention.o_DNH}
        biases = {"q": attention.q_NH, "k": attention.k_KH, "v": attention.v_KH, "o": attention.o_D}
        named = {}
        for role, name in self.family.projections(layer).items():
            weight, bias = weights[role], biases[role]
            named[f"{name}.weight"] = weight.flatten(1) if role == "o" else weight.flatten(0, 1)
            if bias is not None:
                named[f"{name}.bias"] = bias.flatten()
        return named
