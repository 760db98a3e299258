"""Settings that pydantic checks, and a mistake in them as one sentence."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import InvalidInput


class Settings(BaseModel):
    """A frozen set of named values; an unknown name is a mistake, and a docstring describes each value."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @classmethod
    def read(
        cls, values: Mapping[str, Any], other_names: Mapping[str, str] = MappingProxyType({}), where: str = ""
    ) -> Self:
        """Return checked settings.

        Args:
            values: by the names of the fields.
            other_names: names that other programs give to some of the fields.
            where: the name of the file that the values come from.

        Raises:
            InvalidInput: names the field, its value and what would be right.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            sentence = _sentence(error, cls, other_names)
            raise InvalidInput(f"{where}: {sentence}" if where else sentence) from None


def read_yaml(file: Path, what: str) -> dict[str, Any]:
    """Return the mapping that a YAML or JSON file holds.

    Args:
        file: the file.
        what: what it should hold, for the sentence.

    Raises:
        InvalidInput: it cannot be read, or holds no mapping.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise InvalidInput(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise InvalidInput(f"{file} holds no {what}; it should be a mapping of names to values")
    return content


def suggest(name: str, known: Iterable[str], other_names: Mapping[str, str]) -> str:
    """Return half a sentence that names the known name nearest to `name`, or all of them."""
    known = list(known)
    names = {other: own for other, own in other_names.items() if own in known}
    names |= {own: own for own in known}
    match = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {names[match[0]]!r}?" if match else f"known: {', '.join(known)}"


def _sentence(error: ValidationError, settings: type[Settings], other_names: Mapping[str, str]) -> str:
    """Return the worst mistake; an unknown name comes first, since it is why another one is missing."""
    worst = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    name = ".".join(map(str, worst["loc"]))
    if worst["type"] == "extra_forbidden":
        return f"unknown name {name!r}; {suggest(name, settings.model_fields, other_names)}"
    if worst["type"] == "missing":
        description = settings.model_fields[name].description or ""
        return f"{name} is missing: {' '.join(description.split())}"
    reason = worst["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return f"{name} is {worst['input']!r}; {reason}" if name else reason
