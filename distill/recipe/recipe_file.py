"""Recipe files: YAML with overrides, and mistakes in them reported in one sentence."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import InvalidInput
from ...core.settings import Settings, description_of, names_of
from ...core.untrusted import parse_yaml, read_yaml
from .data_section import Data, TextSource
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
SECTIONS: dict[str, type[Settings]] = {
    "": Recipe, "data": Data, "data.source": TextSource, "stages": Stage, "stages.lora": Lora, "save": Save,
    "evaluate": Evaluate,
}  # fmt: skip


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
    content = read_yaml(file)
    for override in overrides:
        _override(content, override)
    return Recipe.read(content, _OTHER_NAMES, file.name, SECTIONS)


def as_recipe(recipe: str | Path | Recipe | Mapping[str, Any]) -> Recipe:
    """Return a recipe from a YAML file, a mapping of a recipe's keys, or a recipe.

    A mapping may have paths where a file has their texts.

    Raises:
        InvalidInput: it is none of these, or something in it cannot be used.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe == "":
        raise InvalidInput("recipe is empty; name a file")
    if isinstance(recipe, str | Path):
        return read_recipe(Path(recipe).expanduser())
    if isinstance(recipe, Mapping):
        return Recipe.read(_plain(recipe), _OTHER_NAMES, "recipe", SECTIONS)
    raise InvalidInput(f"the recipe is a {type(recipe).__name__}; it should be a file, a Recipe or a mapping")


def _plain(value: Any) -> Any:
    """Return a value of Python as a recipe file would have it: a path at any depth becomes its text."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def describe_key(key: str) -> str:
    """Return the meaning of a key of a resolved recipe, such as `stages[0].losses.kl`.

    It is the description of the nearest documented key.
    """
    parts = re.sub(r"\[\d+\]", "", key).split(".")
    for size in range(len(parts), 0, -1):
        section, name = ".".join(parts[: size - 1]), parts[size - 1]
        if section in SECTIONS and name in names_of(SECTIONS[section]):
            return description_of(SECTIONS[section], name)
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
        found = parse_yaml(value, f"--set {key}", top=None, unique_keys=True)
        place[int(last) if isinstance(place, list) else last] = found
    except InvalidInput:
        raise
    except (ValueError, IndexError, TypeError, AttributeError):
        raise InvalidInput(
            f"--set {key}: the recipe has no such key; lists are numbered from 0, as in stages.0.lr"
        ) from None
