"""Runs of a distillation: stopped, launched over processes, and read back."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from torch import Tensor

from kvfold.distill.recipe.recipe import Recipe
from kvfold.distill.run import loop
from kvfold.distill.stages.state import Progress

from .warm_python import warm_python


def weights(directory: str | Path) -> dict[str, Tensor]:
    """Read the weights of an output."""
    tensors: dict[str, Tensor] = load_file(Path(directory) / "model.safetensors")
    return tensors


def metrics(directory: str | Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl."""
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


STAGES: list[dict[str, Any]] = [
    {"name": "first", "tokens": 960, "lr": 1e-2, "batch_tokens": 192, "train": "attention"},
    {"name": "second", "tokens": 960, "lr": 1e-3, "batch_tokens": 192, "schedule": "wsd"},
]
# A program that runs a distillation and kills itself after the step that is its last argument.
KILLED = """
import os, signal, sys
from kvfold.distill.run import loop
from kvfold.distill.cli import main
step, advance = int(sys.argv.pop()), loop.advance
def advance_or_die(*arguments):
    progress = advance(*arguments)
    return os.kill(os.getpid(), signal.SIGKILL) if progress.total_steps == step else progress
loop.advance = advance_or_die
main()
"""


def write_recipe(recipe: Recipe, file: Path) -> Path:
    """Write a recipe, resolved, and return the file."""
    file.write_text(yaml.safe_dump(recipe.resolved()), encoding="utf-8")
    return file


def same_bits(one: Path, other: Path) -> bool:
    """Return whether two outputs have the same bytes as weights."""
    return (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, signum: int) -> None:
    """Send this process a signal after a step of the run."""
    advance = loop.advance

    def advance_and_signal(*arguments: object) -> Progress:
        progress = advance(*arguments)  # type: ignore[arg-type]
        if progress.total_steps == step:
            os.kill(os.getpid(), signum)
        return progress

    monkeypatch.setattr(loop, "advance", advance_and_signal)


def launch(recipe: Recipe, profile: str) -> int:
    """Run a recipe in two processes as the command does, and return the exit code."""
    file = write_recipe(recipe, Path(recipe.output).with_suffix(".yaml"))
    extra = ["--num_processes", "2", "--main_process_port", "0"]
    command = [warm_python(), "-m", "kvfold.distill", str(file), "--profile", profile, "--", *extra]
    return subprocess.run(
        command, check=False, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ).returncode
