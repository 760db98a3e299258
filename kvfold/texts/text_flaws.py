"""The place in a file of texts at which reading fails, as its owner would look for it."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..core.untrusted import printable
from .text_files import builder_of, compression, flaw_of_utf8, is_plain_text

_LARGEST = 2**30  # bytes of a file that is searched


def first_flaw(files: Sequence[Path], place: str) -> str | None:
    """Return what is wrong in the first file that is not UTF-8 or not JSON, and what would be right.

    Args:
        files: of texts; compressed ones, Parquet and large ones are not searched.
        place: the file, directory or glob that named them.

    Returns:
        Half a sentence, which names the file unless `place` does; None if nothing is found.
    """
    for file in files:
        if compression(file) or file.stat().st_size > _LARGEST:
            continue
        flaw = None
        if is_plain_text(file):
            byte = flaw_of_utf8(file)
            if byte is not None:
                flaw = utf8_flaw("it" if str(file) == place else printable(file), byte)
        elif builder_of(file) == "json":
            flaw = _flaw_of_json(file, "" if str(file) == place else f"{printable(file)} ")
        if flaw:
            return flaw
    return None


def utf8_flaw(name: str, byte: int) -> str:
    """Return half a sentence for a text that is not UTF-8 from a byte on."""
    return f"{name} is not UTF-8 text (byte {byte}); save it as UTF-8"


def _flaw_of_json(file: Path, called: str) -> str | None:
    """Return the flaw of a list of JSON, or of the first line that is no JSON value."""
    for number, content in _values(file):
        try:
            json.loads(content.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            return utf8_flaw(f"{called}line {number}" if number else called.strip() or "it", error.start)
        except json.JSONDecodeError as error:
            wanted = "one JSON object per line"
            wanted = wanted if number else f"a list of objects, or {wanted}"
            place = f"line {number or error.lineno}"
            return f"{called}{place} is not JSON ({error.msg}, column {error.colno}); write {wanted}"
        except (RecursionError, ValueError):  # too deep, or too many digits
            return None
    return None


def _values(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the whole of a list as number 0, and otherwise each line that is not blank with its number."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if number == 1 and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                yield 0, line + stream.read()
                return
            if line.strip():
                yield number, line.rstrip()
