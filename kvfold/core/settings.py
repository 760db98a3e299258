"""Settings that pydantic checks, and a mistake in them as one sentence."""

import difflib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from .errors import InvalidInput
from .untrusted import shorten

LARGEST_SEED = 2**63 - 1  # that torch takes
# Of tokens, sequences, ranks and all that names no other maximum; products of more are of no use.
LARGEST_COUNT = 10**9

T = TypeVar("T", bound="Settings")


class Settings(BaseModel):
    """A frozen set of named values; an unknown name is a mistake, and a docstring describes each value."""

    # What checks values is built when the first are checked: `--help` and imports need the fields alone.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, defer_build=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: object, info: ValidationInfo) -> object:
        parts = _parts(cls.model_fields[str(info.field_name)].annotation)
        if int in parts and not isinstance(value, int) and isinstance(value, Integral):  # of numpy
            return int(value)
        if bool in parts or not (int in parts or float in parts):  # pydantic reads true as 1
            return value
        reason = _KINDS["int" if int in parts else "float"]
        for name, each in value.items() if isinstance(value, Mapping) else ():
            if isinstance(each, bool):
                raise ValueError(f"{name} is {each}; {reason}")
        if any(isinstance(each, bool) for each in (value if isinstance(value, list | tuple) else [value])):
            raise ValueError(reason)
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _counts_have_a_maximum(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[str(info.field_name)]
        inner = [part.metadata for part in _parts(field.annotation) if isinstance(part, FieldInfo)]
        has_maximum = any(hasattr(one, "le") for one in [*field.metadata, *itertools.chain(*inner)])
        if type(value) is int and value > LARGEST_COUNT and not has_maximum:
            raise ValueError(f"it should be less than or equal to {LARGEST_COUNT}")
        return value

    @classmethod
    def read(
        cls,
        values: Mapping[str, Any],
        other_names: Mapping[str, str] = MappingProxyType({}),
        where: str = "",
        sections: "Mapping[str, type[Settings]]" = MappingProxyType({}),
        called: Callable[[str], str] = str,
    ) -> Self:
        """Return checked settings.

        Args:
            values: by the names of the fields.
            other_names: names that other programs give to some of the fields.
            where: the name of the file that the values come from.
            sections: the settings that are fields of these ones, by dotted name without indices.
            called: returns what the user knows a field as, such as the option of a command.

        Raises:
            InvalidInput: names the field, its value and what would be right.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            noun = "key" if where else "name"
            sentence = sentence_of(error, {"": cls, **sections}, other_names, noun, called)
            raise InvalidInput(f"{where}: {sentence}" if where else sentence) from None

    def part(self, kind: type[T]) -> T:
        """Return the fields of one of the classes that these settings derive from."""
        return kind.model_construct(**{name: getattr(self, name) for name in kind.model_fields})


def _parts(kind: object) -> list[object]:
    return [kind, *(part for argument in get_args(kind) for part in _parts(argument))]


def names_of(settings: type[Settings]) -> list[str]:
    """Return the names of all fields as a user writes them."""
    return [field.alias or name for name, field in settings.model_fields.items()]


def description_of(settings: type[Settings], name: str) -> str:
    """Return the meaning of a field, on one line."""
    fields = dict(zip(names_of(settings), settings.model_fields.values(), strict=True))
    return " ".join((fields[name].description or "").split())


def suggest(
    name: str, known: Iterable[str], other_names: Mapping[str, str], belongs_in: Sequence[str] = ()
) -> str:
    """Return half a sentence about an unknown name.

    Args:
        name: the unknown name.
        known: the names that would be right.
        other_names: names that other programs give to some of them.
        belongs_in: all places that have such a name.

    Returns:
        The known name nearest to `name`, or else the places, or else all known names.
    """
    known = list(known)
    names = {other: own for other, own in other_names.items() if own in known}
    names |= {own: own for own in known}
    match = difflib.get_close_matches(name, names, n=1)
    if match:
        return f"did you mean {names[match[0]]!r}?"
    if belongs_in:
        return f"it belongs in {' or '.join(belongs_in)}"
    return f"known: {', '.join(known)}" if known else "none is taken here"


# By the kind of value that pydantic names in the type of an error, such as `float_parsing` and `float_type`.
_KINDS = {
    "float": "it should be a number",
    "int": "it should be a whole number",
    "bool": "it should be true or false",
    "string": "it should be text",
    "tuple": "it should be a list",
    "path": "it should be a path",
}


def reason_of(kind: str, message: str) -> str:
    """Return what pydantic's error says that a value should be, in plain words.

    `kind` is pydantic's type of the error, such as `float_parsing`.
    """
    wanted = _KINDS.get(kind.partition("_")[0])
    if wanted and kind.endswith(("_parsing", "_type", "_from_float")):
        return wanted
    return {
        "model_type": "it should be a mapping of keys to values",
        "value_error": message.removeprefix("Value error, "),
        "string_pattern_mismatch": "it should consist of letters, digits and _.+-, as a file name",
        "string_too_short": "it should not be empty",
        "too_short": "it should have at least one entry",
    }.get(kind, message.replace("Input should", "it should"))


def sentence_of(
    errors: ValidationError,
    sections: Mapping[str, type[Settings]],
    other_names: Mapping[str, str] = MappingProxyType({}),
    noun: str = "name",
    called: Callable[[str], str] = str,
) -> str:
    """Return the worst mistake; an unknown name comes first, since it is often why another one is missing."""
    error = min(errors.errors(), key=lambda found: found["type"] != "extra_forbidden")
    location = error["loc"][:-2] if "[key]" in error["loc"] else error["loc"]
    location = tuple(part for part in location if not str(part).startswith("<"))  # tags of unions
    is_section = isinstance(error["input"], dict)
    if len(location) == 2 and isinstance(location[1], int) and not is_section:  # a list with commas
        location = location[:1]
    *parents, name = location or ("",)
    spelled = (called(str(part)) if number == 0 else part for number, part in enumerate(location))
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in spelled)
    place = place.removeprefix(".")
    section = ".".join(part for part in parents if isinstance(part, str))
    if error["type"] == "extra_forbidden":
        where = f" in {place.rpartition('.')[0]}" if parents else ""
        homes = [other for other, settings in sections.items() if other and name in names_of(settings)]
        known = names_of(sections[section])
        hint = suggest(str(name), known, other_names, homes)
        return f"unknown {noun} {shorten(name)}{where}; {hint}"
    if error["type"] == "missing":
        wanted = description_of(sections[section], str(name))
        kind = sections[section].model_fields[str(name)].annotation if section == "" else None
        if get_origin(kind) is Literal:
            wanted = f"{wanted.removesuffix('.')}; choose from {', '.join(get_args(kind))}"
        return f"{place} is missing: {wanted}"
    reason = reason_of(error["type"], error["msg"])
    if error["type"] == "value_error" and isinstance(error["input"], dict):  # a mistake in a whole section
        return f"{place}: {reason}" if place else reason
    value = str(error["input"]) if isinstance(error["input"], Path) else error["input"]
    return f"{place} is {shorten(value, 200)}; {reason}" if place else reason
