"""The growth of a text in the steps of a tokenizer.json, by which a hostile one could take all memory."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import InvalidInput
from ..core.untrusted import printable

_MOST = 64  # times; the steps of published models in the tests count 18 times at most
_MOST_STEPS = 1000  # of a part; published models have a few dozen
_PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
_BYTES = 4  # characters that a ByteLevel step makes of one
# Characters that a step of Unicode makes of one at most. What it made it leaves as it is the next time, and
# every published tokenizer may have one step of a kind, so the first is not counted. The next ones are, since
# a step between them may make the characters anew.
_UNICODE = {"NFKC": 18, "NFKD": 18, "Precompiled": 18, "NFC": 4, "NFD": 4, "Lowercase": 2}
# The text that such a decoder replaces by a space; an empty one is found between any two characters.
_REPLACED = {"BPEDecoder": "suffix", "CTC": "word_delimiter_token"}
# Regular expressions that may match between two characters, or are none of Python's, match everywhere.
_ASSERTION = re.compile(r"\(\?|[\^$]|\\[ABbGKZz]")


def check_growth(tokenizer: Mapping[str, Any], file: Path) -> None:
    """Check that a tokenizer makes no text more than 64 times as long: each step could double its length.

    Args:
        tokenizer: the content of a tokenizer.json; another file of a tokenizer has no such parts.
        file: its place, for the error.

    Raises:
        InvalidInput: its normalizer, pre-tokenizer or decoder could, or has more than 1,000 steps.
    """
    for part, inner in _PARTS.items():
        steps = list(_steps(tokenizer.get(part), inner))
        flaw = ""
        if len(steps) > _MOST_STEPS:
            flaw = f"has more than {_MOST_STEPS:,} steps"
        elif _growth(steps) > math.log(_MOST):
            flaw = f"can make a text more than {_MOST} times as long"
        if flaw:
            raise InvalidInput(
                f"the {part} in {printable(file)} {flaw}; take the tokenizer that the model was "
                "published with"
            )


def _growth(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the logarithm of how many times as long the steps of a part can make a text.

    Growths of two steps multiply where the second one can read a character that the first one made. A step
    that replaces a plain text reads the characters of that text alone.
    """
    most = anywhere = 0.0  # of any character so far, and of those that may be any
    made: dict[str, float] = {}  # by character
    free = set(_UNICODE.values())
    for step in steps:
        factor = _factor(step)
        expanded = _UNICODE.get(str(step.get("type")))
        if expanded in free:
            free.remove(expanded)
        elif expanded:
            factor = expanded
        read, written = _replaced(step)
        fed = max([anywhere, *(made.get(letter, 0.0) for letter in read)]) if read else most
        grown = fed + math.log(factor)
        most = max(most, grown)
        if written is None:
            anywhere = max(anywhere, grown)
        else:
            made |= {letter: max(made.get(letter, 0.0), grown) for letter in set(written)}
    return most


def _replaced(step: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the plain text that a step reads and the text that it writes; None where they may be any."""
    pattern, content = step.get("pattern"), step.get("content")
    if step.get("type") != "Replace" or not isinstance(content, str):
        return None, None
    plain = pattern.get("String") if isinstance(pattern, dict) else None
    return plain if isinstance(plain, str) else None, content


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
        return _BYTES + bool(step.get("add_prefix_space"))
    if kind == "BertNormalizer":
        return 3  # spaces around Chinese characters
    if kind == "Metaspace":
        return 1 if step.get("prepend_scheme") == "never" else 2
    if isinstance(kind, str) and kind in _REPLACED:
        return 1 if step.get(_REPLACED[kind]) else 3
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
