"""The growth of a text in the steps of a tokenizer.json, by which a hostile one could take all memory."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import InvalidInput
from ..core.untrusted import printable

_MOST = 64  # times; steps of published models lengthen a text 36 times at most
_PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
_UNICODE = ("NFKC", "NFKD", "Precompiled")
_EXPANDED = 18  # characters that such a step makes of one, which it leaves as they are the second time
_BYTES = 2  # characters of a ByteLevel step for most letters of other alphabets
# Regular expressions that may match between two characters, or are none of Python's, match everywhere.
_ASSERTION = re.compile(r"\(\?|[\^$]|\\[ABbGKZz]")


def check_growth(tokenizer: Mapping[str, Any], file: Path) -> None:
    """Check that a tokenizer lengthens no text beyond measure: each step could double what the last one made.

    Args:
        tokenizer: the content of a tokenizer.json; another file of a tokenizer has no such parts.
        file: its place, for the error.

    Raises:
        InvalidInput: its normalizer, pre-tokenizer or decoder could.
    """
    for part, inner in _PARTS.items():
        steps = list(_steps(tokenizer.get(part), inner))
        repeated = max(0, sum(step.get("type") in _UNICODE for step in steps) - 1)
        growth = sum(math.log(_factor(step)) for step in steps) + repeated * math.log(_EXPANDED)
        if growth > math.log(_MOST) or len(steps) > _MOST:
            raise InvalidInput(
                f"the {part} in {printable(file)} can make a text more than {_MOST} times as long; take the "
                "tokenizer that the model was published with"
            )


def _steps(part: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part in their order; sequences may nest."""
    if not isinstance(part, dict):
        return
    if part.get("type") != "Sequence":
        yield part
        return
    within = part.get(inner)
    for step in within if isinstance(within, list) else ():
        yield from _steps(step, inner)


def _factor(step: Mapping[str, Any]) -> float:
    """Return how many characters a step may make of one; a step of the wrong form counts as none."""
    kind = step.get("type")
    if kind == "ByteLevel":
        return _BYTES
    if kind == "Prepend":
        return 1 + _length(step.get("prepend"))
    if kind != "Replace":
        return 1
    pattern, content = step.get("pattern"), _length(step.get("content"))
    pattern = pattern if isinstance(pattern, dict) else {}
    if plain := _length(pattern.get("String")):
        return max(1, content / plain)
    return content + 1 if _may_be_empty(pattern.get("Regex")) else max(1, content)


def _length(text: Any) -> int:
    return len(text) if isinstance(text, str) else 0


def _may_be_empty(pattern: Any) -> bool:
    """Return whether a regular expression may match no character."""
    if not isinstance(pattern, str) or _ASSERTION.search(pattern):
        return True
    try:
        return re.fullmatch(pattern, "") is not None
    except (re.error, OverflowError, RecursionError):
        return True
