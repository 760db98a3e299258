"""The parts of the name of a calibration: `none`, `self`, a text, `self+TEXT`, or saved statistics.

It imports nothing, so that options are read before torch is loaded.
"""

_OWN = "self"  # text that the source writes
_WITH_OWN = f"{_OWN}+"  # followed by a text


def parts(calibration: str) -> tuple[bool, str | None]:
    """Return whether a source writes calibration text of its own, and the name of the text that it reads.

    Example:
        ```python
        assert parts("self") == (True, None)
        assert parts("stdlib") == (False, "stdlib")
        assert parts("self+stdlib") == (True, "stdlib")
        ```
    """
    if calibration == _OWN:
        return True, None
    return calibration.startswith(_WITH_OWN), calibration.removeprefix(_WITH_OWN)


def names_statistics(calibration: str) -> bool:
    """Return whether a calibration is a file of saved statistics, not a text."""
    return calibration.endswith(".safetensors") and not calibration.startswith(_WITH_OWN)
