"""The page as one HTML file that needs no other file, and its figures as PNGs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...core.console import notice
from ...core.errors import InvalidInput
from ...core.files import private_directory, rename_whole, whole_file
from ...core.untrusted import printable
from ...core.version import __version__
from .canvas import DARK, LIGHT, styled, to_svg, write_png
from .groups import Group, read_groups
from .sections import PageSection, sections


@dataclass(frozen=True)
class PagePart:
    """A group of checkpoints and its sections."""

    group: Group
    sections: tuple[PageSection, ...]


def write_page(directories: Sequence[Path], out: Path, png: Path | None) -> tuple[int, dict[str, Any]]:
    """Write one page about several checkpoints, and each figure as a PNG into the new directory `png`.

    Returns:
        The number of figures, and the numbers on the page as plain values.

    Raises:
        InvalidInput: a library is missing, a place is taken, or a directory holds no evaluation.
    """
    lacking = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if lacking:
        raise InvalidInput(
            f"kvfold report needs {' and '.join(lacking)}; install it: pip install 'kvfold[report]'"
        )
    for option, path in (("--out", out), ("--png", png)):
        if path is None:
            continue
        if path.exists() or path.is_symlink():
            raise InvalidInput(f"{option} {path} exists; name another path")
        if not path.absolute().parent.is_dir():
            raise InvalidInput(f"{option} {path}: there is no directory {path.parent}")
    places = [directory.resolve() for directory in directories]
    for number, directory in enumerate(directories):
        if places[number] in places[:number]:
            notice(f"{directory} is named more than once; the page shows it once")
    groups = read_groups(directories)
    for sentence in notices(groups):
        notice(sentence)
    parts = compose(groups)
    pictures = write(parts, out, png)
    figures = sum(len(section.charts) for part in parts for section in part.sections)
    return figures, _summary(parts, out, pictures)


def compose(groups: Sequence[Group]) -> tuple[PagePart, ...]:
    """Draw all figures and tables."""
    with styled():
        return tuple(PagePart(group, sections(group)) for group in groups)


def notices(groups: Sequence[Group]) -> list[str]:
    """Return the warnings that belong above the numbers."""
    found = []
    sources = {group.source.identity for group in groups if group.source}
    unknown = [one.label for group in groups if group.source is None for one in group.members]
    if len(sources) + bool(unknown) > 1:
        found.append(
            "These checkpoints have different sources, so they are shown in groups; compare only within a "
            "group."
        )
    elif len(groups) > 1:
        found.append(
            "Not all checkpoints were measured on the same text in the same windows; compare only within a "
            "group."
        )
    if unknown:
        found.append(
            f"The source of {', '.join(unknown)} is unknown, so its numbers are not paired with a source."
        )
    return found


def _render(parts: Sequence[PagePart]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__name__.rpartition(".")[0], "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    texts = resources.files(__package__) / "templates"
    return environment.get_template("page.html").render(
        parts=parts,
        notices=notices([part.group for part in parts]),
        light=LIGHT,
        dark=DARK,
        svg=to_svg,
        version=__version__,
        style=(texts / "page.css").read_text(encoding="utf-8"),
        script=(texts / "page.js").read_text(encoding="utf-8"),
    )


def _shown(value: Any) -> Any:
    """Return a text of a record with escapes for what does not print; a terminal would obey some of it."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "\n".join(map(printable, value.split("\n")))


def write(parts: Sequence[PagePart], page: Path, pictures: Path | None) -> list[Path]:
    """Write the page and the pictures, each completely or not at all; returns the pictures' paths.

    Raises:
        InvalidInput: a path exists.
        OSError: one cannot be written.
    """
    names: list[str] = []
    with whole_file(page) as temporary:
        temporary.write_text(_render(parts), encoding="utf-8")
        if pictures is None:
            return []
        with private_directory(pictures) as place:
            made = place / pictures.name
            made.mkdir()
            for number, part in enumerate(parts):
                prefix = f"{number}-" if len(parts) > 1 else ""
                for chart in (chart for section in part.sections for chart in section.charts):
                    names.append(f"{prefix}{chart.name}.png")
                    write_png(chart.drawn, made / names[-1])
            rename_whole(made, pictures)
    return [pictures / name for name in names]


def _summary(parts: Sequence[PagePart], page: Path, pictures: Sequence[Path]) -> dict[str, Any]:
    groups = []
    for part in parts:
        table = part.sections[0].tables[0]
        rows = [
            {column: cell.value for column, cell in zip(table.columns, row, strict=True)}
            for row in table.rows
        ]
        missing = [
            {"what": what, "command": command}
            for section in part.sections
            for what, command in section.missing
        ]
        source, protocol = part.group.source, part.group.protocol
        groups.append(
            {
                "source": source and {"path": source.path, "name": source.name, "identity": source.identity},
                "protocol": protocol and asdict(protocol),
                "directories": [str(one.directory) for one in part.group.everyone],
                "checkpoints": rows,
                "missing": missing,
            }
        )
    return {
        "page": str(page),
        "pictures": [str(path) for path in pictures],
        "notices": notices([part.group for part in parts]),
        "groups": groups,
    }
