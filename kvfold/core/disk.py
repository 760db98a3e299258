"""Places that cannot or must not be written, and errors of a full disk, which libraries report in many ways.

Python's own errors of writing name no file, and safetensors, torch and others have errors of their own. Here
all of them become an `OSError` that names a place, and that becomes one sentence.

No heavy import here: `--help` goes through this module.
"""

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from .errors import InvalidInput

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DISK = (*_FULL, errno.EROFS, errno.EIO)
_NO_TEMPORARY = "No usable temporary directory"  # `tempfile` finds none by writing into each


class DiskError(OSError):
    """An error of the disk with the place that kvfold was writing as its `filename`."""


def writing_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that the system and loaded libraries raise for disk errors."""
    found: list[type[Exception]] = [OSError, RuntimeError]
    safetensors = sys.modules.get("safetensors")
    if safetensors is not None:
        found.append(safetensors.SafetensorError)
    return tuple(found)


def disk_error(error: BaseException, place: str | os.PathLike[str] | None = None) -> DiskError | None:
    """Return an exception as the error of a disk, which names a place.

    Args:
        error: of the system, or of a library that quotes the system's words.
        place: the file or directory that was written; by default the file that the error names.

    Returns:
        The error with the system's number and words, and a place as `filename` where one is known: the
        innermost that was given. None if the disk is not the cause.

    Example:
        >>> error = RuntimeError("write failed: No space left on device (os error 28)")
        >>> disk_error(error, "out/model.safetensors").filename
        'out/model.safetensors'
    """
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    if number not in _DISK:
        if _NO_TEMPORARY in text:
            return DiskError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{_temporary()} (TMPDIR)")
        number = next((n for n in _DISK if os.strerror(n) in text or f"os error {n})" in text), None)
    if number is None:
        return None
    if isinstance(error, DiskError):
        return error
    named = place if place is not None else getattr(error, "filename", None)
    return DiskError(number, os.strerror(number), *([] if named is None else [os.fspath(named)]))


@contextmanager
def naming(place: str | os.PathLike[str]) -> Iterator[None]:
    """Name a place in errors of the disk that come from a block.

    Raises:
        DiskError: the disk is full or cannot be written. Other errors pass as they are.
    """
    try:
        yield
    except writing_errors() as error:
        found = disk_error(error, place)
        if found is None:
            raise
        raise found from error


def disk_sentence(error: DiskError, *, kept: str = "") -> str:
    """Return what a `disk_error` says to the user: the place, the reason, and what to do.

    `kept` is a clause about what an earlier part of the work left.
    """
    place = error.filename
    if place is None:
        place = f"a file of the output, or a temporary one in {_temporary()} (TMPDIR),"
        advice = "make room in both"
    elif is_full(error):
        advice = "make room there"
    else:
        advice = "fix that, or name another place"
    if kept:
        advice = f"{kept}: {advice}"
    return f"{place} cannot be written: {error.strerror}; {advice} and run the same command again"


def is_full(error: OSError) -> bool:
    """Return whether room on the disk would have prevented an error."""
    return error.errno in _FULL


def check_room(output: Path, need: int, begun: Path) -> None:
    """Refuse, before long work, an output that its disk has no room for.

    `need` is in bytes. What an earlier run has written of it, in `begun`, needs no more room.

    Raises:
        InvalidInput: the disk is too small.
    """
    place = next(path for path in output.absolute().parents if path.exists())
    disk = shutil.disk_usage(place)
    held = sum(file.stat().st_size for file in begun.rglob("*") if file.is_file())
    if disk.total and need > disk.free + held:  # some network disks do not tell their size
        raise InvalidInput(
            f"{output} takes {need / 1e6:,.1f} MB, and the disk of {place} has {disk.free / 1e6:,.1f} MB "
            "free; make room there, or name an output on a larger disk"
        )


def _temporary() -> str:
    return tempfile.tempdir or os.environ.get("TMPDIR") or "/tmp"


def check_outside(kept: Mapping[str, Path | None], models: Iterable[Path | None]) -> None:
    """Refuse a place, of `kept` by option, that is the directory of a model or inside it.

    Raises:
        InvalidInput: names it; nothing is written to a model.
    """
    for model, (option, place) in product(models, kept.items()):
        if model is not None and place is not None and place.resolve().is_relative_to(model.resolve()):
            raise InvalidInput(f"{option} {place} is {model} or inside it; name a place elsewhere")
