"""The beginning of a run: its models, its output, and what an earlier run of the same recipe has left.

A run that was killed at any moment resumes when the same recipe is given again: from its newest whole state,
from its output if that exists already, or from nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...checkpoints.directory import check_output
from ...checkpoints.identity import fingerprint
from ...checkpoints.record import read_record, source_directory
from ...core.errors import InvalidInput, naming
from ...core.hub import resolve
from ..recipe.recipe import SHARED, Recipe, differences
from ..stages import state
from ..stages.state import Progress

_RESULT = {"recipe", "models", "student", "teacher", "steps", "tokens", "stages"}  # a finished run's record
# Advice to use an option of another command becomes advice to set a key of the recipe.
_NAMES = {"--out": "--set output=DIR", "--teacher": "--set teacher=DIR"}


def find_models(recipe: Recipe, output: Path) -> tuple[Path, Path]:
    """Return the directories of student and teacher, which are downloaded if that is needed.

    Raises:
        InvalidInput: as of `models_of`, or the output would be inside one.
    """
    with naming(_NAMES):
        student, teacher = models_of(recipe, resolve)
    assert student
    assert teacher
    for directory in (student, teacher):
        if output.resolve().is_relative_to(directory.resolve()):
            raise InvalidInput(
                f"output {output} is inside {directory}, which is never written; name another with --set "
                "output=DIR"
            )
    return student, teacher


def models_of(recipe: Recipe, find: Callable[[str], Path | None]) -> tuple[Path | None, Path | None]:
    """Return the directories of student and teacher, as `find` finds them; None for what it does not look up.

    Raises:
        InvalidInput: one does not exist or has no config.json, or there is no teacher.
    """
    student = _found("student", recipe.student, find)
    if recipe.teacher not in (None, SHARED):
        return student, _found("teacher", str(recipe.teacher), find)
    if student is None:
        return None, None
    teacher = source_directory(student)
    if teacher is None:
        raise InvalidInput(
            f"{student} has no kvfold.json that names its source; name the teacher with --set teacher=DIR"
        )
    return student, teacher


def _found(role: str, name: str, find: Callable[[str], Path | None]) -> Path | None:
    try:
        directory = find(name)
    except InvalidInput as mistake:
        first = "; convert it first (kvfold convert ... --out)" if role == "student" else ""
        raise InvalidInput(f"{role} {mistake}{first}") from None
    if directory and not (directory / "config.json").is_file():
        raise InvalidInput(f"{role} {directory} has no config.json; name the directory that holds the model")
    return directory


def find_result(recipe: Recipe, output: Path) -> dict[str, Any] | None:
    """Return the record of a finished run of this recipe with these models; None if there is none.

    The run may have been killed after its output had its name, while it was tidying up or later.

    Raises:
        InvalidInput: the output exists, and is not of such a run.
    """
    if output.is_dir():
        record = (read_record(output) or {}).get("distill", {})
        is_same = record.keys() >= _RESULT and not differences(record["recipe"], recipe.resolved())
        if is_same and record["models"] == fingerprints(*find_models(recipe, output)):
            return {key: value for key, value in record.items() if key != "recipe"}
    with naming(_NAMES):
        check_output(output)
    return None


def complete(output: Path) -> str:
    """Return a sentence about the output of a run that has ended before."""
    return f"{output} is already complete for this recipe; to train again, remove it or name another output"


def last_progress(
    recipe: Recipe, partial: Path, student: Path, teacher: Path
) -> tuple[Progress, Path | None]:
    """Return where an earlier run of the recipe stopped, and the state saved there.

    Without an earlier run they are the beginning and None.

    Raises:
        InvalidInput: the earlier run had another recipe or other models.
    """
    models = fingerprints(student, teacher)
    found = state.newest(partial / "state")
    if found is None:
        return Progress(recipe=recipe.resolved(), models=models), None
    progress = state.read_progress(found)
    changed = differences(progress.recipe, recipe.resolved())
    if changed:
        raise InvalidInput(
            f"the recipe differs from the one that {partial} was started with in {', '.join(changed)}; "
            "change it back to resume, or name another output to start over"
        )
    check_models(progress.models, partial, student, teacher)
    return replace(progress, recipe=recipe.resolved(), models=models), found


def check_models(known: Mapping[str, str], partial: Path, student: Path, teacher: Path) -> None:
    """Check that the models of a run are those that it was started with, whose fingerprints are `known`.

    Raises:
        InvalidInput: one has changed.
    """
    for role, directory in (("student", student), ("teacher", teacher)):
        if role in known and known[role] != fingerprint(directory):
            raise InvalidInput(
                f"the {role} {directory} is not the checkpoint that {partial} was started with; put that "
                "one back to resume, or name another output to start over"
            )


def fingerprints(student: Path, teacher: Path) -> dict[str, str]:
    """Return the fingerprints of both models by their roles."""
    return {"student": fingerprint(student), "teacher": fingerprint(teacher)}
