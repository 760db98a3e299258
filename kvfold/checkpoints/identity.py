"""The identity of a checkpoint: a hash of everything in its directory that decides what it computes."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from .directory import TOKENIZER_FILES
from .eval_json import MeasuredCheckpoint
from .quantised.schemes import MODELOPT_FILE
from .record import read_record, sha256

_PARTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    MODELOPT_FILE,
    *TOKENIZER_FILES,
    "tokenizer*",
    "*.py",
)
_TOLD = ("stage", "version", "target", "method", "cache")  # of kvfold.json


def checkpoint(directory: Path, hashes: Mapping[str, str]) -> MeasuredCheckpoint:
    """Name a checkpoint.

    Args:
        directory: the checkpoint.
        hashes: of its files, from `hashes_of`.

    Raises:
        InvalidInput: its kvfold.json is damaged.
    """
    record = read_record(directory)
    told = None if record is None else {key: record[key] for key in _TOLD if key in record}
    hub = directory.parent.parent.name if directory.parent.name == "snapshots" else ""
    name = hub.removeprefix("models--").replace("--", "/") or directory.name
    return MeasuredCheckpoint(str(directory), name, identity(hashes), told)


def hashes_of(directory: Path) -> dict[str, str]:
    """Return the hexadecimal SHA-256 of every file that decides what a checkpoint computes, by name.

    These are weights, configuration, tokenizer and code, and each is read once. A report, a model card or
    kvfold.json next to them changes nothing.

    Args:
        directory: the checkpoint.
    """
    files = {path.name: path for pattern in _PARTS for path in directory.glob(pattern) if path.is_file()}
    return {name: sha256(files[name]) for name in sorted(files)}


def identity(hashes: Mapping[str, str]) -> str:
    """Return the hexadecimal SHA-256 of the output of sha256sum for some files, sorted by name.

    Args:
        hashes: hexadecimal SHA-256 of each file, by name.
    """
    lines = [f"{hashes[name]}  {name}\n" for name in sorted(hashes)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
