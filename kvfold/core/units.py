"""Sizes, numbers of tokens and shares as people write them: `24GB`, `32k`, `300k`, `25%`.

The same letter means two things in the field, and both are kept: a context of `32k` tokens is 32 x 1024, a
budget of `300k` training tokens is 300 x 1000.
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from numbers import Integral
from typing import Any, Literal

import click

from .errors import InvalidInput
from .untrusted import shorten

_DECIMAL = {name: 1000**power for power, name in enumerate(("", "KB", "MB", "GB", "TB"))}
_BINARY = {name: 1024**power for power, name in enumerate(("", "KIB", "MIB", "GIB", "TIB"))}
_UNITS = {"tokens": {"": 1, "K": 2**10, "M": 2**20}, "bytes": _DECIMAL | _BINARY | {"B": 1}}
_EXAMPLES = {"tokens": "4096 or 32k (32 x 1024)", "bytes": "24GB (24 x 10^9 bytes) or 24GiB (24 x 2^30)"}
_TRAINED = {"k": 10**3, "m": 10**6, "b": 10**9}
_NUMBER = r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_MOST_DIGITS = 19


def read_size(text: str, option: str, kind: Literal["tokens", "bytes"]) -> int:
    """Read a length of a context or a size in bytes.

    Args:
        text: decimal digits, with a fraction or without, and a unit in any case. Of tokens, `k` and `m` are
            binary; of bytes, `KB` to `TB` are decimal and `KiB` to `TiB` binary. Without a unit it counts
            tokens or bytes.
        option: the option it was given to, for the error.
        kind: what is counted.

    Returns:
        A whole number of at least 1; a fraction of a token or byte is dropped.

    Raises:
        InvalidInput: the text is not such a size, or is less than 1.
    """
    size = _size(text, kind)
    if size is None:
        raise InvalidInput(
            f"{option} {text!r} is not a number of {kind}; write for example {_EXAMPLES[kind]}"
        )
    return size


def bytes_of(value: Any, name: str) -> int:
    """Return a size in bytes that Python gives: a whole number, or a text as `read_size` takes it.

    Args:
        value: the size.
        name: of the argument, for the error.

    Raises:
        InvalidInput: it is no such size, or less than 1.
    """
    if isinstance(value, str):
        return read_size(value, name, "bytes")
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) < 10**_MOST_DIGITS:
        raise InvalidInput(f"{name} is {shorten(value)}; it should be a size, for example 500MB or 5GB")
    return int(value)


def counted(count: int, noun: str) -> str:
    """Return a number with a noun that forms its plural by an s, such as `1 step` or `2 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class ByteSize(click.ParamType):  # type: ignore[type-arg] # click 8.2 takes no argument
    """The type of an option that takes bytes, such as `500MB` or `5GB`; its value is an `int`."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes; a default that is a number already is left as it is."""
        if isinstance(value, int):
            return value
        size = _size(value, "bytes")
        if size is None:
            self.fail(f"{value!r} is not a size; write for example 500MB or 5GB", param, ctx)
        return size


def parse_tokens(value: object) -> object:
    """Return a number of training tokens: 5000000 for `"5M"`.

    Args:
        value: digits with `k` (1000), `M` or `B`, in any case, or without a unit; `_` may separate digits. A
            value that is not a string is returned as it is, for pydantic to judge.

    Returns:
        An `int`, or a `float` if the text has a fraction and no unit.

    Raises:
        ValueError: the string is not a number.
    """
    if not isinstance(value, str):
        return value
    number, unit = value.strip().replace("_", ""), 1
    if number[-1:].lower() in _TRAINED:
        unit = _TRAINED[number[-1].lower()]
        number = number[:-1]
    try:
        parsed = float(number)
        return round(parsed * unit) if unit > 1 or parsed.is_integer() else parsed
    except (ValueError, OverflowError):
        raise ValueError("it should be a number of tokens, such as 5000, 300k, 5M or 1B") from None


def read_share(text: str, option: str) -> Fraction:
    """Read a share of the source's cache, between 0 and 1 and neither, exactly as it is written.

    Args:
        text: `25%` or `0.25`.
        option: the option it was given to, for the error.

    Raises:
        InvalidInput: the text is not such a share.
    """
    match = re.fullmatch(rf"{_NUMBER}(%?)", text.strip())
    share = Fraction(Decimal(match[1])) if match else Fraction(0)
    if match and match[2]:
        share /= 100
    if not 0 < share < 1:
        raise InvalidInput(
            f"{option} {text or repr(text)} is not a share of the source's cache; write for example 25% or "
            "0.25"
        )
    return share


def show_percent(share: float) -> str:
    """Return a share in percent, with up to six digits: `12.5%` for 0.125."""
    return f"{100 * share:g}%"


def show_bytes(size: float) -> str:
    """Return a number of bytes with a decimal unit and three digits: `1.5 KB`."""
    for unit in ("TB", "GB", "MB", "KB"):
        if size >= _DECIMAL[unit]:
            number = size / _DECIMAL[unit]
            return f"{number:.3g} {unit}" if number < 1000 else f"{number:,.0f} {unit}"
    return f"{size:.0f} B"


def _size(text: str, kind: Literal["tokens", "bytes"]) -> int | None:
    match = re.fullmatch(rf"{_NUMBER}\s*([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in _UNITS[kind] or len(match[1]) > _MOST_DIGITS:
        return None
    return int(Decimal(match[1]) * _UNITS[kind][match[2]]) or None


def show_kinds(layers: Mapping[str, int]) -> str:
    """Return the numbers of layers by kind as text.

    Example:
        >>> show_kinds({"linear_attention": 36, "full_attention": 12})
        '36 linear_attention layers, 12 full_attention layers'
    """
    return ", ".join(f"{count} {kind} layers" for kind, count in layers.items())


def seconds_left(elapsed: float, done: int, total: int, at_once: int = 1) -> float | None:
    """Return the seconds that the rest takes, where `at_once` items are worked on side by side.

    None while all that are left are at work: when they began is not known.

    Example:
        >>> seconds_left(10.0, done=1, total=8, at_once=4)  # the first four end together
        10.0
        >>> seconds_left(20.0, done=5, total=8, at_once=4)  # the other three may end now
    """
    rounds, ended = math.ceil(total / at_once), math.ceil(done / at_once)
    return None if rounds == ended and done < total else elapsed * (rounds / ended - 1)
