"""The growth of a text in the steps of a tokenizer's files, by which a hostile one could take all memory."""

import base64
import binascii
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any

from ..core.errors import InvalidInput
from ..core.untrusted import printable, read_bytes, read_json, shorten

# Objects of JSON in which transformers looks for a tokenizer.
_OBJECTS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
)  # fmt: skip
_PIECES = ("*.model", "*.spm", "*.tokenizer")  # models of SentencePiece
_LIMIT_BYTES = 2**26  # twice the largest published tokenizer.json
_MAP_BYTES = 2**22  # of a map of characters, which takes seconds to check; published ones have 0.25 MB
_MOST = 64  # times; the steps of published models in the tests count 18 times at most
_MOST_STEPS = 1000  # of a part; published models have a few dozen
_PARTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
_BYTES = 4  # characters that a ByteLevel step makes of one
# Characters that a step of Unicode makes of one at most; a Precompiled one with the map of published models.
# What it made it leaves as it is the next time, and every published tokenizer may have one step of a kind, so
# the first is not counted. The next ones are, since a step between them may make the characters anew.
_UNICODE = {"NFKC": 18, "NFKD": 18, "Precompiled": 18, "NFC": 4, "NFD": 4, "Lowercase": 2}
# The text that such a decoder replaces by a space; an empty one is found between any two characters.
_REPLACED = {"BPEDecoder": "suffix", "CTC": "word_delimiter_token"}
# Regular expressions that may match between two characters, or are none of Python's, match everywhere.
_ASSERTION = re.compile(r"\(\?|[\^$]|\\[ABbGKZz]")
_MAPPED = {3: "normalizer", 5: "decoder"}  # fields of a SentencePiece model with a map of characters
_MAP = 2  # the field of that map in them
_MOST_FIELDS = 10**6  # of a file; the largest published vocabularies have 262,144 pieces
_TAG = 2**32 - 1  # bits of a tag; readers drop further ones
_VARINT, _FIXED_64, _LENGTH, _OPEN, _CLOSE, _FIXED_32 = range(6)  # the wire types of Protocol Buffers


def check_tokenizer(directory: Path) -> None:
    """Check the files of a tokenizer that transformers may read, before it does.

    Args:
        directory: a model directory.

    Raises:
        InvalidInput: as of `check_growth`, of a tokenizer.json or of a SentencePiece model; a file cannot be
            read; or tokenizer_config.json names a tokenizer.json elsewhere.
    """
    listed: list[str] = []
    for name in _OBJECTS:
        file = directory / name
        if file.is_file():
            content = read_json(file, _LIMIT_BYTES)
            check_growth(content, file)
            if name == "tokenizer_config.json":
                listed = _versions(content, file)
    for name in listed:
        if (directory / name).is_file():
            check_growth(read_json(directory / name, _LIMIT_BYTES), directory / name)
    for file in sorted(path for pattern in _PIECES for path in directory.glob(pattern)):
        if file.is_file():
            _check_pieces(read_bytes(file, _LIMIT_BYTES), file)


def _versions(config: Mapping[str, Any], file: Path) -> list[str]:
    """Return the names of tokenizer.4.0.json and the like, of which transformers reads its version's."""
    names = config.get("fast_tokenizer_files")
    if names is None:
        return []
    if not isinstance(names, list):  # transformers would take the keys of an object for names
        raise InvalidInput(
            f"{printable(file)} has {shorten(names)} as fast_tokenizer_files, where a list of names is "
            "needed; correct or remove the field"
        )
    for name in names:
        if not isinstance(name, str) or set(name) & set("/\\\0"):
            raise InvalidInput(
                f"{printable(file)} has {shorten(name)} in fast_tokenizer_files, where names of files next "
                "to it are needed; correct or remove the field"
            )
    return names


def _check_pieces(content: bytes, file: Path) -> None:
    """Check that a SentencePiece model makes few characters of one.

    Other content, such as a tokenizer.model of tiktoken, is left to its reader.
    """
    counted = count(1)
    for field, message in _fields(content, file, counted):
        if field not in _MAPPED:
            continue
        for inner, characters in _fields(message, file, counted):
            if inner == _MAP and _longest(characters) > _MOST:
                raise _growing(_MAPPED[field], file)


