"""The meaning of a recipe's keys, the cost of running it, and checks of the models and texts that it names.

Nothing is trained or written.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...checkpoints.directory import check_output
from ...checkpoints.quantised.packed_checkpoint import open_checkpoint
from ...core.errors import InvalidInput, naming
from ...core.hub import local_directory
from ...models.causal_lm import describe
from ...models.load_options import LoadOptions
from ...texts.sources import check_source
from ..data.samples import check_texts
from ..parallel.launch import SHARDED
from ..recipe.recipe import Recipe, flatten
from ..recipe.recipe_file import as_recipe, describe_key, read_content
from ..stages.student_checkpoint import unrounded
from ..stages.weights import check_peft
from ..watch.held_out import check_held_out
from ..watch.trackers import check_trackers
from .preflight import check_stages
from .resume import models_of


def validate(file: Path, overrides: Sequence[str] = ()) -> list[str]:
    """Check a recipe, and everything that it names on this machine.

    Models and texts on the Hub are not looked up. Only the beginning of a text is read and tokenised; the run
    itself finds mistakes further on.

    Returns:
        Sentences on what may surprise the reader without being a mistake.

    Raises:
        InvalidInput: the recipe or something that it names is wrong.
    """
    recipe = as_recipe(file, overrides=overrides)
    try:
        return check_places(recipe)
    except InvalidInput as mistake:
        raise InvalidInput(f"{file.name}: {mistake}") from None


def check_before_launch(recipe: Recipe) -> None:
    """Check a recipe before several processes are started, so that one of them reports a mistake and not all.

    Raises:
        InvalidInput: as of `check_places`. For a run that resumes or has ended, only the models are checked.
    """
    if not recipe.output_directory.exists() and not recipe.working_directory.exists():
        check_places(recipe)
        return
    student, teacher = models_of(recipe, local_directory)
    if student and teacher:
        check_stages(recipe, student, teacher, sharded=recipe.profile in SHARDED)


def check_places(recipe: Recipe) -> list[str]:
    """Check everything that a recipe names on this machine; result and errors as of `validate`."""
    student, teacher = models_of(recipe, local_directory)
    with naming({"--out": "output"}):
        check_output(recipe.output_directory)
    check_trackers(recipe.trackers)
    if any(stage.train == "lora" for stage in recipe.stages):
        check_peft()
    for directory in filter(None, (student, teacher)):
        open_checkpoint(directory)  # reads the places of all tensors in its files
    if student and teacher:
        check_stages(recipe, student, teacher, sharded=recipe.profile in SHARDED)
    for source in recipe.data.sources:
        check_source(source.source)
    described = describe(student, LoadOptions()) if student else None
    sentences, tokens = check_texts(recipe, described)
    if recipe.evaluate:
        check_held_out(recipe, described, tokens)
    rounded = unrounded(student) if student else []
    return [*recipe.rounded_batches(), *recipe.few_steps(), *rounded, *sentences]


def explain(file: Path, overrides: Sequence[str] = (), processes: int | None = None) -> dict[str, Any]:
    """Return the meaning of every key, and what each stage does and takes.

    Args:
        file: the recipe, or a fold, whose recipe is the default one.
        overrides: `KEY=VALUE`.
        processes: how many processes divide the run by its profile; None for one per GPU, or one without a
            GPU.

    Returns:
        Plain values: `keys` (`key`, `value`, `from`: file, fold, --set or default, `meaning`), `stages`
        (`name`, `mode`, `steps`, `tokens`, `step_tokens`, and `footprint`, which is None if a model is not
        here) and `note`, the reason for None.

    Raises:
        InvalidInput: the recipe is wrong, a stage cannot be trained with its models, or several processes are
            named for a profile with one.
    """
    from .footprint import footprint_of

    recipe = as_recipe(file, overrides=overrides)
    if recipe.profile in (None, "cpu", "single"):
        if processes and processes > 1:
            raise InvalidInput(
                f"--processes {processes} needs a profile with several processes; add --set profile=ddp (or "
                f"{', '.join(SHARDED)})"
            )
        processes = 1
    student = teacher = None
    note: str | None = "memory and time are known only for models that are directories on this machine"
    try:
        student, teacher = models_of(recipe, local_directory)
    except InvalidInput as mistake:
        note = str(mistake)
    if student and teacher:
        check_stages(recipe, student, teacher, sharded=recipe.profile in SHARDED)
    stages = []
    for stage in recipe.stages:
        found = None
        if student and teacher:
            found = footprint_of(recipe, stage, student, teacher, processes)
            note = None
        stages.append(
            {
                "name": stage.name,
                "mode": stage.how,
                "losses": {name: stage.losses[name] for name in stage.learnt},
                "train": stage.train,
                "cache_dtype": stage.cache_dtype,
                "lr": stage.lr,
                "steps": recipe.steps(stage),
                "step_tokens": recipe.step_tokens(stage),
                "tokens": recipe.steps(stage) * recipe.step_tokens(stage),
                "footprint": found,
            }
        )
    keys = _keys(recipe, "fold" if file.is_dir() else "file", read_content(file), overrides)
    return {"recipe": str(file), "keys": keys, "stages": stages, "note": note}


def _keys(
    recipe: Recipe, origin: str, content: dict[str, Any], overrides: Sequence[str]
) -> list[dict[str, Any]]:
    given = {
        origin: list(flatten(content)),
        # `stages.0.lr` as `stages[0].lr`
        "--set": [re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", override.partition("=")[0]) for override in overrides],
    }
    rows = []
    for key, value in flatten(recipe.resolved()).items():
        origin = "default"
        for name, places in given.items():
            if any(key == place or key.startswith((f"{place}.", f"{place}[")) for place in places):
                origin = name
        rows.append({"key": key, "value": value, "from": origin, "meaning": describe_key(key)})
    return rows
