"""Runs of the suite `tasks`, and rows like those of WikiText-2."""

from pathlib import Path
from typing import Any

from kvfold.checkpoints.quality_blocks import TasksBlock
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate

ROWS = [
    "", " = First tale = \n", "", " He said ( twice ) that 1 @,@ 000 foxes @-@ like ones ' ran ' . \n", "",
    " = = A part = = \n", "", ' The " héros " went , then came 20 ° back ; it rained [ a lot ] . \n' * 3, "",
    " = Second tale = \n", "", " Short . \n",
]  # fmt: skip


CPU = Options(device="cpu")


def run_tasks(student: Path, teacher: Path | None, path: Path, names: str, **settings: Any) -> TasksBlock:
    """Evaluate tasks of the files in `path`."""
    given = {"tasks": names, "task_path": path, **settings}
    found = evaluate(student, teacher, None, CPU, suites=("tasks",), settings=given).suites["tasks"]
    assert isinstance(found, TasksBlock)
    return found
