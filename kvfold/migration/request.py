"""The request of a migration, and its working directory.

    <out>.partial/  lock  asked.json  identity.json  statistics.safetensors  folded/STEP/  distilled/STEP/

Each file appears under its name only when it is whole, so the same command resumes after the last of them.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints.own_files import remove_own_tree, strange_files
from ..convert.decide.plan import Plan
from ..convert.families.source import open_source
from ..core.errors import InvalidInput
from ..core.files import PREFIX, locked, remove_own, replace_text
from ..core.untrusted import read_json
from ..distill.recipe.recipe import Recipe, differences, flatten
from ..eval.assertions import Assertion
from ..eval.options import Options
from ..texts.corpus import Text

SCHEMA = 1
RECORD = "asked.json"  # what the working directory is of
_MARK = "kvfold_migrate"  # a key of the record
# There from the start; earlier versions wrote `.new`.
_FIRST = {"lock", RECORD, f"{RECORD}.partial", f"{RECORD}.new"}
# Everything else that a run puts there.
_DIRECTORIES = {"identity", "folded", "distilled", "unmet", "identity.partial", "unmet.partial"}
_FILES = {
    f"{name}{end}" for name in ("identity.json", "statistics.safetensors") for end in ("", ".partial", ".new")
}


# Keys of the record that kvfold chooses by itself, in other versions otherwise, and their names for `--set`.
_CHOSEN = {
    "recipe.stages[0].lr": "stages.0.lr",
    "recipe.stages[0].batch_tokens": "stages.0.batch_tokens",
    "recipe.evaluate.every": "evaluate.every",
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """A size on the way.

    Attributes:
        name: its proportion of the source's cache, such as `25%`, or `mqa`.
        sizes: the options of `target.from_options`.
        plan: the fold by weights alone, which knows the output's shapes.
    """

    name: str
    sizes: dict[str, Any]
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Migration:
    """A checked request.

    Attributes:
        model: the source as the user named it.
        source: its directory.
        to: `gqa`, `mqa` or `mla`.
        steps: from the largest cache to the smallest.
        bound: the condition on an evaluation.
        text: held-out text.
        options: how the text is read.
        calibration: the arguments of `study`.
        effort: of the folds.
        refine: steps of the fold's refinement.
        recipe: of every step's distillation; student and output are filled in.
        out: the output as the user named it.
        keep_steps: whether every step's checkpoints stay, in `<out>/steps`.
        command: the command that makes the same output again, without `--out`.
    """

    model: str
    source: Path
    to: str
    steps: tuple[Step, ...]
    bound: Assertion
    text: Text
    options: Options
    calibration: dict[str, Any]
    effort: str
    refine: int
    recipe: Recipe
    out: Path
    keep_steps: bool
    command: str

    @property
    def partial(self) -> Path:
        """The working directory."""
        return working_directory(self.out)

    @property
    def unmet(self) -> Path:
        """The output where no step holds the bound."""
        return Path(f"{self.out}.unmet")

    def asked(self) -> dict[str, Any]:
        """Return everything that the numbers depend on.

        It must stay the same between two runs; the bound and the list of steps may change.
        """
        recipe = self.recipe.resolved()
        return {
            _MARK: SCHEMA,
            "source": open_source(self.source).checkpoint.identity(),
            "to": self.to,
            "text": self.text.sha256,
            "window": self.options.window,
            "max_windows": self.options.max_windows,
            "calibration": self.calibration,
            "effort": self.effort,
            "refine": self.refine,
            "recipe": {
                key: value for key, value in recipe.items() if key not in {"student", "output", "save"}
            },
        }


def working_directory(out: Path) -> Path:
    """Return the working directory of the migration to an output."""
    return Path(f"{out}.partial")


@contextmanager
def claimed(asked: Migration) -> Iterator[None]:
    """Keep other runs out of the working directory, which must be free or of the same migration.

    If the output exists at the end, what the run wrote into the directory is removed, and also if
    `InvalidInput` ends the run before a checkpoint was made. Anything else leaves it, to resume from: also a
    run that met no bound, for another bound.

    Args:
        asked: the migration.

    Raises:
        InvalidInput: the directory is of something else, or another run is at work in it.
    """
    partial, record = asked.partial, asked.partial / RECORD
    _check_claimable(partial)
    partial.mkdir(parents=True, exist_ok=True)
    busy = f"another run is at work in {partial}; wait for it, or name another --out"
    with locked(partial / "lock", busy):
        _check_same(record, asked)
        try:
            yield
        except InvalidInput as error:
            if not any((partial / name).is_dir() for name in ("folded", "distilled")):
                left = _remove(partial)
                if left:
                    raise InvalidInput(f"{error}; {left} in {partial} was left in place") from None
            raise
        if asked.out.exists():
            _remove(partial)


def begun_length(partial: Path) -> int | None:
    """Return the tokens of a calibration sequence of the run that has begun in a directory, if one has."""
    record = partial / RECORD
    if record.is_symlink() or not record.is_file() or not record.stat().st_size:
        return None
    begun = _read(record)
    calibration = begun.get("calibration") if _MARK in begun else None
    length = calibration.get("length") if isinstance(calibration, dict) else None
    return length if type(length) is int and length > 1 else None


def _check_claimable(partial: Path) -> None:
    """Refuse a directory that is not an unfinished migration, and not empty either."""
    if not partial.exists() and not partial.is_symlink():
        return
    ours = partial.is_dir() and not partial.is_symlink()
    if ours:
        record = partial / RECORD
        if record.is_symlink() or not record.is_file():
            ours = all(_is_first(path) for path in partial.iterdir())
        elif record.stat().st_size:
            ours = _MARK in _read(record)
    if not ours:
        raise InvalidInput(
            f"{partial} exists and is not an unfinished migration; move it, or name another --out"
        )
    taken = [partial / name for name in sorted(_FILES) if (partial / name).exists()]
    if any(path.is_symlink() or not path.is_file() for path in taken):
        raise InvalidInput(f"{partial} holds a directory or a link where kvfold has a file; move it")
    for strange in (path for name in sorted(_DIRECTORIES) for path in strange_files(partial / name)):
        raise InvalidInput(
            f"{partial} holds {strange.relative_to(partial)}, which kvfold did not write; move it"
        )


def _is_first(path: Path) -> bool:
    """Return whether a file may be of a run that was killed before its record was there."""
    return path.name in _FIRST and path.is_file() and not path.is_symlink()


def _remove(partial: Path) -> str:
    """Remove what a run wrote, the record last, by which an interrupted removal differs from foreign files.

    Returns:
        Names of what was left; empty if there is nothing, and the directory is gone.
    """
    for path in partial.iterdir():
        if path.is_symlink() or path.name in _FIRST:
            continue
        if path.is_dir() and (path.name in _DIRECTORIES or path.name.startswith(PREFIX)):
            remove_own_tree(path)
        elif path.name in _FILES:
            path.unlink()
    return ", ".join(path.name for path in remove_own(partial, _is_first))


def _read(record: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = read_json(record)
    except InvalidInput:
        raise InvalidInput(f"{record} is damaged; remove {record.parent} to start again") from None
    return content


def _check_same(record: Path, asked: Migration) -> None:
    """Store the request, or compare it with that of an earlier run."""
    new = json.loads(json.dumps(asked.asked()))
    if not record.exists():
        replace_json(record, new)
        return
    old = _read(record)
    changed = differences(old, new)
    values = flatten(old)
    if changed and all(one.partition(" ")[0] in _CHOSEN for one in changed):
        again = " ".join(f"--set {name}={values[key]}" for key, name in _CHOSEN.items() if key in values)
        raise InvalidInput(
            f"{record.parent} was begun with other values of what kvfold chooses by itself, as earlier "
            f"versions do; add {again} to the command to resume it, or remove it to start again"
        )
    if changed:
        raise InvalidInput(
            f"{record.parent} was begun with another {', '.join(changed)}; run the same command to resume "
            "it, or remove it to start again"
        )


def replace_json(file: Path, value: Any) -> None:
    """Write plain values, whole or not at all."""
    replace_text(file, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
