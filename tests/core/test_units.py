"""Numbers with units: what is accepted, exactly how much it is, and what is refused."""

import click
import pytest
from click.testing import CliRunner

from kvfold.core.errors import InvalidInput
from kvfold.core.units import ByteSize, parse_tokens, read_share, read_size, show_bytes, show_percent


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500MB", 5 * 10**8),
        ("5GB", 5 * 10**9),
        ("20kb", 20_000),
        ("1 TB", 10**12),
        ("24GiB", 24 * 2**30),
        ("1.5GB", 15 * 10**8),
        ("77", 77),
        ("9007199254740993B", 2**53 + 1),  # which a float does not hold
    ],
)
def test_bytes_are_read_by_functions_and_options_alike(text: str, size: int) -> None:
    assert read_size(text, "--memory", "bytes") == size

    @click.command()
    @click.option("--shard-size", type=ByteSize(), default="5GB")
    def main(shard_size: int) -> None:
        click.echo(repr(shard_size))

    assert CliRunner().invoke(main, ["--shard-size", text]).stdout == f"{size}\n"
    assert CliRunner().invoke(main, []).stdout == "5000000000\n"
    refused = CliRunner().invoke(main, ["--shard-size", "many"])
    assert refused.exit_code == 2
    assert "'many' is not a size; write for example 500MB or 5GB" in refused.stderr


@pytest.mark.parametrize("text", ["", "GB", "0", "0.1", "-1GB", "5XB", "nan", "1e9", "9" * 400, "٣GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^--memory .* is not a number of bytes; write for example 24GB"):
        read_size(text, "--memory", "bytes")


def test_a_context_is_binary_and_a_training_budget_is_decimal() -> None:
    assert read_size("32k", "--context", "tokens") == 32768
    assert parse_tokens("32k") == 32000


def test_tokens_of_a_recipe() -> None:
    texts = ("5000", "350k", "1.001M", "1B", "1_000", "1e6", " 2 ")
    assert [parse_tokens(text) for text in texts] == [5000, 350_000, 1_001_000, 10**9, 1000, 10**6, 2]
    assert (parse_tokens("0.05"), parse_tokens(7), parse_tokens(None)) == (0.05, 7, None)
    for wrong in ("", "k", "many", "1e400k"):
        with pytest.raises(ValueError, match=r"a number of tokens, such as 5000, 300k, 5M or 1B"):
            parse_tokens(wrong)


def test_shares() -> None:
    assert [read_share(text, "--x") for text in ("25%", "0.25", ".25", " 12.5% ")] == [0.25] * 3 + [0.125]
    for wrong in ("", "0", "1", "100%", "25 %", "-1%", "x", "nan"):
        with pytest.raises(InvalidInput, match=r"^--x .* is not a share of the source's cache; write for ex"):
            read_share(wrong, "--x")


def test_numbers_are_shown() -> None:
    sizes = (12, 1.5e3, 24e9, 2e12, 1.234e16)
    assert [show_bytes(size) for size in sizes] == ["12 B", "1.5 KB", "24 GB", "2 TB", "12,340 TB"]
    assert [show_percent(share) for share in (0.25, 0.125, 0.333)] == ["25%", "12.5%", "33.3%"]
