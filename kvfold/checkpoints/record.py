"""`kvfold.json`, the record in every output: what was done to which source.

Later stages find the teacher and the parents there.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from ..core.errors import InvalidInput
from ..core.hub import resolve
from ..core.untrusted import printable, read_json, type_adapter
from .record_fields import Recorded
from .side_files import flaw_of

FILE = "kvfold.json"
SCHEMA = 1
_LIMIT_BYTES = 2**26  # a record with the spectrum of every layer has some MB
_BLOCK = 2**20  # bytes of a file that are hashed between two looks at an interruption
_READERS = 8  # files that are hashed at once: a core hashes less than a disk reads


def read_record(directory: Path) -> dict[str, Any] | None:
    """Return the record of a checkpoint; None if kvfold did not make it.

    Raises:
        InvalidInput: the record is not one that this version reads.
    """
    path = directory / FILE
    if not path.is_file():
        return None
    record: dict[str, Any] = read_json(path, _LIMIT_BYTES)
    if type(record.get("schema")) is int and record["schema"] != SCHEMA:
        raise InvalidInput(
            f"{path} has schema {record['schema']}, this kvfold reads schema {SCHEMA}; use the version that "
            "wrote it"
        )
    try:
        # As JSON, so that the strict types take objects and lists; half a character has no UTF-8.
        type_adapter(Recorded).validate_json(json.dumps(record), strict=True)
        is_whole = "target" not in record or isinstance(record["target"].get("name"), str)
    except ValueError:  # of pydantic, also for half a character
        is_whole = False
    if not is_whole:
        raise InvalidInput(f"{printable(path)} is damaged: it is not a record written by kvfold")
    return record


def is_folded(directory: Path) -> bool:
    """Return whether kvfold made a checkpoint otherwise than by rounding the weights of a source.

    A record names a target where it is of a fold, or of what was made of one. `kvfold quantize` writes
    records of sources, too.

    Raises:
        InvalidInput: the record is not one that this version reads.
    """
    record = read_record(directory)
    return record is not None and ("target" in record or record["stage"] != "quantize")


def check_unfolded(directory: Path) -> None:
    """Check that a checkpoint may be a source.

    Raises:
        InvalidInput: kvfold folded it, or the record is not one that this version reads.
    """
    if is_folded(directory):
        told = "is already folded by kvfold; fold the source named in its kvfold.json instead"
        raise InvalidInput(f"{directory} {told}")


def write_record(directory: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Write `kvfold.json` into a checkpoint that is being made, after its weights.

    The record is returned as it is written: with the SHA-256 of each weight file.
    """
    weights = {path.name: path for path in sorted(directory.glob("*.safetensors")) if path.is_file()}
    whole = {**record, "weights": hashes(weights)}
    (directory / FILE).write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return whole


def other_weights(directory: Path, known: Mapping[str, str] | None = None) -> str:
    """Return a sentence if the weights of a checkpoint are not those that its record describes; else "".

    They differ after training with another tool, where kvfold.json was copied next to the result, and after
    damage. They also differ where another tool only saved them again, since it writes the same tensors in
    another order. Other safetensors in the directory, such as saved statistics, do not count. A checkpoint
    without a record, or with one of an earlier kvfold, has no hashes to differ from. `known` has the SHA-256
    of files that were read already, by name.

    Raises:
        InvalidInput: the record or the index is damaged, or a weight file is missing.
    """
    from .directory import weight_files

    recorded = (read_record(directory) or {}).get("weights", {})
    if not recorded:
        return ""
    files = {path.name: path for path in weight_files(directory)}
    if alone := sorted(recorded.keys() ^ files.keys()):
        name, how = alone[0], "is not among them" if alone[0] in recorded else "is not described"
    else:
        found = hashes(files, known)
        name = next((name for name in sorted(files) if recorded[name] != found[name]), "")
        how = "differs"
    if not name:
        return ""
    return (
        f"the weights of {directory} are not those that its {FILE} describes ({printable(name)} {how}): "
        "they were trained, changed, saved again by another tool or damaged after kvfold wrote them"
    )


def hub_id(source: Mapping[str, Any]) -> str | None:
    """Return the Hub id of a record's source; None where the source was a directory of unknown origin."""
    if source.get("revision") is None:
        return None
    if "/" in source["name"]:
        return str(source["name"])
    for part in Path(source["path"]).parts:  # a directory of the Hub's cache: models--org--name
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return None


