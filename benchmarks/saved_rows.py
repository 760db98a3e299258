"""Result files whose rows may come from several runs: each row names the run that measured it."""

import json
from datetime import date
from typing import Any

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
        self._result: dict[str, list[Row]] = {"runs": []}
        if update and self.path.exists():
            self._result = json.loads(self.path.read_text(encoding="utf-8"))
        run = {"date": date.today().isoformat(), "machine": machine(), **about}
        if run not in self._result["runs"]:
            self._result["runs"].append(run)
        self._run = self._result["runs"].index(run)

    def find(self, section: str, **named: Any) -> Row | None:
        """Return the row of a section with the given fields; None where there is none."""
        for row in self._result.get(section, []):
            if all(row.get(field) == value for field, value in named.items()):
                return row
        return None

    def put(self, section: str, row: Row, *key: str) -> None:
        """Add a row of this run, in the place of the one that is equal in the fields of the key."""
        rows = self._result.setdefault(section, [])
        measured = {**row, "run": self._run}
        known = self.find(section, **{field: row.get(field) for field in key})
        if known is None:
            rows.append(measured)
        else:
            rows[rows.index(known)] = measured

    def write(self) -> None:
        """Write the file, without runs that no row names any more."""
        sections = [name for name in self._result if name != "runs"]
        used = sorted({row["run"] for name in sections for row in self._result[name]})
        whole: dict[str, list[Row]] = {"runs": [self._result["runs"][run] for run in used]}
        for name in sections:
            whole[name] = [{**row, "run": used.index(row["run"])} for row in self._result[name]]
        self.path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
