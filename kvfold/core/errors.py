"""The one exception for mistakes of the user, and the names that its messages use for options."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

LONGEST = 1500  # characters of a sentence; a value of a file that it quotes may be of any length
_BEGINNING = 1000
# An option, or a whole command that a sentence quotes, whose options keep their names.
_COMMANDS = (
    "assemble|convert|demo|distill|engines|eval|families|lab|migrate|plan|publish|quantize|report|verify"
)
_OPTION = re.compile(rf"`[^`]*`|\b(?:kvfold (?:{_COMMANDS})|vllm serve) [^;,)]*|(?<![\w-])--[a-z][a-z0-9-]*")


class InvalidInput(ValueError):
    """An error in something that the user gave.

    The message is one sentence: which value is wrong, and what would be right. Commands print it and exit
    with code 2; callers of the library can catch it. Errors of kvfold itself never have this class.

    Args:
        sentence: the message. The middle of one that is longer than `LONGEST` is left out.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(bounded(sentence))


def bounded(sentence: str) -> str:
    """Return a sentence of at most `LONGEST` characters, without its middle if it is longer.

    Its beginning says what is wrong, and its end what would be right.
    """
    if len(sentence) <= LONGEST:
        return sentence
    return f"{sentence[:_BEGINNING]} ... {sentence[_BEGINNING + 5 - LONGEST :]}"


def renamed(sentence: str, names: Mapping[str, str]) -> str:
    """Return a sentence in which options have other names, apart from those of a command that it quotes.

    `names` gives them by option, such as `kv_budget` for `--kv-budget`; other options stay.
    """
    return _OPTION.sub(lambda found: names.get(found[0], found[0]), sentence)


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Let mistakes in the block give options other names, as `renamed` does.

    Raises:
        InvalidInput: as in the block.
    """
    try:
        yield
    except InvalidInput as mistake:
        mistake.args = (bounded(renamed(str(mistake), names)),)
        raise
