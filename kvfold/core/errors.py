"""The one exception for mistakes of the user."""


class InvalidInput(ValueError):
    """An error in something that the user gave.

    The message is one sentence: which value is wrong, and what would be right. Commands print it and exit
    with code 2; callers of the library can catch it. Errors of kvfold itself never have this class.
    """
