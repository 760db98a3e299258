"""Result files whose rows may come from several runs: each row names the run that measured it."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from kvfold.core.files import write_whole

from .machine import RESULTS, machine

Row = dict[str, Any]


class SavedRows:
    """A file in benchmarks/results with rows, and the runs that measured them.

    `runs` has the date, the machine and the versions of each run. A row's `run` is a place in that list.

    Args:
        name: of the file, without its suffix.
        about: what is recorded of this run, such as versions.
        update: keep rows of earlier runs that this one does not measure again.

    Example:
        >>> saved = SavedRows("engine-cpu", {"version": "1.0"}, update=True)
        >>> if saved.find("rows", fold="MLA") is None:
        ...     saved.put("rows", {"fold": "MLA", "kl": 0.01}, "fold")
        ...     saved.write()
    """

    def __init__(self, name: str, about: Row, *, update: bool) -> None:
        self.path = RESULTS / f"{name}.json"
        self._run = {"date": date.today().isoformat(), "machine": machine(), **about}
        self._unwritten: list[tuple[str, Row, tuple[str, ...]]] = []
        self._result = self._read() if update else {"runs": []}
        self._update = update

    def _read(self) -> dict[str, list[Row]]:
        if not self.path.exists():
            return {"runs": []}
        result: dict[str, list[Row]] = json.loads(self.path.read_text(encoding="utf-8"))
        return result

    def find(self, section: str, **named: Any) -> Row | None:
        """Return the row of a section with the given fields; None where there is none."""
        for row in self._result.get(section, []):
            if all(row.get(field) == value for field, value in named.items()):
                return row
        return None

    def put(self, section: str, row: Row, *key: str) -> None:
        """Add a row of this run, in the place of the one that is equal in the fields of the key."""
        self._unwritten.append((section, row, key))
        self._place(section, row, key)

    def _place(self, section: str, row: Row, key: tuple[str, ...]) -> None:
        runs, rows = self._result["runs"], self._result.setdefault(section, [])
        if self._run not in runs:
            runs.append(self._run)
        measured = {**row, "run": runs.index(self._run)}
        known = self.find(section, **{field: row.get(field) for field in key})
        if known is None:
            rows.append(measured)
        else:
            rows[rows.index(known)] = measured

    def write(self) -> None:
        """Write the file, without runs that no row names any more.

        Rows that another process wrote since this one began are kept, unless `update` is off.
        """
        with _alone_in(self.path.parent):
            if self._update:
                self._result = self._read()
                for section, row, key in self._unwritten:
                    self._place(section, row, key)
            self._unwritten, self._update = [], True  # only the first write may begin the file anew
            self._write()

    def _write(self) -> None:
        sections = [name for name in self._result if name != "runs"]
        used = sorted({row["run"] for name in sections for row in self._result[name]})
        whole: dict[str, list[Row]] = {"runs": [self._result["runs"][run] for run in used]}
        for name in sections:
            whole[name] = [{**row, "run": used.index(row["run"])} for row in self._result[name]]
        write_whole(self.path, json.dumps(whole, indent=2) + "\n", replace=True)


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Keep other processes out of a directory for the duration of a block.

    The lock is on the directory itself. A lock file would stay for ever, because removing one that another
    process waits for lets two in; and the file with the rows is another one after each write.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # which releases the lock, as the end of the process does
