"""A whole evaluation as a user asks for it, and its result."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
from pydantic import ValidationError

from ..checkpoints.record import folded_parent, is_distilled, read_record, source_directory
from ..core.console import is_first, notice
from ..core.disk import check_outside
from ..core.errors import InvalidInput
from ..core.hub import local_directory, resolve
from ..core.processes import together
from ..core.settings import LARGEST_COUNT, LARGEST_SEED, reason_of, refuse_excess, refuse_text, refuse_truth
from ..core.type_adapters import type_adapter
from ..core.units import ByteSize, bytes_of
from ..core.untrusted import shorten
from ..core.work import WorkDir
from ..models.load_options import DEVICE_MAPS, DEVICES, DTYPES
from ..texts.corpus import read_text
from .assertions import Assertion, check_models
from .options import Options
from .result import Result
from .run import evaluate, reserved
from .suites.catalogue import DEFAULT, SUITES, check_settings, chosen

_LEAST = {"window": 2, "max_windows": 1, "batch_size": 1}
_CHOICES = {"device": DEVICES, "dtype": DTYPES, "device_map": DEVICE_MAPS}


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """An evaluation as a user asks for it.

    Attributes:
        model: the checkpoint, a directory or a Hub id.
        teacher: the model to compare with; None: the source named in kvfold.json.
        text: a protocol, a file or `stdlib`; None for suites that read none.
        rows: a file of WikiText-2's rows, in place of the Hub's.
        suites: names of `SUITES`.
        settings: values of the suites' own options, by their names.
        options: how to load and how to cut.
        assertions: that the caller will check on the result.
    """

    model: str
    teacher: str | None = None
    text: str | None = None
    rows: Path | None = None
    suites: tuple[str, ...] = DEFAULT
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Options = field(default_factory=Options)
    assertions: tuple[Assertion, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a missing text, options of weights that have no effect, and counts that are too large."""
        _check_counts({**self.settings, **vars(self.options)})
        reading = [name for name in self.suites if SUITES[name].reads_text]
        if self.text is None and reading:
            told = f"the suites {', '.join(reading)} read a text; choose one with --text, for example stdlib"
            if local_directory(self.model) is None:
                told = f"{self.model} is not a directory here; if it is a Hub id, {told}"
            raise InvalidInput(told)
        for name in ("offload_dir", "cpu_memory"):
            if getattr(self.options, name) is not None and self.options.device_map != "auto":
                raise InvalidInput(
                    f"--{name.replace('_', '-')} has no effect without --device-map auto; add that option"
                )
        if self.options.device_map == "auto" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InvalidInput(
                "--device-map auto uses all devices in one process; start kvfold without a launcher"
            )


def measure(request: EvalRequest, journal: WorkDir) -> Result:
    """Return what the suites of a request find.

    Args:
        request: what to measure.
        journal: what an interrupted evaluation of the same has measured already.

    Raises:
        InvalidInput: a checkpoint or the text cannot be used, a suite refuses, or an assertion is about a
            model that is missing.
    """
    with together():
        content = None if request.text is None else read_text(request.text, request.rows)
        student = resolve(request.model)
        source = source_directory(student) if request.teacher is None else resolve(request.teacher)
        if source is None:
            notice(
                f"{student} has no kvfold.json that names a teacher; choose one with --teacher to compare "
                "with it"
            )
        parent = folded_parent(student)
        check_outside(_kept(request), (student, source, parent))
        check_models(request.assertions, _missing(student, source, parent))
    return evaluate(
        student,
        source,
        content,
        request.options,
        parent,
        suites=request.suites,
        settings=request.settings,
        journal=journal,
    )


def _kept(request: EvalRequest) -> dict[str, Path | None]:
    """Return the directories in which an evaluation keeps files, by their options."""
    options = request.options
    return {
        "--teacher-cache": options.teacher_cache,
        "--offload-dir": options.offload_dir,
        "--task-cache": request.settings.get("task_cache"),
    }


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


def _check_counts(given: Mapping[str, Any]) -> None:
    """Check that no whole number is above the largest of use.

    Args:
        given: values by the names of options.

    Raises:
        InvalidInput: one is larger.
    """
    for name, value in given.items():
        is_large = name.endswith(("memory", "seed"))
        try:
            refuse_excess(value, LARGEST_SEED if is_large else LARGEST_COUNT)
        except ValueError as mistake:
            raise InvalidInput(f"--{name.replace('_', '-')} {shorten(value)}: {mistake}") from None


