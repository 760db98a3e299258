"""Recipe files and folds as recipes, with overrides, and mistakes in them reported in one sentence."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import InvalidInput
from ...core.settings import Settings, description_of, names_of
from ...core.untrusted import parse_yaml, read_yaml
from .data_section import Data, TextSource
from .default_recipe import default_rate, default_recipe, weights_of
from .recipe import Evaluate, Lora, Recipe, Save, Stage

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


def read_content(file: Path) -> dict[str, Any]:
    """Return the keys that a recipe gives: those of a YAML file, or of the default recipe of a fold.

    Raises:
        InvalidInput: the file is no YAML of one mapping, or the directory is no fold.
    """
    return default_recipe(file) if file.is_dir() else read_yaml(file)


def as_recipe(
    recipe: str | Path | Recipe | Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> Recipe:
    """Return a recipe from a YAML file, a fold, a mapping of a recipe's keys, or a recipe.

    A mapping may have paths where a file has their texts. `settings` has values that replace the recipe's
    own, by dotted names such as `stages.0.lr`, and so have `overrides`: `stages.0.lr=1e-4`, values as YAML.

    Raises:
        InvalidInput: it is none of these, or something in it cannot be used: names the key, its value and a
            value that would be right.
    """
    name = "recipe"
    if isinstance(recipe, Recipe):
        if not settings and not overrides:
            return recipe
        content = recipe.model_dump(mode="json", by_alias=True)  # a batch that follows from tokens stays open
    elif recipe == "":
        raise InvalidInput("recipe is empty; name a file or a fold")
    elif isinstance(recipe, str | Path):
        file = Path(recipe).expanduser()
        content, name = read_content(file), file.name
    elif isinstance(recipe, Mapping):
        content = plain_values(recipe)
    else:
        raise InvalidInput(
            f"the recipe is of type {type(recipe).__name__}; it should be a file, a fold, a Recipe or a "
            "mapping"
        )
    settings = {} if settings is None else settings
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise InvalidInput(
            f"settings is {settings!r}; it should be a mapping such as {{'stages.0.lr': 1e-4}}"
        )
    for key, value in settings.items():
        _place(content, key, plain_values(value), f"settings[{key!r}]")
    for override in overrides:
        _override(content, override)
    _fill_rates(content)
    return Recipe.read(content, _OTHER_NAMES, name, SECTIONS)


def _fill_rates(content: dict[str, Any]) -> None:
    """Give stages without a learning rate the one of `kvfold distill FOLD`, if the student can be read."""
    student, stages = content.get("student"), content.get("stages")
    open_stages = [
        stage
        for stage in (stages if isinstance(stages, list) else [])
        if isinstance(stage, dict) and not stage.keys() & {"lr", "learning_rate"}
    ]
    if not open_stages or not isinstance(student, str):
        return
    from ...checkpoints.directory import Checkpoint

    place = Path(student).expanduser()
    if (place / "config.json").is_file():
        rate = default_rate(weights_of(Checkpoint(place, packed=True)))
        for stage in open_stages:
            stage["lr"] = rate


def plain_values(value: Any) -> Any:
    """Return a value of Python as a recipe file would have it: a path at any depth becomes its text."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {name: plain_values(inner) for name, inner in value.items()}
    return [plain_values(inner) for inner in value] if isinstance(value, list | tuple) else value


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
    if not equals or not key.rpartition(".")[2]:
        raise InvalidInput(f"--set {override} should be key=value, such as --set stages.0.lr=1e-4")
    found = parse_yaml(value, f"--set {key}", top=None, unique_keys=True)
    _place(content, key, found, f"--set {key}")


def _place(content: dict[str, Any], key: str, value: Any, name: str) -> None:
    """Put a value in the place that a dotted key names.

    Raises:
        InvalidInput: there is no such place; `name` is what the user calls the setting.
    """
    *parents, last = key.split(".")
    place: Any = content
    try:
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        place[int(last) if isinstance(place, list) else last] = value
    except (ValueError, IndexError, TypeError, AttributeError):
        raise InvalidInput(
            f"{name}: the recipe has no such key; lists are numbered from 0, as in stages.0.lr"
        ) from None
