"""The page as one HTML file that needs nothing else, and its figures as PNGs."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ...core.errors import InvalidInput
from ...core.files import whole_directory, whole_file
from .canvas import DARK, LIGHT, styled, to_svg, write_png
from .groups import Group
from .sections import Section, sections


@dataclass(frozen=True)
class Part:
    """A group and what the page shows of it."""

    group: Group
    sections: tuple[Section, ...]


def compose(groups: Sequence[Group]) -> tuple[Part, ...]:
    """Draw everything."""
    with styled():
        return tuple(Part(group, sections(group)) for group in groups)


def notices(groups: Sequence[Group]) -> list[str]:
    """What must be known before numbers are compared."""
    found = []
    sources = {group.source.identity for group in groups if group.source}
    unknown = [one.label for group in groups if group.source is None for one in group.members]
    if len(sources) + bool(unknown) > 1:
        found.append(
            "These checkpoints have different sources, so they stand in groups; compare within a group only."
        )
    elif len(groups) > 1:
        found.append(
            "Not all was measured on the same text in the same windows; compare within a group only."
        )
    if unknown:
        found.append(f"No source is known of {', '.join(unknown)}: nothing is paired there.")
    return found


def render(parts: Sequence[Part]) -> str:
    """The page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from ... import __version__

    environment = Environment(
        loader=PackageLoader(__name__.rpartition(".")[0], "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html")
    return template.render(
        parts=parts,
        notices=notices([part.group for part in parts]),
        light=LIGHT,
        dark=DARK,
        svg=to_svg,
        version=__version__,
        style=_template("page.css"),
        script=_template("page.js"),
    )


def check_places(page: Path, pictures: Path | None) -> None:
    """Refuse places that are taken, before anything is drawn.

    Raises:
        InvalidInput: there is something already, or no directory to write in.
    """
    for option, path in (("--out", page), ("--png", pictures)):
        if path is None:
            continue
        if path.exists() or path.is_symlink():
            raise InvalidInput(f"{option} {path} exists; name another")
        if not path.absolute().parent.is_dir():
            raise InvalidInput(f"{option} {path}: there is no directory {path.parent}")


def write(parts: Sequence[Part], page: Path, pictures: Path | None) -> list[Path]:
    """Write the page and the pictures, each whole or not at all.

    Args:
        parts: what `compose` drew.
        page: the HTML file.
        pictures: a new directory for the PNGs; None for none.

    Returns:
        The pictures' paths.

    Raises:
        InvalidInput: a place is taken or cannot be written.
    """
    check_places(page, pictures)
    try:
        with whole_file(page) as temporary:
            temporary.write_text(render(parts), encoding="utf-8")
            names = [] if pictures is None else _write_pictures(parts, pictures)
    except OSError as error:
        raise InvalidInput(
            f"{error.filename or page} cannot be written: {error.strerror}; name another place"
        ) from None
    return names


def _write_pictures(parts: Sequence[Part], directory: Path) -> list[Path]:
    names = []
    with whole_directory(directory) as temporary:
        for number, part in enumerate(parts):
            prefix = f"{number}-" if len(parts) > 1 else ""
            for chart in (chart for section in part.sections for chart in section.charts):
                names.append(f"{prefix}{chart.name}.png")
                write_png(chart.drawn, temporary / names[-1])
    return [directory / name for name in names]


def _template(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def summary(parts: Sequence[Part], page: Path, pictures: Sequence[Path]) -> dict[str, Any]:
    """What was shown, as plain values: for `--json`."""
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
                "source": source and source.model_dump(),
                "protocol": protocol and protocol.model_dump(),
                "directories": [str(one.directory) for one in part.group.everyone],
                "checkpoints": rows,
                "missing": missing,
            }
        )
    found = notices([part.group for part in parts])
    return {
        "page": str(page),
        "pictures": [str(path) for path in pictures],
        "notices": found,
        "groups": groups,
    }
