"""What is done of a half-written output, a line a unit: the same command goes on after a kill, in however
many processes.

The first process's journal is the lock of the directory; every other has one of its own there, which the next
run takes over.
"""

import fcntl
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ...core.errors import InvalidInput

JOURNAL = "journal.jsonl"
Found = dict[str, Any]  # of a unit, as the journal and kvfold.json have it


class Journal:
    """An open journal.

    Attributes:
        done: the units that are done, with what was found.
    """

    def __init__(self, file: IO[str], fingerprint: str, done: dict[str, Found]) -> None:
        self.done: dict[str, Found] = {}
        self._file, self._fingerprint = file, fingerprint
        self.restart(done)

    def restart(self, done: dict[str, Found]) -> None:
        """Begin anew with what is done already."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(self._fingerprint) + "\n")
        self.done = {}
        self.add(done)

    def add(self, found: dict[str, Found]) -> None:
        """Tell of units whose bytes are on the disk."""
        self._file.writelines(json.dumps([name, value]) + "\n" for name, value in found.items())
        self._file.flush()
        self.done |= found


@contextmanager
def first_journal(partial: Path, fingerprint: str) -> Iterator[Journal]:
    """The first process's journal, with what an earlier run of the same plan has done; another plan's
    leftovers are removed.

    A kill leaves the directory for the next run; an error that a rerun would meet again removes it.

    Raises:
        InvalidInput: another kvfold is writing there, or the directory is somebody else's.
    """
    partial.mkdir(parents=True, exist_ok=True)
    if {path.name for path in partial.iterdir()} - {JOURNAL} and not _is_ours(partial / JOURNAL):
        raise InvalidInput(
            f"{partial} exists and is no half-written output of kvfold; move it, or name another --out"
        )
    with _locked(partial / JOURNAL) as file:
        done = _read(file, fingerprint)
        for path in partial.glob("journal-*.jsonl"):
            with _locked(path) as its:  # no process of the run before is still at work
                done = {**done, **(_read(its, fingerprint) or {})} if done is not None else None
        if done is None:
            for path in partial.iterdir():
                if path.name != JOURNAL:
                    path.unlink()
        journal = Journal(file, fingerprint, done or {})
        for path in partial.glob("journal-*.jsonl"):
            path.unlink()
        try:
            yield journal
        except (OSError, InvalidInput):
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def other_journal(partial: Path, fingerprint: str, rank: int) -> Iterator[Journal]:
    """The journal of process number `rank`, empty."""
    with _locked(partial / f"journal-{rank}.jsonl") as file:
        yield Journal(file, fingerprint, {})


def remove_journals(partial: Path) -> None:
    """All of them, when everything is done."""
    for path in partial.glob("journal*.jsonl"):
        path.unlink()


@contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(
                f"another kvfold is writing {path.parent}; wait for it or name another --out"
            ) from None
        yield file


def _read(file: IO[str], fingerprint: str) -> dict[str, Found] | None:
    """What a journal of this plan tells; None where it is another's."""
    file.seek(0)
    # A kill may have cut the last line short: what it names is done again.
    lines = [line for line in file.read().splitlines(keepends=True) if line.endswith("\n")]
    return dict(map(json.loads, lines[1:])) if lines[:1] == [json.dumps(fingerprint) + "\n"] else None


def _is_ours(journal: Path) -> bool:
    """Whether a directory holds a journal that begins with a plan's fingerprint."""
    return (
        journal.is_file()
        and re.match(r'"[0-9a-f]{64}"\n', journal.read_text(encoding="utf-8", errors="replace")) is not None
    )
