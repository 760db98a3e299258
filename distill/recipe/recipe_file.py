"""Recipe files: YAML with overrides, and mistakes in them reported in one sentence."""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ...core.errors import InvalidInput
from .data_section import Data, RecipeSection, TextSource
from .recipe import Lora, Recipe, Save, Stage
from .watch_section import Evaluate

# Names that other trainers give to the keys.
_OTHER_NAMES = {
    "learning_rate": "lr", "batch_size": "batch_tokens", "micro_batch_size": "micro_batch",
    "max_tokens": "tokens",
    "max_grad_norm": "grad_clip", "lr_scheduler": "schedule", "warmup_steps": "warmup",
    "sequence_length": "seq_len",
    "block_size": "seq_len", "dataset": "source", "text_column": "text_field",
    "messages_column": "messages_field",
    "conversations": "messages_field", "pack": "packing", "probability": "weight", "ratio": "weight",
    "subset": "name",
    "text": "text_field", "messages": "messages_field", "model": "student", "out": "output",
    "output_dir": "output",
    "save_steps": "every", "logging_steps": "log_every", "dtype": "precision", "eval": "evaluate",
    "validation": "evaluate",
    "eval_steps": "every", "report_to": "trackers", "log_with": "trackers",
}  # fmt: skip
_SECTIONS: dict[str, type[RecipeSection]] = {
    "": Recipe, "data": Data, "data.source": TextSource, "stages": Stage, "stages.lora": Lora, "save": Save,
    "evaluate": Evaluate,
}  # fmt: skip
_TAGS = {"<text>", "<mixture>"}  # the two forms of data.source, as they appear in errors


def read_recipe(file: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        file: YAML.
        overrides: `key=value` with a dotted key such as `stages.0.lr=1e-4`; values are YAML.

    Returns:
        The checked recipe.

    Raises:
        InvalidInput: names the key, its value and a value that would be right.
    """
    content = read_content(file)
    for override in overrides:
        _override(content, override)
    return check_recipe(content, file.name)


def as_recipe(recipe: str | Path | Recipe | Mapping[str, Any]) -> Recipe:
    """Return a recipe from a YAML file, a mapping of a recipe's keys, or a recipe.

    Raises:
        InvalidInput: it is none of these, or something in it cannot be used.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str | Path):
        return read_recipe(Path(recipe))
    if isinstance(recipe, Mapping):
        return check_recipe(recipe, "recipe")
    raise InvalidInput(f"the recipe is a {type(recipe).__name__}; it should be a file, a Recipe or a mapping")


def check_recipe(content: Mapping[str, Any], name: str) -> Recipe:
    """Return the recipe that plain values describe.

    Args:
        content: what a recipe's file holds.
        name: of the file, or of what stands for it.

    Raises:
        InvalidInput: names the key, its value and what would be right.
    """
    try:
        return Recipe.model_validate(dict(content))
    except ValidationError as error:
        raise InvalidInput(f"{name}: {_sentence(error)}") from None


def read_content(file: Path) -> dict[str, Any]:
    """Return the content of a recipe file, unchecked.

    Raises:
        InvalidInput: it is not a YAML mapping.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise InvalidInput(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise InvalidInput(f"{file} is not a recipe; it should be a mapping that starts with schema: 1")
    return content


def describe_key(key: str) -> str:
    """Return the meaning of a key of a resolved recipe, such as `stages[0].losses.kl`.

    It is the description of the nearest documented key.
    """
    parts = re.sub(r"\[\d+\]", "", key).split(".")
    for size in range(len(parts), 0, -1):
        section, name = ".".join(parts[: size - 1]), parts[size - 1]
        if section in _SECTIONS and name in _keys(_SECTIONS[section]):
            return _description(_SECTIONS[section], name)
    raise KeyError(key)


def _override(content: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    *parents, last = key.split(".")
    if not equals or not last:
        raise InvalidInput(f"--set {override} should be key=value, such as --set stages.0.lr=1e-4")
    place: Any = content
    try:
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        place[int(last) if isinstance(place, list) else last] = yaml.safe_load(value)
    except (ValueError, IndexError, TypeError, AttributeError):
        raise InvalidInput(
            f"--set {key}: the recipe has no such key; lists are numbered from 0, as in stages.0.lr"
        ) from None
    except yaml.YAMLError:
        raise InvalidInput(f"--set {key}: {value!r} is not a YAML value") from None


def _sentence(errors: ValidationError) -> str:
    """Return the worst error as one sentence.

    An unknown key comes first, since it is often why another key is missing.
    """
    error = min(errors.errors(), key=lambda error: error["type"] != "extra_forbidden")
    location = error["loc"][:-2] if "[key]" in error["loc"] else error["loc"]
    location = tuple(part for part in location if part not in _TAGS)
    *parents, key = location or ("",)
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(
        "."
    )
    section = ".".join(part for part in parents if isinstance(part, str))
    if error["type"] == "extra_forbidden":
        where = f" in {place.rpartition('.')[0]}" if parents else ""
        return f"unknown key {key!r}{where}; {_suggestion(str(key), section)}"
    if error["type"] == "missing":
        return f"{place} is missing: {_description(_SECTIONS[section], str(key))}"
    reason = {
        "model_type": "it should be a mapping of keys to values",
        "value_error": error["msg"].removeprefix("Value error, "),
        "string_pattern_mismatch": "it should consist of letters, digits and _.+-, as a file name",
        "too_short": "it should have at least one entry",
    }.get(error["type"], error["msg"].replace("Input should", "it should"))
    if error["type"] == "value_error" and isinstance(error["input"], dict):  # a mistake in a whole section
        return f"{place}: {reason}" if place else reason
    return f"{place} is {error['input']!r}; {reason}" if place else reason


def _suggestion(key: str, section: str) -> str:
    known = _keys(_SECTIONS[section])
    names = {
        **{other: name for other, name in _OTHER_NAMES.items() if name in known},
        **{name: name for name in known},
    }
    match = difflib.get_close_matches(key, names, n=1)
    if match:
        return f"did you mean {names[match[0]]!r}?"
    elsewhere = [other for other, fields in _SECTIONS.items() if other and key in _keys(fields)]
    return f"it belongs in {elsewhere[0]}" if elsewhere else f"known: {', '.join(known)}"


def _keys(section: type[RecipeSection]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def _description(section: type[RecipeSection], key: str) -> str:
    fields = {field.alias or name: field for name, field in section.model_fields.items()}
    return " ".join((fields[key].description or "").split())
