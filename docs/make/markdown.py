"""Pieces of Markdown that cannot break a table."""

from collections.abc import Iterable, Sequence


def code(text: str) -> str:
    """Return a text as inline code, safe in the cell of a table."""
    return f"`{text}`".replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; line breaks within a cell become spaces, and columns without a value are left out."""
    cells = [[" ".join(cell.split()) for cell in row] for row in rows]
    kept = [place for place in range(len(head)) if any(row[place] for row in cells)]
    lines = ["| " + " | ".join(head[place] for place in kept) + " |", "|" + "---|" * len(kept)]
    lines += ["| " + " | ".join(_escaped(row[place]) for place in kept) + " |" for row in cells]
    return "\n".join(lines)


def _escaped(cell: str) -> str:
    """Return a cell in which each `|` is escaped once."""
    return text(cell.replace("\\|", "|").replace("|", "\\|"))


def text(words: str) -> str:
    """Return words in which `<` and `[` outside of code are characters, not the start of a tag or a link."""
    parts = words.split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("[", "&#91;") for part in parts[::2]]
    return "`".join(parts)
