"""The page of every key of a recipe and of a request, from the schemas that read them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvfold.convert.request import FoldRequest
from kvfold.core.command_options import meaning
from kvfold.distill.recipe.recipe_file import SECTIONS

from .markdown import code, table

INTRODUCTION = """# Recipe reference

A recipe is a YAML file for `kvfold distill`. Unknown keys are mistakes, and a misspelt key is answered with
the nearest known one. Numbers of tokens may be written as `300k`, `5M` or `1B`. Relative paths start at the
current directory. `kvfold distill explain RECIPE` prints the same meanings next to the values of your
recipe, and `--set stages.0.lr=1e-4` changes one key for one run.
"""
_PLAIN = {int: "integer", float: "number", str: "text", bool: "`true` or `false`", Path: "path"}
TITLES = {
    "": "The recipe",
    "data": "data",
    "data.source": "data.source, as a list",
    "stages": "stages, a list",
    "stages.lora": "stages[].lora",
    "save": "save",
    "evaluate": "evaluate",
}


def keys_page() -> str:
    """Return the page in Markdown: a section per part of a recipe, then the request of `kvfold convert`.

    Raises:
        ValueError: a key has no description.
    """
    parts = [INTRODUCTION]
    for section, model in SECTIONS.items():
        parts.append(f"## {TITLES[section]}\n\n{_first(model)}\n\n{_keys(model)}\n")
    parts.append(
        "## A request of kvfold convert\n\n`kvfold convert --config request.yaml` takes these keys. They are "
        "the options of the command with `_` for `-`, and the arguments of `kvfold.fold`; `engines` may also "
        "be written `engine`.\n\n"
        f"{_keys(FoldRequest)}\n"
    )
    return "\n".join(parts)


def _first(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def _keys(model: type[BaseModel]) -> str:
    rows = []
    for name, field in sorted(model.model_fields.items(), key=lambda item: not item[1].is_required()):
        words, default = meaning(field)
        if not words:
            raise ValueError(f"{model.__name__}.{name} has no description")
        rows.append((code(field.alias or name), _type(field), default or _default(field), words))
    return table(("key", "type", "default", "meaning"), rows)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, tuple):
        value = list(value)
    return code(yaml.safe_dump(value, default_flow_style=True, width=200).replace("\n...", "").strip())


def _type(field: FieldInfo) -> str:
    return " or ".join(dict.fromkeys(_names(field.annotation)))


def _names(kind: Any) -> Iterator[str]:
    """Yield what a value may be, in the words of YAML."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        yield from (code(yaml.safe_dump(value).replace("\n...", "").strip()) for value in parts)
    elif kind is type(None):
        yield code("null")
    elif origin is tuple or kind in (tuple, list):
        inner = [name for part in parts if part is not ... for name in _names(part)]
        yield f"list of {' or '.join(dict.fromkeys(inner))}"
    elif origin is dict:
        names, values = (" or ".join(dict.fromkeys(_names(part))) for part in parts)
        yield f"mapping of {names} to {values}"
    elif hasattr(kind, "__metadata__"):
        yield from _names(kind.__origin__)
    elif parts:
        for part in parts:
            yield from _names(part)
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        yield "mapping (below)"
    else:
        yield _PLAIN.get(kind) or kind.__name__