def _fields(content: bytes, file: Path, counted: Iterator[int]) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of bytes of a message of Protocol Buffers, up to what is none.

    Fields of a group count as the message's own.

    Args:
        content: the message.
        file: its place, for the error.
        counted: numbers the fields of all messages of the file.
    """
    place = 0
    while place < len(content):
        tag, place = _varint(content, place)
        kind, size = tag & 7, 0
        field = (tag & _TAG) >> 3
        if kind == _VARINT:
            _, place = _varint(content, place)
        elif kind == _LENGTH:
            size, place = _varint(content, place)
            yield field, content[place : place + size]
        elif kind in (_FIXED_32, _FIXED_64):
            size = 4 if kind == _FIXED_32 else 8
        elif kind not in (_OPEN, _CLOSE):
            return
        place += size
        if next(counted) > _MOST_FIELDS:
            raise InvalidInput(
                f"{printable(file)} has more than {_MOST_FIELDS:,} fields; take the tokenizer that the model "
                "was published with"
            )


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """Return a number of Protocol Buffers and the place after it, which is the end where there is none."""
    number = 0
    for shift in range(0, 70, 7):
        if place >= len(content):
            break
        byte = content[place]
        number, place = number | (byte & 127) << shift, place + 1
        if byte < 128:
            return number, place
    return 0, len(content)


def _longest(characters: bytes) -> int:
    """Return how many characters a map of SentencePiece makes of one at most; of a long text not all.

    A map that is too large to be checked counts as one that makes too many. A map is the length of a search
    tree in 4 bytes, the tree, and texts that each end in a zero byte.
    """
    if len(characters) > _MAP_BYTES:
        return _MOST + 1
    place, longest = 4 + int.from_bytes(characters[:4], "little"), 0
    while longest <= _MOST and (found := _text_beyond(longest).search(characters, place)):
        place, longest = found.end(), max(longest, len(found[0].decode("utf-8", "replace")))
    return longest


@cache
def _text_beyond(size: int) -> re.Pattern[bytes]:
    """Return the pattern of a text of more bytes than a size, up to those that few characters can have."""
    return re.compile(rb"[^\0]{%d,%d}" % (size + 1, 4 * _MOST + 1))


def _growing(part: str, file: Path) -> InvalidInput:
    return InvalidInput(
        f"the {part} in {printable(file)} can make a text more than {_MOST} times as long, or is too large "
        f"to tell (a map of more than {_MAP_BYTES} bytes); take the tokenizer that the model was published "
        "with"
    )


def check_growth(tokenizer: Mapping[str, Any], file: Path) -> None:
    """Check that a tokenizer makes no text much longer: each step could double its length.

    Args:
        tokenizer: the content of a tokenizer.json; another file of a tokenizer has no such parts.
        file: its place, for the error.

    Raises:
        InvalidInput: its normalizer, pre-tokenizer, post-processor or decoder could, has too many steps, or
            one whose type is not named.
    """
    for part, inner in _PARTS.items():
        content = tokenizer.get(part)
        if not isinstance(
            content, dict | list
        ):  # a vocabulary has numbers there, which nothing reads as steps
            continue
        steps = list(islice(_steps(content, part, inner, file), _MOST_STEPS + 1))
        if len(steps) > _MOST_STEPS:
            raise InvalidInput(
                f"the {part} in {printable(file)} has more than {_MOST_STEPS:,} steps; take the tokenizer "
                "that the model was published with"
            )
        if part == "post_processor":  # there ByteLevel only moves the places of tokens
            steps = [step for step in steps if step.get("type") != "ByteLevel"]
        if _growth(steps) > math.log(_MOST):
            raise _growing(part, file)


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
        expanded = max(_UNICODE.get(str(step.get("type")), 0), _mapped(step))
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


def _mapped(step: Mapping[str, Any]) -> int:
    """Return how many characters the map of a step makes of one at most; 0 where it has none."""
    characters = step.get("precompiled_charsmap")
    if not isinstance(characters, str):
        return 0
    try:
        return _longest(base64.b64decode(characters))
    except (binascii.Error, ValueError):  # of which tokenizers makes nothing either
        return 0


def _replaced(step: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the plain text that a step reads and the text that it writes; None where they may be any."""
    pattern, content = step.get("pattern"), step.get("content")
    if step.get("type") != "Replace" or not isinstance(content, str):
        return None, None
    plain = pattern.get("String") if isinstance(pattern, dict) else None
    return plain if isinstance(plain, str) else None, content


def _steps(step: Any, part: str, inner: str, file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part in their order; sequences may nest.

    Raises:
        InvalidInput: a step names no type of the part, by whose fields alone tokenizers would read it.
    """
    kind = step.get("type") if isinstance(step, dict) else None
    if not isinstance(kind, str) or kind not in _types(part):
        raise InvalidInput(
            f"the {part} in {printable(file)} has the step {shorten(step)}, which needs a `type` that "
            "tokenizers knows; take the tokenizer that the model was published with"
        )
    if kind != "Sequence":
        yield step
        return
    within = step.get(inner)
    for nested in within if isinstance(within, list) else ():  # tokenizers refuses any other
        yield from _steps(nested, part, inner, file)


@cache
def _types(part: str) -> frozenset[str]:
    """Return the types of a part's steps in the installed tokenizers, which are its classes."""
    from tokenizers import decoders, normalizers, pre_tokenizers, processors

    base = {
        "normalizer": normalizers.Normalizer,
        "pre_tokenizer": pre_tokenizers.PreTokenizer,
        "post_processor": processors.PostProcessor,
        "decoder": decoders.Decoder,
    }[part]
    return frozenset(kind.__name__ for kind in base.__subclasses__())


def _factor(step: Mapping[str, Any]) -> float:
    """Return how many characters or tokens a step may make of one; one of the wrong form counts as none."""
    kind = step.get("type")
    if kind == "TemplateProcessing":
        return max(1, *(_template_size(step, name) for name in ("single", "pair")))
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


def _template_size(step: Mapping[str, Any], name: str) -> int:
    """Return how many tokens a template of a post-processor makes of texts of one token."""
    template, special = step.get(name), step.get("special_tokens")
    size = 0
    for part in template if isinstance(template, list) else ():
        token = part.get("SpecialToken") if isinstance(part, dict) else None
        named = token.get("id") if isinstance(token, dict) else None
        found = special.get(named) if isinstance(special, dict) and isinstance(named, str) else None
        written = found.get("ids") if isinstance(found, dict) else None
        size += len(written) if isinstance(written, list) else 1
    return size


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
