"""The rows of a part, kept as they are measured."""

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

Row = dict[str, Any]


class Rows:
    """The rows of `gpu-PART.json`.

    Args:
        part: its name.
        out: directory of the file.

    Raises:
        InvalidInput: the file has rows of another GPU.
    """

    def __init__(self, part: str, out: Path) -> None:
        self.part, self.file, self.here = part, out / f"gpu-{part}.json", machine()
        self.rows: dict[str, Row] = {}
        self.failed: dict[str, str] = {}
        out.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            earlier = json.loads(self.file.read_text(encoding="utf-8"))
            if earlier["machine"]["gpu"] != self.here["gpu"]:
                raise InvalidInput(
                    f"{self.file} has rows of the GPU {earlier['machine']['gpu']}, not {self.here['gpu']}; "
                    "name another --out, or remove it"
                )
            self.rows = earlier["rows"]

    def attempt(self, label: str, measure: Callable[[], Row]) -> Row | None:
        """Measure a row unless it is there, and keep it; return None where it fails."""
        if label in self.rows:
            return self.rows[label]
        click.echo(f"{self.part}: {label} ...", err=True)
        start = time.monotonic()
        try:
            row = measure()
        except Exception as error:  # of a GPU, a compiler, another version of a package, a child process
            traceback.print_exc()
            self.failed[label] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        else:
            self.rows[label] = {**row, "wall_seconds": round(time.monotonic() - start, 2)}
        self.write()  # first, since a GPU that a row has broken fails at the next call
        if torch.cuda.is_available():
            gc.collect()  # outside the handler, whose traceback would hold tensors
            torch.cuda.empty_cache()
        return self.rows.get(label)

    def write(self) -> None:
        """Write all rows."""
        result = {
            "machine": self.here, "date": date.today().isoformat(), "part": self.part,
            "rows": self.rows, "failed": self.failed,
        }  # fmt: skip
        replace_text(self.file, json.dumps(result, indent=1) + "\n")
