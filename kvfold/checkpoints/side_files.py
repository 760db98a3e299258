"""Files next to the weights that kvfold may read, copy and publish.

A checkpoint that somebody else made may hold links to any file of this machine, devices that never end and
pipes that never begin. Only regular files of the checkpoint itself are opened.
"""

import stat
from fnmatch import fnmatchcase
from pathlib import Path

from ..core.errors import InvalidInput
from ..core.hub import commit_of
from ..core.untrusted import printable

# The largest tokenizers have some tens of MB. A larger file is not what its name says, and may fill the disk.
LIMIT_BYTES = 2**28


def flaw_of(path: Path, directory: Path | None, limit_bytes: int | None = LIMIT_BYTES) -> str:
    """Return why a file of a checkpoint must not be read; empty if it may.

    A link may lead to another file of the checkpoint, or to the Hub cache's copy of the file. Without
    `directory` a link may lead anywhere, and without `limit_bytes` any size will do. The flaw ends a sentence
    that begins with the file.
    """
    try:
        place = path.resolve(strict=True)
        found = place.stat()
    except (OSError, RuntimeError):  # the latter, before Python 3.13: links in a circle
        return "is a link to a file that does not exist, or cannot be reached"
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    if directory and not any(place.is_relative_to(root) for root in _roots(directory)):
        return "is a link to a file outside of the checkpoint"
    if limit_bytes is not None and found.st_size > limit_bytes:
        return f"has {found.st_size:,} bytes, more than the {limit_bytes:,} that such a file may have"
    return ""


def check_readable(directory: Path, patterns: tuple[str, ...]) -> None:
    """Refuse files of a checkpoint that would stop or fill this process if they were read.

    Unlike the files that are copied, these may be links to anywhere. `patterns` are those of `fnmatch`;
    directories and links to nothing do not count.

    Raises:
        InvalidInput: one of them is not a regular file, or is too large.
    """
    for path in _named(directory, patterns):
        if path.exists() and (flaw := flaw_of(path, None)):
            raise InvalidInput(f"{printable(path)} {flaw}; put the file itself there, or remove it")


def is_readable(path: Path, directory: Path) -> bool:
    """Return whether a file exists and is a regular file of a checkpoint, of a reasonable size."""
    return not flaw_of(path, directory)


def matching(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Return the files of a checkpoint whose names match one of some patterns, sorted.

    Patterns are those of `fnmatch`; directories do not count.

    Raises:
        InvalidInput: one of them is not a regular file of the checkpoint, or is too large.
    """
    found = _named(directory, patterns)
    for path in found:
        flaw = flaw_of(path, directory)
        if flaw:
            raise InvalidInput(f"{printable(path)} {flaw}; put the file itself there, or remove it")
    return found


def _named(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    found = sorted(directory.iterdir())  # glob would not see a link to nothing
    return [
        path
        for path in found
        if not path.is_dir() and any(fnmatchcase(path.name, pattern) for pattern in patterns)
    ]


def _roots(directory: Path) -> list[Path]:
    """Return the directories that a checkpoint's files are in: its own, and the Hub cache's of its files."""
    own = directory.resolve()
    if commit_of(own) is None:
        return [own]
    return [own, own.parent.parent / "blobs"]  # not where a link of that name leads
