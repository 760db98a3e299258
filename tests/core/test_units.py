"""Numbers with units: what is accepted, exactly how much it is, and what is refused."""

import pytest

from kvfold.core.errors import InvalidInput
from kvfold.core.units import (
    parse_bytes,
    parse_context,
    parse_tokens,
    read_share,
    show_bytes,
    show_context,
    show_percent,
    show_trained,
)


@pytest.mark.parametrize(("text", "size"), [
    ("500MB", 5 * 10**8),
    ("5GB", 5 * 10**9),
    ("20kb", 20_000),
    ("1 TB", 10**12),
    ("24GiB", 24 * 2**30),
    ("1.5GB", 15 * 10**8),
    ("77", 77),
    (" .5 tb ", 5 * 10**11),
    ("9007199254740993B", 2**53 + 1),  # which a float does not hold
])  # fmt: skip
def test_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0", "0.1", "-1GB", "5XB", "nan", "1e9", "9" * 400, "٣GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^it should be a size, for example 500MB or 5GB$"):
        parse_bytes(text)


def test_a_context_is_binary_and_a_training_budget_is_decimal() -> None:
    assert [parse_context(text) for text in ("32k", "8192", "1.5K")] == [32768, 8192, 1536]
    assert parse_tokens("32k") == 32000
    for wrong in ("", "k", "0", "-1k", "32kb", "1e3", "nan", "32 k k", "3٢", "9" * 400):
        with pytest.raises(ValueError, match=r"^it should be a number of tokens, for example 8192 or 8k$"):
            parse_context(wrong)


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
    assert [show_context(tokens) for tokens in (32768, 131072, 500)] == ["32k", "128k", "500"]
    assert [show_trained(tokens) for tokens in (200_000, 5 * 10**7, 1024)] == ["200k", "50M", "1024"]