def eval_request(
    model: str | Path,
    text: str | Path | None,
    suites: Sequence[str],
    teacher: str | Path | None,
    given: Mapping[str, Any],
) -> EvalRequest:
    """Return a request from values of Python.

    Args:
        model: the checkpoint, a directory or a Hub id.
        text: a protocol, a file or `stdlib`; None for suites that read none.
        suites: names of `SUITES`.
        teacher: the model to compare with; None: the source named in kvfold.json.
        given: values by names of `option_names`.

    Raises:
        InvalidInput: a suite is unknown, or a value is unusable.
    """
    names = chosen(",".join(suites))
    given = dict(given)
    rows = given.pop("rows", None)
    if not isinstance(rows, str | Path | None):
        raise InvalidInput(f"rows is {shorten(rows)}; it should be a path")
    if given.get("cpu_memory") is not None:
        given["cpu_memory"] = bytes_of(given["cpu_memory"], "cpu_memory")
    known = [one.name for one in fields(Options)]
    return EvalRequest(
        model=str(model),
        teacher=None if teacher is None else str(teacher),
        text=None if text is None else str(text),
        rows=None if rows is None else Path(rows).expanduser(),
        suites=names,
        settings=read_settings(names, {name: given[name] for name in given if name not in known}),
        options=_read_options({name: given[name] for name in given if name in known}),
    )


def option_names() -> list[str]:
    """Return the fields of `Options`, `rows`, and the suites' own options."""
    own = [str(option.name) for suite in SUITES.values() for option in suite.options]
    return [*(one.name for one in fields(Options)), "rows", *own]


def _read_options(given: Mapping[str, Any]) -> Options:
    """Return options whose values are what the command would accept."""
    kinds = get_type_hints(Options)
    for option, value in given.items():
        refuse_text(option, value, kinds[option])
        try:
            refuse_truth(value, kinds[option])
        except ValueError as mistake:
            raise InvalidInput(f"{option} is {shorten(value)}; {mistake}") from None
    paths = {name for name in given if Path in get_args(kinds[name])}
    try:
        options = type_adapter(Options).validate_python(
            {name: _in_home(value) if name in paths else value for name, value in given.items()}
        )
    except ValidationError as error:
        first = error.errors()[0]
        reason = reason_of(first["type"], first["msg"])
        if not first["loc"]:  # a mistake that `Options` itself finds, whose sentence has the value
            raise InvalidInput(reason) from None
        raise InvalidInput(f"{first['loc'][0]} is {shorten(first['input'])}; {reason}") from None
    for name, least in _LEAST.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise InvalidInput(f"{name} is {shorten(value)}; it should be at least {least}")
    for name, choices in _CHOICES.items():
        value = getattr(options, name)
        if value not in choices:
            raise InvalidInput(f"{name} is {shorten(value)}; it should be one of {', '.join(choices)}")
    return options


def _in_home(value: object) -> object:
    """Return a path with the home directory for `~`, as a shell gives it; other values as they are."""
    return os.path.expanduser(value) if isinstance(value, str | Path) else value


def read_settings(suites: tuple[str, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every suite's own options, read as the command reads them.

    Args:
        suites: those that are run.
        given: values by the options' names; those that are None or missing have their defaults.

    Raises:
        InvalidInput: an option belongs to no chosen suite, or its value is unusable.
    """
    given = {name: value for name, value in given.items() if value is not None}
    check_settings(suites, list(given))
    options = [option for suite in SUITES.values() for option in suite.options]
    words = []
    for option in options:
        value = given.get(str(option.name))
        if isinstance(option.type, click.types.IntParamType):
            refuse_text(str(option.name), value, int)
        if option.is_flag:
            words += [option.opts[0]] if value else []
        elif value is not None:
            values = list(value) if isinstance(value, list | tuple) else [value]
            texts = [str(_in_home(one) if isinstance(option.type, click.Path) else one) for one in values]
            for text in texts if option.multiple else [",".join(texts)]:
                words += [option.opts[0], text]
    try:
        context = click.Command("eval", params=list(options)).make_context("eval", words)
    except click.BadParameter as mistake:
        wrong: Any = mistake.param
        raise InvalidInput(
            f"{wrong.name} is {shorten(given[wrong.name])}; it should be {_wanted(wrong.type)}"
        ) from None
    except click.UsageError as mistake:
        raise InvalidInput(mistake.format_message()) from None
    return dict(context.params)


def _wanted(kind: object) -> str:
    """Return what a value of a suite's option should be."""
    if isinstance(kind, ByteSize):
        return "a size, for example 500MB or 5GB"
    number = "a number" if isinstance(kind, click.FloatRange) else "a whole number"
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return number
    if kind.max is not None:
        return f"{number} from {kind.min} to {kind.max}"
    return f"{number} {'above' if kind.min_open else 'of at least'} {kind.min}"


def run_request(request: EvalRequest, out: Path | None) -> Result:
    """Return what the suites of a request find, and write it to a file where one is named.

    Args:
        request: what to measure.
        out: the JSON report, from which an interrupted evaluation is resumed; None for none.

    Raises:
        InvalidInput: as `measure`; or the file exists, or cannot be written.
    """
    with ExitStack() as stack:
        with together():
            reserving = reserved(out) if out is not None and is_first() else nullcontext((WorkDir(), None))
            journal, write = stack.enter_context(reserving)
        result = measure(request, journal)
        if write is not None:
            write(result.to_text())
    return result
