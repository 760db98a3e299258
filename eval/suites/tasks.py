"""The suite `tasks`: benchmarks of lm-evaluation-harness, with all models compared document by document.

Two accuracies that differ by less than their errors may still come from models that disagree on many
documents. Therefore answers that change from right to wrong or back are counted (flips, Dutta et al. 2024,
arXiv 2407.09141) and tested (exact McNemar test).
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scipy import stats  # type: ignore[import-untyped]

from ...checkpoints.eval_json import parsed
from ...checkpoints.quality_blocks import (
    AnswerFlips,
    Estimate,
    FiniteNumbers,
    TaskAverage,
    TaskMetric,
    TasksBlock,
    TaskScores,
)
from ...core.console import progress
from ...core.errors import InvalidInput
from ...core.files import write_whole
from ...core.untrusted import read_json
from ..estimate import NORMAL, estimate, paired_difference, proportion, proportion_difference
from ..subject import Subject
from . import harness
from .catalogue import TasksSettings


@dataclass(frozen=True)
class _KeptMetric(FiniteNumbers):
    """A metric in --task-cache; without values where it is no mean over documents."""

    value: float
    values: list[float] | None = None
    documents: list[str] | None = None

    @property
    def is_paired(self) -> bool:
        """True if there is a value of each document, or of none."""
        if self.values is None or self.documents is None:
            return self.values is None and self.documents is None
        return 0 < len(self.values) == len(self.documents)


@dataclass(frozen=True)
class _KeptScores(FiniteNumbers):
    """A model's scores in --task-cache."""

    samples: int
    shots: int
    metrics: dict[str, _KeptMetric]


def rows(found: TasksBlock, roles: tuple[str, ...]) -> list[list[str]]:
    """Return the lines of the table, each a label and one cell per role."""
    only = "" if found.limit is None else f", only the first {found.limit}"
    lines = []
    for name, task in found.tasks.items():
        metric = task.metrics[task.primary]
        values = (getattr(metric, role) for role in roles)
        lines.append(
            [f"{name}, {task.primary}, {task.shots}-shot{only}", *(str(value or "") for value in values)]
        )
        if metric.difference is not None:
            lines.append(["  - teacher's [95 %]", _interval(metric.difference)])
        if metric.flips is not None:
            flips = (
                f"{metric.flips.right_to_wrong}, {metric.flips.wrong_to_right}, p = "
                f"{metric.flips.p_value:.2g}"
            )
            lines.append(["  right to wrong, wrong to right, McNemar", flips])
    if len(found.tasks) > 1:
        averages = (getattr(found.average, role) for role in roles)
        lines.append(["average", *("" if value is None else f"{value:.4f}" for value in averages)])
        if found.average.difference is not None:
            lines.append(["  - teacher's [95 %]", _interval(found.average.difference)])
    return lines


def check(settings: TasksSettings) -> None:
    """Check that the harness is installed and knows the tasks."""
    harness.check_tasks(harness.named(settings.tasks), settings.task_path)
    directory = settings.task_cache
    if directory is not None and directory.exists() and not directory.is_dir():
        raise InvalidInput(f"--task-cache {directory} is not a directory; name another one")


def measure(subject: Subject) -> TasksBlock:
    """Run every task on every model."""
    settings = subject.asked(TasksSettings)
    names = harness.named(settings.tasks)
    units = [(name, role) for name in names for role in subject.roles]
    if subject.one_at_a_time:
        units = [(name, role) for role in subject.roles for name in names]
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name, role in progress(units, "Tasks", len(units)):
        found[name][role] = subject.part(f"tasks/{role}/{name}", partial(_answers, subject, role, name))
    tasks = {name: _task(name, roles) for name, roles in found.items()}
    return TasksBlock(
        harness.version(),
        settings.limit,
        settings.fewshot,
        tasks,
        _average(list(tasks.values())),
    )


def _answers(subject: Subject, role: str, name: str) -> dict[str, Any]:
    """Return a model's scores in a task, from --task-cache where they are kept."""
    settings = subject.asked(TasksSettings)
    directory, limit, fewshot = settings.task_path, settings.limit, settings.fewshot

    def run() -> dict[str, Any]:
        size = subject.options.batch_size
        return harness.run(
            partial(subject.load, role), name, directory, batch_size=size, limit=limit, fewshot=fewshot
        )

    if settings.task_cache is None:
        return run()
    asked = {
        "model": subject.checkpoints[role].identity,
        "task": name,
        "own_tasks": harness.hash_of(directory),
        "harness": harness.version(),
        "limit": limit,
        "fewshot": fewshot,
        "dtype": subject.dtype(role),
        "device": subject.device,
    }
    if role == "student" and subject.options.cache_dtype is not None:
        asked["cache_dtype"] = subject.options.cache_dtype
    key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    file = settings.task_cache / f"{name.replace('/', '_')}-{key[:32]}.json"
    if not file.is_file():
        kept = json.dumps({"asked": asked, "found": run()}, allow_nan=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, kept, replace=True)
    return read_kept(file, asked)


