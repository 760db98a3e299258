"""The page of all commands and options, from click."""

import re
from collections.abc import Iterator

import click

from kvfold.cli import main
from kvfold.distill.cli import explain, validate

from .markdown import code, table, text

INTRODUCTION = """# Commands

Every command has `--help`, and most have `--json` for scripts. Exit codes: 0 done, 2 a mistake in what was
given (one sentence says which value and what would be right), 3 a check or a bound does not hold, 129, 130 or
143 stopped by a signal (the same command resumes).
"""


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command of `kvfold` with its words, such as `kvfold distill explain`."""
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        yield f"kvfold {name}", command
        if name == "distill":
            yield "kvfold distill validate", validate
            yield "kvfold distill explain", explain


def commands_page() -> str:
    """Return the page in Markdown: a section per command, a row per argument and option.

    Raises:
        ValueError: a command or an option has no help.
    """
    return "\n".join([INTRODUCTION, *(_section(words, command) for words, command in all_commands())])


def _section(words: str, command: click.Command) -> str:
    context = click.Context(command, info_name=words)
    if not command.help:
        raise ValueError(f"{words} has no help")
    usage = " ".join([words, *command.collect_usage_pieces(context)])
    rows = [_row(words, context, parameter) for parameter in command.get_params(context)]
    return "\n".join(
        [
            f"## {words}",
            "",
            f"```text\n{usage}\n```",
            "",
            _paragraphs(command.help),
            "",
            table(("option", "value", "meaning", "default"), [row for row in rows if row]),
            "",
            _paragraphs(command.epilog or ""),
            "",
        ]
    )


def _paragraphs(words: str) -> str:
    return "\n\n".join(text(" ".join(part.split())) for part in words.split("\n\n"))


def _row(words: str, context: click.Context, parameter: click.Parameter) -> tuple[str, ...] | None:
    """Return the cells of an option; None for `--help` and arguments, which the usage line shows."""
    if not isinstance(parameter, click.Option) or parameter.name == "help":
        return None
    if not parameter.help:
        raise ValueError(f"{words} {parameter.opts[0]} has no help")
    names = " ".join(code(name) for name in (*parameter.opts, *parameter.secondary_opts))
    value = "" if parameter.is_flag else code(parameter.make_metavar(context))
    extra = parameter.get_help_extra(context)
    words = re.sub(r"\[default: (.*)\]$", r"Default: \1", " ".join(parameter.help.split()))
    meaning, written, default = words.partition("Default: ")
    shown = [code(extra["default"])] if "default" in extra else []
    shown += [default.removesuffix(".")] if written else []
    shown += [extra["range"]] if "range" in extra else []
    shown += ["may be repeated"] if parameter.multiple else []
    return names, value, meaning.strip(), "; ".join(shown)
