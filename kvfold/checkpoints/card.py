"""The model card next to the weights (README.md), which may be anybody's, and the licence of an output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import InvalidInput
from ..core.untrusted import parse_yaml, printable
from .side_files import flaw_of, is_readable

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


LICENSE_FIELDS = ("license", "license_name", "license_link")
# Beginnings of common licence texts, with the identifiers that the Hub uses.
_TEXTS = (
    (re.compile(r"Apache License\s+Version 2\.0"), "apache-2.0"),
    (re.compile(r"MIT License|Permission is hereby granted, free of charge, to any person"), "mit"),
    (re.compile(r"LLAMA 2 COMMUNITY LICENSE", re.I), "llama2"),
    (re.compile(r"META LLAMA 3 COMMUNITY LICENSE", re.I), "llama3"),
    (re.compile(r"LLAMA 3\.1 COMMUNITY LICENSE", re.I), "llama3.1"),
    (re.compile(r"LLAMA 3\.2 COMMUNITY LICENSE", re.I), "llama3.2"),
    (re.compile(r"LLAMA 3\.3 COMMUNITY LICENSE", re.I), "llama3.3"),
)


def license_of(directory: Path, source: Path, cards: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metadata fields of a licence; empty if nothing names one.

    The first of these counts that names one: the model cards, `license` in the source's config.json, and the
    licence's text (LICENSE*), which travels with the weights. `cards` are the metadata of the output's own
    card and of the source's, which may be gone.
    """
    for fields in (*cards, _config(source)):
        if _is_named(fields.get("license")):
            return {field: fields[field] for field in LICENSE_FIELDS if _is_named(fields.get(field))}
    for place in (directory, source):
        for file in sorted(place.glob("LICENSE*")):
            if is_readable(file, place):
                with file.open("rb") as stream:
                    head = stream.read(2000).decode("utf-8", errors="replace")
                for text, name in _TEXTS:
                    if text.search(head):
                        return {"license": name}
                return {"license": "other", "license_link": file.name}
    return {}


def _is_named(value: Any) -> bool:
    """Return whether a field of a licence holds what the Hub accepts there: a text, or a list of texts."""
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(text, str) and text for text in texts)


def _config(source: Path) -> Mapping[str, Any]:
    from .directory import read_config

    try:
        config = read_config(source)
    except InvalidInput:
        return {}
    return config if isinstance(config.get("license"), str) else {}
