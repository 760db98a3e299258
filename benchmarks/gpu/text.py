"""Text that any machine with Python has: its standard library and the sources and documents of its packages.

A whole package is either training text or held-out text, so that no held-out file has a near copy in the
training text.
"""

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import click

import kvfold
from kvfold.core.files import replace_text
from kvfold.texts.standard_library import stdlib_documents

from .sizes import Sizes

ENDINGS = (".py", ".md", ".rst", ".txt")
LARGEST, SMALLEST = 300_000, 200  # bytes of a file: larger ones are tables
HELD_OUT = 20  # one package of so many is held out
HELD_BYTES = 4 * 10**6
TRAIN, HELD = "train.jsonl", "held-out.txt"


def roots() -> list[Path]:
    """Return the folders whose direct children are packages."""
    found = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    return [root for root in dict.fromkeys([*found, Path("/usr/share")]) if root.is_dir()]


def is_held_out(package: str) -> bool:
    """Return whether a package is held out; all files of a name with any ending are one package."""
    name = package.split("-")[0].split(".")[0].lower()
    return hashlib.sha256(name.encode()).digest()[0] * HELD_OUT < 256


def documents(folders: list[Path], held_out: bool, limit: int) -> Iterator[str]:
    """Yield texts in an order that spreads packages, each content once, up to `limit` bytes.

    Args:
        folders: as `roots` returns them.
        held_out: the part that is yielded.
        limit: bytes of all texts together.
    """
    files = [
        (hashlib.sha256(str(file.relative_to(root)).encode()).digest(), file)
        for root in folders
        for package in sorted(root.iterdir())
        if is_held_out(package.name) == held_out
        for file in ([package] if package.is_file() else package.rglob("*"))
        if file.suffix in ENDINGS
    ]
    seen: set[bytes] = set()
    for _, file in sorted(files):
        try:
            if not SMALLEST <= file.stat().st_size <= LARGEST:
                continue
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):  # a link to nothing, or not text
            continue
        content = hashlib.sha256(text.encode()).digest()
        if content in seen or not text.strip():
            continue
        seen.add(content)
        limit -= len(text.encode())
        if limit < 0:
            return
        yield text


def write_text(work: Path, sizes: Sizes) -> dict[str, int]:
    """Write the training and the held-out text below `work`, unless they are there; return their bytes.

    The standard library's training part is always in the training text; its held-out modules, from which the
    suite `retrieval` takes its filler, are in neither.
    """
    limit, folders = sizes.text_bytes, [Path(kvfold.__file__).parent] if sizes.name == "toy" else roots()
    if not (work / HELD).exists():
        library = "\n\n".join(stdlib_documents(held_out=False)).encode()[: limit // 2].decode(errors="ignore")
        texts = [library[start : start + LARGEST] for start in range(0, len(library), LARGEST)]
        texts += documents(folders, False, limit - len(library.encode()))
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        replace_text(work / TRAIN, "".join(lines))
        held = "\n\n".join(documents(folders, True, min(HELD_BYTES, limit)))
        if not held:
            click.echo(
                "no package is held out here, so the held-out modules of the standard library are", err=True
            )
            held = "\n\n".join(stdlib_documents(held_out=True))
        replace_text(work / HELD, held)
    return {name: (work / name).stat().st_size for name in (TRAIN, HELD)}
