"""The working directory of a run.

A run takes it only if it is free or kvfold's own, and removes it if nothing was done.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ...checkpoints.own_files import TRACKERS, remove_own_tree, strange_files
from ...core.console import notice
from ...core.disk import disk_error, disk_sentence, writing_errors
from ...core.errors import InvalidInput
from ...core.files import locked
from ...core.signals import ignored
from ..stages.state import saved

_LOCK = "lock"  # held while a run is at work; it also marks a directory that kvfold made
# Everything that a run puts there. The lock is removed last, so that an interrupted removal differs from
# a directory that kvfold did not make.
_WRITTEN = ("tokens.bin", "marks.bin", "tokens.json", "metrics.jsonl", "evaluations.jsonl")
_FILES = (*_WRITTEN, *(f"{name}.partial" for name in _WRITTEN))
WRITTEN = "written"  # finished batches of the text that the teacher writes
_DIRECTORIES = ("state", "stages", "best", TRACKERS, "final", WRITTEN)
_NAMES = {*_FILES, *_DIRECTORIES, _LOCK}


@contextmanager
def claimed(partial: Path) -> Iterator[None]:
    """Keep other runs out of the working directory for the duration.

    A directory without a saved state is emptied first, apart from text that the teacher has written. The
    directory is removed at the end, and also when `InvalidInput` ends the run before any state or text was
    saved. Anything else that ends the run leaves it, to resume from.

    Raises:
        InvalidInput: the directory was not made by kvfold, cannot be made, or another run is at work in it.
    """
    missing = [path for path in (partial, *partial.parents) if not path.exists()]
    with _locked(partial):
        if saved(partial / "state"):
            remove_own_tree(partial / WRITTEN)  # the text is in tokens.bin
        else:
            _empty(partial, keep=WRITTEN)
        try:
            with _reporting_disk_errors(partial):
                yield
        except InvalidInput:
            if not saved(partial / "state"):
                if not _has_text(partial):
                    _remove(partial, missing)
                else:
                    notice(
                        f"the text that the teacher wrote is kept in {partial}; remove it to write it again"
                    )
            raise
        with ignored():  # the output exists, so the run has ended well
            _remove(partial, [])


@contextmanager
def _reporting_disk_errors(partial: Path) -> Iterator[None]:
    """Raise a full or unwritable disk as a sentence. For most such errors the system names no file."""
    try:
        yield
    except writing_errors() as error:
        of_disk = disk_error(error, partial)
        if of_disk is None:
            raise
        kept = "what was saved is kept" if saved(partial / "state") or _has_text(partial) else ""
        raise InvalidInput(disk_sentence(of_disk, kept=kept)) from None


def tidy(partial: Path) -> None:
    """Remove the working directory of a run that has ended.

    Raises:
        InvalidInput: it was not made by kvfold, or a run is at work in it.
    """
    with _locked(partial):
        _remove(partial, [])


def is_ours(partial: Path) -> bool:
    """Return whether a directory is empty, missing, or the working directory of a run."""
    return _strange(partial) is None


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    found = _strange(partial)
    if found:
        raise InvalidInput(
            f"{partial} exists and is not an unfinished run of kvfold ({found}); move it, or name another "
            "output with --set output=DIR"
        )
    busy = f"another run is at work in {partial}; wait for it, or name another output"
    stack = ExitStack()
    try:
        partial.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(partial / _LOCK, busy))
    except OSError as error:
        raise InvalidInput(
            f"cannot write {partial}: {error.strerror}; name another output with --set output=DIR"
        ) from None
    with stack:
        yield


def _strange(partial: Path) -> str | None:
    """Return what in a directory is not from a run of kvfold; None if there is nothing."""
    if not partial.exists() and not partial.is_symlink():
        return None
    if partial.is_symlink() or not partial.is_dir():
        return "it is not a directory"
    names = {path.name for path in partial.iterdir()}
    for name in sorted(names & {*_FILES, _LOCK}):
        if (partial / name).is_symlink() or ((partial / name).exists() and not (partial / name).is_file()):
            return f"its {name} is not a regular file"
    if not names:
        return None
    if not names <= _NAMES or not (partial / _LOCK).is_file():
        return f"it holds {min(names - _NAMES or names)}"
    inside = (path for name in _DIRECTORIES for path in strange_files(partial / name))
    found = next(inside, None)
    return None if found is None else f"it holds {found.relative_to(partial)}"


def _has_text(partial: Path) -> bool:
    """Return whether the teacher has written text that no state needs yet."""
    return any((partial / WRITTEN).glob("batch-*.safetensors"))


def _empty(partial: Path, keep: str | None = None) -> None:
    for name in _DIRECTORIES:
        if name != keep:
            remove_own_tree(partial / name)
    for name in _FILES:
        (partial / name).unlink(missing_ok=True)


def _remove(partial: Path, made: Sequence[Path]) -> None:
    """Remove what a run put into its directory.

    If that empties it, the directory is removed too, and then those in `made`, innermost first.
    """
    _empty(partial)
    (partial / _LOCK).unlink()
    with suppress(OSError):  # something was put there meanwhile
        for path in dict.fromkeys((partial, *made)):
            path.rmdir()
