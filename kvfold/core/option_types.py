"""Types of values that people write as text: sizes, tokens, lists and places."""

import os
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from .command_options import Option
from .settings import LARGEST_SEED
from .units import parse_bytes, parse_context, parse_tokens, show_bytes, show_context, show_trained


def as_list(value: object) -> object:
    """Return values from a text with commas or from a single number; pydantic judges the rest."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    return (value,) if isinstance(value, Real) and not isinstance(value, Integral) else value


def _as_place(value: object) -> object:
    """Return a path with the home directory for `~`. An empty text would be the current directory."""
    if value == "" or "\0" in str(value):
        raise ValueError("it should be a path, neither empty nor with a null character")
    return Path(os.path.expanduser(value)) if isinstance(value, str | Path) else value


Names = Annotated[tuple[str, ...], BeforeValidator(as_list), Option(metavar="NAME,...")]
Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    Field(ge=1, le=LARGEST_SEED),
    Option(metavar="SIZE", written=lambda size: show_bytes(size).replace(" ", "")),
]
Tokens = Annotated[
    int, BeforeValidator(parse_context), Field(ge=1), Option(metavar="TOKENS", written=show_context)
]
Place = Annotated[Path, BeforeValidator(_as_place)]
TrainedTokens = Annotated[
    int, BeforeValidator(parse_tokens), Field(ge=1), Option(metavar="TOKENS", written=show_trained)
]
