"""Time and memory of the phases of a measurement."""

import time
from collections.abc import Callable
from typing import Any

import torch


class Phases:
    """Seconds and peak memory of the phases of a row.

    Memory is the GPU's peak above what was allocated when the phase began; null without a GPU.
    """

    def __init__(self) -> None:
        self.found: dict[str, float | None] = {}

    def run(self, name: str, act: Callable[[], Any]) -> Any:
        """Return what `act` returns, and keep what it took."""
        on_gpu = torch.cuda.is_available()
        before = 0
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.monotonic()
        result = act()
        if on_gpu:
            torch.cuda.synchronize()
        self.found[f"{name}_seconds"] = round(time.monotonic() - start, 3)
        peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
        self.found[f"{name}_gpu_mb"] = None if peak is None else round(peak / 1e6, 1)
        return result
