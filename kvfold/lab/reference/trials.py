"""Time, memory and output distances of the variants when they run.

Legend: heads.py.
"""

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .heads import TokenCache

REPEATS = 5


class _Living(TorchDispatchMode):
    """Counts the bytes of what operations make, as long as it lives.

    Memory that they use internally is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        before = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                at = storage.data_ptr()
                size = storage.nbytes()
                if size and at not in before and at not in self._known:
                    self._known.add(at)
                    self.now += size
                    weakref.finalize(storage, self._dies, at, size)
        self.peak = max(self.peak, self.now)
        return result

    def _dies(self, at: int, size: int) -> None:
        self._known.discard(at)
        self.now -= size


@dataclass(frozen=True)
class Trial:
    """One forward pass.

    Attributes:
        name: of the variant.
        device: it ran on.
        tokens: new ones (prefill), or those in the cache (decode).
        prefill_seconds: median over repeats of one sequence of that many tokens.
        decode_seconds: the same, of one token behind that many; the cache, which it joins, grows over the
            repeats.
        peak_bytes: most that tensors made by the prefill took at once, without the weights.
    """

    name: str
    device: str
    tokens: int
    prefill_seconds: float
    decode_seconds: float
    peak_bytes: int


@torch.no_grad()
def run(name: str, module: nn.Module, d_model: int, tokens: int, device: str) -> Trial:
    """Run a causal module of this package on random tokens, after one run to warm up."""
    module = module.to(device)
    dtype = next(module.parameters()).dtype
    input_BTD = torch.randn(1, tokens + 1, d_model, device=device, dtype=dtype)
    first_BTD = input_BTD[:, :tokens]
    next_BTD = input_BTD[:, tokens:]

    def decode(cache: TokenCache) -> Callable[[], Tensor]:
        return lambda: module(next_BTD, cache=cache)

    def cached() -> TokenCache:
        cache = TokenCache()
        module(first_BTD, cache=cache)
        return cache

    module(first_BTD)
    with _Living() as living:
        module(first_BTD)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        module(first_BTD)
        peak = torch.cuda.max_memory_allocated() - before
    else:
        peak = living.peak
    prefill = median(_seconds(lambda: module(first_BTD), device) for _ in range(REPEATS))
    after = median(_seconds(decode(cached()), device) for _ in range(REPEATS))
    return Trial(name, device, tokens, prefill, after, peak)


def _seconds(call: Callable[[], Tensor], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def distances(module: nn.Module, source: nn.Module, input_BTD: Tensor) -> tuple[float, float]:
    """Return relative L2 ‖y - ŷ‖/‖y‖ over all tokens, and cosine distance 1 - cos(y, ŷ).

    The latter is a mean over tokens.
    """
    wanted_BTD = source(input_BTD)
    got_BTD = module(input_BTD)
    relative = float((got_BTD - wanted_BTD).norm() / wanted_BTD.norm())
    cosine = nn.functional.cosine_similarity(got_BTD.double(), wanted_BTD.double(), dim=-1)
    return relative, max(0.0, float(1 - cosine.mean()))
