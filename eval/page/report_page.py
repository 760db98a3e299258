"""Evaluations as one HTML page: read, drawn and written."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...core.console import notice
from ...core.errors import InvalidInput


@dataclass(frozen=True)
class ReportPage:
    """A page that was written.

    Attributes:
        file: the HTML file.
        figures: how many figures are on it.
        summary: what it shows, as plain values.
    """

    file: Path
    figures: int
    summary: dict[str, Any]


def write_page(directories: Sequence[Path], out: Path, png: Path | None) -> ReportPage:
    """Write one page about several checkpoints.

    Args:
        directories: checkpoints, each with an eval.json.
        out: the HTML file; must not exist.
        png: a new directory for every figure as a PNG; None for none.

    Raises:
        InvalidInput: a library is missing, a place is taken, or a directory holds no evaluation.
    """
    lacking = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if lacking:
        raise InvalidInput(
            f"kvfold report needs {' and '.join(lacking)}; install it: pip install 'kvfold[report]'"
        )
    from .document import check_places, compose, notices, summary, write
    from .groups import read_groups

    check_places(out, png)
    for sentence in _repeated(directories):
        notice(sentence)
    groups = read_groups(directories)
    for sentence in notices(groups):
        notice(sentence)
    parts = compose(groups)
    pictures = write(parts, out, png)
    figures = sum(len(section.charts) for part in parts for section in part.sections)
    return ReportPage(out, figures, summary(parts, out, pictures))


def _repeated(directories: Sequence[Path]) -> list[str]:
    """Return a sentence for every directory that is named again."""
    seen: set[Path] = set()
    sentences = []
    for directory in directories:
        place = directory.resolve()
        if place in seen:
            sentences.append(f"{directory} is named more than once; the page shows it once")
        seen.add(place)
    return sentences
