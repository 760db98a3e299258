"""What a migration is asked for, and its working directory:

<out>.partial/  lock  asked.json  identity.json  statistics.safetensors  folded/STEP/  distilled/STEP/

Each file appears under its name only when it is whole, so that the same command goes on after the last one
that did.
"""

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..convert.decide.plan import Plan
from ..convert.families.source import open_source
from ..core.errors import InvalidInput
from ..distill.recipe.recipe import Recipe, differences
from ..eval.assertions import Assertion
from ..eval.options import Options
from ..texts.corpus import Text

SCHEMA = 1
RECORD = "asked.json"  # what the working directory is of
_FIRST = {"lock", RECORD, f"{RECORD}.new"}  # what is there from the start


@dataclass(frozen=True, kw_only=True)
class Step:
    """A size on the way.

    Attributes:
        name: its share of the source's cache, e.g. `25%`, or `mqa`.
        sizes: the options of `target.from_options`.
        plan: the fold by weights alone, which knows the output's shapes.
    """

    name: str
    sizes: dict[str, Any]
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Migration:
    """What is asked for, checked.

    Attributes:
        model: the source as the user named it.
        source: its directory.
        to: `gqa`, `mqa` or `mla`.
        steps: from the largest cache to the smallest.
        bound: what an evaluation has to hold.
        text: held-out text.
        options: how it is read.
        calibration: the arguments of `study`.
        refine: steps of the fold's refinement.
        recipe: of every step's distillation; student and output are filled in.
        out: the output.
        keep_steps: whether every step's checkpoints stay, in `<out>/steps`.
    """

    model: str
    source: Path
    to: str
    steps: tuple[Step, ...]
    bound: Assertion
    text: Text
    options: Options
    calibration: dict[str, Any]
    refine: int
    recipe: Recipe
    out: Path
    keep_steps: bool

    @property
    def partial(self) -> Path:
        """The working directory."""
        return self.out.with_name(self.out.name + ".partial")

    def asked(self) -> dict[str, Any]:
        """What every number depends on.

        The bound and the list of steps may change between two runs, this may not.
        """
        recipe = self.recipe.resolved()
        return {
            "kvfold_migrate": SCHEMA,
            "source": open_source(self.source).checkpoint.identity(),
            "to": self.to,
            "text": self.text.sha256,
            "window": self.options.window,
            "max_windows": self.options.max_windows,
            "calibration": self.calibration,
            "refine": self.refine,
            "recipe": {
                key: value for key, value in recipe.items() if key not in {"student", "output", "save"}
            },
        }


@contextmanager
def claimed(asked: Migration) -> Iterator[None]:
    """Keep other runs out of the working directory, which must be free or of the same migration; where the
    output is there at the end it is removed.

    Also when `InvalidInput` ends the run before a checkpoint was made. Anything else leaves it, to go on
    from: a run that met no bound too, for another bound.
    """
    partial, record = asked.partial, asked.partial / RECORD
    if partial.exists() and not record.is_file() and {path.name for path in partial.iterdir()} - _FIRST:
        raise InvalidInput(f"{partial} exists and is no unfinished migration; move it, or name another --out")
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(
                f"another run is at work in {partial}; wait for it, or name another --out"
            ) from None
        _check_same(record, asked)
        try:
            yield
        except InvalidInput:
            if not any((partial / name).is_dir() for name in ("folded", "distilled")):
                shutil.rmtree(partial)
            raise
        if asked.out.exists():
            _remove(partial)


def _remove(partial: Path) -> None:
    """The record last, by which a removal that was cut short can be told from a stranger's directory."""
    for path in partial.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in _FIRST:
            path.unlink()
    shutil.rmtree(partial)


def _check_same(record: Path, asked: Migration) -> None:
    """Note what is asked, or compare it with what an earlier run has noted."""
    new = json.loads(json.dumps(asked.asked()))
    if not record.exists():
        write_json(record, new)
        return
    try:
        changed = differences(json.loads(record.read_text(encoding="utf-8")), new)
    except ValueError:
        raise InvalidInput(f"{record} is damaged; remove {record.parent} to start anew") from None
    if changed:
        raise InvalidInput(
            f"{record.parent} was begun with another {', '.join(changed)}; give the same command to go "
            f"on, or remove it to "
            "start anew"
        )


def write_json(file: Path, value: Any) -> None:
    """Write plain values, whole or not at all."""
    replace_text(file, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def replace_text(file: Path, content: str) -> None:
    """Write a file whole or not at all, and not through a link that others share."""
    new = file.with_name(file.name + ".new")
    with suppress(FileNotFoundError):
        new.unlink()
    new.write_text(content, encoding="utf-8")
    new.rename(file)
