"""The run of a whole evaluation that a user asks for."""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

from ..checkpoints.record import folded_parent, is_distilled, read_record, source_directory
from ..core.console import is_first, notice
from ..core.disk import check_outside
from ..core.hub import resolve
from ..core.processes import together
from ..core.work import WorkDir
from ..texts.corpus import read_text
from .assertions import Assertion, check_models
from .options import EvalRequest
from .result import Result
from .run import evaluate, reserved


def run_request(
    request: EvalRequest, out: Path | None = None, assertions: Sequence[Assertion] = ()
) -> Result:
    """Return what the suites of a request find, and write it to a file where one is named.

    Raises:
        InvalidInput: a checkpoint or the text cannot be used, a suite refuses, an assertion is about a model
            that is missing, or the file exists or cannot be written.
    """
    with ExitStack() as stack:
        with together():
            reserving = reserved(out) if out is not None and is_first() else nullcontext((WorkDir(), None))
            journal, write = stack.enter_context(reserving)
        with together():
            content = None if request.text is None else read_text(request.text, request.rows)
            student = resolve(request.model)
            source = source_directory(student) if request.teacher is None else resolve(request.teacher)
            if source is None:
                notice(
                    f"{student} has no kvfold.json that names a teacher; choose one with --teacher to "
                    "compare with it"
                )
            parent = folded_parent(student)
            kept = {
                "--teacher-cache": request.teacher_cache,
                "--offload-dir": request.offload_dir,
                "--task-cache": request.task_cache,
            }
            check_outside(kept, (student, source, parent))
            check_models(assertions, _missing(student, source, parent))
        result = evaluate(
            student,
            source,
            content,
            request.options,
            parent,
            suites=request.suites,
            settings=request,
            journal=journal,
        )
        if write is not None:
            write(result.to_text())
    return result


def _missing(student: Path, source: Path | None, parent: Path | None) -> dict[str, str]:
    """Return the models that cannot be compared with, each with the reason and the remedy."""
    missing = {}
    if parent is None and is_distilled(read_record(student) or {}):
        missing["parent"] = (
            f"the fold from which {student} was distilled is not where its kvfold.json says; put it back, or "
            "leave the assertion out"
        )
    elif parent is None:
        missing["parent"] = (
            f"{student} was not distilled from a fold, so nothing was recovered; leave the assertion out, or "
            "evaluate the output of kvfold distill"
        )
    if source is None:
        missing["teacher"] = f"{student} has no teacher; choose one with --teacher"
    return missing
