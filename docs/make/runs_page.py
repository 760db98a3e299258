"""The page of where and when each result was measured, from the files of benchmarks/results."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .markdown import code, table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
INTRODUCTION = """# Runs

Every file of `benchmarks/results` with the command that wrote it, the day and the machine. This page is made
from those files. The pages of [Results](results.md) name the files. A benchmark saves rows of several runs
in one file; the day is that of the last run, unless there is a row for each.
"""
# Files whose names do not begin with that of their benchmark; - becomes _ in the others.
_COMMANDS = {
    "fold-cost-sizes": "fold_cost",
    "gpu-kernel": "gpu kernel",
    "gpu-pretrained": "gpu pretrained",
    "latent-norm": "fidelity",
    "llama-cpp-cpu": "llama_cpp",
    "llama-cpp-types": "gguf_types",
    "mlx-rules-cpu": "mlx_rules",
    "sglang-rules-cpu": "sglang_rules",
    "vllm-http-cpu": "vllm_http",
    "vllm-plugin-cpu": "vllm_plugin",
}
# Commands that only an earlier revision has.
REVISION = "361df92"
_EARLIER = {
    "eval-memory": "eval_memory",
    "gpu-distil": "gpu distil --lent",
    "gpu-fold": "gpu fold --lent",
    "gpu-fold-source": "gpu train --lent",
    "gpu-large": "gpu large --lent",
    "gpu-train": "gpu train --lent",
    "pipeline": "pipeline",
    "quantised-memory": "quantised_memory",
    "queries": "queries",
    "resident": "resident",
    "saved-students": "saved_students",
    "twins": "twins",
}


def runs_page() -> str:
    """Return the page in Markdown: one row for each day and machine of each file."""
    head = ("file", "command, `python -m`", "day", "machine", "torch")
    rows = [row for file in sorted(RESULTS.glob("*.json")) for row in _rows(file)]
    return f"{INTRODUCTION}\n{table(head, dict.fromkeys(rows))}\n"


def command(name: str) -> str:
    """Return the command that writes a file of this name.

    Raises:
        ValueError: there is no such benchmark.

    Example:
        >>> command("fidelity-demo")
        'benchmarks.fidelity'
    """
    for start in _starts(name):
        if start in _EARLIER:
            return f"benchmarks.{_EARLIER[start]} of revision {REVISION}"
        module, *options = _COMMANDS.get(start, start.replace("-", "_")).split()
        place = ROOT / "benchmarks" / module
        if place.with_suffix(".py").exists() or (place / "__main__.py").exists():
            return " ".join([f"benchmarks.{module}", *options])
    raise ValueError(f"no benchmark writes benchmarks/results/{name}.json; name it in docs/make/runs_page.py")


def _starts(name: str) -> Iterator[str]:
    """Yield a name, and what is left of it without its last words."""
    words = name.split("-")
    for count in range(len(words), 0, -1):
        yield "-".join(words[:count])


def _rows(file: Path) -> Iterator[tuple[str, ...]]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    runs = found.get("runs")
    # Where runs are of repetitions, not of days, they say nothing of their own about them.
    for own in runs if isinstance(runs, list) else [{}]:
        run = {**found, **own}
        machine = run.get("machine") or {}
        where = machine.get("gpu") or machine.get("processor", "not recorded")
        cores, memory = machine.get("cores"), machine.get("memory_gb")
        size = f", {cores} cores, {memory} GB" if cores and memory else ""
        yield (
            code(file.name),
            code(command(file.stem)),
            str(run.get("date", "not recorded")),
            f"{where}{size}",
            machine.get("torch", ""),
        )
