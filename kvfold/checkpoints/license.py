"""The licence of an output: its source's, as far as the source names one."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FIELDS = ("license", "license_name", "license_link")
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
    licence's text (LICENSE*), which travels with the weights.

    Args:
        directory: the output.
        source: the checkpoint that it was made of, which may be gone.
        cards: metadata of the output's own card, and of the source's.
    """
    for fields in (*cards, _config(source)):
        if fields.get("license"):
            return {field: fields[field] for field in FIELDS if fields.get(field)}
    for place in (directory, source):
        for file in sorted(place.glob("LICENSE*")):
            return _named(file)
    return {}


def _named(file: Path) -> dict[str, Any]:
    head = file.read_bytes()[:2000].decode("utf-8", errors="replace")
    for text, name in _TEXTS:
        if text.search(head):
            return {"license": name}
    return {"license": "other", "license_link": file.name}


def _config(source: Path) -> Mapping[str, Any]:
    from ..core.errors import InvalidInput
    from .directory import read_config

    try:
        config = read_config(source)
    except InvalidInput:
        return {}
    return config if isinstance(config.get("license"), str) else {}
