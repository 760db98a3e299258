"""Names in place of the absolute paths in published files, which are of one machine and its user alone."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..checkpoints.record import FILE as RECORD
from ..checkpoints.record import hub_id, read_record
from ..core.untrusted import read_json

_PATTERNS = (RECORD, "eval.json", "eval-*.json", "report.json", "report.html")
_COMMANDS = ("command", "train_command")
_EVALUATED = re.compile(r"kvfold eval (/[^\s<&]+)")


def without_paths(directory: Path, files: Mapping[str, int]) -> dict[str, bytes]:
    """Return the files of a checkpoint that name places of this machine, with names in place of these.

    A path becomes its last part, and that of the source its Hub id where it has one. A place below the user's
    home that only a sentence mentions begins with `~`.

    Returns:
        The content of each file that differs from the one in the directory.

    Raises:
        InvalidInput: one of them is not JSON.
    """
    chosen = [name for name in files if any(Path(name).match(pattern) for pattern in _PATTERNS)]
    found = {name: read_json(directory / name, top=None) for name in chosen if name.endswith(".json")}
    pages = {
        name: (directory / name).read_bytes().decode("utf-8", "surrogateescape")
        for name in chosen
        if name not in found
    }
    paths = [path for content in found.values() for path in _paths(content)]
    for page in pages.values():  # which have commands for other checkpoints
        paths += filter(_is_place, _EVALUATED.findall(page))
    names = {path: Path(path).name for path in paths}
    home = os.path.expanduser("~")
    if Path(home).is_absolute() and home != os.sep:
        names.setdefault(home, "~")
    contents = dict(found)
    source = (read_record(directory) or {})["source"]
    origin = hub_id(source)
    if origin:  # by its path, where its name is not the id
        if _is_place(source["path"]):
            names[source["path"]] = origin
        contents[RECORD] = {**found[RECORD], "source": {**source, "name": origin}}
    changed = {}
    for name, content in contents.items():
        told = _renamed(content, names)
        if told != found[name]:
            changed[name] = (json.dumps(told, indent=2) + "\n").encode()
    for name, page in pages.items():
        text = _replaced(page, names)
        if text != page:
            changed[name] = text.encode("utf-8", "surrogateescape")
    return changed


def _is_place(text: str) -> bool:
    """Return whether a text is a path of at least two parts: one, such as `/out`, tells nothing."""
    return Path(text).is_absolute() and len(Path(text).parts) > 2


def _paths(value: Any, key: str = "") -> Iterator[str]:
    """Yield the absolute paths that are a whole text of a JSON value, or a word of a command in it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _paths(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _paths(inner, key)
    elif isinstance(value, str) and key != "notices":  # sentences, which may begin with a path
        words = []
        if key in _COMMANDS:
            with suppress(ValueError):  # of a command that kvfold did not write
                words = shlex.split(value)
        for word in (value, *words):
            path = word.removeprefix("self+")  # of --calibration self+FILE
            if _is_place(path):
                yield path


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(inner, names) for inner in value]
    return _replaced(value, names) if isinstance(value, str) else value


def _replaced(text: str, names: Mapping[str, str]) -> str:
    longest_first = sorted(map(re.escape, names), key=len, reverse=True)
    pattern = rf"(?<![\w.])(?:{'|'.join(longest_first)})(?![\w-])"
    return re.sub(pattern, lambda found: names[found[0]], text) if names else text
