"""The journal of a half-written output, by which the same command resumes after a kill.

It has one line per finished unit. The journal marks `<out>.partial` as kvfold's, and its lock keeps other
runs out. Each rank above 0 has a journal and a lock of its own there, which the next run merges, in however
many processes it runs.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints.directory import SIDE_FILES
from ...checkpoints.quantised.schemes import MODELOPT_FILE
from ...checkpoints.record import FILE as RECORD
from ...checkpoints.shards import INDEX
from ...core.console import notice
from ...core.errors import InvalidInput
from ...core.files import locked, remove_own, replace_text
from ...core.untrusted import LIMIT_BYTES, parse_json, shorten

JOURNAL = "journal.jsonl"
LOCK = "lock"
Found = dict[str, Any]  # about a unit, as the journal and kvfold.json have it
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HEAD = re.compile(r'"[0-9a-f]{64}"\n')
# Every name that a conversion writes. Anything else in `<out>.partial` was put there by someone else.
_NAMES = re.compile(
    r"(lock|journal)(-\d+)?(\.jsonl)?(\.partial)?"
    r"|model(-\d{5}-of-\d{5,})?\.safetensors|\w+_kvfold\.py"
)
_OTHERS = (INDEX, "config.json", MODELOPT_FILE, RECORD, "README.md", *SIDE_FILES)


class FoldJournal:
    """A journal that is being written.

    Args:
        file: the journal; it is replaced.
        fingerprint: hexadecimal SHA-256 of the plan, its first line.
        done: units that are finished already.
        asked: the options of the fold, its second line; none in the journal of a rank above 0.

    Attributes:
        done: the finished units, with what was found about each.
    """

    def __init__(
        self, file: Path, fingerprint: str, done: Mapping[str, Found], asked: Mapping[str, Any] | None = None
    ) -> None:
        self.done: dict[str, Found] = {}
        self._file = file
        self._head = "".join(json.dumps(line) + "\n" for line in (fingerprint, asked) if line is not None)
        self.restart(done)

    def restart(self, done: Mapping[str, Found]) -> None:
        """Begin the journal again with some finished units.

        Args:
            done: what was found about each of them.

        Raises:
            OSError: the journal cannot be written.
        """
        replace_text(self._file, self._head + _lines(done))
        self.done = dict(done)

    def add(self, found: Mapping[str, Found]) -> None:
        """Note units whose bytes are on the disk.

        Args:
            found: what was found about each of them.

        Raises:
            OSError: the journal cannot be written.
        """
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(_lines(found))
        self.done |= found


@contextmanager
def first_journal(partial: Path, fingerprint: str, asked: Mapping[str, Any]) -> Iterator[FoldJournal]:
    """Claim the directory of a half-written output, and open the journal of rank 0 in it.

    Units that an earlier run of the same plan has finished are in the journal. What a run of another plan has
    left is removed, unless it holds finished layers. A kill leaves the directory for the next run. An error
    that a rerun would meet again removes what kvfold wrote, and no other file.

    Args:
        partial: the directory; it is made if it does not exist.
        fingerprint: hexadecimal SHA-256 of the plan.
        asked: the options of the fold, of which a later run with others names those that differ.

    Yields:
        The open journal.

    Raises:
        InvalidInput: another run is writing there, or it holds finished layers with other options, or a
            file that kvfold did not write.
    """
    _check_claimable(partial)
    partial.mkdir(parents=True, exist_ok=True)
    with locked(partial / LOCK, _busy(partial)):
        _check_claimable(partial)
        done = _merge(partial, fingerprint, asked)
        if done is None:
            remove_own(partial, lambda path: _is_own(path) and path.name not in {LOCK, JOURNAL})
        try:
            journal = FoldJournal(partial / JOURNAL, fingerprint, done or {}, asked)
            for path in partial.iterdir():  # a source may have lost files that an earlier run copied
                if path.suffix != ".safetensors" and path.name not in {LOCK, JOURNAL}:
                    path.unlink()
            yield journal
        except _KeepAll:
            raise
        except (OSError, InvalidInput) as error:
            left = remove_own(partial, _is_own)
            if left and isinstance(error, InvalidInput):
                raise InvalidInput(f"{error}; {_named(left)} in {partial} was left in place") from None
            raise


def check_options(partial: Path, asked: Mapping[str, Any]) -> None:
    """Refuse a directory that `first_journal` would refuse later, before any long work.

    Args:
        partial: the directory of the half-written output; it need not exist.
        asked: the options of the fold.

    Raises:
        InvalidInput: it holds finished layers with other options, or a file that kvfold did not write.
    """
    if not _is_unnamed(partial):
        _check_claimable(partial)
    if not _is_marked(partial):
        return
    found = [_read(path) for path in (partial / JOURNAL, *_others(partial)) if path.suffix == ".jsonl"]
    _compare(partial, [journal for journal in found if journal], json.loads(json.dumps(asked)))


def check_idle(partial: Path) -> None:
    """Refuse a directory in which another run is at work, before any long work.

    Raises:
        InvalidInput: another run holds its lock.
    """
    if _is_marked(partial) and (partial / LOCK).exists():
        with locked(partial / LOCK, _busy(partial)):
            pass


@contextmanager
def other_journal(partial: Path, fingerprint: str, rank: int) -> Iterator[FoldJournal]:
    """Open an empty journal for a rank above 0.

    Args:
        partial: the directory that rank 0 has claimed.
        fingerprint: hexadecimal SHA-256 of the plan.
        rank: of this process.

    Yields:
        The open journal.

    Raises:
        InvalidInput: another run is writing there.
    """
    with locked(partial / f"{LOCK}-{rank}", _busy(partial)):
        yield FoldJournal(partial / f"journal-{rank}.jsonl", fingerprint, {})


@contextmanager
def only_unnamed(partial: Path) -> Iterator[bool]:
    """Say whether a directory holds a finished output that has no journal any more, and keep other runs out.

    A run that is killed right before it gives its output the final name leaves that.

    Args:
        partial: the directory.

    Raises:
        InvalidInput: another run is at work there.
    """
    if not _is_unnamed(partial):
        yield False
        return
    with locked(partial / LOCK, _busy(partial)):
        yield True


def _is_unnamed(partial: Path) -> bool:
    """Return whether a directory holds a finished output, and no journal."""
    if partial.is_symlink() or not (partial / RECORD).is_file() or (partial / JOURNAL).exists():
        return False
    return not _strange(partial)


def unneeded(partial: Path) -> list[Path]:
    """Return the journals and locks, which do not belong to a finished output.

    Args:
        partial: the directory, in which everything else is written.

    Raises:
        InvalidInput: the directory holds a file that kvfold did not write. Everything is kept, so the same
            command finishes the output once the file is moved.
    """
    strange = _strange(partial)
    if strange:
        raise _KeepAll(
            f"{partial} holds {_named(strange)}, which kvfold did not write; move it and run the same "
            "command again, which keeps all work"
        )
    return [path for path in sorted(partial.iterdir()) if path.name.startswith(("journal", LOCK))]


class _KeepAll(InvalidInput):
    """An error after which the half-written output stays."""


@dataclass(frozen=True)
class _Read:
    """A journal of an earlier run: its fingerprint, the options of the fold where it has them, its units."""

    fingerprint: str
    asked: dict[str, Any]
    done: dict[str, Found]


def _merge(partial: Path, fingerprint: str, asked: Mapping[str, Any]) -> dict[str, Found] | None:
    """Return the units of all journals of an earlier run; None if that of rank 0 is of no use.

    Raises:
        InvalidInput: another run is at work, or an earlier one finished layers with other options.
    """
    first = _read(partial / JOURNAL)
    found = [first]
    for path in _others(partial):
        if path.suffix == ".jsonl":
            rank = path.stem.partition("-")[2]
            with locked(partial / f"{LOCK}-{rank}", _busy(partial)):  # no rank of that run is still at work
                found.append(_read(path))
    strangers = [journal for journal in found if journal and journal.fingerprint != fingerprint]
    layers = {name for journal in strangers for name in journal.done if name.startswith("layer ")}
    if layers:
        _compare(partial, strangers, asked)
        notice(  # no option that the user could give makes use of them
            f"the fold starts over: {partial} held {_count(layers)} by another version of kvfold, of other "
            "source files, or by other statistics (of another text, device or number of threads)"
        )
        return None
    if first is None or first.fingerprint != fingerprint:
        return None
    return {name: unit for journal in found if journal for name, unit in journal.done.items()}


def _compare(partial: Path, journals: Sequence[_Read], asked: Mapping[str, Any]) -> None:
    """Refuse a fold where journals have finished layers of one with other options."""
    layers = {name for journal in journals for name in journal.done if name.startswith("layer ")}
    before = next((journal.asked for journal in journals if journal.asked), {})
    if layers and before and before != dict(asked):
        raise InvalidInput(
            f"{partial} holds {_count(layers)} of a fold {_difference(before, asked)}; give the command as "
            "it was to resume it, name another --out, or remove that directory"
        )


def _count(layers: Collection[str]) -> str:
    return "1 finished layer" if len(layers) == 1 else f"{len(layers)} finished layers"


def _difference(before: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Return how a fold that was begun differs from the one that is asked for."""
    changed = [name for name in {**asked, **before} if before.get(name) != asked.get(name)]
    if "model" in changed:
        return f"of another source ({shorten(before.get('model'), 300)})"
    options = ["--engine" if name == "engines" else f"--{name.replace('_', '-')}" for name in changed]
    return f"with another {', '.join(options)}"


