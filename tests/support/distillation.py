"""Runs of a distillation: stopped, launched over processes, and read back."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.core.signals import Interrupted
from kvfold.distill.cli import main
from kvfold.distill.recipe.recipe import Recipe
from kvfold.distill.run import loop
from kvfold.distill.run.job import distill
from kvfold.distill.stages.state import Progress

from .commands import ended
from .tokenizers import save_tokenizer
from .warm_python import warm_python


def as_launched(monkeypatch: pytest.MonkeyPatch, rank: str = "0", count: str = "2") -> None:
    """Set what a launcher tells a process."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
    for name, value in {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)


def weights(directory: str | Path) -> dict[str, Tensor]:
    """Read the weights of an output."""
    tensors: dict[str, Tensor] = load_file(Path(directory) / "model.safetensors")
    return tensors


def metrics(directory: str | Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl."""
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


def curve(directory: Path) -> dict[str, Any]:
    """Read curve.json."""
    content: dict[str, Any] = json.loads((directory / "curve.json").read_text())
    return content


def another(source: Path, place: Path, last: str = "end", **changes: Any) -> Path:
    """Save a random Llama like another one, with changes of its configuration."""
    LlamaForCausalLM(LlamaConfig.from_pretrained(source, **changes)).save_pretrained(place)
    save_tokenizer(place, last=last)
    return place


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


def interrupt(recipe: Recipe, step: int) -> None:
    """Run a recipe until it has saved the step after `step`, or a stage's end."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, step, signal.SIGTERM)
        with pytest.raises(Interrupted):
            distill(recipe)


def command(*words: object, code: int | None = None) -> Result:
    """Run `kvfold distill`, which must end with `code` if that is given."""
    return ended(CliRunner().invoke(main, [str(word) for word in words]), code)


def refuses(message: str, *words: object) -> bool:
    """Return whether `kvfold distill` refuses something with one sentence that has these words."""
    result = command(*words)
    return result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1


def rows(table: str) -> list[tuple[str, str]]:
    """Return the two columns of a table whose lines have an arrow between them."""
    lines = (line.partition(" -> ") for line in table.strip().split("\n"))
    return [(left, right) for left, _, right in lines]


def launch(recipe: Recipe, profile: str) -> int:
    """Run a recipe in two processes as the command does, and return the exit code."""
    file = write_recipe(recipe, Path(recipe.output).with_suffix(".yaml"))
    extra = ["--num_processes", "2", "--main_process_port", "0"]
    command = [warm_python(), "-m", "kvfold.distill", str(file), "--profile", profile, "--", *extra]
    return subprocess.run(
        command, check=False, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ).returncode
