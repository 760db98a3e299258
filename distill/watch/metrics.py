"""metrics.jsonl, with one line per logged step, and the summary of a finished run."""

import json
import math
import time
from collections.abc import Mapping
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


class Metrics:
    """metrics.jsonl during one stage; `tokens` is those trained on in the run when the clock starts."""

    def __init__(self, file: Path, stage: str, tokens: int) -> None:
        self._file = file
        self._stage = stage
        self._clock = (time.monotonic(), tokens)

    def append(self, progress: Progress, values: Mapping[str, float]) -> dict[str, float]:
        """Append a line for the step that `progress` has just completed. Its speed is since the line before.

        Returns:
            The values of the line.
        """
        then, tokens = self._clock
        self._clock = (time.monotonic(), progress.tokens)
        speed = round((progress.tokens - tokens) / (self._clock[0] - then), 1)
        values = {**values, "tokens_per_second": speed, "peak_memory_gib": peak_memory()}
        self.record(progress, values)
        return values

    def leave_out(self, seconds: float) -> None:
        """Exclude this many seconds, in which nothing was trained, from the speed."""
        self._clock = (self._clock[0] + seconds, self._clock[1])

    def record(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Append a line with only these values."""
        line = {"step": progress.total_steps, "stage": self._stage, "tokens": progress.tokens, **values}
        append_line(self._file, line)


def append_line(file: Path, line: Mapping[str, Any]) -> None:
    """Append an object to a file of JSON lines."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines; none if there is no file."""
    if not file.exists():
        return []
    return read_json_lines(file, "remove the directory that holds it to start over")


def _is_whole(line: str) -> bool:
    try:
        return line.endswith("\n") and type(parse_json(line, "a line").get("step")) is int
    except InvalidInput:  # not JSON, or not an object
        return False


def trim_metrics(file: Path, steps: int) -> None:
    """Drop the lines of steps that will be done again, and incomplete lines."""
    if file.exists():
        lines = read_bytes(file, _LIMIT_BYTES).decode("utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if _is_whole(line) and json.loads(line)["step"] <= steps]
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
        own = [
            line
            for line in lines
            if line.get("stage") == stage.name
            and all(type(line.get(name)) in {int, float} for name in (*losses, "step"))
        ]
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
