"""Names of the files that kvfold writes into its working directories, which strangers' files differ from."""

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from ..core.files import PREFIX, private_directory, release_held
from .directory import SIDE_FILES
from .quantised.schemes import MODELOPT_FILE
from .record import FILE as RECORD
from .shards import INDEX

TRACKERS = "trackers"  # a directory that other programs fill
_PATTERNS = (
    "model*.safetensors", INDEX, "config.json", MODELOPT_FILE, RECORD, "README.md", "*_kvfold.py",
    *SIDE_FILES, "eval.json", "report.json", "report.html", "metrics.jsonl", "evaluations.jsonl",
    "curve.json", "curve.png", "progress.json", "manifest.json", "weights.safetensors",
    "optimizer.safetensors", "layer-*.json", "layer-*.safetensors", "step-*.safetensors", "tokens.bin",
    "tokens.json", "marks.bin", "identity.json", "statistics.safetensors", "journal*.jsonl", "lock", "lock-*",
    "batch-*.safetensors",
)  # fmt: skip


def strange_files(directory: Path) -> Iterator[Path]:
    """Yield the files below a working directory that kvfold does not write, by their names.

    Args:
        directory: the directory. If it is a link, or no directory, it is what is yielded.
    """
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        yield directory
        return
    if _is_passed(directory.name):
        return
    for place, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if not _is_passed(name)]
        for path in (Path(place, name) for name in (*directories, *files)):
            is_ours = path.is_dir() or (path.is_file() and _is_own_name(path.name))
            if path.is_symlink() or not is_ours:
                yield path


def remove_own_tree(directory: Path) -> None:
    """Remove what kvfold wrote below a working directory, and every directory that this empties.

    Strangers' files stay where they are, and no link is followed.

    Args:
        directory: the directory; nothing happens if it is a link, or none.
    """
    strangers = set(strange_files(directory))
    if directory in strangers:
        return
    for place, _, files in os.walk(directory, topdown=False):
        for path in (Path(place, name) for name in files):
            if path not in strangers:
                path.unlink(missing_ok=True)
        if not os.listdir(place):
            os.rmdir(place)


def discard(directory: Path) -> None:
    """Remove a working directory so that a kill leaves it whole, or nothing of that name.

    Where strangers' files are in it, they stay, as `remove_own_tree` leaves them.

    Args:
        directory: the directory; nothing happens if it is a link, or none.
    """
    if directory.is_symlink() or not directory.is_dir():
        return
    release_held(directory)
    if any(strange_files(directory)):
        remove_own_tree(directory)
        return
    with private_directory(directory) as place:
        directory.rename(place / directory.name)


def _is_passed(name: str) -> bool:
    """Return whether everything in a directory of this name counts as written by kvfold."""
    return name == TRACKERS or name.startswith(PREFIX)


def _is_own_name(name: str) -> bool:
    name = name.removesuffix(".partial")
    return name.startswith(PREFIX) or any(fnmatchcase(name, pattern) for pattern in _PATTERNS)
