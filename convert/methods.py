"""The table of methods: for each target a name and a function from weights to weights, the default first."""

from collections.abc import Callable

from torch import Tensor

from . import factor, pool
from .attention import Attention, LatentAttention
from .errors import InvalidInput
from .metric import Metric
from .target import GQA, MLA

POOL: dict[str, Callable[[Attention, GQA, Metric], Attention]] = {
    "subspace": pool.subspace,
    "aligned": pool.aligned,
    "mean": pool.mean,
}
FACTOR: dict[str, Callable[[Attention, MLA, Tensor, tuple[factor.Band, ...], Metric], LatentAttention]] = {
    "subspace": factor.to_mla
}


def names(target: GQA | MLA) -> tuple[str, ...]:
    """The methods for a target, the default first."""
    return tuple(FACTOR if isinstance(target, MLA) else POOL)


def check(target: GQA | MLA, method: str | None) -> str:
    """The method to use: the one named, or the target's default.

    Raises:
        InvalidInput: the target has no such method.
    """
    known = names(target)
    if method is not None and method not in known:
        raise InvalidInput(f"--method {method} is not for this target; it has {', '.join(known)}")
    return method or known[0]
