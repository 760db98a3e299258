"""Evaluation texts by name: files, the standard library, WikiText-2 by a named protocol."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..core.errors import InvalidInput
from ..core.untrusted import printable
from .document_rows import DocumentSource
from .sources import read_texts
from .standard_library import stdlib_documents
from .text_files import compression, is_plain_text
from .text_flaws import utf8_flaw
from .wikitext import articles, plain_spelling, read_rows, words

_LARGEST = 2**30  # bytes of a text


@dataclass(frozen=True)
class Size:
    """Length of a text before it was respelled; its loss is divided by this.

    Attributes:
        words: words, as lm-evaluation-harness counts them.
        bytes: bytes in UTF-8.
    """

    words: int
    bytes: int


@dataclass(frozen=True)
class Text:
    """Named documents, and the way to read them.

    Attributes:
        name: the text's name in a report, e.g. `stdlib` or `wikitext2-gptq-2048`.
        documents: the text, one string per document.
        cut: the rule that cuts it into windows; see windows.py.
        window: tokens per window, if the name fixes them.
        original: the size to divide by, if it is not that of the documents.
    """

    name: str
    documents: tuple[str, ...]
    cut: Literal["windows", "gptq", "rolling"] = "windows"
    window: int | None = None
    original: Size | None = None

    @property
    def joined(self) -> str:
        """The documents as one string, an empty line between two."""
        return "\n\n".join(self.documents)

    @property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of `joined` in UTF-8, which identifies the text of a measurement."""
        return hashlib.sha256(self.joined.encode()).hexdigest()


def read_text(text: str, rows: Path | None = None, field: str = "text", field_option: str = "") -> Text:
    """Read the evaluation text that a user named.

    Args:
        text: `stdlib` (the held-out modules of the running interpreter), `wikitext2-gptq-N`,
            `lm-eval:wikitext`, or the path of a file, with or without `text:` before it: a UTF-8 text, or
            rows of documents as training reads them (.jsonl, .json, .parquet), also compressed.
        rows: a file with the rows of WikiText-2, read instead of those on the Hub.
        field: the field that holds a document, in files that have fields.
        field_option: the option or key that gave the field, for errors; empty if there is none.

    Returns:
        The text with its name and protocol.

    Raises:
        InvalidInput: the file is missing, is not UTF-8, has no such field or holds only white space;
            WikiText-2 cannot be obtained.
    """
    if match := re.fullmatch(r"wikitext2-gptq-(\d+)", text):
        if int(match[1]) < 2:
            raise InvalidInput(f"--text {text}: a window has at least 2 tokens; use wikitext2-gptq-2048")
        return Text(text, tuple(read_rows(rows)), "gptq", int(match[1]))
    if text == "lm-eval:wikitext":
        pages = articles(read_rows(rows))
        original = Size(sum(map(words, pages)), sum(len(page.encode()) for page in pages))
        return Text(text, tuple(map(plain_spelling, pages)), "rolling", original=original)
    if rows is not None:
        raise InvalidInput(
            f"--rows is for WikiText-2, not for --text {text}; leave it out, or use --text "
            f"wikitext2-gptq-2048"
        )
    if text == "stdlib":
        return Text("stdlib", stdlib_documents(held_out=True))
    path = Path(os.path.expanduser(text.removeprefix("text:")))
    if not path.is_file():
        raise InvalidInput(
            f"{printable(text)} is not a file; --text takes a file of text or of documents, or the word "
            f"stdlib, wikitext2-gptq-2048 or lm-eval:wikitext"
        )
    if path.stat().st_size > _LARGEST:
        raise InvalidInput(
            f"{printable(text)} has {path.stat().st_size:,} bytes; an evaluation reads a text of at most "
            f"{_LARGEST:,}, so name a part of it"
        )
    if compression(path) or not is_plain_text(path):
        place = text.removeprefix("text:")
        documents = _read_rows(DocumentSource(place, field, option="--text", field_option=field_option))
    else:
        try:  # with its line ends, since the file is scored and hashed
            documents = (path.read_bytes().decode("utf-8"),)
        except UnicodeDecodeError as error:
            raise InvalidInput(utf8_flaw(printable(text), error.start)) from None
    if not any(document.strip() for document in documents):
        raise InvalidInput(f"{printable(text)} holds no text; an evaluation needs at least one window of it")
    return Text(f"text:{path.name}", documents)


def _read_rows(source: DocumentSource) -> tuple[str, ...]:
    """Return the documents of a file in the order in which a recipe's `evaluate.source` has them."""
    documents: list[str] = []
    characters = 0
    for texts in read_texts(source, seed=0):
        documents += texts
        characters += sum(map(len, texts))
        if characters > _LARGEST:
            raise InvalidInput(
                f"{source.called} holds more than {_LARGEST:,} characters, the most that an evaluation "
                "reads; name a part of it"
            )
    return tuple(documents)
