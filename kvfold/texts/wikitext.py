"""The test part of WikiText-2 (arXiv 1609.07843), read by two protocols of the field.

`wikitext2-gptq-N` joins the rows of the data set with empty lines. `lm-eval:wikitext` reads articles in
plain spelling: lm-evaluation-harness scores those, and divides by words and bytes of the original.
"""

import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ..core.errors import InvalidInput
from ..core.untrusted import is_text, printable, read_json
from .document_rows import DocumentSource, read_downloaded

HUB = ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
ROWS = 4358
_ABSENT = "give its rows as a JSON file with --rows FILE"


def read_rows(file: Path | None) -> list[str]:
    """Return the rows of the data set, with an empty string for an empty line.

    Args:
        file: a JSON object `{"text": [rows]}` or a list of rows; None to read the Hub through the cache of
            `datasets`.

    Raises:
        InvalidInput: the file holds no such rows, or there is neither cache nor network.
    """
    if file is None:
        name, configuration, split = HUB
        source = DocumentSource(name, config=configuration, split=split, option="")
        try:
            return [row for columns in read_downloaded(source) for row in columns["text"]]
        except InvalidInput as mistake:
            raise InvalidInput(f"{mistake}; {_ABSENT}") from None
    content = read_json(file, name=f"--rows {file}", top=None)
    rows = content.get("text") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not rows or not all(map(is_text, rows)):
        raise InvalidInput(
            f'--rows {printable(file)} holds no rows; give an object {{"text": [rows]}} or a list of strings'
        )
    return rows


def articles(rows: list[str]) -> tuple[str, ...]:
    """Return the articles of lm-evaluation-harness's data set, each from its title, a first-level heading.

    The rows lack the blank that every empty line of the original file holds. It is restored, since bytes are
    counted.
    """
    lines = "".join(row or " \n" for row in rows).split("\n")
    starts = [number for number, line in enumerate(lines) if _is_title(line)]
    whole = ("\n".join(lines[start:end]) for start, end in pairwise([0, *starts, len(lines)]))
    return tuple(article for article in whole if article.strip())


def _is_title(line: str) -> bool:
    joined = line.replace("= = =", "===").replace("= =", "==").strip()
    return joined.startswith("= ") and joined.endswith(" =")


class _Pair(NamedTuple):
    """Two marks within which a text has no blanks at its ends.

    A regular expression takes the cube of their number for blanks that no mark ends.
    """

    opening: str
    closing: str

    def sub(self, text: str) -> str:
        """Return a text without the blanks inside of the marks."""
        parts, place = [], 0
        while (start := text.find(self.opening, place)) >= 0:
            end = text.find(self.closing, start + 1)
            if end < 0:
                break
            parts += [text[place : start + 1], text[start + 1 : end].strip(), self.closing]
            place = end + 1
        return "".join([*parts, text[place:]])


# Replacements in this order; a pattern is a plain string or a regular expression.
_SPELLING = (
    ("s '", "s'"),
    (re.compile(r"/' [0-9]/"), "/'[0-9]/"),
    (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."),
    (" : ", ": "), (" ; ", "; "), (" . ", ". "), (" ! ", "! "), (" ? ", "? "), (" , ", ", "),
    _Pair("(", ")"), _Pair("[", "]"), _Pair("{", "}"), _Pair('"', '"'), _Pair("'", "'"),
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"),
)  # fmt: skip


def plain_spelling(article: str) -> str:
    """Return an article without the blanks that the data set puts around punctuation.

    The rules are those of lm-evaluation-harness.
    """
    for rule in _SPELLING:
        if isinstance(rule, _Pair):
            article = rule.sub(article)
            continue
        found, put = rule
        article = article.replace(found, put) if isinstance(found, str) else found.sub(put, article)
    return article


def words(article: str) -> int:
    """Return the number of words that lm-evaluation-harness counts in an article as the data set has it."""
    return len(re.split(r"\s+", article))
