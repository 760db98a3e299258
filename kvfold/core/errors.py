"""The one exception for mistakes of the user."""

LONGEST = 1500  # characters of a sentence; a value of a file that it quotes may be of any length
_BEGINNING = 1000


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
