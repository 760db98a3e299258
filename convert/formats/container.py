"""The one interface of output formats: everything that planning and writing ask of a container.

A container is one source and one target in one format. It knows the names, shapes and layout of the output's
tensors, its config.json, and what engines cache and rebuild.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checkpoints.shards import TensorSpec
from ..algebra.forward import AnyAttention
from ..families.source import Source
from .serving_widths import Profile


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One output tensor made of one source tensor without a method.

    Attributes:
        source: the source tensor's name.
        spec: the output's shape and dtype.
        change: from the one (float64) to the other; None: the bytes pass through in pieces.
        part: name of a stored part of a quantised tensor, whose bytes pass; None for the tensor itself.
        by_rows: the change is one of rows, each by itself: what is large need not be in memory at once.
    """

    source: str
    spec: TensorSpec
    change: Callable[[Tensor], Tensor] | None = None
    by_rows: bool = False
    part: str | None = None


def unchanged(name: str, spec: TensorSpec, renamed: str | None = None) -> dict[str, Copy]:
    """Return a copy of a tensor that passes through, under its own name or a new one."""
    return {renamed or name: Copy(source=name, spec=spec)}


class Container(ABC):
    """An output format; `Grouped`, `HostClass`, `Narrowed`, `Remote` and `Stock` are the five.

    Attributes:
        kind: name of the format in plans and tables.
        keeps_source_config: config.json is made from the source's fields as they are on disk. Otherwise it is
            made from the complete configuration, with every default filled in.
        is_absorbable: engines other than transformers attend in the latent, without rebuilding keys and
            values.
    """

    kind: ClassVar[str]
    keeps_source_config: ClassVar[bool] = False
    is_absorbable: ClassVar[bool] = False

    @property
    @abstractmethod
    def architecture(self) -> str:
        """Return the name of the class that loads the output."""

    @property
    @abstractmethod
    def cached(self) -> tuple[int, int]:
        """Return the widths of what one layer caches per token: latent and rotary key, or keys and values."""

    @property
    @abstractmethod
    def heads(self) -> tuple[int, int]:
        """Return the widths of one head's key without its shared rotary part, and of its value."""

    def elements(self, layer: int) -> int:
        """Return how many elements a layer caches per token; in most formats all layers cache as many."""
        return sum(self.cached)

    @property
    def rebuilt(self) -> int:
        """Return how many elements of keys and values a layer rebuilds per cached token at each step.

        It is 0 where attention is computed from what is cached.
        """
        return 0

    @property
    def folds_jointly(self) -> bool:
        """Return whether keys and values come from one latent without a rotary key."""
        return False

    @property
    def holds_biases(self) -> bool:
        """Return whether the source's biases have a place; otherwise they are folded into weights."""
        return True

    @property
    def query_rank(self) -> int | None:
        """Return the width of what queries are projected from behind a norm; None where there is none."""
        return None

    @property
    def profile(self) -> Profile | None:
        """Return the widths of other engines that the output was brought into, if it was."""
        return None

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the code that is shipped with the weights."""
        return ()

    @abstractmethod
    def config(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json of the output.

        Args:
            source: the source's, as `keeps_source_config` says.
        """

    @abstractmethod
    def specs(self, layer: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Return names, shapes and dtypes of one layer's attention tensors."""

    @abstractmethod
    def tensors(self, attention: AnyAttention, layer: int) -> dict[str, Tensor]:
        """Return one folded layer's attention under the names and in the layout of the class.

        Args:
            attention: of the form that this container writes; its dtype is kept.
            layer: number of the layer.
        """

    def norms(self, layer: int) -> tuple[str, ...]:
        """Return a layer's norms that are replaced too, in addition to what `Source.reads` names."""
        return ()

    def copies(self, name: str, spec: TensorSpec) -> dict[str, Copy]:
        """Return what a tensor that is not attention becomes; by default it passes through."""
        return unchanged(name, spec)

    def notices(self, source: Source, why: str | None) -> list[str]:
        """Return what a user should know before loading the output, in sentences.

        Args:
            source: the checkpoint that was folded.
            why: the reason for the form, where it was not the user's choice.
        """
        return []
