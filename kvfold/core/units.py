"""Sizes, numbers of tokens and shares as people write them: `24GB`, `32k`, `300k`, `25%`.

The same letter means two things in the field, and both are kept: a context of `32k` tokens is 32 x 1024, a
budget of `300k` training tokens is 300 x 1000.
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction

from .errors import InvalidInput

_DECIMAL = {name: 1000**power for power, name in enumerate(("", "KB", "MB", "GB", "TB"))}
_BINARY = {name: 1024**power for power, name in enumerate(("", "KIB", "MIB", "GIB", "TIB"))}
_BYTES = _DECIMAL | _BINARY | {"B": 1}
_CONTEXT = {"": 1, "K": 2**10, "M": 2**20}
_TRAINED = {"k": 10**3, "m": 10**6, "b": 10**9}
_NUMBER = r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_MOST_DIGITS = 19


def parse_bytes(value: object) -> object:
    """Return a size in bytes: 24000000000 for `"24GB"`.

    Args:
        value: decimal digits, with a fraction or without, and a unit in any case: `KB` to `TB` are decimal
            and `KiB` to `TiB` binary. Without a unit it counts bytes. A value that is not a string is
            returned as it is, for pydantic to judge.

    Raises:
        ValueError: the string is no such size, or less than 1; a fraction of a byte is dropped.
    """
    return _size(value, _BYTES, "it should be a size, for example 500MB or 5GB")


def parse_context(value: object) -> object:
    """Return a length of a context in tokens, as `parse_bytes` does: 32768 for `"32k"`."""
    return _size(value, _CONTEXT, "it should be a number of tokens, for example 8192 or 8k")


def _size(value: object, units: Mapping[str, int], wanted: str) -> object:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(rf"{_NUMBER}\s*([A-Z]*)", value.strip().upper())
    is_size = match and match[2] in units and len(match[1]) <= _MOST_DIGITS
    size = int(Decimal(match[1]) * units[match[2]]) if match and is_size else 0
    if not size:
        raise ValueError(wanted)
    return size


def counted(count: int, noun: str) -> str:
    """Return a number with a noun that forms its plural by an s, such as `1 step` or `2 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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


def show_context(tokens: int) -> str:
    """Return a length of a context as `parse_context` reads it: `32k` for 32768."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def show_trained(tokens: int) -> str:
    """Return a number of training tokens as `parse_tokens` reads it: `200k` for 200000."""
    units = {"B": 10**9, "M": 10**6, "k": 10**3}
    return next((f"{tokens // n}{unit}" for unit, n in units.items() if tokens % n == 0), str(tokens))


def read_share(text: str, option: str) -> Fraction:
    """Read a share of the source's cache, between 0 and 1 and neither, exactly as it is written.

    It is written as `25%` or `0.25`; `option` is named in the error.

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
