"""Where a run begins: its models, its output, and what an earlier run of the same recipe has left.

A run that was killed at any moment goes on when the same recipe is given again: from its newest whole state,
from its output where that stands already, or from nothing.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from ...checkpoints.directory import check_output
from ...checkpoints.record import read_record, source_directory
from ...core.console import notice
from ...core.errors import InvalidInput
from ...core.hub import resolve
from ..data.token_store import holds_same
from ..recipe.recipe import SHARED, Recipe, differences
from . import state
from .claim import is_ours
from .state import Progress

_STAGE = re.compile(r"stages\[(\d+)\]")
_SAMPLE = (
    2**12
)  # bytes read at both ends and in the middle of every tensor: folds of one source differ in few tensors


def find_models(recipe: Recipe, output: Path) -> tuple[Path, Path]:
    """Where student and teacher lie.

    Raises:
        InvalidInput: one is not there, or the output would lie inside one.
    """
    with as_settings():
        student = _resolve("student", recipe.student)
        named = recipe.teacher not in (None, SHARED)
        teacher = _resolve("teacher", str(recipe.teacher)) if named else source_directory(student)
    if teacher is None:
        raise InvalidInput(
            f"{student} has no kvfold.json that names its source; name the teacher with --set teacher=DIR"
        )
    for directory in (student, teacher):
        if output.resolve().is_relative_to(directory.resolve()):
            raise InvalidInput(
                f"output {output} lies inside {directory}, which is never written; name another with "
                f"--set output=DIR"
            )
    return student, teacher


def _resolve(role: str, name: str) -> Path:
    try:
        directory = resolve(name)
    except InvalidInput as mistake:
        raise InvalidInput(f"{role} {mistake}") from None
    if not (directory / "config.json").is_file():
        raise InvalidInput(f"{role} {name} has no config.json; name the directory that holds the model")
    return directory


@contextmanager
def as_settings() -> Iterator[None]:
    """Advice of the other parts to use an option of their commands becomes advice to set a key of the
    recipe.
    """
    try:
        yield
    except InvalidInput as mistake:
        what, mark, advice = str(mistake).rpartition("; ")
        for option, key in (("--out", "output"), ("--teacher", "teacher")):
            advice = advice.replace(option, f"--set {key}=DIR") if mark else advice
        raise InvalidInput(what + mark + advice) from None


def find_result(recipe: Recipe, output: Path, partial: Path) -> dict[str, Any] | None:
    """What a run of this recipe with these models said of itself whose output stands already: given again, it
    has ended.

    It may have been killed after its output had its name, while it tidied up or thereafter.

    Raises:
        InvalidInput: the output exists, and is no such run's.
    """
    if output.is_dir() and is_ours(partial):
        told = (read_record(output) or {}).get("distill", {})
        is_same = "models" in told and not differences(told["recipe"], recipe.resolved())
        if is_same and told["models"] == fingerprints(*find_models(recipe, output)):
            return {key: value for key, value in told.items() if key != "recipe"}
    with as_settings():
        check_output(output)
    return None


def last_progress(
    recipe: Recipe, partial: Path, student: Path, teacher: Path
) -> tuple[Progress, Path | None]:
    """Where an earlier run of the recipe stopped, and the state saved there; the beginning and None when
    there was none.

    That run may have had other stages after those that it has begun, as long as what it has done is what this
    recipe asks for.

    Raises:
        InvalidInput: that run had another recipe or other models.
    """
    models = fingerprints(student, teacher)
    found = state.newest(partial / "state")
    if found is None:
        return Progress(recipe=recipe.resolved(), models=models), None
    progress = state.read_progress(found)
    _check_changes(progress, recipe, partial)
    for role, directory in (("student", student), ("teacher", teacher)):
        if progress.models.get(role, models[role]) != models[role]:
            raise InvalidInput(
                f"the {role} {directory} is not the checkpoint that {partial} was started with; put that "
                f"one back to go on, "
                "or name another output to start anew"
            )
    return replace(progress, recipe=recipe.resolved(), models=models), found


def _check_changes(progress: Progress, recipe: Recipe, partial: Path) -> None:
    """Refuse a recipe by which what is done would have become something else.

    Say which later stages have changed.
    """
    changed = differences(progress.recipe, recipe.resolved())
    if not changed:
        return
    _refuse(changed, progress.stage, partial)
    try:
        before = Recipe.model_validate(progress.recipe)
    except ValidationError:  # of another version, which knew other keys
        _refuse(changed, len(progress.recipe["stages"]) + len(recipe.stages), partial)
        raise
    _refuse(changed, max(_begun(one, partial) for one in (before, recipe)), partial)
    if not holds_same(partial / "tokens.bin", recipe.data, before.windows, recipe.windows):
        raise InvalidInput(
            f"the recipe reads {recipe.windows} windows of text and the one that {partial} was started "
            f"with {before.windows}, "
            "which changes the order of the text in what is done; give the stages that have not begun as "
            "many tokens as they "
            "had, or name another output to start anew"
        )
    notice(f"the recipe differs in stages that have not begun, and goes on so: {', '.join(changed)}")


def _refuse(changed: list[str], begun: int, partial: Path) -> None:
    """Refuse all changes but those of stages behind the one with the index `begun`."""
    done = [key for key in changed if not (found := _STAGE.match(key)) or int(found[1]) <= begun]
    if done:
        raise InvalidInput(
            f"the recipe differs from the one that {partial} was started with in {', '.join(done)}; "
            "change it back to go on, or name another output to start anew"
        )


def _begun(recipe: Recipe, partial: Path) -> int:
    """The last stage of which something may be done that no state tells of.

    Streamed layers, or a checkpoint of its own.
    """
    places = partial / "stages"
    return max(
        (
            at
            for at, stage in enumerate(recipe.stages)
            if stage.how == "stream" or (places / stage.name).exists()
        ),
        default=-1,
    )


def fingerprints(student: Path, teacher: Path) -> dict[str, str]:
    """Of both models, by their roles."""
    return {"student": fingerprint(student), "teacher": fingerprint(teacher)}


def fingerprint(directory: Path) -> str:
    """Tells a checkpoint from others by its config and by parts of every weight, wherever it lies, whenever
    copied.
    """
    digest = hashlib.blake2b((directory / "config.json").read_bytes(), digest_size=16)
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            for begin, end in _tensors(stream, file.stat().st_size):
                for place in (begin, (begin + end) // 2, max(begin, end - _SAMPLE)):
                    stream.seek(place)
                    digest.update(stream.read(min(_SAMPLE, end - place)))
    return digest.hexdigest()


def _tensors(stream: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Where the header and the tensors of a safetensors file lie.

    Of a damaged one, which loading refuses, all there is.
    """
    try:
        length = 8 + int.from_bytes(stream.read(8), "little")
        rows = json.loads(stream.read(min(length, size) - 8)).items()
        places = [row["data_offsets"] for name, row in rows if name != "__metadata__"]
        return [(0, length), *((length + int(begin), length + int(end)) for begin, end in sorted(places))]
    except (ValueError, KeyError, TypeError, AttributeError):
        return [(0, size)]
