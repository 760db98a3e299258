"""The content of a publication: a card, and the files that a checkpoint consists of, by their names."""

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from ..checkpoints.directory import SIDE_FILES
from ..checkpoints.quantised.packed_checkpoint import open_checkpoint
from ..checkpoints.shards import INDEX
from ..checkpoints.side_files import LIMIT_BYTES, flaw_of
from ..core.errors import InvalidInput
from ..core.untrusted import printable
from ..models.remote_code import FILES as CODE
from ..models.remote_code import carries_own_code

WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")  # the names that transformers loads
_NEEDED = ("config.json", "kvfold.json")
_OTHERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "vocab.model",
    # All that travels with weights, without the patterns that files of somebody's own match too.
    *(pattern for pattern in SIDE_FILES if pattern not in {"*token*.json", "vocab*"}),
    "additional_chat_templates/*.jinja",
    "eval.json",
    "eval-*.json",
    "report.html",
    "report.json",
    "metrics.jsonl",
    "curve.json",
    "curve.png",
)
_IMAGES = {".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg"}
# In a card: ![words](place "title") and <img src="place">.
_IMAGE = re.compile(r"!\[[^\]\n]{0,500}\]\(\s{0,9}<?([^)>\s]+)|<img\s[^>]{0,500}?src\s?=\s?[\"']([^\"'>\n]+)")


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
        left_out: the entries of the directory that are not sent, with a reason.
        contents: of the files that are sent otherwise than they are there, by name.
    """

    directory: Path
    repository: str
    private: bool
    card: str
    files: dict[str, int]
    notices: tuple[str, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of every file that is sent, the card first."""
        return {"README.md": len(self.card.encode()), **self.files}


def choose_files(directory: Path, card: str) -> tuple[dict[str, int], dict[str, str]]:
    """Choose the files of a checkpoint to send; README.md is not among them, since it is made from the card.

    Returns:
        The bytes of every file to send, by its name in the repository; and why each other entry of the
        directory is left out, by its name. The name of a directory ends with a slash.

    Raises:
        InvalidInput: a file that is needed is a link to somewhere else or cannot be read, or a file is
            half-written.
    """
    weights = open_checkpoint(directory).files
    for file in weights:
        if file.parent != directory:
            raise InvalidInput(f"{printable(file)} is not in {printable(directory)}; move the weights there")
    needed = {INDEX, *(file.name for file in weights), *_NEEDED}
    needed |= set(CODE) if carries_own_code(directory) else set()
    shown = {unquote(place or other).removeprefix("./") for place, other in _IMAGE.findall(card)}
    images = {place for place in shown if PurePosixPath(place).suffix.lower() in _IMAGES}
    files: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for entry in sorted(directory.iterdir()):
        if entry.name == "README.md":
            continue
        if entry.suffix == ".partial" and not entry.is_dir():
            raise InvalidInput(f"{printable(entry)} is half-written; finish what writes it, or remove it")
        inside = [entry]
        if entry.is_dir() and not entry.is_symlink():
            inside = sorted(path for path in entry.rglob("*") if path.is_symlink() or not path.is_dir())
        for path in inside:
            name = path.relative_to(directory).as_posix()
            is_needed = name in needed
            # A `*` of a pattern stands for no `/`.
            same_depth = (other for other in _OTHERS if other.count("/") == name.count("/"))
            if not (is_needed or name in images or any(fnmatchcase(name, each) for each in same_depth)):
                left_out[f"{entry.name}/" if entry.is_dir() else name] = "not part of a checkpoint"
                continue
            flaw = flaw_of(path, directory, None if is_needed else LIMIT_BYTES)
            if flaw and is_needed:
                raise InvalidInput(f"{printable(path)} {flaw}; put the file itself there")
            if flaw:
                left_out[name] = flaw
                continue
            files[name] = path.stat().st_size
    return files, left_out
