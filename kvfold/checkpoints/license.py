"""The licence of an output: its source's, as far as the source names one."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .side_files import is_readable

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
    licence's text (LICENSE*), which travels with the weights. `cards` are the metadata of the output's own
    card and of the source's, which may be gone.
    """
    for fields in (*cards, _config(source)):
        if _is_named(fields.get("license")):
            return {field: fields[field] for field in FIELDS if _is_named(fields.get(field))}
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
    from ..core.errors import InvalidInput
    from .directory import read_config

    try:
        config = read_config(source)
    except InvalidInput:
        return {}
    return config if isinstance(config.get("license"), str) else {}
