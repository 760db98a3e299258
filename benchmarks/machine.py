"""On what a number was measured, and where it is kept."""

import json
import os
import platform
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
