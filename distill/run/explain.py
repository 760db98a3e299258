"""What a recipe says, key by key, what running it takes, and whether what it names is there.

Nothing is trained or written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...checkpoints.directory import Checkpoint, check_output
from ...checkpoints.record import source_directory
from ...core.errors import InvalidInput
from ...models.causal_lm import describe
from ...models.load_options import LoadOptions
from ...texts.sources import check_source
from ..data.samples import check_texts
from ..parallel.launch import SHARDED
from ..recipe.recipe import SHARED, Recipe, Stage, flatten
from ..recipe.recipe_file import describe_key, read_content, read_recipe
from ..stages.weights import check_peft
from ..watch.held_out import check_held_out
from ..watch.trackers import check_trackers
from .preflight import check_stages


def validate(file: Path, overrides: Sequence[str] = ()) -> tuple[Recipe, list[str]]:
    """Check a recipe, and all that it names on this machine; what it names on the Hub is not looked up.

    Of texts the beginning is read and tokenised, so that mistakes further on are found by the run itself.

    Returns:
        The recipe, and sentences on what is no mistake but may be a surprise.

    Raises:
        InvalidInput: what is wrong with it.
    """
    recipe = read_recipe(file, overrides)
    try:
        return recipe, check_places(recipe)
    except InvalidInput as mistake:
        raise InvalidInput(f"{file.name}: {mistake}") from None


def check_before_launch(recipe: Recipe) -> None:
    """See what can be seen before several processes are started, so that one tells a mistake and not all.

    Raises:
        InvalidInput: as of `check_places`; of a run that goes on, or has ended, the models alone are looked
        at.
    """
    output = Path(recipe.output).expanduser()
    if not output.exists() and not output.with_name(output.name + ".partial").exists():
        check_places(recipe)
        return
    student, teacher = models_of(recipe)
    if student and teacher:
        check_stages(recipe, student, teacher, sharded=recipe.profile in SHARDED)


def check_places(recipe: Recipe) -> list[str]:
    """Check all that a recipe names on this machine; result and errors as of `validate`."""
    student, teacher = models_of(recipe)
    output = Path(recipe.output).expanduser()
    try:
        check_output(output)
    except InvalidInput as mistake:
        raise InvalidInput(str(mistake).replace("--out", "output")) from None
    check_trackers(recipe.trackers)
    if any(stage.train == "lora" for stage in recipe.stages):
        check_peft()
    for directory in filter(None, (student, teacher)):
        Checkpoint(directory)  # reads where in its files every tensor is
    if student and teacher:
        check_stages(recipe, student, teacher, sharded=recipe.profile in SHARDED)
    for source in recipe.data.sources:
        check_source(source.source)
    described = describe(student, LoadOptions()) if student else None
    told, tokens = check_texts(recipe, described)
    if recipe.evaluate:
        check_held_out(recipe, described, tokens)
    return told


def models_of(recipe: Recipe) -> tuple[Path | None, Path | None]:
    """Student and teacher, where they are directories here; None for what is on the Hub.

    Raises:
        InvalidInput: a directory is named that is not there, or it has no config.json.
    """
    student = _local("student", recipe.student)
    if recipe.teacher not in (None, SHARED):
        return student, _local("teacher", str(recipe.teacher))
    if student is None:
        return None, None
    source = source_directory(student, "teacher")
    if source is None:
        raise InvalidInput(
            f"student {recipe.student} has no kvfold.json that names its source; name the teacher"
        )
    return student, source


def _local(key: str, name: str) -> Path | None:
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        raise InvalidInput(f"{key} {name} has no config.json; name the directory that holds the model")
    if name.startswith((".", "/", "~")) or path.exists() or name.count("/") > 1:
        advice = (
            "convert it first (kvfold convert ... --out)"
            if key == "student"
            else "name the directory of a model"
        )
        raise InvalidInput(f"{key} {name} is not a directory here; {advice}")
    return None


def explain(file: Path, overrides: Sequence[str] = (), processes: int | None = None) -> dict[str, Any]:
    """What every key is, and what each stage does and takes.

    Args:
        file: the recipe.
        overrides: `KEY=VALUE`.
        processes: how many share the run by its profile; None: as many as there are GPUs, or one.

    Returns:
        Plain values: `keys` (`key`, `value`, `from`: file, --set or default, `meaning`), `stages` (`name`,
        `mode`, `steps`, `tokens`, `step_tokens`, and `footprint`, None where a model is not here) and `note`,
        why it is None.

    Raises:
        InvalidInput: the recipe is wrong, a stage cannot be trained with its models, or its profile is of one
        process and
            several are named.
    """
    recipe = read_recipe(file, overrides)
    keys = _keys(recipe, read_content(file), overrides)
    footprints, note = _footprints(recipe, _processes(recipe, processes))
    stages = [
        {
            "name": stage.name,
            "mode": stage.how,
            "losses": {name: stage.losses[name] for name in stage.learnt},
            "train": stage.train,
            "lr": stage.lr,
            "steps": recipe.steps(stage),
            "step_tokens": recipe.step_windows(stage) * recipe.data.seq_len,
            "tokens": recipe.steps(stage) * recipe.step_windows(stage) * recipe.data.seq_len,
            "footprint": found,
        }
        for stage, found in zip(recipe.stages, footprints, strict=True)
    ]
    return {"recipe": str(file), "keys": keys, "stages": stages, "note": note}


def _keys(recipe: Recipe, content: Mapping[str, Any], overrides: Sequence[str]) -> list[dict[str, Any]]:
    given = {
        "file": list(flatten(content)),
        "--set": [_place(override.partition("=")[0]) for override in overrides],
    }
    rows = []
    for key, value in flatten(recipe.resolved()).items():
        origins = [name for name, places in given.items() if any(_is_inside(key, place) for place in places)]
        rows.append(
            {
                "key": key,
                "value": value,
                "from": [*origins, "default"][0 if not origins else len(origins) - 1],
            }
        )
        rows[-1]["meaning"] = describe_key(key)
    return rows


def _place(key: str) -> str:
    """`stages.0.lr` as `stages[0].lr`."""
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in key.split(".")).removeprefix(".")


def _is_inside(key: str, place: str) -> bool:
    return key == place or key.startswith((f"{place}.", f"{place}["))


def _processes(recipe: Recipe, named: int | None) -> int:
    if recipe.profile in (None, "cpu", "single"):
        if named and named > 1:
            raise InvalidInput(
                f"--processes {named} needs a profile that has several; add --set profile=ddp (or "
                f"{', '.join(SHARDED)})"
            )
        return 1
    import torch

    return named or (max(1, torch.cuda.device_count()) if recipe.device != "cpu" else 1)


def _footprints(recipe: Recipe, processes: int) -> tuple[list[dict[str, Any] | None], str | None]:
    try:
        student, teacher = models_of(recipe)
    except InvalidInput as mistake:
        return [None] * len(recipe.stages), str(mistake)
    if student is None or teacher is None:
        return [None] * len(recipe.stages), "memory and time are told for models that are directories here"
    check_stages(recipe, student, teacher, sharded=recipe.profile in SHARDED)
    return [_footprint(recipe, stage, student, teacher, processes) for stage in recipe.stages], None


def _footprint(recipe: Recipe, stage: Stage, student: Path, teacher: Path, processes: int) -> dict[str, Any]:
    import torch

    from .footprint import footprint, matmul_rate, skeleton

    gpu = recipe.device != "cpu" and torch.cuda.is_available()
    bf16 = recipe.precision == "bf16" or (
        recipe.precision == "auto" and gpu and torch.cuda.is_bf16_supported()
    )
    models, shards = (skeleton(student), skeleton(teacher)), processes if recipe.profile in SHARDED else 1
    found = footprint(recipe, stage, *models, bf16, shards, keeps_layers=recipe.profile == "zero2")
    tokens = recipe.steps(stage) * recipe.step_windows(stage) * recipe.data.seq_len
    return {
        "weights": found.weights,
        "trained": found.trained,
        "processes": processes,
        "memory_bytes": {**found.memory, "total": sum(found.memory.values())},
        "flops_per_token": found.flops,
        "seconds_at_least": None
        if found.flops is None
        else found.flops * tokens / matmul_rate(recipe, bf16) / processes,
    }
