"""Stopped right before every kind of thing that a run does on disk, and gone on each time: the same bits in
the end.

One run is started again and again. Each time it is stopped before the first operation on its files of a kind
at which none was stopped yet (opening tokens.bin.partial, renaming it, removing an old state, ...): by
SIGKILL, by SIGTERM, and by a full disk, in turn, until none is left and it ends. Its processes are forked
from one that has imported everything.
"""

import errno
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kvfold.distill.cli import main
from kvfold.distill.recipe.recipe import Recipe
from kvfold.distill.run.job import distill

from ...support.distillation import metrics, write_recipe
from ...support.warm_server import WarmServer
from ..conftest import MakeRecipe

# What Python tells of before it does it, with the position among its arguments of the directory that a path
# starts from.
_EVENTS = {"open": 0, "os.mkdir": 2, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.link": 2}
_TENSORS = ".safetensors"
_SPEED = ("tokens_per_second", "peak_memory_gib")
FULL = 99  # instead of 2, where the last sentence is about the disk
STOPPED = (-signal.SIGKILL, 128 + signal.SIGTERM, FULL)
STAGE = {"tokens": 384, "batch_tokens": 192, "lr": 1e-2}
ALIGN = {**STAGE, "losses": {"attention_output": 1.0}, "train": "attention"}
_SERVER = WarmServer([__name__, "transformers.models.llama.modeling_llama", "datasets", "matplotlib.pyplot"])


def kind_of(event: str, arguments: Sequence[Any], work: Path) -> str | None:
    """Return the operation that is about to be done and its place, without numbers and stages' names.

    None for what changes nothing or is elsewhere.
    """
    if event not in _EVENTS or not isinstance(arguments[0], str | os.PathLike):
        return None
    opened = arguments[_EVENTS[event]] if event != "open" else None
    start = Path.cwd() if opened in (None, -1) else Path(os.readlink(f"/proc/self/fd/{opened}"))
    path = Path(os.path.abspath(start / arguments[0]))
    # Tensors are written by a library that tells nothing; they are opened once more when they are forced to
    # disk.
    changes = (
        path.exists()
        if event == "os.remove"
        else event != "open" or arguments[2] & os.O_ACCMODE or path.suffix == _TENSORS
    )
    if not changes or not path.is_relative_to(work):
        return None
    place = str(path.relative_to(work))
    # Every step of every stage is once the last that is saved.
    if event != "os.rename" or "out.partial/state/step" not in place:
        place = re.sub(r"-[0-9a-f]{5,}|(?<=stages/)\w+", "", place)
    return f"{event} {place if event == 'os.rename' or place.count('/') < 2 else os.path.dirname(place)}"


def run_and_stop(file: Path, work: Path, known: list[str], told: Path) -> None:
    """Run a recipe until the first kind of operation under `work` that is not known yet, and tell of it and
    of the end.
    """
    torch.set_num_threads(1)
    stopped: list[str] = []

    def stop(event: str, arguments: Sequence[Any]) -> None:
        kind = kind_of(event, arguments, work)
        if kind is None or kind in known + stopped:
            return
        means = (len(known) + len(stopped)) % 3
        stopped.append(kind)
        told.write_text("\n".join(stopped))
        if means == 2 and not event.startswith("os.r") and len(stopped) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.kill(os.getpid(), signal.SIGTERM if means == 1 else signal.SIGKILL)

    sys.addaudithook(stop)
    done = CliRunner().invoke(main, [str(file)])
    is_told = done.exit_code == 2 and "No space left on device" in done.stderr.splitlines()[-1]
    os._exit(FULL if is_told else done.exit_code)


def run_to_the_end(recipe: Recipe, work: Path, told: Path) -> list[str]:
    """Start a recipe as often as it takes; returns where it was stopped."""
    file = write_recipe(recipe, told.with_name("recipe.yaml"))
    kinds: list[str] = []
    code = None
    while code != 0:
        told.write_text("")
        code = _SERVER.run(run_and_stop, file, work, kinds, told)
        stopped = told.read_text().splitlines()
        assert code == 0 or (code in STOPPED and stopped), f"exit code {code} after {stopped or kinds[-1:]}"
        kinds += stopped
    return kinds


@pytest.fixture
def recipe(make_recipe: MakeRecipe, held: Path, tmp_path: Path) -> Recipe:
    """All kinds of stages, a teacher's cache, evaluations that choose the best weights, and every step
    saved.
    """
    stages = [
        {**ALIGN, "name": "stream", "mode": "stream"},
        {**ALIGN, "name": "align"},
        {**STAGE, "name": "kl", "lr": 1e-3},
    ]
    return make_recipe(
        stages=stages,
        output=str(tmp_path / "whole" / "out"),
        teacher_cache=str(tmp_path / "whole" / "cache"),
        evaluate={"source": str(held), "every": 1, "windows": 4, "keep": "best"},
        save={"every": 1, "keep": 1, "keep_stages": True},
    )


def result(out: Path) -> dict[str, Any]:
    """All that a run leaves, but its speed and where it was."""
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.safetensors")}
    lines = [{key: value for key, value in line.items() if key not in _SPEED} for line in metrics(out)]
    told = json.loads((out / "kvfold.json").read_text())["distill"]
    return {
        **files,
        "metrics": lines,
        "curve": json.loads((out / "curve.json").read_text()),
        "told": told["evaluation"],
    }


@pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="there is no /proc, which tells where a directory is"
)
def test_a_run_goes_on_wherever_it_was_stopped(recipe: Recipe, tmp_path: Path) -> None:
    distill(recipe)
    work = tmp_path / "work"
    work.mkdir()
    killed = recipe.model_copy(update={"output": str(work / "out"), "teacher_cache": str(work / "cache")})
    kinds = run_to_the_end(killed, work, tmp_path / "told")
    assert result(work / "out") == result(tmp_path / "whole" / "out")
    assert {path.name for path in work.iterdir()} == {"out", "cache"}
    for kind in (
        "open out.partial/tokens.bin.partial",
        "os.rename out.partial/stages/.stream/layer.safetensors.partial",  # in a layer of a streamed stage
        "os.rename out.partial/state/step-00000006.partial",
        "open out.partial/evaluations.jsonl",
        "open cache/manifest.json.partial",
        "os.rename cache/head.safetensors.partial",
        "os.rename cache/hidden.safetensors.partial",
        "open out.partial/best/step.partial",
        "os.rename out.partial/final",
        "os.remove out.partial/lock",
    ):
        assert kind in kinds, kinds
