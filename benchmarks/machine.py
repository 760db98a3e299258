"""The machine that measured, the time and memory of phases, and where results are kept."""

import json
import os
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Return processor, cores, memory and versions."""
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in info.read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def save(name: str, result: dict[str, Any]) -> Path:
    """Write a result to benchmarks/results/<name>.json, together with the machine and the date."""
    path = RESULTS / f"{name}.json"
    path.write_text(
        json.dumps({"machine": machine(), "date": date.today().isoformat(), **result}, indent=2) + "\n",
        encoding="utf-8",
    )
    return path


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
