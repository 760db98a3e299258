"""The model card next to the weights (README.md), which may be anybody's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import InvalidInput
from ..core.untrusted import parse_yaml, printable
from .side_files import flaw_of

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

FILE = "README.md"
_LIMIT_BYTES = 2**24  # cards have some kB; those with embedded figures have some MB
_METADATA_BYTES = 2**18  # the parser of YAML takes some seconds for more


def read_card(directory: Path) -> ModelCard | None:
    """Read the card of a checkpoint.

    It is None where there is none.

    Raises:
        InvalidInput: README.md is not a regular file of the checkpoint, is too large, or its metadata cannot
            be read.
    """
    from huggingface_hub import ModelCard

    path = directory / FILE
    if not (path.exists() or path.is_symlink()):
        return None
    flaw = flaw_of(path, directory, _LIMIT_BYTES)
    if flaw:
        raise InvalidInput(f"{printable(path)} {flaw}; put a model card there, or remove it")
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if not text.lstrip().startswith("---"):
            return ModelCard(f"---\n{{}}\n---\n{text}")
        _check_metadata(text)
        card = ModelCard(text)
        card.data.to_dict()
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        reason = printable(" ".join(str(error).split()))[:300]
        raise InvalidInput(
            f"{printable(path)} cannot be read as a model card ({reason}); fix the YAML between its lines of "
            "---"
        ) from None
    return card


def _check_metadata(text: str) -> None:
    """Refuse hostile metadata before a parser that recurses sees it, and tags that are not texts."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    match = REGEX_YAML_BLOCK.search(text)
    if match is None:
        return
    found = parse_yaml(match[2], "its metadata", _METADATA_BYTES, top=None)
    tags = found.get("tags") if isinstance(found, dict) else None
    for tag in tags if isinstance(tags, list) else [tags]:
        if not isinstance(tag, str | None):
            raise InvalidInput(f"its tag {tag!r} is not a text")
