"""Code in a checkpoint: finding code that is not kvfold's, and copies that hold no other code."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checkpoints.directory import NAMES_CODE, SIDE_CONFIGS, fields_of, read_config, without_code
from ..checkpoints.quantised.packed_checkpoint import open_checkpoint
from ..checkpoints.quantised.schemes import MODELOPT_FILE
from ..checkpoints.shards import INDEX
from ..core.files import link_or_copy, write_json
from ..core.untrusted import read_json
from .remote_code import AUTO_MAP, FILES, HERE, carries_own_code, is_remote, missing_code

CONFIGS = ("config.json", *SIDE_CONFIGS)
_CODE = {".py", ".pyc", ".so", ".pyd"}
_GENERATE = "custom_generate"  # the directory whose generate.py transformers runs in trusted checkpoints


def foreign_code(directory: Path) -> str:
    """Find code in a checkpoint, or a name of code, that is not this kvfold's; nothing of it is run.

    Returns:
        A clause that says what was found; empty where all code is this kvfold's.
    """
    remote = is_remote(directory)
    for name in CONFIGS:
        # As transformers may read a damaged file all the same, names of code included, it is refused here.
        content = read_json(directory / name, top=None) if (directory / name).is_file() else None
        for field, named in fields_of(content):
            is_own = remote and name == "config.json" and field == "auto_map" and named == AUTO_MAP
            if field in NAMES_CODE and named and not is_own:
                return f"{field} in {name} names {_shown(named)}, which is not code that this kvfold ships"
    missing = missing_code(directory) if remote else ""
    if missing:
        return f"files of its code are missing ({missing})"
    if remote and not carries_own_code(directory):
        return "the code next to the weights is not that of this kvfold"
    if remote and read_config(directory).get("auto_map") != AUTO_MAP:
        return "config.json has no auto_map that names this kvfold's code"
    allowed = FILES if remote else ()
    for path in sorted([*directory.iterdir(), *(directory / _GENERATE).glob("*")]):
        if path.suffix in _CODE and not (path.parent == directory and path.name in allowed):
            return f"{path.relative_to(directory)} is not code that this kvfold ships"
    return ""


def _shown(named: Any) -> str:
    """Return the first name of code that is not kvfold's, or the whole value where there is no such name."""
    names = [str(name) for name in named.values()] if isinstance(named, dict) else []
    return next((name for name in names if name not in AUTO_MAP.values()), json.dumps(named))[:120]


def config_for_copy(source: Path) -> dict[str, Any]:
    """Return config.json of a checkpoint without the names of any code but this kvfold's.

    Raises:
        InvalidInput: there is none, or it is no JSON object.
    """
    named = {"auto_map": dict(AUTO_MAP)} if is_remote(source) else {}
    config: dict[str, Any] = without_code(read_config(source))
    return config | named


def copy_config(source: Path, out: Path) -> None:
    """Write config.json of one checkpoint into another, in which no code but this kvfold's is named.

    Args:
        source: whose config.json is copied; where it names no other code, byte by byte.
        out: the directory that gets it.

    Raises:
        InvalidInput: there is none, or it is no JSON object.
    """
    kept = config_for_copy(source)
    if kept == read_config(source):
        shutil.copyfile(source / "config.json", out / "config.json")
    else:
        write_json(out / "config.json", kept)


@contextmanager
def clean_copy(directory: Path) -> Iterator[Path]:
    """Make a temporary copy of an output in which the only code is this kvfold's own.

    Args:
        directory: an output with code of its own. Its weights are linked, or copied where links are
            impossible.

    Raises:
        InvalidInput: it is no checkpoint.
    """
    weights = [*open_checkpoint(directory).files]
    weights += [path for path in (directory / INDEX, directory / MODELOPT_FILE) if path.is_file()]
    with tempfile.TemporaryDirectory(prefix="kvfold-") as place:
        clean = Path(place)
        config = {**without_code(read_config(directory)), "auto_map": dict(AUTO_MAP)}
        (clean / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for name in FILES:
            shutil.copyfile(HERE / name, clean / name)
        for path in weights:
            link_or_copy(path.resolve(), clean / path.name, symbolic=True)
        yield clean
