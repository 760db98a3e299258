"""Output tensors that are not attention: they pass through, or change as a container requires."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...checkpoints.shards import TensorSpec


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
