"""The content of a publication: a card, and every file of a directory except hidden files and pickles."""

import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import InvalidInput

WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")  # the names that transformers loads
_PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib"}


@dataclass(frozen=True)
class Publication:
    """A checkpoint that is ready to be published.

    Attributes:
        directory: the checkpoint; nothing is written to it.
        repository: owner/name.
        private: the repository is to be private.
        card: content of README.md.
        files: all other files, relative to the directory, with their bytes.
        notices: sentences for the user.
    """

    directory: Path
    repository: str
    private: bool
    card: str
    files: dict[str, int]
    notices: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of every file that is sent, the card first."""
        return {"README.md": len(self.card.encode()), **self.files}


def files_of(directory: Path) -> dict[str, int]:
    """Return the bytes of every file to send, by its name in the repository.

    README.md is not among them, since it is made from the card.

    Raises:
        InvalidInput: a file is a pickle, is half-written or cannot be read.
    """
    found = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if any(part.startswith(".") or part == "__pycache__" for part in name.parts) or path.is_dir():
            continue
        if not path.is_file() or not os.access(path, os.R_OK):
            raise InvalidInput(f"{path} cannot be read; remove it, or make it readable")
        if path.suffix == ".partial":
            raise InvalidInput(f"{path} is half-written; finish what writes it, or remove it")
        if _is_pickle(path):
            raise InvalidInput(
                f"{path} is a pickle, which can run code when loaded; only safetensors are published: "
                f"remove it"
            )
        found[name.as_posix()] = path.stat().st_size
    found.pop("README.md", None)
    return found


def _is_pickle(path: Path) -> bool:
    """Return whether a file is a pickle, by its name or its content.

    Pickles of protocol 2 and later begin with their protocol; torch stores one in a zip file with its
    tensors.
    """
    if path.suffix.lower() in _PICKLED:
        return True
    with path.open("rb") as file:
        head = file.read(4)
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return True
    if head != b"PK\x03\x04":
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False
