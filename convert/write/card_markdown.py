"""Markdown of a model card, in which texts of files are neither markup nor HTML."""

import re
from collections.abc import Sequence

from ...core.untrusted import printable

_MARKS = re.compile(r"[\\`*~&\[\]<>]|^[#+-]|(?<![^\W_])_|_(?![^\W_])")  # not within a word
_ADDRESS = re.compile(r"://|www\.|@[\w-]+\.|mailto:|xmpp:", re.IGNORECASE)


def as_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table whose first column is of words and whose others are of numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def as_words(text: str) -> str:
    """Return a text of a file on one line of Markdown, in which it is neither markup nor HTML.

    Many readers make a link of an address in spite of escapes, but not in code.
    """
    return as_code(text) if _ADDRESS.search(text) else _MARKS.sub(r"\\\g<0>", printable(text))


def as_code(text: str) -> str:
    """Return a text of a file on one line as code of Markdown, which knows no escapes."""
    shown = re.sub(r"\\+\|", "|", printable(text))  # in a table they would undo the escape of the bar
    return f"`{shown.replace('`', chr(39))}`"


def fenced(language: str, text: str) -> str:
    """Return lines as a block of code, between fences that are longer than any in the lines."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    lines = "\n".join(map(printable, text.splitlines()))
    return f"{fence}{language}\n{lines}\n{fence}"


def listed(names: Sequence[str]) -> str:
    """Return names as code, with commas between them."""
    return ", ".join(map(as_code, names))