def source_directory(directory: Path, option: str = "--teacher") -> Path | None:
    """Return the source that a record names, which is the teacher; None if there is no record.

    `option` names the source instead, for the error.

    Raises:
        InvalidInput: the source does not exist any more, or the record is damaged.
    """
    record = read_record(directory)
    if record is None:
        return None
    source = record["source"]
    if place := directory_at(source["path"]):
        return place
    if source.get("revision") is not None:
        return resolve(hub_id(source) or source["name"], source["revision"])
    raise InvalidInput(
        f"the source of {directory}, {source['path']}, does not exist any more; name it with {option}"
    )


def folded_parent(directory: Path) -> Path | None:
    """Return the folded checkpoint from which a distilled one was trained.

    It is None if that is gone, or if `directory` is any other checkpoint.

    Raises:
        InvalidInput: the record is damaged.
    """
    record = read_record(directory) or {}
    if not is_distilled(record):
        return None
    for parent in record.get("parents", []):
        if parent["stage"] == "convert" and (place := directory_at(parent["path"])):
            return place
    return None


def directory_at(path: str) -> Path | None:
    """Return the directory at a path of a record; None if there is none, or the path is a name.

    In a published record names stand for paths, and a directory of that name here may be another one.
    """
    place = Path(path)
    return place if place.is_absolute() and place.is_dir() else None


def is_distilled(record: Mapping[str, Any]) -> bool:
    """Return whether a record is that of a distilled checkpoint, or of one made of it."""
    return "distill" in record or record.get("stage") == "distill"


def next_record(parent: Path, stage: str) -> dict[str, Any]:
    """Return the record of what a stage makes of a checkpoint: its own, with it as the newest parent.

    Raises:
        InvalidInput: the checkpoint's record is damaged.
    """
    record = read_record(parent) or {
        "schema": SCHEMA,
        "stage": "source",
        "source": describe(parent, None),
        "parents": [],
    }
    newest = {"stage": record["stage"], "path": str(parent.resolve())}
    return {**record, "stage": stage, "parents": [*record["parents"], newest]}


def describe(
    directory: Path, name: str | None, revision: str | None = None, known: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the entry of a source in a record: name, path, commit and the SHA-256 of each file.

    `revision` is its commit if it came from the Hub; `known` has hashes of files that were read already.
    """
    files = {
        path.name: path
        for path in sorted(directory.iterdir())
        # Weights may be linked from anywhere; of another file elsewhere not even a hash is published.
        if (path.suffix == ".safetensors" and path.is_file())
        or (path.suffix in {".json", ".jinja"} and path.is_file() and not flaw_of(path, directory, None))
    }
    return {
        "name": name or directory.name,
        "path": str(directory.resolve()),
        "revision": revision,
        "files": hashes(files, known),
    }


def changed_since(
    record: Mapping[str, Any] | None, source: Path, known: Mapping[str, str] | None = None
) -> str:
    """Return the first file of a source that has changed since a record was written; empty if none has.

    Only weights and config.json count. A record without hashes says nothing. `source` is a directory that
    stands for it; `known` has hashes of files that were read already.
    """
    recorded = record["source"].get("files", {}) if record else {}
    names = sorted(name for name in recorded if name.endswith(".safetensors") or name == "config.json")
    if gone := next((name for name in names if not (source / name).is_file()), ""):
        return str(gone)
    found = hashes({name: source / name for name in names}, known)
    return str(next((name for name in names if recorded[name] != found[name]), ""))


def hashes(files: Mapping[str, Path], known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the hexadecimal SHA-256 of some files, by name; several are read at once.

    `known` are those of files that were read already.
    """
    found = dict(known or {})
    unread = [name for name in files if name not in found]
    ended = Event()
    with ThreadPoolExecutor(_READERS) as pool:
        try:
            digests = pool.map(lambda name: sha256(files[name], ended), unread)
            found.update(zip(unread, digests, strict=True))
        except BaseException:  # such as Ctrl-C, which should not wait for files of gigabytes
            ended.set()
            raise
    return {name: found[name] for name in files}


def sha256(path: Path, ended: Event | None = None) -> str:
    """Return the hexadecimal SHA-256 of a file.

    Raises:
        CancelledError: `ended` was set before the end of the file was read.
    """
    digest = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
            if ended is not None and ended.is_set():
                raise CancelledError(f"{path} is hashed in part")
    return digest.hexdigest()
