"""Directories in which long work is claimed, recorded unit by unit, resumed and finished.

    <out>.partial/  lock  journal.jsonl  and what the work makes

The first line of the journal says which work it is; each further line is a finished unit with the CRC-32 of
the line. The directory is this user's alone (mode 0700), and what it makes is moved out of it under its final
name only when it is whole. Ranks above 0 of a distributed run have a journal and a lock of their own there,
which the next run merges, in however many processes it runs.

No heavy import here: `--help` goes through this module.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .console import notice
from .disk import disk_error, disk_sentence, naming, writing_errors
from .errors import InvalidInput
from .files import PREFIX, locked, release_held, rename_whole
from .signals import ignored
from .system_calls import opened_directory

JOURNAL, LOCK = "journal.jsonl", "lock"
TRACKERS = "trackers"  # a directory that other programs fill
WRITTEN = "written"  # a directory of text and statistics, which say themselves what they belong to
_MARK = "kvfold_work"  # key of the first line; its value is the version of this format
_FINISHED = "finished"  # the last unit: the inode of the result, which keeps it under its final name
# Every name that kvfold gives to a file in a working directory. Other files there are the user's.
OWN_FILES = (
    "model*.safetensors", "model.safetensors.index.json", "config.json", "hf_quant_config.json",
    "kvfold.json", "README.md", "*_kvfold.py", "eval.json", "report.json", "report.html", "metrics.jsonl",
    "evaluations.jsonl", "curve.json", "curve.png", "progress.json", "manifest.json", "weights.safetensors",
    "optimizer.safetensors", "layer-*.json", "layer-*.safetensors", "step-*.safetensors", "tokens.bin",
    "tokens.json", "marks.bin", "asked.json", "identity.json", "statistics.safetensors", "journal*.jsonl",
    "lock", "lock-*", "batch-*.safetensors",
    "*token*.json", "vocab*", "merges.txt", "*.model", "*.tiktoken", "chat_template*", "*.jinja",
    "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip


@dataclass(frozen=True)
class _Journal:
    """The content of a journal: the kind of work, its request and its state, and the finished units."""

    kind: str
    request: dict[str, Any]
    state: str
    units: dict[str, Any]


class WorkDir:
    """A directory of one piece of work, which `claimed` opens, or the same in memory only.

    Args:
        path: the directory; None: in memory.
        kind: of the work, such as `fold`.
        option: the option that names the output, for errors.
        rank: of this process; each has a journal.

    Attributes:
        path: as above.
        units: what is finished, as JSON gives it back, by name.
        is_finished: whether the result has its final name.
        keeps_all: whether an error leaves everything as it is.

    Example:
        >>> work = WorkDir()
        >>> work.unit("sum", lambda: (1, 2)), work.unit("sum", lambda: (3, 4))
        ([1, 2], [1, 2])
    """

    def __init__(
        self, path: Path | None = None, kind: str = "", option: str = "--out", rank: int = 0
    ) -> None:
        self.units: dict[str, Any] = {}
        self.is_finished = False
        self.keeps_all = False
        self._path, self._kind, self._option = path, kind, option
        self._journal = JOURNAL if rank == 0 else f"journal-{rank}.jsonl"
        self._head = ""
        self._held: int | None = None  # a descriptor of the directory, where the system has them

    @property
    def path(self) -> Path:
        """The directory."""
        assert self._path is not None, "the work is in memory"
        return self._path

    def begin(self, request: Mapping[str, Any], state: str = "") -> None:
        """Take up the units of an earlier run of the same request, or begin.

        `state` is a digest of all else that the units depend on; those of another state are not used.

        Raises:
            InvalidInput: the directory holds finished units of another request, or another run is at work.
        """
        wanted = json.loads(json.dumps(request, default=str))
        head = {_MARK: 1, "kind": self._kind, "request": wanted, "state": state}
        self._head = json.dumps(head) + "\n"
        if self._path is None or self._journal != JOURNAL:
            self.restart({})
            return
        self.keeps_all = True  # a refusal leaves what is there
        found = self._compare(wanted)
        self.keeps_all = False
        if any(journal.units and journal.state != state for journal in found.values()):
            notice(  # no option that the user could give makes use of them
                f"{self.path} is begun anew: it was begun with other input files, by other statistics, on "
                "another device or number of threads, or by another version of kvfold"
            )
        first = found.get(JOURNAL)
        if first is None or (first.request, first.state) != (wanted, state):
            if first is not None:
                self.clear(keep=WRITTEN)
            self.restart({})
            return
        same = [journal.units for journal in found.values() if journal.state == state]
        units = {name: unit for each in same for name, unit in each.items()}
        self.restart({name: unit for name, unit in units.items() if name != _FINISHED})

    def check(self, request: Mapping[str, Any]) -> None:
        """Raise what `begin` would raise about the request."""
        self._compare(json.loads(json.dumps(request, default=str)))

    def request(self) -> dict[str, Any] | None:
        """Return the request that the directory was begun with; None if it was not begun."""
        found = self._read(JOURNAL)
        return found.request if found else None

    def restart(self, units: Mapping[str, Any]) -> None:
        """Write the journal anew with these units alone; the journals of other ranks are removed."""
        if self._path is not None:
            temporary = f"{self._journal}.partial"
            with suppress(FileNotFoundError):
                self._remove(temporary)
            with naming(self.path), self._open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as stream:
                stream.write((self._head + _lines(units)).encode())
                stream.flush()
                os.fsync(stream.fileno())
            names = (temporary, self._journal)
            if self._held is None:
                (self.path / names[0]).replace(self.path / names[1])
            else:
                os.replace(*names, src_dir_fd=self._held, dst_dir_fd=self._held)
            if self._journal == JOURNAL:
                for other in self._others():
                    self._remove(other)
        self.units = dict(units)

    def add(self, units: Mapping[str, Any]) -> None:
        """Record units whose results are on the disk.

        They are plain values with finite numbers, by name.

        Raises:
            InvalidInput: the directory was replaced by another one.
            OSError: the journal cannot be written.
        """
        text = _lines(units)
        if self._path is not None:
            self._check_held()
            with naming(self.path), self._open(self._journal, os.O_APPEND | os.O_WRONLY) as stream:
                stream.write(text.encode())
                stream.flush()
                os.fsync(stream.fileno())
        self.units |= json.loads(json.dumps(dict(units)))

    def unit(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a unit, which is made and recorded unless it is finished already."""
        if name not in self.units:
            self.add({name: make()})
        return self.units[name]

    def finish(self, place: Path, out: Path) -> None:
        """Give a whole result its final name. `claimed` then removes the directory.

        `place` is a file or a directory in this one, and `out` is on the same file system.

        Raises:
            InvalidInput: `out` exists, or `place` holds a file that kvfold did not write. Everything is kept,
                so that the same command finishes the result once the file is moved.
        """
        for path in strangers(place):
            self.keeps_all = True
            raise InvalidInput(
                f"{path.parent} holds {path.name}, which kvfold did not write; move it and run the same "
                "command again, which keeps all work"
            )
        self.add({_FINISHED: place.stat().st_ino})
        rename_whole(place, out)
        self.is_finished = True

    def discard(self) -> list[Path]:
        """Remove what kvfold wrote, and the directory if that empties it; return what is left."""
        path = self.path
        with ignored():
            left = self.clear()
            release_held(path)
            for name in (*self._others(), f"{JOURNAL}.partial", JOURNAL, LOCK):
                with suppress(OSError):
                    self._remove(name)
            with suppress(OSError):
                path.rmdir()
        return left

    def clear(self, keep: str = "") -> list[Path]:
        """Remove what kvfold wrote, apart from journals and locks.

        `keep` is a directory in this one that stays as it is. Returns what kvfold did not write.
        """
        self._check_held()
        kept = {JOURNAL, LOCK, keep, *self._others()}
        left = list(strangers(self.path))
        for path in self.path.iterdir():
            if path.name not in kept:
                remove_own(path)
        return left

    def _compare(self, wanted: Mapping[str, Any]) -> dict[str, _Journal]:
        """Return the journals of an earlier run, unless they have finished units of another request."""
        journals = {JOURNAL: self._read(JOURNAL)}
        for name in self._others():
            if name.startswith("journal"):
                rank = name.removeprefix("journal-").removesuffix(".jsonl")
                with locked(self.path / f"{LOCK}-{rank}", self._busy):  # no process of it is at work
                    journals[name] = self._read(name)
        found = {name: journal for name, journal in journals.items() if journal}
        units = {name for journal in found.values() for name in journal.units}
        before = next((journal.request for journal in found.values() if journal.request != wanted), None)
        if units and before is not None:
            raise InvalidInput(
                f"{self.path} holds {len(units)} finished parts of another command, which differs in "
                f"{', '.join(differences(before, wanted))}; give that command again to resume it, name "
                f"another {self._option}, or remove {self.path}"
            )
        return found

    def _others(self) -> list[str]:
        """Return the names of the journals and locks of ranks above 0."""
        return sorted(path.name for kind in ("journal-*", f"{LOCK}-*") for path in self.path.glob(kind))

    @property
    def _busy(self) -> str:
        return f"another kvfold is at work in {self.path}; wait for it, or name another {self._option}"

    def _open(self, name: str, flags: int) -> Any:
        """Open a file of the directory that is held, without following a link."""
        place = self.path / name if self._held is None else name
        descriptor = os.open(place, flags | getattr(os, "O_NOFOLLOW", 0), 0o600, dir_fd=self._held)
        return os.fdopen(descriptor, "wb" if flags & os.O_WRONLY else "rb")

    def _remove(self, name: str) -> None:
        os.unlink(self.path / name if self._held is None else name, dir_fd=self._held)

    def _check_held(self) -> None:
        """Refuse to continue if another directory has taken this one's name."""
        if self._held is None:
            return
        try:
            same = os.path.samestat(os.fstat(self._held), os.lstat(self.path))
        except FileNotFoundError:
            same = False
        if not same:
            raise InvalidInput(
                f"{self.path} was moved or replaced while it was written; run the same command again"
            )

    def _read(self, name: str) -> _Journal | None:
        """Return a journal; None if there is none, or kvfold did not write it."""
        try:
            with self._open(name, os.O_RDONLY) as stream:
                content = stream.read()
        except OSError:
            return None
        lines = content[: content.rfind(b"\n") + 1].split(b"\n")  # a kill may have cut the last line short
        head = _parsed(lines[0])
        if not isinstance(head, dict) or head.get(_MARK) != 1 or not isinstance(head.get("request"), dict):
            return None
        units = {}
        for line in map(_parsed, lines[1:]):
            if isinstance(line, list) and len(line) == 3 and line[2] == _checksum(*line[:2]):
                units[str(line[0])] = line[1]
        return _Journal(str(head.get("kind")), head["request"], str(head.get("state")), units)

    def result(self) -> Any:
        """Return what `finish` recorded about a result before it got its final name; None if it did not."""
        found = self._read(JOURNAL)
        return found.units.get(_FINISHED) if found else None

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold the directory and its lock for the duration."""
        lock = self._journal.removesuffix(".jsonl").replace("journal", LOCK)
        with ExitStack() as stack:
            stack.callback(setattr, self, "_held", None)
            try:
                self._held = stack.enter_context(opened_directory(self.path))
                stack.enter_context(locked(self.path / lock, self._busy))
            except FileNotFoundError:  # a run that has ended has just removed it
                raise InvalidInput(self._busy) from None
            except OSError as error:
                raise InvalidInput(
                    f"cannot write {self.path}: {error.strerror}; name another {self._option}"
                ) from None
            self._check_held()
            begun = self._read(JOURNAL)
            self.keeps_all = bool(begun and begun.units)  # until `begin` has compared the requests
            if begun and self._kind not in {"", begun.kind}:
                raise InvalidInput(
                    f"{self.path} holds an unfinished {begun.kind}; finish that, remove it, or name another "
                    f"{self._option}"
                )
            yield


@contextmanager
def claimed(
    path: Path,
    kind: str,
    *,
    option: str = "--out",
    keeps: Callable[[WorkDir], bool] = lambda work: False,
    reads_earlier: bool = False,
) -> Iterator[WorkDir]:
    """Claim a working directory: one run is at work in it at a time.

    Once the result has its final name, the end removes the directory. So does an error that a rerun would
    meet again, unless there is work to keep. Anything else that ends the run leaves it to resume from, unless
    nothing is finished. `keeps` returns whether there is work to keep after an error, and `reads_earlier` is
    whether work that versions of kvfold without a journal began is resumed. `begin` is called next.

    Raises:
        InvalidInput: the directory is not kvfold's or not this user's alone, cannot be written, or another
            run is at work in it.
    """
    work = WorkDir(path, kind, option)
    _check_claimable(path, option)
    missing = [place for place in path.parents if not place.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}; name another {option}") from None
    with work.holding():
        _check_claimable(path, option)  # it could have been replaced before it was held
        if not reads_earlier and work.request() is None:
            if {place.name for place in path.iterdir()} - {LOCK, f"{JOURNAL}.partial"}:
                notice(f"{path} was begun by an earlier version of kvfold, and is begun anew")
            work.clear()
        try:
            try:
                yield work
            except writing_errors() as error:  # for most of them the system names no file
                found = disk_error(error, path)
                if found is None:
                    raise
                kept = "what was finished is kept" if keeps(work) else ""
                raise InvalidInput(disk_sentence(found, kept=kept)) from None
        except BaseException as error:
            is_mistake = isinstance(error, InvalidInput)
            is_begun = bool(work.units) or any(name.startswith("journal") for name in work._others())
            is_begun = is_begun or (path / WRITTEN).exists()
            if work.keeps_all or keeps(work) or (is_begun and not is_mistake):
                raise
            left = ", ".join(place.name for place in work.discard())
            for place in missing:
                with suppress(OSError):
                    place.rmdir()
            if left and is_mistake:
                raise InvalidInput(f"{error}; {left} in {path} was left in place") from None
            raise
        if work.is_finished:
            work.discard()


@contextmanager
def whole_directory(out: Path, kind: str) -> Iterator[Path]:
    """Write a directory that appears under its name when the block ends without an error.

    Raises:
        InvalidInput: as of `claimed`, or `out` exists at the end.
    """
    with claimed(working_directory(out), kind) as work:
        work.begin({})
        work.clear()
        place = work.path / "whole"
        place.mkdir()
        yield place
        work.finish(place, out)


@contextmanager
def joined(path: Path, kind: str, rank: int) -> Iterator[WorkDir]:
    """Join the work in a directory that rank 0 has claimed, in a process of a rank above 0.

    Raises:
        InvalidInput: another run is at work in it.
    """
    work = WorkDir(path, kind, rank=rank)
    with work.holding():
        yield work


def discard_finished(out: Path) -> bool:
    """Remove `<out>.partial` if its work has given `out` its name: a kill came before the removal.

    Returns:
        Whether there was such a directory.

    Raises:
        InvalidInput: another run is at work in it.
    """
    path = working_directory(out)
    if not out.exists() or not path.is_dir() or _why_not_ours(path):
        return False
    work = WorkDir(path)
    with work.holding():
        # Where only the lock is left, the kill came while the directory was removed.
        if work.result() != out.stat().st_ino and {place.name for place in path.iterdir()} != {LOCK}:
            return False
        work.discard()
    return True


def working_directory(out: Path) -> Path:
    """Return the working directory of an output."""
    return out.with_name(f"{out.name}.partial")


def strangers(place: Path) -> Iterator[Path]:
    """Yield what is at or below a path and kvfold does not write there, by its name.

    These are also all links. Everything in the directory of trackers and in private directories is kvfold's.
    """
    name = place.name.removesuffix(".partial")
    is_own = name.startswith(PREFIX) or any(fnmatchcase(name, pattern) for pattern in OWN_FILES)
    if place.is_symlink() or (place.is_file() and not is_own):
        yield place
    elif place.is_dir() and not (place.name == TRACKERS or place.name.startswith(PREFIX)):
        for path in sorted(place.iterdir()):
            yield from strangers(path)
    elif place.exists() and not place.is_file() and not place.is_dir():
        yield place


def remove_own(place: Path) -> None:
    """Remove what kvfold wrote at or below a path in a working directory; no link is followed."""
    if place.is_dir() and not place.is_symlink():
        passed = place.name == TRACKERS or place.name.startswith(PREFIX)
        if passed:
            shutil.rmtree(place, ignore_errors=True)
            return
        for path in place.iterdir():
            remove_own(path)
        with suppress(OSError):  # something is left in it
            place.rmdir()
    elif next(strangers(place), None) is None:
        place.unlink(missing_ok=True)


def differences(before: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the names of values that differ between two requests, with short earlier values."""
    old, new = _flat(before), _flat(wanted)
    found = []
    for name in {**new, **old}:
        if old.get(name) != new.get(name):
            shown = f" (was {old[name]})" if len(str(old.get(name, " " * 40))) < 40 else ""
            found.append(name + shown)
    return found


