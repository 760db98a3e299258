"""A whole evaluation in this process: the models by role, and each suite in turn."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..core.console import is_first
from ..core.processes import together
from ..texts.corpus import Text
from .evaluation_journal import Journal
from .options import Options
from .result import SCHEMA, Finding, Protocol, Result
from .subject import Subject, versions
from .suites.catalogue import DEFAULT, SUITES


def evaluate(
    student: Path,
    teacher: Path | None,
    text: Text | None,
    options: Options,
    parent: Path | None = None,
    *,
    suites: Sequence[str] = DEFAULT,
    settings: Mapping[str, Any] | None = None,
    journal: Journal | None = None,
) -> Result:
    """Measure a checkpoint, and where given its teacher and its folded parent, on the same windows of one
    text.

    Args:
        student: the checkpoint.
        teacher: the checkpoint it is compared with; None: only its own numbers.
        text: what is read; None for suites that read none.
        options: how to load and how to cut.
        parent: the converted checkpoint that `student` was distilled from, needed for the recovered share.
        suites: names of `SUITES`.
        settings: values of the suites' own options, by their names.
        journal: what an interrupted evaluation of the same has measured already.

    Returns:
        What was found; in all processes but a launcher's first one without the suites that one process
        measures alone.

    Raises:
        InvalidInput: a checkpoint cannot be loaded, two cannot be compared, the text does not suit the
        windows, a model's
            logits are not finite, or what a suite refuses.
    """
    measures = _measures(suites, settings or {})
    paths = {"student": student, "teacher": teacher, "parent": parent}
    given = {role: path for role, path in paths.items() if path is not None}
    subject = Subject(given, options, text, settings, journal)
    if text is not None:
        _ = subject.windows  # by all processes together, and before any of them works alone
    found = {name: measure(subject) for name, measure in measures.items() if SUITES[name].shared}
    with together():
        if is_first():
            found |= {name: measure(subject) for name, measure in measures.items() if not SUITES[name].shared}
    return Result(
        schema=SCHEMA,
        checkpoint=subject.checkpoints["student"],
        teacher=subject.checkpoints.get("teacher"),
        parent=subject.checkpoints.get("parent"),
        protocol=_protocol(subject) if any(SUITES[name].reads_text for name in suites) else None,
        suites={name: found[name] for name in suites if name in found},
        device=subject.device,
        versions=versions(),
    )


def _measures(
    suites: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, Callable[[Subject], Finding | None]]:
    """What measures each suite, once it has found its settings to be right."""
    modules = {name: import_module(f".suites.{SUITES[name].module}", __package__) for name in suites}
    for module in modules.values():
        if hasattr(module, "check"):
            module.check(settings)
    return {name: module.measure for name, module in modules.items()}


def _protocol(subject: Subject) -> Protocol:
    windows, text = subject.windows, subject.text
    assert text is not None
    count, scored = len(windows.ids_NW), int(windows.scored_NT.sum())
    return Protocol(windows.name, text.sha256, windows.length, count, windows.bos, scored, windows.bytes)