def _others(partial: Path) -> list[Path]:
    """Return the journals and locks of ranks above 0."""
    return sorted([*partial.glob("journal-*"), *partial.glob(f"{LOCK}-*")])


def _lines(found: Mapping[str, Found]) -> str:
    return "".join(json.dumps([name, value]) + "\n" for name, value in found.items())


def _read(file: Path) -> _Read | None:
    """Return a journal; None if there is none, or no run of kvfold wrote it as it is."""
    if not file.is_file():
        return None
    if file.stat().st_size > LIMIT_BYTES:
        return None  # no fold has so many units
    text = file.read_text(encoding="utf-8", errors="replace")
    lines = text[: text.rfind("\n") + 1].splitlines()  # a kill may have cut the last line short
    if not lines or _HEAD.fullmatch(lines[0] + "\n") is None:
        return None
    fingerprint = lines.pop(0).strip('"')
    try:
        asked = parse_json(lines.pop(0), "a line") if lines and lines[0].startswith("{") else {}
        found = [parse_json(line, "a line", top=list) for line in lines]
    except InvalidInput:
        return None
    if not all(map(_is_unit, found)):
        return None
    return _Read(fingerprint, asked, {unit[0]: unit[1] for unit in found})


def _is_unit(line: list[Any]) -> bool:
    """Return whether a line of a journal says about a unit what this version writes there."""
    if len(line) != 2 or not isinstance(line[0], str) or not isinstance(line[1], dict):
        return False
    name, found = line
    if name.startswith("file "):
        return isinstance(found.get("sha256"), str) and _SHA256.fullmatch(found["sha256"]) is not None
    if not isinstance(found.get("checksums", {}), dict):  # journals before 2026-11-28 have none
        return False
    if not name.startswith("layer "):
        return True
    return (
        found.keys() >= {"measured", "spectrum"}
        and _are_numbers(found["measured"])
        and isinstance(found["spectrum"], dict | None)
    )


