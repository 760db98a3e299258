"""Checks of what a caller of the Python API gives, whose types nobody has checked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .core.errors import InvalidInput
from .core.untrusted import shorten


def text_of(value: Any, name: str) -> str:
    """Return the text of a path or of a name, such as a Hub id.

    Args:
        value: a text or a path.
        name: of the argument, for the error.

    Raises:
        InvalidInput: it is neither, is empty, or holds a null character.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InvalidInput(f"{name} is {shorten(value)}; it should be a text or a path")
    if not text or "\0" in text:
        raise InvalidInput(f"{name} is {shorten(text)}, which nothing can be called; name another")
    return text


def path_of(value: Any, name: str) -> Path:
    """Return a path; arguments and errors are those of `text_of`."""
    return Path(text_of(value, name))


def directory_of(value: Any) -> Path:
    """Return the path of a checkpoint's directory.

    Raises:
        InvalidInput: as of `text_of`, or it is no directory.
        OSError: the system has no such names.
    """
    place = path_of(value, "directory")
    if not place.is_dir():
        raise InvalidInput(f"{place} is not a directory; give the directory of a checkpoint")
    return place


def optional_text(value: Any, name: str) -> str | None:
    """Return a text as `text_of` does; None for None."""
    return None if value is None else text_of(value, name)


def optional_path(value: Any, name: str) -> Path | None:
    """Return a path as `path_of` does; None for None."""
    return None if value is None else path_of(value, name)


def paths_of(value: Any, name: str) -> list[Path]:
    """Return paths from a sequence of them, or from a single one.

    Args:
        value: the sequence or the path.
        name: of the argument, for the error.

    Raises:
        InvalidInput: it is neither, or as of `text_of`.
    """
    given = [value] if isinstance(value, str | Path) else value
    if not isinstance(given, Sequence):
        raise InvalidInput(f"{name} is {shorten(given)}; it should be a list of paths")
    return [path_of(one, f"one of {name}") for one in given]


def names_of(value: Any, name: str) -> tuple[str, ...]:
    """Return names from a sequence of texts, or from one text with commas.

    Args:
        value: the sequence or the text.
        name: of the argument, for the error.

    Raises:
        InvalidInput: it is neither.
    """
    names = value.split(",") if isinstance(value, str) else value
    try:
        names = tuple(names)
    except TypeError:
        names = (None,)
    if not all(isinstance(one, str) for one in names):
        raise InvalidInput(f"{name} is {shorten(value)}; it should be a list of names")
    return names
