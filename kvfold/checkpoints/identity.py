"""The identity of a checkpoint: a hash of everything in its directory that decides what it computes."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from .directory import TOKENIZER_FILES
from .quantised.schemes import MODELOPT_FILE
from .record import hashes

_PARTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    MODELOPT_FILE,
    *TOKENIZER_FILES,
    "tokenizer*",
    "*.py",
)


def hashes_of(directory: Path) -> dict[str, str]:
    """Return the hexadecimal SHA-256 of every file that decides what a checkpoint computes, by name.

    These are weights, configuration, tokenizer and code, and each is read once. A report, a model card or
    kvfold.json next to them changes nothing.

    Args:
        directory: the checkpoint.
    """
    files = {path.name: path for pattern in _PARTS for path in directory.glob(pattern) if path.is_file()}
    return hashes({name: files[name] for name in sorted(files)})


def identity(known: Mapping[str, str]) -> str:
    """Return the hexadecimal SHA-256 of the output of sha256sum for some files, sorted by name.

    Args:
        known: hexadecimal SHA-256 of each file, by name.
    """
    lines = [f"{known[name]}  {name}\n" for name in sorted(known)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
