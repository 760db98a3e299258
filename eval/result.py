"""The result of an evaluation: a report that shows itself as a table."""

from dataclasses import dataclass
from importlib import import_module

from ..checkpoints.eval_json import EvalReport
from ..core.grid import Grid
from .suites.catalogue import SUITES


@dataclass(frozen=True)
class Result(EvalReport):
    """A report with the table that `kvfold eval` prints."""

    @property
    def title(self) -> str:
        """The table's title."""
        return self.checkpoint.name if self.protocol is None else self.protocol.name

    @property
    def columns(self) -> list[str]:
        """The table's header: one column per model."""
        return ["", *self.roles]

    @property
    def rows(self) -> list[list[str]]:
        """The table's lines: the text that was read, then the lines of each suite."""
        rows: list[list[str]] = []
        if self.protocol is not None:
            counts = f"{self.protocol.windows}, {self.protocol.scored_tokens}, {self.protocol.scored_bytes}"
            rows.append(["windows, tokens, bytes scored", counts])
            rows.append(["text sha256", self.protocol.text_sha256[:16]])
        for name, block in self.suites.items():
            if block is not None:
                suite = import_module(f".suites.{SUITES[name].module}", __package__)
                rows += suite.rows(block, self.roles)
        return [[*row, *[""] * (len(self.columns) - len(row))] for row in rows]

    def grid(self) -> Grid:
        """Return the table."""
        return Grid(self.title, self.columns, self.rows)
