"""Which checkpoint a number belongs to: a hash of everything in its directory that decides what it computes."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..convert.card import read_record

_PARTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "tokenizer*",
    "*.model",
    "special_tokens_map.json",
    "*.py",
)
_TOLD = ("stage", "version", "target", "method", "cache")  # of kvfold.json


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as a report names it.

    Attributes:
        path: its directory.
        name: the directory's name, or that of the repository in the Hub's cache.
        identity: see `identity`.
        record: what kvfold.json says of how it was made; None where kvfold did not make it.
    """

    path: str
    name: str
    identity: str
    record: dict[str, Any] | None


def checkpoint(directory: Path) -> Checkpoint:
    """Name a checkpoint; reads all its files once."""
    record = read_record(directory)
    told = None if record is None else {key: record[key] for key in _TOLD if key in record}
    hub = directory.parent.parent.name if directory.parent.name == "snapshots" else ""
    name = hub.removeprefix("models--").replace("--", "/") or directory.name
    return Checkpoint(str(directory), name, identity(directory), told)


def identity(directory: Path) -> str:
    """Hexadecimal SHA-256 of the lines `<SHA-256 of a file>  <its name>`, as sha256sum prints them, sorted by name.

    The files are weights, configuration, tokenizer and code; a report, a model card or kvfold.json beside them change nothing.
    """
    files = {path.name: path for pattern in _PARTS for path in directory.glob(pattern) if path.is_file()}
    lines = []
    for name in sorted(files):
        with files[name].open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()
