"""metrics.jsonl, with one line per logged step, and the summary of a finished run."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ...core.console import notice
from ...core.errors import InvalidInput
from ...core.files import replace_text
from ...core.system_calls import peak_resident_bytes
from ...core.untrusted import parse_json, read_bytes, read_json_lines
from ..recipe.recipe import Recipe
from ..stages.state import Progress

_LIMIT_BYTES = 2**30  # of a file of lines; a million steps take some 300 MB


def append_line(file: Path, line: Mapping[str, Any]) -> None:
    """Append an object to a file of JSON lines."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def append_step(file: Path, stage: str, progress: Progress, values: Mapping[str, float]) -> None:
    """Append a line for the step that `progress` has just completed."""
    append_line(file, {"step": progress.total_steps, "stage": stage, "tokens": progress.tokens, **values})


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines; none if there is no file."""
    if not file.exists():
        return []
    return read_json_lines(file, "remove the directory that holds it to start over")


def trim_metrics(file: Path, steps: int) -> None:
    """Drop the lines of steps that will be done again, and incomplete lines."""
    if file.exists():
        kept = []
        content = read_bytes(file, _LIMIT_BYTES).decode("utf-8", errors="replace")
        for line in content.splitlines(keepends=True):
            with suppress(InvalidInput):  # not JSON, or not an object
                step = parse_json(line, "a line").get("step")
                if line.endswith("\n") and isinstance(step, int) and step <= steps:
                    kept.append(line)
        replace_text(file, "".join(kept))


def summarise(file: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """Return for every stage of a finished run its losses at both ends.

    `first` is the loss of the first step, before any training. `last` is the mean over the last tenth of the
    logged steps. Losses are in nats per token where they compare distributions. They are None, with a
    notice, where the file has lost the line of the stage's first or last step.
    """
    lines = read_lines(file)
    stages = []
    end = 0
    for stage in recipe.stages:
        begin, end = end + 1, end + recipe.steps(stage)
        losses = stage.learnt
        own = [line for line in lines if line.get("stage") == stage.name and line.keys() >= {*losses}]
        tail = own[-math.ceil(len(own) / 10) :]
        starts = bool(own) and own[0]["step"] == begin
        ends = bool(own) and own[-1]["step"] == end
        first = {name: own[0][name] if starts else None for name in losses}
        last = {name: sum(line[name] for line in tail) / len(tail) if ends else None for name in losses}
        if not (starts and ends):
            notice(f"{file.name} has lost losses of stage {stage.name}; they are recorded as unknown")
        stages.append({"name": stage.name, "steps": recipe.steps(stage), "first": first, "last": last})
    return stages


def peak_memory() -> float:
    """Return the most memory that this process has used, in GiB: of the GPU if there is one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return round(torch.cuda.max_memory_allocated() / 2**30, 3)
    return round(peak_resident_bytes() / 2**30, 3)
