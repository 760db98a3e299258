"""Time and peak memory of a function on a CPU or on CUDA devices."""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


def timed(device: torch.device, work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of `work` and the seconds until it was computed.

    On CUDA the time is taken by events on the device's stream, after everything queued before has finished.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        result = work()
        return result, time.perf_counter() - start
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        result = work()
        done.record()
        done.synchronize()
        return result, begun.elapsed_time(done) / 1000


class Peak:
    """The peak size of all tensors in bytes, above that at the start."""

    bytes = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the memory that torch allocates inside the context.

    On CUDA it is the allocator's own count over all devices, on a CPU the size of every tensor's storage.
    """
    peak = Peak()
    if device.type == "cuda":
        devices = range(torch.cuda.device_count())
        for each in devices:
            torch.cuda.reset_peak_memory_stats(each)
        before = [torch.cuda.memory_allocated(each) for each in devices]
        yield peak
        peak.bytes = sum(
            torch.cuda.max_memory_allocated(each) - start for each, start in zip(devices, before, strict=True)
        )
        return
    with _Tally() as tally:
        yield peak
    peak.bytes = tally.most


class _Tally(TorchDispatchMode):
    """A count of the storages that operators return, until they are freed.

    Memory that an operator allocates and frees inside is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = {_key(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # A view or an in-place operation returns a storage that it was given.
            if isinstance(tensor, Tensor) and (key := _key(tensor)) not in before and key not in self._alive:
                storage = tensor.untyped_storage()
                self._alive[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, key)
        self.most = max(self.most, self.now)
        return result

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
