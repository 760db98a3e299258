"""Options that a command has from its settings: how they are shown, read and refused."""

from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import Field

from kvfold.core.command_options import Option, meaning, option_name, read_options, takes, words_of
from kvfold.core.console import Command
from kvfold.core.errors import InvalidInput
from kvfold.core.option_types import Bytes, Names, Place, Tokens, TrainedTokens
from kvfold.core.settings import Settings


class Asked(Settings):
    """The request of the command of these tests."""

    count: Annotated[int, Field(ge=1)] | None = None
    """How many. Default: as `size_limit` says."""
    to: Literal["a", "b"]
    """Where to."""
    share: float = Field(default=0.5, gt=0)
    """How much."""
    all_of_it: bool = False
    """Everything."""
    layerwise: bool | None = None
    """One by one."""
    size_limit: Annotated[Bytes, Option("--size")] = 5 * 10**9
    """At most."""
    context: Tokens | None = None
    """How long."""
    tokens: TrainedTokens = 200_000
    """How far."""
    kinds: Annotated[tuple[Literal["x", "y"], ...], Option(repeated=True)] = ("x",)
    """Which. Default: the first."""
    names: Names = ("n", "m")
    """Who."""
    out: Place | None = None
    """The output."""


@click.command("ask", cls=Command)
@takes(Asked)
def main(**options: Any) -> None:
    click.echo(repr(read_options(Asked, options).model_dump(exclude_defaults=True)))


def test_help_says_what_the_fields_say() -> None:
    shown = " ".join(CliRunner().invoke(main, ["--help"], terminal_width=200).output.split())
    assert shown.index("--to [a|b] Where to (required).") < shown.index("--count")
    for words in (
        "--count INTEGER RANGE How many. Default: as --size says. [x>=1]",
        "--share FLOAT RANGE How much. [default: 0.5; x>0]",
        "--all-of-it Everything. --layerwise / --no-layerwise One by one.",
        "--size SIZE At most. [default: 5GB]",
        "--context TOKENS How long. --tokens TOKENS How far. [default: 200k]",
        "--kinds [x|y] Which. Default: the first. [default: x]",
        "--names NAME,... Who. [default: n,m]",
        "--out PATH The output.",
    ):
        assert words in shown


def test_values_reach_the_settings_as_they_are() -> None:
    words = (
        "--to b --count 3 --size 20kb --context 2k --tokens 1M --kinds y --kinds x --names p,q --no-layerwise"
    )
    found = CliRunner().invoke(main, words.split())
    assert found.exit_code == 0, found.output
    assert found.output == (
        "{'count': 3, 'to': 'b', 'layerwise': False, 'size_limit': 20000, 'context': 2048, 'tokens': 1000000, "
        "'kinds': ('y', 'x'), 'names': ('p', 'q')}\n"
    )


@pytest.mark.parametrize(("words", "sentence"), [
    ("--to c", "Invalid value for '--to': 'c' is not one of 'a', 'b'"),
    ("--to a --count 0", "Invalid value for '--count': 0 is not in the range x>=1"),
    ("--to a --count 2000000000", "--count is 2000000000; it should be less than or equal to 1000000000"),
    ("--to a --share nan", "--share is nan; it should be a"),
    ("--to a --size much", "--size is 'much'; it should be a size, for example 500MB or 5GB"),
    ("--to a --context 0", "--context is '0'; it should be a number of tokens, for example 8192 or 8k"),
    ("--to a --kinds z", "Invalid value for '--kinds': 'z' is not one of 'x', 'y'"),
    ("", "--to is missing: Where to; choose from a, b"),
])  # fmt: skip
def test_mistakes_name_the_option(words: str, sentence: str) -> None:
    refused = CliRunner().invoke(main, words.split())
    assert refused.exit_code == 2
    assert sentence in refused.stderr


@pytest.mark.parametrize(("values", "sentence"), [
    ({"to": "c"}, "to is 'c'; it should be 'a' or 'b'"),
    ({}, "to is missing: Where to; choose from a, b"),
    ({"to": "a", "count": "x"}, "count is 'x'; it should be a whole number"),
    ({"to": "a", "share": True}, "share is True; it should be a number"),
    ({"to": "a", "kinds": ["z"]}, "kinds is 'z'; it should be 'x' or 'y'"),
    ({"to": "a", "size_limits": 3}, "unknown name 'size_limits'; did you mean 'size_limit'?"),
    ({"to": "a", "out": "a\0b"}, "it should be a path, neither empty nor with a null"),
])  # fmt: skip
def test_mistakes_of_python_name_the_field(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Asked.read(values)
    assert sentence in str(caught.value)


def test_fields_and_options_know_each_other() -> None:
    assert [option_name(Asked, name) for name in ("size_limit", "all_of_it", "else")] == [
        "--size",
        "--all-of-it",
        "else",
    ]
    assert meaning(Asked.model_fields["count"]) == ("How many.", "as `size_limit` says")
    assert words_of(Asked, {"all_of_it": True, "names": ["p", "q"], "count": 3}) == [
        "--all-of-it", "--names", "p,q", "--count", "3",
    ]  # fmt: skip
