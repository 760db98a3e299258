"""The files of two directories, compared by what they are.

Files are compared by their bytes, with these exceptions:

- JSON of kvfold (`kvfold.json`, `eval.json`, `curve.json`, `metrics.jsonl`) is compared value by value,
  without versions, dates, folders of paths, speed and memory. Options of a recorded command may stand in
  another order.
- `kvfold.json` may have keys that it had not before, and its `notices` may be reworded: these are notes.
- Saved statistics may name the run that they are of, which they did not before: a note.
- Code that is shipped next to weights, model cards and pictures may change: these are notes.

A file that only one of the directories has is a difference, unless it is one of those that may change.
"""

import hashlib
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WEIGHTS = "*.safetensors"
_RECORD = "kvfold.json"
_STATISTICS = "kvfold.statistics"  # key of the metadata of saved statistics
_RECORDS = (_RECORD, "eval.json", "curve.json", "metrics.jsonl")
_CHANGEABLE = {"*.py": "code changed", "*.md": "card changed", "*.png": "picture changed"}
_VERSIONS = {"kvfold", "versions"}  # keys
_MEASURED = {"tokens_per_second", "peak_memory_gib"}  # keys of metrics.jsonl
_PROSE = {"notices"}  # keys of kvfold.json
_FOLDERS = re.compile(r"""(?:(?<=[\s='"])|^)/(?:[^\s/'"]+/)+""")  # of an absolute path
_DATE = re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d\S*)?")


@dataclass(kw_only=True)
class Differences:
    """A comparison of two directories.

    Attributes:
        found: a text for each difference, beginning with the file's path.
        notes: a text for each change that is allowed.
        weights: hexadecimal SHA-256 of every weight file of the first directory, by path.
    """

    found: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)


def compare(before: Path, after: Path) -> Differences:
    """Compare all files of two directories, those of their subdirectories included."""
    result = Differences()
    ours, theirs = _hashes(before), _hashes(after)
    for name in sorted(ours.keys() | theirs.keys()):
        path = Path(name)
        if path.match(WEIGHTS) and name in ours:
            result.weights[name] = ours[name]
        if ours.get(name) == theirs.get(name):
            continue
        allowed = [what for pattern, what in _CHANGEABLE.items() if path.match(pattern)]
        if allowed:
            result.notes.append(f"{name}: {allowed[0]}")
        elif name not in theirs or name not in ours:
            result.found.append(f"{name}: only {'before' if name in ours else 'after'}")
        elif path.match(WEIGHTS) and _are_same_statistics(before / name, after / name):
            result.notes.append(f"{name}: run of the statistics changed")
        elif path.name in _RECORDS:
            _compare_records(name, _read(before / name), _read(after / name), result)
        else:
            result.found.append(f"{name}: {ours[name][:12]} before, {theirs[name][:12]} after")
    return result


def _hashes(directory: Path) -> dict[str, str]:
    """Return the hexadecimal SHA-256 of every file, by its path below the directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        file.relative_to(directory).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


def _are_same_statistics(before: Path, after: Path) -> bool:
    ours = _without_run(before)
    return ours is not None and ours == _without_run(after)


def _without_run(file: Path) -> tuple[dict[str, Any], str] | None:
    """Return the header of saved statistics without their run, and the SHA-256 of the data; None if they are
    not statistics.
    """
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    try:
        header: dict[str, Any] = json.loads(content[8:end])
    except ValueError:
        return None
    metadata = header.get("__metadata__", {})
    if _STATISTICS not in metadata:
        return None
    about = json.loads(metadata[_STATISTICS])
    about.pop("run", None)
    return {**header, "__metadata__": about}, hashlib.sha256(content[end:]).hexdigest()


def _read(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


def _compare_records(name: str, before: Any, after: Any, result: Differences) -> None:
    ours, theirs = _flatten(before), _flatten(after)
    for key in sorted(ours.keys() | theirs.keys()):
        if key in ours and key in theirs and ours[key] == theirs[key]:
            continue
        text = f"{name}: {key} is {_shown(ours, key)} before, {_shown(theirs, key)} after"
        is_record = Path(name).name == _RECORD
        allowed = is_record and (key not in ours or key.partition("[")[0] in _PROSE)
        (result.notes if allowed else result.found).append(text)


def _shown(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "missing"


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a JSON value by their paths, without what may differ between two runs of the
    same code.
    """
    if isinstance(value, dict) and value:
        kept = {key: part for key, part in value.items() if key not in _VERSIONS | _MEASURED}
        parts = [_flatten(part, f"{path}.{key}" if path else key) for key, part in kept.items()]
    elif isinstance(value, list) and value:
        parts = [_flatten(part, f"{path}[{index}]") for index, part in enumerate(value)]
    else:
        return {path: _normalise(value, path) if isinstance(value, str) else value}
    return {key: leaf for part in parts for key, leaf in part.items()}


def _normalise(text: str, path: str) -> str:
    """Return a string without dates and without the folders of absolute paths.

    A command with its words sorted.
    """
    text = _DATE.sub("DATE", _FOLDERS.sub("", text))
    return " ".join(sorted(shlex.split(text))) if path == "command" else text
