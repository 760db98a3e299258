"""Files of texts: their kinds and compressions, the files that a name stands for, and their decompression.

A file that is named itself may have any suffix: it is plain text if it is UTF-8. Of directories and globs
only files of known kinds are taken. Only regular files are read. Of a directory, only those that resolve
inside it, or to the blobs of the Hub's cache.
"""

import bz2
import codecs
import glob
import gzip
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import InvalidInput
from ..core.untrusted import printable

KINDS = ".txt, .jsonl, .json or .parquet (also .gz, .xz, .bz2, .zst)"
_BUILDERS = {".jsonl": "json", ".json": "json", ".txt": "text", ".parquet": "parquet"}
_DECOMPRESSORS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_COMPRESSIONS = {*_DECOMPRESSORS, ".zst"}
_BEGINNING = 2**16  # bytes of a file of another suffix, by which text is recognised; of what is read at once


def compression(file: Path) -> str:
    """Return the suffix of a file's compression, or an empty string."""
    return file.suffix if file.suffix in _COMPRESSIONS else ""


def kind(file: Path) -> str:
    """Return the suffix of a file without that of its compression."""
    return Path(file.name.removesuffix(compression(file))).suffix


def builder_of(file: Path) -> str | None:
    """Return the builder of `datasets` for a file of this name, or None if texts are not of its kind."""
    return _BUILDERS.get(kind(file))


def is_plain_text(file: Path) -> bool:
    """Return True if a file is read whole, as one document, and not for its fields."""
    return builder_of(file) in (None, "text")


def is_data_set(name: str) -> bool:
    """Return True if a name can be that of a data set on the Hub: `org/name`."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and builder_of(Path(name)) is None


def find_files(name: str, option: str) -> list[Path]:
    """Return the files that a name stands for, in sorted order; an empty list for a name on the Hub.

    Args:
        name: a file, a directory or a glob.
        option: the option or key that the name was given to, for errors.

    Raises:
        InvalidInput: nothing of that name can be read, or it holds files of several kinds.
    """
    shown = printable(name)
    try:
        found = _look_up(name, f"{option} {shown}")
    except (OSError, RuntimeError) as error:  # a name too long, no permission, no home directory
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{option} {shown} cannot be read: {reason}") from None
    if len({builder_of(file) for file in found}) > 1:
        raise InvalidInput(
            f"{option} {shown} holds files of several kinds; name one, e.g. {shown.rstrip('/')}/*.jsonl"
        )
    return found


def exists(name: str) -> bool:
    """Return True if a name is that of a file or directory here; False also for what can be no name."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def _look_up(name: str, called: str) -> list[Path]:
    path = Path(name).expanduser()
    if "\0" in name:
        raise InvalidInput(f"{called} is not the name of a file; name one of {KINDS}")
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if builder_of(file) and _is_inside(file, path)]
        if not found:

            def fail(error: OSError) -> None:  # of a directory that cannot be listed, which a search skips
                raise error

            for _ in os.walk(path, onerror=fail):
                pass
            raise InvalidInput(
                f"{called} is a directory that holds no file of a known kind; name one of {KINDS}"
            )
    elif path.is_file():
        if not builder_of(path) and not _begins_as_text(path):
            raise InvalidInput(
                f"{called} is of no known kind and no UTF-8 text; name a UTF-8 text file, or one of {KINDS}"
            )
        found = [path]
    else:
        matches = (Path(file) for file in glob.glob(str(path), recursive=True))
        found = sorted(file for file in matches if builder_of(file) and file.is_file())
        if not found and is_data_set(name):
            return []
        if not found:
            raise InvalidInput(f"{called} is neither a file of {KINDS} here nor an org/name on the Hub")
    return found


def _begins_as_text(file: Path) -> bool:
    """Return True if the beginning of a file is UTF-8 without null characters, as no binary format's is."""
    with file.open("rb") as stream:
        beginning = stream.read(_BEGINNING)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)  # it may end within a character
    except UnicodeDecodeError:
        return False
    return b"\0" not in beginning


def _is_inside(file: Path, directory: Path) -> bool:
    """Return True for a regular file that is stored in the directory or in the blobs of a Hub snapshot."""
    if not file.is_file():
        return False
    root = directory.resolve()
    target = file.resolve()
    snapshots = [parent for parent in (root, *root.parents) if parent.name == "snapshots"]
    blobs = {parent.with_name("blobs") for parent in snapshots}
    return target.is_relative_to(root) or target.parent in blobs


def open_text(file: Path) -> Any:
    """Open a text file that is plain or compressed by .gz, .xz or .bz2, as a stream of UTF-8."""
    return _DECOMPRESSORS.get(compression(file), open)(file, "rt", encoding="utf-8")


def flaw_of_utf8(file: Path) -> int | None:
    """Return the place of the first byte that is not UTF-8, or None; of compressed files in their content."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    with open_text(file) as stream:
        while True:
            content = stream.buffer.read(_BEGINNING)
            held = len(decoder.getstate()[0])  # of a character that the part before has begun
            try:
                decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                return read - held + error.start
            if not content:
                return None
            read += len(content)
