"""The identity of a checkpoint: hashes of what decides what it computes, and the check that it stays so.

What is recorded of a checkpoint is what was read of it: `hashes_of` goes with a `signature` that was taken
before, and `check_signature` follows the last reading.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from ..core.errors import InvalidInput
from .directory import TOKENIZER_FILES, Checkpoint, read_config, weight_files
from .quantised.schemes import MODELOPT_FILE
from .record import hashes, sha256
from .shards import read_header

_CONFIG = "config.json"
_PARTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    _CONFIG,
    MODELOPT_FILE,
    *TOKENIZER_FILES,
    "tokenizer*",
    "*.py",
)
# Bytes read at both ends and in the middle of every tensor; folds of one source differ in few tensors.
_SAMPLE = 2**12
Signature = dict[str, tuple[int, int, int]]  # bytes, time in ns and inode of each file, by name


def hashes_of(directory: Path) -> dict[str, str]:
    """Return the hexadecimal SHA-256 of every file that decides what a checkpoint computes, by name.

    These are weights, configuration, tokenizer and code, and each is read once. A report, a model card or
    kvfold.json next to them changes nothing.
    """
    return hashes(_files(directory))


def signature(directory: Path) -> Signature:
    """Return what changes when a file of `hashes_of` does, without reading any."""
    found = {name: path.stat() for name, path in _files(directory).items()}
    return {name: (about.st_size, about.st_mtime_ns, about.st_ino) for name, about in found.items()}


def check_signature(directory: Path, before: Signature) -> None:
    """Check that no file of `hashes_of` has changed since a signature was taken.

    Raises:
        InvalidInput: a file was written, replaced or removed meanwhile.
    """
    now = signature(directory)
    for name in sorted(now.keys() | before.keys()):
        if now.get(name) != before.get(name):
            raise _changed(directory / name)


def _files(directory: Path) -> dict[str, Path]:
    files = {path.name: path for pattern in _PARTS for path in directory.glob(pattern) if path.is_file()}
    return {name: files[name] for name in sorted(files)}


def identity(known: Mapping[str, str]) -> str:
    """Return the hexadecimal SHA-256 of the output of sha256sum for some files, sorted by name."""
    lines = [f"{known[name]}  {name}\n" for name in sorted(known)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def hash_unchanged(checkpoint: Checkpoint, file: Path) -> str:
    """Return the hexadecimal SHA-256 that a weight file has had since its checkpoint was opened.

    Raises:
        InvalidInput: the file was written, replaced or touched since the checkpoint was opened.
    """
    found = sha256(file)
    about = file.stat()  # of this file alone: a checkpoint may have thousands
    if (file.name, about.st_size, about.st_mtime_ns) not in checkpoint.opened:
        raise _changed(file)
    return found


def check_unchanged(checkpoint: Checkpoint, known: Mapping[str, str] | None = None) -> None:
    """Check that the files of a checkpoint still have the content that was opened.

    A file is read again only where its size or its time differs. A view has no files of its own: the
    checkpoint under it is checked. `known` has hashes from `hash_unchanged`; a touched file without a hash
    there counts as changed.

    Raises:
        InvalidInput: a file was written, replaced or removed meanwhile.
    """
    origin, hashes = checkpoint.origin, known or {}
    files = {file.name: file for file in origin.files}
    try:
        pairs = zip(origin.opened, origin.identity(), strict=True)
    except FileNotFoundError as error:
        raise InvalidInput(f"{error.filename} was removed while it was read") from None
    for name in [before[0] for before, now in pairs if before != now]:
        if name == _CONFIG:
            same = read_config(origin.directory) == origin.config
        else:
            same = name in hashes and sha256(files[name]) == hashes[name]
        if not same:
            raise _changed(files.get(name, origin.directory / name))


def _changed(file: Path) -> InvalidInput:
    return InvalidInput(f"{file} changed while it was read; run the same command again")


def fingerprint(directory: Path) -> str:
    """Return a hash of a checkpoint's config and of parts of every weight.

    It does not depend on where the checkpoint is stored, or when it was copied, nor on other safetensors next
    to its weights, such as saved statistics.

    Raises:
        InvalidInput: a weight file is missing or damaged.
    """
    digest = hashlib.blake2b((directory / "config.json").read_bytes(), digest_size=16)
    for file in weight_files(directory):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        tensors = [(entry.start, entry.start + entry.spec.nbytes) for entry in read_header(file).values()]
        header = (0, min((begin for begin, _ in tensors), default=size))
        with file.open("rb") as stream:
            for begin, end in [header, *sorted(tensors)]:
                for place in (begin, (begin + end) // 2, max(begin, end - _SAMPLE)):
                    stream.seek(place)
                    digest.update(stream.read(min(_SAMPLE, end - place)))
    return digest.hexdigest()
