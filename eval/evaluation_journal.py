"""`<out>.partial`: what an evaluation has measured so far, so that the same command goes on where it was
interrupted.

One JSON object a line: first what was asked, then the parts as they are finished. A line that a kill has cut
off is passed over; the report itself appears as `out` when it is whole.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.errors import InvalidInput

_SCHEMA = 1


class Journal:
    """The finished parts of one evaluation; in memory alone where there is no file."""

    def __init__(self, file: Path | None = None) -> None:
        self.parts: dict[str, Any] = {}
        self._file = file

    def begin(self, asked: Mapping[str, Any]) -> None:
        """Read the parts of an interrupted evaluation of the same, or note what is asked.

        Raises:
            InvalidInput: the file was begun by another evaluation, or is not of this kind.
        """
        if self._file is None:
            return
        head = json.loads(json.dumps({"kvfold_eval": _SCHEMA, **asked}, default=str))
        lines = list(_lines(self._file))
        if not lines:
            # What the kill of an evaluation leaves before it has begun is empty, or its first line cut off.
            self._write(head, "w")
            return
        if lines[0] != head:
            differing = sorted(
                key for key in head.keys() | lines[0].keys() if head.get(key) != lines[0].get(key)
            )
            raise InvalidInput(
                f"{self._file} is of an interrupted evaluation with another {', '.join(differing)}; "
                "repeat its command to go on, or move it away"
            )
        self.parts = {line["part"]: line["value"] for line in lines[1:]}

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """The value of a part as JSON gives it back.

        What was measured before, or what `measure` returns now.
        """
        if name not in self.parts:
            self.keep(name, measure())
        return self.parts[name]

    def keep(self, name: str, value: Any) -> None:
        """Note that a part is finished."""
        line = json.dumps({"part": name, "value": value}, allow_nan=False)
        self.parts[name] = json.loads(line)["value"]
        if self._file is not None:
            self._write(line, "a")

    def _write(self, line: str | Mapping[str, Any], mode: str) -> None:
        assert self._file is not None
        with self._file.open(mode, encoding="utf-8") as file:
            file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal; a last one without its end is cut off the file too.

    Raises:
        InvalidInput: something else is in it.
    """
    content = file.read_bytes() if file.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
        ours = all(isinstance(line, dict) for line in lines) and all(
            "kvfold_eval" in line for line in lines[:1]
        )
    except ValueError:
        ours = False
    if not ours or not (whole or content[:1] in (b"", b"{")):
        raise InvalidInput(f"{file} exists; move it, or name another file")
    if len(whole) < len(content):
        with file.open("r+b") as opened:
            opened.truncate(len(whole))
    yield from lines


@contextmanager
def reserved(out: Path) -> Iterator[tuple[Journal, Callable[[str], None]]]:
    """Open the journal beside `out` before the long work; yield it and what writes the report and removes the
    journal.

    An evaluation that ends without a report leaves its journal where there is something to go on with.

    Raises:
        InvalidInput: `out` exists or cannot be written, or the partial file is somebody else's.
    """
    partial = out.with_name(out.name + ".partial")
    with _told(out):
        if out.exists() or out.is_symlink():
            raise InvalidInput(f"--out {out} exists; name another file")
        if not out.parent.is_dir():
            raise InvalidInput(f"--out {out}: there is no directory {out.parent}")
        if partial.is_symlink() or (partial.exists() and not partial.is_file()):
            raise InvalidInput(f"--out {out}: {partial} exists; move it, or name another file")
        began = list(_lines(partial))
        partial.touch()
    journal = Journal(partial)

    def write(report: str) -> None:
        whole = out.with_name(out.name + ".new")
        with _told(out):
            whole.write_text(report, encoding="utf-8")
            whole.rename(out)
            partial.unlink()

    try:
        yield journal, write
    finally:
        if partial.is_file() and not journal.parts and len(began) < 2:
            partial.unlink()


@contextmanager
def _told(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"--out {out} cannot be written: {error.strerror}; name another file") from None
