"""Numbers with units, as people write them: `32k` tokens, `24GB`."""

import re
from typing import Literal

from .errors import InvalidInput

_DECIMAL = {name: 1000**power for power, name in enumerate(("", "KB", "MB", "GB", "TB"))}
_BINARY = {name: 1024**power for power, name in enumerate(("", "KIB", "MIB", "GIB", "TIB"))}
_UNITS = {"tokens": {"": 1, "K": 2**10, "M": 2**20}, "bytes": _DECIMAL | _BINARY | {"B": 1}}
_EXAMPLES = {"tokens": "4096 or 32k (32 x 1024)", "bytes": "24GB (24 x 10^9 bytes) or 24GiB (24 x 2^30)"}


def read_size(text: str, option: str, kind: Literal["tokens", "bytes"]) -> int:
    """A number of tokens or of bytes.

    Args:
        text: decimal digits, with a fraction or not, and a unit of the kind, in any case: `k` and `m` of
            tokens are binary, `KB` ... `TB` decimal, `KiB` ... `TiB` binary; without one tokens or bytes.
        option: that it was given to, for the sentence.
        kind: what is counted.

    Raises:
        InvalidInput: it is no such size, or less than one.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Z]*)", text.strip().upper())
    units = _UNITS[kind]
    size = int(float(match[1]) * units[match[2]]) if match and match[2] in units and len(match[1]) < 20 else 0
    if size < 1:
        raise InvalidInput(f"{option} {text!r} is no number of {kind}; write for example {_EXAMPLES[kind]}")
    return size


def show_bytes(size: float) -> str:
    """Bytes as people read them, decimal."""
    for unit in ("TB", "GB", "MB", "KB"):
        if size >= _DECIMAL[unit]:
            return (
                f"{size / _DECIMAL[unit]:.3g} {unit}"
                if size < 1000 * _DECIMAL[unit]
                else f"{size / _DECIMAL[unit]:,.0f} {unit}"
            )
    return f"{size:.0f} B"
