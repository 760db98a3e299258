"""Options of a command, made from the fields of its settings.

A field says everything once: its type and bounds, its default, and its meaning, in which other fields stand
in backticks. `takes` makes click options of it, `read_options` gives the settings what a user wrote.
"""

import re
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from .settings import LARGEST_COUNT, Settings

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Option:
    """An annotation of a field whose name or type does not say how its option is written.

    Attributes:
        name: such as `--engine`; empty: the field's name with dashes.
        metavar: what the value is called in the help; None: click's word for the type.
        written: writes a default as a user would.
        repeated: whether the option may be given several times.
    """

    name: str = ""
    metavar: str | None = None
    written: Callable[[Any], str] = str
    repeated: bool = False


def takes(settings: type[Settings], without: Collection[str] = ()) -> Callable[[F], F]:
    """Return a decorator that gives a command an option for each field of its settings, required ones first.

    No option is made for the fields named in `without`: the command does not have them, or defines its own.
    """
    known = settings.model_fields
    names = sorted(
        (name for name in known if name not in without), key=lambda name: not known[name].is_required()
    )

    def decorate(function: F) -> F:
        made: list[click.Parameter] = function.__dict__.setdefault("__click_params__", [])
        made.extend(_option(settings, name) for name in reversed(names))
        return function

    return decorate


def read_options(settings: type[S], options: Mapping[str, Any], **more: Any) -> S:
    """Return the settings that the command line asks for; mistakes name options.

    `more` gives fields that the command reads from its arguments instead of options.

    Raises:
        InvalidInput: names the option, its value and what would be right.
    """
    command = click.get_current_context().command
    arguments = {each.name for each in command.params if isinstance(each, click.Argument)}

    def called(name: str) -> str:
        return name.upper() if name in arguments else option_name(settings, name)

    return settings.read({**given(options), **more}, called=called)


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are on the command line of the command that runs, without defaults."""
    source, default = click.get_current_context().get_parameter_source, click.core.ParameterSource.DEFAULT
    return {name: value for name, value in options.items() if source(name) != default}


def option_name(settings: type[Settings], name: str) -> str:
    """Return the option of a field, such as `--kv-budget`; what is no field is returned as it is."""
    if name not in settings.model_fields:
        return name
    spelled = _spelling(_metadata(settings.model_fields[name])).name
    return spelled.partition("/")[0] or f"--{name.replace('_', '-')}"


def words_of(settings: type[Settings], values: Mapping[str, Any]) -> list[str]:
    """Return values as a command line has them: an option each, and lists with commas."""
    words: list[str] = []
    for name, value in values.items():
        words.append(option_name(settings, name))
        if value is not True:
            words.append(",".join(map(str, value)) if isinstance(value, list | tuple) else str(value))
    return words


def meaning(field: FieldInfo) -> tuple[str, str]:
    """Return the meaning of a field on one line, and the default that its last sentence explains, if any."""
    words, _, default = " ".join((field.description or "").split()).partition(" Default: ")
    return words, default.removesuffix(".")


def _option(settings: type[Settings], name: str) -> click.Option:
    field = settings.model_fields[name]
    metadata = _metadata(field)
    kind, spelled = _kind(field.annotation), _spelling(metadata)
    if spelled.repeated:
        kind = _kind(get_args(kind)[0])
    text = " ".join((field.description or "").split())
    others = settings.model_fields.keys() - {name}
    text = re.sub(
        r"`(\w+)`", lambda found: option_name(settings, found[1]) if found[1] in others else found[0], text
    )
    if field.is_required():
        text = f"{text.removesuffix('.')} (required)."
    if get_origin(kind) is tuple and get_origin(get_args(kind)[0]) is Literal:
        words, explained, default = text.partition(" Default: ")
        text = f"{words} Known: {', '.join(get_args(get_args(kind)[0]))}.{explained}{default}"
    names = [spelled.name or f"--{name.replace('_', '-')}", name]
    if kind is bool and field.default is None and not spelled.name:
        names[0] += f"/--no-{name.replace('_', '-')}"
    if kind is bool:
        return click.Option(names, is_flag=True, default=field.default, help=text)
    shown: Any = None if field.is_required() else field.default
    if isinstance(shown, tuple):
        shown = shown if spelled.repeated else ",".join(map(spelled.written, shown)) or None
    elif shown is not None:
        shown = spelled.written(shown)
    return click.Option(
        names,
        type=_click_type(kind, metadata),
        default=shown,
        show_default=shown is not None,
        metavar=spelled.metavar,
        multiple=spelled.repeated,
        help=text,
    )


def _click_type(kind: Any, metadata: list[Any]) -> Any:
    """Return the type that click checks; what a field's own validator reads stays a text."""
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if kind is Path:
        return click.Path(path_type=Path)
    if kind not in (int, float) or any(isinstance(part, BeforeValidator) for part in metadata):
        return click.STRING
    bounds: dict[str, Any] = {}
    for part in metadata:
        if hasattr(part, "gt"):
            bounds |= {"min": part.gt, "min_open": True}
        elif hasattr(part, "ge"):
            bounds |= {"min": part.ge}
        elif hasattr(part, "le") and part.le < LARGEST_COUNT:
            bounds |= {"max": part.le}
    if not bounds:
        return click.INT if kind is int else click.FLOAT
    return click.IntRange(**bounds) if kind is int else click.FloatRange(**bounds)


def _spelling(metadata: list[Any]) -> Option:
    """Return what the annotations of a field say together; a later one replaces what an earlier one says."""
    said: dict[str, Any] = {}
    for part in metadata:
        if isinstance(part, Option):
            said |= {name: value for name, value in vars(part).items() if value != getattr(Option, name)}
    return Option(**said)


def _metadata(field: FieldInfo) -> list[Any]:
    found: list[Any] = []
    waiting: list[Any] = [field.annotation]
    while waiting:
        kind = waiting.pop()
        for part in getattr(kind, "__metadata__", ()):
            found += part.metadata if isinstance(part, FieldInfo) else [part]
        if get_origin(kind) in (Union, types.UnionType) or hasattr(kind, "__metadata__"):
            waiting += get_args(kind)[: 1 if hasattr(kind, "__metadata__") else None]
    return [*found, *field.metadata]


def _kind(annotation: Any) -> Any:
    if hasattr(annotation, "__metadata__"):
        return _kind(annotation.__origin__)
    if get_origin(annotation) in (Union, types.UnionType):
        return next(_kind(part) for part in get_args(annotation) if part is not type(None))
    return annotation
