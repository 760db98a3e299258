"""Trackers that receive a run's metrics through accelerate.

They write to `<output>.partial/trackers`, which becomes `<output>/trackers`. Nothing leaves the machine
unless it is asked for: wandb is offline unless WANDB_MODE says otherwise (`wandb sync` sends a run later),
and trackio is local and writes to TRACKIO_DIR if that is set.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ...core.errors import InvalidInput
from ..recipe.recipe import Recipe, TrackerName

PROJECT = "kvfold"

# From a recipe, the trackers' directory and the steps done to the arguments of each tracker's own start.
TRACKERS: dict[TrackerName, Callable[[Recipe, Path, int], dict[str, Any]]] = {
    # The values of steps that an interrupted run does again are not shown twice.
    "tensorboard": lambda recipe, directory, steps: {"purge_step": steps + 1},
    "wandb": lambda recipe, directory, steps: {
        "name": Path(recipe.output).name,
        "dir": str(directory),
        "mode": os.environ.get("WANDB_MODE", "offline"),
        "config": recipe.resolved(),
    },
    "trackio": lambda recipe, directory, steps: {
        "name": Path(recipe.output).name,
        "config": recipe.resolved(),
        "resume": "allow",
        "embed": False,
    },
}


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Refuse trackers whose library is not installed: accelerate would leave them out silently.

    Raises:
        InvalidInput: names the first one, with the command that installs it.
    """
    for name in names:
        if find_spec(name) is None:
            raise InvalidInput(f"trackers names {name}, which is not installed; run pip install {name}")


def directory_of(recipe: Recipe) -> Path:
    """Return the directory that trackers write to during a run."""
    return recipe.working_directory / "trackers"


@contextmanager
def tracking(accelerator: Accelerator, recipe: Recipe, steps: int) -> Iterator[None]:
    """Pass the values of `accelerator.log` to the recipe's trackers; `steps` were done before."""
    if not recipe.trackers:
        yield
        return
    directory = directory_of(recipe).absolute()
    if accelerator.is_main_process:
        directory.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    if "trackio" in recipe.trackers:
        os.environ.setdefault("TRACKIO_DIR", str(directory / "trackio"))  # read when trackio is imported
    settings = {name: TRACKERS[name](recipe, directory, steps) for name in recipe.trackers}
    with redirect_stdout(sys.stderr):  # stdout is for the result
        accelerator.init_trackers(PROJECT, init_kwargs=settings)
    try:
        yield
    finally:
        with redirect_stdout(sys.stderr):
            for tracker in accelerator.trackers:
                tracker.finish()
        accelerator.trackers = []
