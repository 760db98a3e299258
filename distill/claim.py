"""The working directory of a run: taken only when it is free or kvfold's own, and gone again when nothing was done."""

import fcntl
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..convert.errors import InvalidInput
from .state import saved

_LOCK = "lock"  # held while a run is at work, and the mark of a directory that kvfold made
# All that a run puts there; the lock is last, so that a removal cut short can be told from a stranger's directory.
_WRITTEN = ("tokens.bin", "marks.bin", "tokens.json", "metrics.jsonl", "evaluations.jsonl")
_FILES = (*_WRITTEN, *(f"{name}.partial" for name in _WRITTEN))
_DIRECTORIES = ("state", "stages", "best", "trackers", "final")
_NAMES = {*_FILES, *_DIRECTORIES, _LOCK}


@contextmanager
def claimed(partial: Path) -> Iterator[None]:
    """Keep other runs out of the working directory; one without a saved state is emptied first.

    At the end it is removed; also when `InvalidInput` ends the run before any state was saved. Anything else that ends the run
    leaves it, to go on from.

    Raises:
        InvalidInput: the directory is somebody else's, cannot be made, or another run is in it.
    """
    _check_ours(partial)
    missing = [path for path in (partial, *partial.parents) if not path.exists()]
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = (partial / _LOCK).open("w")
    except OSError as error:
        raise InvalidInput(f"cannot write {partial}: {error.strerror}; name another output with --set output=DIR") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(f"another run is at work in {partial}; wait for it, or name another output") from None
        if not saved(partial / "state"):
            _empty(partial)
        try:
            yield
        except InvalidInput:
            if not saved(partial / "state"):
                _remove(partial, missing)
            raise
        _remove(partial, [])


def _check_ours(partial: Path) -> None:
    if not partial.exists() and not partial.is_symlink():
        return
    if partial.is_symlink() or not partial.is_dir():
        found = "it is no directory"
    else:
        names = {path.name for path in partial.iterdir()}
        if not names or (names <= _NAMES and (partial / _LOCK).is_file()):
            return
        found = f"it holds {min(names - _NAMES or names)}"
    raise InvalidInput(
        f"{partial} exists and is no unfinished run of kvfold ({found}); move it, or name another output with --set output=DIR"
    )


def _empty(partial: Path) -> None:
    for name in _DIRECTORIES:
        shutil.rmtree(partial / name, ignore_errors=True)
    for name in _FILES:
        (partial / name).unlink(missing_ok=True)


def _remove(partial: Path, made: Sequence[Path]) -> None:
    """Remove what a run put into its directory; if that empties it also the directory, and those in `made`, innermost first."""
    _empty(partial)
    (partial / _LOCK).unlink()
    with suppress(OSError):  # somebody put something there meanwhile
        for path in dict.fromkeys((partial, *made)):
            path.rmdir()
