"""`<out>.partial`: what an evaluation has measured so far, by which the same command resumes.

It holds one JSON object per line: first what was asked, then the parts as they are finished. A last line that
a kill has cut off is dropped. The report itself appears as `out` when it is whole. A lock next to it keeps
another evaluation with the same `out` away.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..core.disk import disk_error, disk_sentence
from ..core.errors import InvalidInput
from ..core.files import PREFIX, locked, write_whole
from ..core.untrusted import parse_json

_SCHEMA = 1
_REPORT = "report"  # the last part: hexadecimal SHA-256 of the report that is about to be written
_HEAD = b'{"kvfold_eval": '  # how the first line begins


class EvaluationJournal:
    """The finished parts of one evaluation.

    Args:
        file: where they are kept; None: in memory only.

    Attributes:
        parts: their values as JSON gives them back, by name.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.parts: dict[str, Any] = {}
        self._file = file

    def begin(self, asked: Mapping[str, Any]) -> None:
        """Read the parts of an interrupted evaluation of the same, or note what is asked.

        Args:
            asked: everything that the numbers depend on; values that JSON does not know are kept as text.

        Raises:
            InvalidInput: the file was begun by another evaluation, is not of this kind, or cannot be written.
        """
        if self._file is None:
            return
        head = json.loads(json.dumps({"kvfold_eval": _SCHEMA, **asked}, default=str))
        lines = list(_read_lines(self._file))
        if not lines:
            with _reporting(self._file):
                write_whole(self._file, json.dumps(head) + "\n", replace=True)
            return
        if lines[0] != head:
            differing = sorted(
                key for key in head.keys() | lines[0].keys() if head.get(key) != lines[0].get(key)
            )
            raise InvalidInput(
                f"{self._file} is of an interrupted evaluation with another {', '.join(differing)}; "
                "repeat its command to resume it, or move it away"
            )
        self.parts = _parts(lines)

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the value of a part, which is measured unless it is finished already.

        Args:
            name: of the part.
            measure: returns plain values with finite numbers.

        Returns:
            The value as JSON gives it back.
        """
        if name not in self.parts:
            self.keep(name, measure())
        return self.parts[name]

    def keep(self, name: str, value: Any) -> None:
        """Note that a part is finished.

        Args:
            name: of the part.
            value: plain values with finite numbers.

        Raises:
            InvalidInput: the file cannot be written, for example because the disk is full.
        """
        self.parts[name] = json.loads(json.dumps(value, allow_nan=False))
        digest = _digest(name, self.parts[name])
        line = json.dumps({"part": name, "value": self.parts[name], "sha256": digest})
        if self._file is not None:
            with _reporting(self._file), self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())


@contextmanager
def reserved(out: Path) -> Iterator[tuple[EvaluationJournal, Callable[[str], None]]]:
    """Open the journal next to `out` before the long work.

    An evaluation that ends without a report leaves its journal if there is something to resume from.

    Args:
        out: the report, which must not exist.

    Yields:
        The journal, and a function that writes the report and removes the journal.

    Raises:
        InvalidInput: `out` exists or cannot be written, another evaluation writes it, or
            `partial` is a file that kvfold did not write.
    """
    partial = out.with_name(out.name + ".partial")
    lock = out.with_name(f"{PREFIX}{out.name}.lock")
    busy = f"--out {out}: another kvfold is writing it; wait for it, or name another file"
    with ExitStack() as stack:
        with _reporting(out, "--out "):
            if out.exists() or out.is_symlink():
                if partial.is_file() and not partial.is_symlink() and out.is_file():
                    with locked(lock, busy):
                        _remove_finished(partial, out)
                        lock.unlink(missing_ok=True)
                raise InvalidInput(f"--out {out} exists; name another file")
            if not out.parent.is_dir():
                raise InvalidInput(f"--out {out}: there is no directory {out.parent}")
            stack.enter_context(locked(lock, busy))
            stack.callback(lock.unlink, missing_ok=True)
            if partial.is_symlink() or (partial.exists() and not partial.is_file()):
                raise InvalidInput(f"--out {out}: {partial} exists; move it, or name another file")
            list(_read_lines(partial))
        journal = EvaluationJournal(partial)

        def write(report: str) -> None:
            journal.keep(_REPORT, hashlib.sha256(report.encode()).hexdigest())
            with _reporting(out, "--out "):
                write_whole(out, report)
                partial.unlink(missing_ok=True)

        try:
            yield journal, write
        finally:
            if not journal.parts and _has_no_part(partial):
                partial.unlink()


def _remove_finished(partial: Path, out: Path) -> None:
    """Remove the journal of exactly this report, which a kill right after the report was written has left."""
    with suppress(InvalidInput):  # the file is not a journal, and stays
        if _parts(list(_read_lines(partial))).get(_REPORT) == hashlib.sha256(out.read_bytes()).hexdigest():
            partial.unlink(missing_ok=True)


def _digest(name: str, value: Any) -> str:
    """Return the hexadecimal SHA-256 of a part, as JSON gives it back."""
    return hashlib.sha256(json.dumps([name, value]).encode()).hexdigest()


def _parts(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the parts of a journal's lines, without those that were changed since or have no hash."""
    return {
        line["part"]: line["value"]
        for line in lines[1:]
        if line.get("sha256") == _digest(line["part"], line["value"])
    }


def _has_no_part(partial: Path) -> bool:
    try:
        return partial.is_file() and len(list(_read_lines(partial))) < 2
    except InvalidInput:
        return False  # not a journal: someone else has put it there meanwhile


def _read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a journal; a last one that was cut off is cut off the file too.

    Raises:
        InvalidInput: the file is something else.
    """
    foreign = InvalidInput(f"{file} exists; move it, or name another file")
    content = b""
    if file.is_file():
        with file.open("rb") as stream:
            content = stream.read(len(_HEAD))
            if content and content != _HEAD:
                raise foreign
            content += stream.read()  # of any size: a long text has many windows
    whole = content[: content.rfind(b"\n") + 1]
    try:
        lines = [parse_json(line, "a line") for line in whole.split(b"\n") if line]
    except InvalidInput:
        raise foreign from None
    if not all(isinstance(line.get("part"), str) and "value" in line for line in lines[1:]):
        raise foreign
    if len(whole) < len(content):
        with file.open("r+b") as opened:
            opened.truncate(len(whole))
    yield from lines


@contextmanager
def _reporting(file: Path, option: str = "") -> Iterator[None]:
    """Raise the system's errors as sentences; of a full disk the system names no file."""
    try:
        yield
    except OSError as error:
        of_disk = disk_error(error, file)
        if of_disk is not None:
            raise InvalidInput(f"{option}{disk_sentence(of_disk)}") from None
        raise InvalidInput(
            f"{option}{file} cannot be written: {error.strerror}; name another file, or fix that and run the "
            "same command again"
        ) from None