def _are_numbers(losses: Any) -> bool:
    """Return whether the losses of a layer are finite numbers by name, or were not measured."""
    if not isinstance(losses, dict):
        return losses is None
    return "refined" in losses and all(
        type(loss) in {int, float} and math.isfinite(loss) for loss in losses.values()
    )


def _check_claimable(partial: Path) -> None:
    """Refuse a directory that is not a half-written output of kvfold, and not empty either."""
    if not partial.exists() and not partial.is_symlink():
        return
    sentence = f"{partial} exists and is not a half-written output of kvfold; move it, or name another --out"
    if partial.is_symlink() or not partial.is_dir() or not (_is_begun(partial) or _is_marked(partial)):
        raise InvalidInput(sentence)
    strange = _strange(partial)
    if strange:
        raise InvalidInput(f"{partial} holds {_named(strange)}, which kvfold did not write; move it")
    linked = [path for path in sorted(partial.iterdir()) if path.stat().st_nlink > 1]
    if linked := [path for path in linked if not path.match("journal*") and path.name != LOCK]:
        raise InvalidInput(
            f"{partial} holds {_named(linked)}, whose second name, a hard link, would change too; remove "
            "that name, or make it a copy"
        )


def _is_marked(partial: Path) -> bool:
    """Return whether a directory holds a journal that begins with the fingerprint of a plan."""
    return _begins(partial / JOURNAL)


def _is_begun(partial: Path) -> bool:
    """Return whether a directory is empty, or holds what a run leaves that is killed at once."""
    for path in partial.iterdir():
        if path.is_symlink() or not path.is_file() or path.name not in {LOCK, JOURNAL, f"{JOURNAL}.partial"}:
            return False
        if path.stat().st_size and not _begins(path):
            return False
    return True


def _begins(journal: Path) -> bool:
    if journal.is_symlink() or not journal.is_file():
        return False
    with journal.open("rb") as stream:
        return _HEAD.match(stream.read(80).decode("ascii", errors="replace")) is not None


def _strange(partial: Path) -> list[Path]:
    return [path for path in sorted(partial.iterdir()) if not _is_own(path)]


def _is_own(path: Path) -> bool:
    """Return whether an entry of the directory is a file of a name that a conversion writes."""
    if path.is_symlink() or not path.is_file():
        return False
    return _NAMES.fullmatch(path.name) is not None or any(path.match(pattern) for pattern in _OTHERS)


def _named(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths)


def _busy(partial: Path) -> str:
    return f"another kvfold is writing {partial}; wait for it, or name another --out"
