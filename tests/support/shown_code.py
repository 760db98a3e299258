"""The documents as tests read them: pages, their blocks, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from docs.make.commands_page import all_commands

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
_BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.S)
_ONLY_READ = "not run: "  # a mark in front of a block, with the reason
_COMPARED = "output is compared"


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: str  # its path from the root
    kind: str  # `console`, `python`, `yaml`, ...
    text: str
    reason: str | None  # why it is read and not run; None where it is run
    compared: bool  # whether the output that it shows must come out

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each command after `$`, with the lines of output that are shown below it."""
        lines = self.text.replace("\\\n", " ").splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            yield lines[start][2:], [line for line in lines[start + 1 : end] if line.strip()]


def blocks(page: str) -> list[Block]:
    """Return the blocks of code of a page, in order."""
    found = []
    for match in _BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")):
        mark = match["mark"] or ""
        reason = mark.removeprefix(_ONLY_READ) if mark.startswith(_ONLY_READ) else None
        found.append(Block(page, match["kind"], match["text"], reason, mark == _COMPARED))
    return found


def all_blocks() -> list[Block]:
    """Return the blocks of all pages, those of the README first."""
    return [block for page in PAGES for block in blocks(page)]


def kvfold_words(command: str) -> list[str] | None:
    """Return the words after `kvfold` of a command, also behind a launcher; None for other programs."""
    words = shlex.split(command, comments=True)
    for start, word in enumerate(words):
        if word == "kvfold" and (start == 0 or words[start - 1] == "-m"):
            return words[start + 1 :]
        if word == "kvfold.distill" and words[start - 1] == "-m":
            return ["distill", *words[start + 1 :]]
    return None


def check_words(words: list[str]) -> None:
    """Parse a command of kvfold without running it; raise click.ClickException where it is wrong."""
    commands = {tuple(name.split()[1:]): command for name, command in all_commands()}
    name = tuple(words[:2]) if tuple(words[:2]) in commands else tuple(words[:1])
    if name not in commands:
        raise click.UsageError(f"there is no command kvfold {' '.join(words[:1])}")
    command = commands[name]
    given = words[len(name) :]
    # Arguments of accelerate follow `--`, and only a running command takes them apart.
    given = given[: given.index("--")] if "--" in given else given
    context = click.Context(command, info_name=" ".join(name))
    values, _, _ = command.make_parser(context).parse_args(list(given))
    for parameter in command.params:  # a path need not exist here
        is_option = isinstance(parameter, click.Option) and parameter.name in values
        if is_option and not isinstance(parameter.type, click.Path):
            parameter.type_cast_value(context, values[parameter.name])
