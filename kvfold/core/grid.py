"""Tables as values, which show themselves in a terminal and in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Literal

from .untrusted import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

WIDTH = 160  # columns where there is no terminal: lines are never wrapped, so that grep can read them


@dataclass(frozen=True)
class Grid:
    """A table of texts.

    Attributes:
        title: the line above the table.
        columns: headings; the first column and those without a heading are aligned left, others right.
        rows: cells, as many in each row as there are columns.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich__(self) -> Table:
        """Return the table as rich draws it."""
        from rich.table import Table
        from rich.text import Text

        # As `Text` nothing in a name is markup; a name may hold brackets, or codes that move the cursor.
        table = Table(title=Text(_shown(self.title), style="table.title"), title_justify="left")
        for index, column in enumerate(self.columns):
            justify: Literal["left", "right"] = "left" if self._is_left(index) else "right"
            table.add_column(Text(_shown(column)), justify=justify, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(_shown(cell)) for cell in row))
        return table

    def __str__(self) -> str:
        """Return the table as plain text."""
        from rich.console import Console

        stream = StringIO()
        Console(file=stream, width=WIDTH).print(self)
        return stream.getvalue().rstrip()

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        lines = "".join(f"<tr>{self._cells(row)}</tr>" for row in self.rows)
        caption = f"<caption>{escape(self.title)}</caption>"
        return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"

    def _cells(self, row: Sequence[str]) -> str:
        aligned = ((cell, "left" if self._is_left(index) else "right") for index, cell in enumerate(row))
        return "".join(f'<td style="text-align:{side}">{escape(cell)}</td>' for cell, side in aligned)

    def _is_left(self, index: int) -> bool:
        return index == 0 or not self.columns[index]


def _shown(cell: str) -> str:
    """Return a text as a table shows it: its own line breaks, and other control characters as escapes."""
    return "\n".join(map(printable, str(cell).split("\n")))


class Tabular(ABC):
    """A result that shows itself as a table: in a terminal, in rich output and in a notebook.

    A dataclass of this kind is made with `repr=False`, so that Python's prompt shows the table too.
    """

    @abstractmethod
    def grid(self) -> Grid:
        """Return the result as a table."""

    def __str__(self) -> str:
        return str(self.grid())

    def __repr__(self) -> str:
        return str(self)

    def __rich__(self) -> Grid:
        """Return the table, which rich draws."""
        return self.grid()

    def _repr_html_(self) -> str:
        return self.grid()._repr_html_()
