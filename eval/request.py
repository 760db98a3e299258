"""The run of a whole evaluation that a user asks for."""

from contextlib import ExitStack, nullcontext
from pathlib import Path

from ..checkpoints.record import folded_parent, source_directory
from ..core.console import is_first, notice
from ..core.disk import check_outside
from ..core.hub import resolve
from ..core.processes import together
from ..core.work import WorkDir
from ..texts.corpus import read_text
from .options import EvalRequest
from .result import Result
from .run import evaluate, reserved


def run_request(request: EvalRequest, out: Path | None = None) -> Result:
    """Return what the suites of a request find, and write it to a file where one is named.

    Raises:
        InvalidInput: a checkpoint or the text cannot be used, a suite refuses, or the file exists or cannot
            be written.
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
