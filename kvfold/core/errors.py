"""The one exception for the user's mistakes."""


class InvalidInput(Exception):
    """Something the user gave cannot be used.

    The message is one sentence: what is wrong with the value, and what would be right. Commands print it and
    exit with code 2; a library caller may catch it. Mistakes of kvfold itself are never this.
    """
