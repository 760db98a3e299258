"""GQA and MQA in another class than the source's own, which cannot have fewer key/value heads.

The classes are in families/hosts.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checkpoints.shards import TensorSpec
from ...core.errors import InvalidInput
from ..algebra.attention import Attention
from ..algebra.forward import AnyAttention
from ..algebra.target import GroupedTarget
from ..families.hosts import HOSTS, Host
from ..families.layers.layer_shapes import LayerShape
from ..families.packing import attention_shapes, pack
from ..families.source import Source
from ..methods.latent import source_bands
from .container import Container, Copy, unchanged
from .grouped import FewerHeads, Grouped, cached_queries
from .serving import slot_rope


@dataclass(frozen=True, kw_only=True)
class HostClass(FewerHeads):
    """One output in this format.

    Attributes:
        host: the class, its names and layout.
        biases: whether the projections have biases.
        rope: rope parameters that turn a head's pairs as the source does, in the half layout over all pairs.
    """

    kind: ClassVar[str] = "rehosted"

    host: Host
    biases: bool
    rope: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """Return the name of the class that loads the output."""
        return self.host.family.architecture

    def config(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json of the output, made from the source's complete one."""
        written = self.host.config(source, self.target.num_key_value_heads, self.rope)
        return {"architectures": [self.architecture], **written}

    def specs(self, layer: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Return names, shapes and dtypes of one layer's attention tensors."""
        folded = replace(self.geometry, num_key_value_heads=self.target.num_key_value_heads)
        shape = LayerShape(family=self.host.family, geometry=folded, rotary_width=0)
        biases = set(shape.family.roles) if self.biases else set[str]()
        return {name: TensorSpec(dtype, sizes) for name, sizes in attention_shapes(shape, layer, biases)}

    def tensors(self, attention: AnyAttention, layer: int) -> dict[str, Tensor]:
        """Return one folded layer's attention under the names and in the layout of the class.

        The class scores with head_dim^-½; any other scale goes into the query.
        """
        assert isinstance(attention, Attention)
        factor = attention.scale * self.geometry.head_dim**0.5
        width = self.geometry.head_dim
        if factor != 1.0:
            q_NH = None if attention.q_NH is None else attention.q_NH * factor
            attention = replace(attention, q_NHD=attention.q_NHD * factor, q_NH=q_NH)
        names = self.host.family.projections(layer)
        packed = pack(attention, self.host.family, width if self.host.family.rotary else 0)
        return {
            f"{names[name.split('.')[0]]}.{name.split('.')[1]}": tensor for name, tensor in packed.items()
        }

    def copies(self, name: str, spec: TensorSpec) -> dict[str, Copy]:
        """Return a tensor that is not attention under its new name."""
        if name == self.family.head:
            return unchanged(name, spec, self.host.family.head)
        module, _, part = name.removeprefix(self.family.prefix).rpartition(".")
        number = re.search(r"\.(\d+)\.", module)
        layer = number[1] if number else ""
        renamed = self.host.modules.get(module.replace(f".{layer}.", ".{layer}.", 1) if layer else module)
        if renamed is None:
            raise InvalidInput(
                f"{name} has no place in {self.architecture}, the class that {self.family.label} is "
                "written in"
            )
        renamed = f"{self.host.family.prefix}{renamed.format(layer=layer)}.{part}"
        if self.family.transposed and layer and len(spec.shape) == 2:
            return {
                renamed: Copy(
                    source=name,
                    spec=TensorSpec(spec.dtype, spec.shape[::-1]),
                    change=lambda weight: weight.mT,
                )
            }
        return unchanged(name, spec, renamed)

    def notices(self, source: Source, why: str | None) -> list[str]:
        """Return a warning where transformers' class caches every query head, folded or not."""
        return cached_queries(self.host.family)


def grouped_container(source: Source, target: GroupedTarget) -> Container:
    """Return the output format of fewer key/value heads.

    It is the source's own class where that has key/value heads, and its host otherwise.
    """
    family, geometry = source.family, source.geometry
    if family.kv_heads is not None:
        return Grouped(
            family=family,
            geometry=geometry,
            target=target,
            biases=source.biases,
            layers={layer: source.shape(layer) for layer in source.folded},
        )
    if family.host is None:
        raise InvalidInput(
            f"no class of transformers computes {family.label} with fewer key/value heads than query heads"
        )
    host = HOSTS[family.host]
    written = f"{family.label} is written as {host.family.architecture}"
    for field, value in host.needs.items():
        if source.config[field] != value:
            raise InvalidInput(
                f"{written}, which has {field} {value}, but config.json has {source.config[field]}"
            )
    heads = geometry.num_key_value_heads
    if not host.any_heads and target.num_key_value_heads not in (1, heads):
        raise InvalidInput(
            f"{written}, which has one key/value head or {heads}, not {target.num_key_value_heads}; use "
            "--to mqa"
        )
    rope = {}
    if family.rotary is not None:
        table_F, factor = source.frequencies()
        rope = slot_rope(source, source_bands(table_F, 1))
        if factor != 1.0:
            rope["attention_factor"] = factor
    return HostClass(
        host=host,
        family=family,
        geometry=geometry,
        target=target,
        biases=bool(source.biases),
        rope=rope,
    )
