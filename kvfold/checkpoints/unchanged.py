"""The check that a source keeps its content while it is read."""

from collections.abc import Mapping
from pathlib import Path

from ..core.errors import InvalidInput
from .directory import Checkpoint, read_config
from .record import sha256

_CONFIG = "config.json"


def hash_unchanged(checkpoint: Checkpoint, file: Path) -> str:
    """Return the hexadecimal SHA-256 that a weight file has had since its checkpoint was opened.

    Args:
        checkpoint: of the file.
        file: one of its weight files.

    Raises:
        InvalidInput: the file was written, replaced or touched since the checkpoint was opened.
    """
    found = sha256(file)
    about = file.stat()  # of this file alone: a checkpoint may have thousands
    if (file.name, about.st_size, about.st_mtime_ns) not in checkpoint.opened:
        raise _changed(file)
    return found


def check_unchanged(checkpoint: Checkpoint, known: Mapping[str, str] | None = None) -> None:
    """Check that the files of a checkpoint still have the content that was opened.

    A file is read again only where its size or its time differs.

    Args:
        checkpoint: the checkpoint; of a view, that whose files it reads is checked.
        known: hashes of its weight files by name, from `hash_unchanged`; without its hash, a file that was
            touched counts as changed.

    Raises:
        InvalidInput: a file was written, replaced or removed meanwhile.
    """
    origin, hashes = checkpoint.origin, known or {}
    files = {file.name: file for file in origin.files}
    for name in _touched(origin):
        if name == _CONFIG:
            same = read_config(origin.directory) == origin.config
        else:
            same = name in hashes and sha256(files[name]) == hashes[name]
        if not same:
            raise _changed(files.get(name, origin.directory / name))


def _touched(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the files whose size or time is not as it was when the checkpoint was opened."""
    try:
        pairs = zip(checkpoint.opened, checkpoint.identity(), strict=True)
    except FileNotFoundError as error:
        raise InvalidInput(f"{error.filename} was removed while it was read") from None
    return [before[0] for before, now in pairs if before != now]


def _changed(file: Path) -> InvalidInput:
    return InvalidInput(f"{file} changed while it was read; run the same command again")
