"""Time and memory of one piece of work on a CPU or on CUDA devices."""

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
    """What `work` returns, and the seconds until its result is there.

    On CUDA by events on the device's stream, with nothing else queued before.
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
    """The most bytes that tensors took at once, beyond those that were there before."""

    bytes = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Watch what torch allocates.

    On CUDA its allocator's own count over all devices, on a CPU every tensor's storage.
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
    """Counts storages that operators return, until they are freed.

    What an operator takes inside and frees is not seen.
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
            # A view or an operation in place returns a storage that was given.
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