def fingerprint(*values: Any) -> str:
    """Return the hexadecimal SHA-256 of plain values; those that JSON does not know count as text."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return the values inside a request by their names, such as `recipe.stages[0].lr`."""
    if isinstance(value, dict):
        inside = {f"{name}.{key}" if name else str(key): part for key, part in value.items()}
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        inside = {f"{name}[{at}]": part for at, part in enumerate(value)}
    else:
        return {name: value}
    return {inner: each for key, part in inside.items() for inner, each in _flat(part, key).items()}


def _check_claimable(path: Path, option: str) -> None:
    if why := _why_not_ours(path):
        raise InvalidInput(
            f"{path} exists and is not unfinished work of this user's kvfold: {why}; move it, or name "
            f"another {option}"
        )


def _why_not_ours(path: Path) -> str:
    """Return why a directory is no working directory of this user; empty if it is one, or missing."""
    if not path.exists() and not path.is_symlink():
        return ""
    if path.is_symlink() or not path.is_dir():
        return "it is not a directory"
    is_marked = (path / LOCK).is_file() and not (path / LOCK).stat().st_size
    if not is_marked and any(path.iterdir()):
        return f"it has no {LOCK} of kvfold"
    # An empty one is only ours if nobody else can put a link there.
    if not _is_private(path, 0o022 if is_marked else 0o077):
        return "it is another user's, or others can write to it"
    strange = next(strangers(path), None)
    return "" if strange is None else f"it holds {strange.relative_to(path)}"


def _is_private(path: Path, bits: int) -> bool:
    """Return whether a directory has the owner and, of these bits, the rights of a private one made here."""
    about = path.lstat()
    if hasattr(os, "getuid") and about.st_uid == os.geteuid() and not about.st_mode & bits:
        return True
    try:  # some file systems know neither owners nor rights
        with TemporaryDirectory(dir=path.absolute().parent, prefix=PREFIX) as made:
            private = os.lstat(made)
    except OSError:
        return False
    return about.st_uid == private.st_uid and not about.st_mode & ~private.st_mode & bits


def _lines(units: Mapping[str, Any]) -> str:
    lines = []
    for name, unit in units.items():
        value = json.loads(json.dumps(unit, allow_nan=False))
        lines.append(json.dumps([name, value, _checksum(name, value)]) + "\n")
    return "".join(lines)


def _checksum(name: str, unit: Any) -> int:
    return zlib.crc32(json.dumps([name, unit]).encode())


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
