"""`kvfold.json`, the record in every output.

What was done to which source, so that later stages find teacher and parent.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import InvalidInput
from ..core.hub import resolve

FILE = "kvfold.json"
SCHEMA = 1


def read_record(directory: Path) -> dict[str, Any] | None:
    """The record of a checkpoint; None when kvfold did not write it.

    Raises:
        InvalidInput: the record is not one that this version reads.
    """
    path = directory / FILE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        schema = record["schema"]
        if schema == SCHEMA and not (
            isinstance(record["source"]["path"], str) and isinstance(record["parents"], list)
        ):
            raise TypeError
    except (ValueError, TypeError, KeyError):
        raise InvalidInput(f"{path} is damaged: it is not a record written by kvfold") from None
    if schema != SCHEMA:
        raise InvalidInput(
            f"{path} has schema {schema}, this kvfold reads schema {SCHEMA}; use the version that wrote it"
        )
    return dict(record)


def write_record(directory: Path, record: dict[str, Any]) -> None:
    """Write `kvfold.json` into a checkpoint that is being made."""
    (directory / FILE).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def source_directory(directory: Path, option: str = "--teacher") -> Path | None:
    """The source checkpoint named in the record: the teacher. None when the checkpoint has no record.

    Args:
        directory: the checkpoint.
        option: with which the user can name the source instead.

    Raises:
        InvalidInput: the record names a source that is not there any more.
    """
    record = read_record(directory)
    if record is None:
        return None
    source = record["source"]
    if Path(source["path"]).is_dir():
        return Path(source["path"])
    if source["revision"] is not None:
        return resolve(source["name"], source["revision"])
    raise InvalidInput(
        f"the source of {directory}, {source['path']}, is not there any more; name it with {option}"
    )


def folded_parent(directory: Path) -> Path | None:
    """Of a distilled checkpoint the converted one it started from.

    None for any other, and when it is gone.
    """
    record = read_record(directory)
    for parent in (record or {}).get("parents", []):
        if parent["stage"] == "convert" and Path(parent["path"]).is_dir():
            return Path(parent["path"])
    return None


def distilled_record(student: Path, recipe: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The record of a checkpoint distilled from `student`: the student's, with the student as its newest
    parent.

    Args:
        student: directory that the training started from.
        recipe: the resolved recipe, as plain values.
        result: what the training reports (tokens, steps, losses), as plain values.
    """
    record = read_record(student) or {
        "schema": SCHEMA,
        "stage": "source",
        "source": describe(student, None),
        "parents": [],
    }
    parent = {"stage": record["stage"], "path": str(student.resolve())}
    return {
        **record,
        "stage": "distill",
        "parents": [*record["parents"], parent],
        "distill": {"recipe": recipe, **result},
    }


def describe(
    directory: Path, name: str | None, revision: str | None = None, known: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """How a record names a source: its name, where it lies, its commit if it came from the Hub, a SHA-256 of
    each file.

    Args:
        known: SHA-256 of files that were read already.
    """
    files = sorted(
        path
        for path in directory.iterdir()
        if path.is_file() and path.suffix in {".safetensors", ".json", ".jinja"}
    )
    hashes = {path.name: (known or {}).get(path.name) or sha256(path) for path in files}
    return {
        "name": name or directory.name,
        "path": str(directory.resolve()),
        "revision": revision,
        "files": hashes,
    }


def changed_since(
    record: Mapping[str, Any] | None, source: Path, known: Mapping[str, str] | None = None
) -> str:
    """Of a source that has changed since a record was written, the first file that has; empty where none has,
    or none is told.

    Args:
        record: of what was made of it.
        source: a directory that stands for the source.
        known: SHA-256 of files in it that were read already.
    """
    told = record["source"].get("files", {}) if record else {}
    decisive = sorted(name for name in told if name.endswith(".safetensors") or name == "config.json")
    files = ((name, source / name) for name in decisive)
    return next(
        (
            name
            for name, path in files
            if not path.is_file() or told[name] != ((known or {}).get(name) or sha256(path))
        ),
        "",
    )


def sha256(path: Path) -> str:
    """Of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
