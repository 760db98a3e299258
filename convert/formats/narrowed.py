"""Latent attention in the source's own class, with a narrower latent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checkpoints.directory import without_code
from ...checkpoints.shards import TensorSpec
from ..algebra.attention import LatentAttention
from ..algebra.forward import AnyAttention
from ..algebra.target import LatentGeometry, LatentTarget
from ..families.config_fields import former_rope
from ..families.family import Family
from ..families.latent_layout import latent_shapes, written_latent
from .container import Container


@dataclass(frozen=True, kw_only=True)
class Narrowed(Container):
    """One output in this format.

    Attributes:
        family: the source's row.
        geometry: its attention shape.
        target: the width of the latent.
        settings: its complete config.json.
        factor: on the cosines and sines of its rotation.
        places: what the names of each layer's attention tensors begin with.
    """

    kind: ClassVar[str] = "narrowed"
    keeps_source_config: ClassVar[bool] = True
    is_absorbable: ClassVar[bool] = True

    family: Family
    geometry: LatentGeometry
    target: LatentTarget
    settings: Mapping[str, Any] = field(repr=False)
    factor: float
    places: Mapping[int, str] = field(repr=False)

    @property
    def architecture(self) -> str:
        """Return the name of the class that loads the output."""
        return self.family.architecture

    @property
    def cached(self) -> tuple[int, int]:
        """Return kv_lora_rank and qk_rope_head_dim, the widths that a layer caches per token."""
        return self.target.kv_lora_rank, self.target.qk_rope_head_dim

    @property
    def heads(self) -> tuple[int, int]:
        """Return qk_nope_head_dim and v_head_dim."""
        return self.geometry.head_dim - self.geometry.qk_rope_head_dim, self.geometry.v_head_dim

    @property
    def rebuilt(self) -> int:
        """Return the elements of all heads' keys and values, which transformers expands from the latent."""
        nope, value = self.heads
        return self.geometry.num_attention_heads * (nope + self.cached[1] + value)

    def config(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json of the output, made from the source's."""
        made = {**without_code(source), "kv_lora_rank": self.target.kv_lora_rank}
        return made | former_rope(made)

    def specs(self, layer: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Return names, shapes and dtypes of one layer's attention tensors."""
        shapes = latent_shapes({**self.settings, "kv_lora_rank": self.target.kv_lora_rank})
        return {self.places[layer] + name: TensorSpec(dtype, shape) for name, shape in shapes.items()}

    def tensors(self, attention: AnyAttention, layer: int) -> dict[str, Tensor]:
        """Return one folded layer's attention under the names and in the layout of the class."""
        assert isinstance(attention, LatentAttention)
        named = written_latent(attention, interleaved=self.family.rotary != "half", factor=self.factor)
        return {self.places[layer] + name: tensor for name, tensor in named.items()}
