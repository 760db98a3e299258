"""The suite `ruler`: generated tasks over long texts, the same prompts for every model.

The tasks are those of RULER that need no download (ruler_tasks.py). An answer is generated greedily; its
score is the share of the wanted strings that it contains.
"""

import hashlib
from collections.abc import Sequence
from functools import partial

from ...checkpoints.quality_blocks import RulerBlock, RulerScores
from ...core.console import notice, progress
from ..estimate import proportion, proportion_difference
from ..subject import Subject
from .catalogue import RulerSettings
from .decoding import write
from .haystack import prose
from .ruler_tasks import TASKS, NoRoom, RulerPrompt, RulerTasks, no_room, score

LONGEST = 4096

Found = dict[str, list[list[float]]]  # by task, the scores of each prompt at each length


def rows(found: RulerBlock, roles: tuple[str, ...]) -> list[list[str]]:
    """Return the lines of the table, each a label and one cell per role."""
    scores: list[RulerScores] = [getattr(found, role) for role in roles]
    lines = [["ruler, mean of all tasks", *(str(one.overall) for one in scores)]]
    for number, length in enumerate(found.lengths):
        lines.append([f"  at {length} tokens", *(str(one.by_length[number]) for one in scores)])
    for task in found.tasks:
        lines.append([f"  {task}", *(str(one.by_task[task]) for one in scores)])
    if found.difference is not None:
        lines.append(["  all tasks, - teacher's", str(found.difference)])
    return lines


def check_room(subject: Subject) -> None:
    """Check that the prompts fit into every model's positions."""
    prompts = subject.once(_prompts)
    fitting = {task for task, _ in prompts}
    left_out = [name for name in _tasks(subject.asked(RulerSettings)) if name not in fitting]
    if left_out:
        shortest = min(length for _, length in prompts)
        notice(f"--suite ruler leaves out {', '.join(left_out)}: no room in {shortest} tokens")


def measure(subject: Subject) -> RulerBlock:
    """Give every model the same prompts."""
    prompts = subject.once(_prompts)
    tasks = tuple(dict.fromkeys(task for task, _ in prompts))
    lengths = sorted({length for _, length in prompts})
    units = [(role, *unit) for role in subject.roles for unit in prompts]
    found: dict[str, Found] = {role: {task: [] for task in tasks} for role in subject.roles}
    for role, task, length in progress(units, "RULER", len(units)):
        ask = partial(_ask, subject, role, prompts[task, length])
        found[role][task].append(subject.part(f"ruler/{role}/{task}/{length}", ask))
    difference = None
    if "teacher" in found:
        difference = proportion_difference(_all(found["student"]), _all(found["teacher"]))
    scores = {role: _scores(values, len(lengths)) for role, values in found.items()}
    return RulerBlock(
        tasks=tasks,
        lengths=tuple(lengths),
        samples=subject.asked(RulerSettings).ruler_samples,
        seed=subject.asked(RulerSettings).ruler_seed,
        filler_sha256=hashlib.sha256("\n".join(prose()).encode()).hexdigest(),
        student=scores["student"],
        teacher=scores.get("teacher"),
        parent=scores.get("parent"),
        difference=difference,
    )


def _ask(subject: Subject, role: str, prompts: Sequence[RulerPrompt]) -> list[float]:
    """Return the score of each prompt."""
    loaded = subject.load(role)
    ids, steps = [prompt.ids for prompt in prompts], [prompt.steps for prompt in prompts]
    answers = write(loaded, ids, steps, subject.options.batch_size, role)
    return [
        score(loaded.tokenizer.decode(answer), prompt.answers)
        for answer, prompt in zip(answers, prompts, strict=True)
    ]


def _scores(found: Found, lengths: int) -> RulerScores:
    def at(number: int) -> list[float]:
        return [value for rows in found.values() for value in rows[number]]

    return RulerScores(
        overall=proportion(_all(found)),
        by_length=tuple(proportion(at(number)) for number in range(lengths)),
        by_task={task: proportion([value for row in rows for value in row]) for task, rows in found.items()},
        accuracy={
            task: tuple(sum(row) / len(row) for row in rows)
            for task, rows in found.items()
        },
    )  # fmt: skip


def _all(found: Found) -> list[float]:
    return [value for rows in found.values() for row in rows for value in row]


def _tasks(settings: RulerSettings) -> tuple[str, ...]:
    """Return the tasks in the table's order; all by default."""
    return tuple(name for name in TASKS if settings.ruler_tasks is None or name in settings.ruler_tasks)


def _prompts(subject: Subject) -> dict[tuple[str, int], list[RulerPrompt]]:
    """Return the prompts by task and length.

    By default, lengths without room for every task are left out where a longer one is left, and tasks without
    room in a length that is left.

    Raises:
        InvalidInput: a length exceeds a model's positions or has no room for a task.
    """
    settings, student = subject.asked(RulerSettings), subject.described("student")
    seed, samples = settings.ruler_seed, settings.ruler_samples
    tasks, lengths = _tasks(settings), _lengths(subject)
    generator = RulerTasks(student.path, student.tokenizer)
    found, refused = dict[tuple[str, int], list[RulerPrompt]](), set[tuple[str, int]]()
    for task in tasks:
        for length in lengths:
            try:
                drawn = [generator.sample(task, length, f"{seed}/{n}") for n in range(samples)]
            except NoRoom:
                refused.add((task, length))
            else:
                found[task, length] = drawn
    if settings.ruler_lengths is None:
        short = {length for _, length in refused} - {lengths[-1]}
        lengths = [length for length in lengths if length not in short]
    # Each task with the longest of the lengths that have no room for it.
    without = {task: length for length in lengths for task in tasks if (task, length) in refused}
    if without and (settings.ruler_tasks is not None or len(without) == len(tasks)):
        wanting = {length: [task for task in tasks if without.get(task) == length] for length in lengths}
        raise no_room(
            student.path,
            {length: names for length, names in wanting.items() if names},
            is_default=settings.ruler_lengths is None,
            positions=subject.limit.positions,
        )
    return {
        (task, length): drawn
        for (task, length), drawn in found.items()
        if length in lengths and task not in without
    }


def _lengths(subject: Subject) -> list[int]:
    """Return the lengths asked for; by default half and all of every model's positions, up to `LONGEST`."""
    limit = subject.limit
    asked = subject.asked(RulerSettings).ruler_lengths
    if asked is None:
        most = min(limit.positions or LONGEST, LONGEST)
        return [most // 2, most]
    limit.check(f"--ruler-lengths {asked[-1]}", asked[-1])
    return list(asked)