def read_kept(file: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores in a file of --task-cache, as `harness.run` returned them.

    Raises:
        InvalidInput: the file is not one of these scores.
    """
    damaged = InvalidInput(f"{file} was not written by kvfold or is damaged; move it away")
    try:
        kept = read_json(file)
        found = parsed(_KeptScores, kept.get("found"), file, "move it away")
    except InvalidInput:
        raise damaged from None
    if kept.get("asked") != asked or not all(metric.is_paired for metric in found.metrics.values()):
        raise damaged
    return asdict(found)


def _task(name: str, roles: Mapping[str, Mapping[str, Any]]) -> TaskScores:
    student = roles["student"]
    metrics = {metric: _metric(name, metric, roles) for metric in student["metrics"]}
    if not metrics:
        raise InvalidInput(f"--tasks {name}: the harness returns no number for it; leave it out")
    primary = harness.PRIMARY.get(name, "acc")
    return TaskScores(
        student["samples"], student["shots"], primary if primary in metrics else next(iter(metrics)), metrics
    )


def _metric(name: str, metric: str, roles: Mapping[str, Mapping[str, Any]]) -> TaskMetric:
    """Return one metric of a task, paired document by document where it is a mean over them."""
    entries = {role: found["metrics"].get(metric) for role, found in roles.items()}
    if any(
        entry is None or entry.get("documents") != entries["student"].get("documents")
        for entry in entries.values()
    ):
        raise InvalidInput(
            f"--tasks {name}: its data changed since --task-cache was written; name another directory"
        )
    values = {role: entry.get("values") for role, entry in entries.items()}
    known = [each for scores in values.values() if scores is not None for each in scores]
    are_scores = min(known, default=0) >= 0 and max(known, default=0) <= 1
    mean, compare = (proportion, proportion_difference) if are_scores else (estimate, paired_difference)
    estimates = {
        role: Estimate(entry["value"], None) if values[role] is None else mean(values[role])
        for role, entry in entries.items()
    }
    ours, theirs = values["student"], values.get("teacher")
    difference, turned = None, None
    if "teacher" in entries:
        difference = Estimate(estimates["student"].mean - estimates["teacher"].mean, None)
    if ours is not None and theirs is not None:
        difference = compare(ours, theirs)
        turned = flips(ours, theirs) if {*ours, *theirs} <= {0.0, 1.0} else None
    return TaskMetric(
        student=estimates["student"],
        teacher=estimates.get("teacher"),
        parent=estimates.get("parent"),
        difference=difference,
        flips=turned,
    )


def flips(student: Sequence[float], teacher: Sequence[float]) -> AnswerFlips:
    """Count the flips, with the exact p of both directions being equally likely (McNemar 1947)."""
    lost = sum(their > our for our, their in zip(student, teacher, strict=True))
    won = sum(our > their for our, their in zip(student, teacher, strict=True))
    return AnswerFlips(lost, won, float(stats.binomtest(lost, lost + won, 0.5).pvalue) if lost + won else 1.0)


def _average(tasks: Sequence[TaskScores]) -> TaskAverage:
    metrics = [task.metrics[task.primary] for task in tasks]

    def mean(role: str) -> float | None:
        values: list[Estimate | None] = [getattr(metric, role) for metric in metrics]
        return None if None in values else math.fsum(value.mean for value in values if value) / len(values)

    student = mean("student")
    assert student is not None
    return TaskAverage(
        student, mean("teacher"), mean("parent"), _mean([metric.difference for metric in metrics])
    )


def _mean(differences: Sequence[Estimate | None]) -> Estimate | None:
    """Return the mean of independent estimates, with the normal interval; None where one is missing."""
    known = [each for each in differences if each is not None]
    if len(known) < len(differences):
        return None
    mean = math.fsum(each.mean for each in known) / len(known)
    errors = [each.standard_error for each in known if each.standard_error is not None]
    if len(errors) < len(known):
        return Estimate(mean, None)
    error = math.hypot(*errors) / len(known)
    return Estimate(mean, error, mean - NORMAL * error, mean + NORMAL * error)


def _interval(value: Estimate) -> str:
    return str(value) if value.low is None else f"{value} [{value.low:.4f}, {value.high:.4f}]"
