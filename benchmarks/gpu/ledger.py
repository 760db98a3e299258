"""The rows of a part, kept as they are measured, and the time that is left for more."""

import gc
import json
import time
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch

from kvfold.core.errors import InvalidInput
from kvfold.core.files import replace_text

from ..machine import machine

PARTS = ("kernel", "train", "fold", "distil", "large", "pretrained")
Row = dict[str, Any]


class NotRun(Exception):
    """A row cannot be measured on this machine or in this call; the message says why in a sentence."""


class Ledger:
    """The rows of a part.

    Args:
        part: its name.
        sizes: name of the sizes.
        work: directory that keeps rows for a later call.
        out: directory of the result, `gpu-<part>.json`.
        seconds: of this call; no row is begun after that.

    Raises:
        InvalidInput: `work` has rows of another GPU or of other sizes.
    """

    def __init__(self, part: str, sizes: str, work: Path, out: Path, seconds: float) -> None:
        self.part, self.sizes = part, sizes
        self.places = [folder / f"gpu-{part}.json" for folder in dict.fromkeys((work, out))]
        self.start, self.end = time.monotonic(), time.monotonic() + seconds
        self.rows: dict[str, Row] = {}
        self.not_run: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.before = 0.0
        self.here = machine()
        for folder in (work, out):
            folder.mkdir(parents=True, exist_ok=True)
        if self.places[0].exists():
            self._read(self.places[0])

    def _read(self, place: Path) -> None:
        earlier = json.loads(place.read_text(encoding="utf-8"))
        for key, found, wanted in (
            ("GPU", earlier["machine"]["gpu"], self.here["gpu"]),
            ("sizes", earlier["sizes"], self.sizes),
        ):
            if found != wanted:
                raise InvalidInput(
                    f"{place} has rows of the {key} {found}, not {wanted}; name another --work, or remove it"
                )
        self.rows, self.before = earlier["rows"], earlier["seconds"]

    def left(self) -> float:
        """Return the seconds that are left for this call."""
        return self.end - time.monotonic()

    def attempt(self, label: str, measure: Callable[[], Row], needs: float = 0.0) -> Row | None:
        """Measure a row unless it is there, and keep it.

        Args:
            label: name of the row.
            measure: returns it.
            needs: seconds that it takes at least; it is not begun with less.

        Returns:
            The row; None where it could not be measured.
        """
        if label in self.rows:
            return self.rows[label]
        if self.left() <= needs:
            self.not_run[label] = "no time was left; the same command measures it"
            return None
        begun = time.monotonic()
        click.echo(f"{self.part}: {label} ...", err=True)
        try:
            row = measure()
        except (NotRun, InvalidInput) as reason:
            self.not_run[label] = str(reason)
        except torch.OutOfMemoryError as error:
            self.not_run[label] = f"it does not fit into the GPU's memory: {_first_line(error)}"
        except Exception as error:  # of a GPU, a compiler, another version of a package, a child process
            traceback.print_exc()
            self.failed[label] = _first_line(error)
        else:
            self.rows[label] = {**row, "wall_seconds": round(time.monotonic() - begun, 2)}
        self.write()  # first, since a GPU that a row has broken fails at the next call
        if torch.cuda.is_available():
            gc.collect()  # outside the handlers, whose traceback would hold tensors
            torch.cuda.empty_cache()
        said = self.not_run.get(label) or self.failed.get(label) or f"{time.monotonic() - begun:.1f} s"
        click.echo(f"{self.part}: {label}: {said}", err=True)
        return self.rows.get(label)

    def write(self) -> None:
        """Write all rows, to the working directory and as the result."""
        result = {
            "machine": self.here, "date": date.today().isoformat(), "part": self.part, "sizes": self.sizes,
            "seconds": round(self.before + time.monotonic() - self.start, 1),
            "rows": self.rows, "not_run": self.not_run, "failed": self.failed,
        }  # fmt: skip
        for place in self.places:
            replace_text(place, json.dumps(result, indent=1) + "\n")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
