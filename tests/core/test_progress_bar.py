"""The time left of work that is done several items at a time."""

import io

import pytest
from rich.console import Console

from kvfold.core import progress_bar
from kvfold.core.progress_bar import shown_in_bar
from kvfold.core.units import seconds_left


def test_items_side_by_side_end_together() -> None:
    """After the first of four layers at a time, three of four rounds of 16 layers are left, not 15 layers."""
    assert seconds_left(10, done=1, total=16, at_once=4) == 30
    assert seconds_left(20, done=8, total=16, at_once=4) == 20
    assert seconds_left(10, done=1, total=16) == 150
    assert seconds_left(10, done=16, total=16, at_once=4) == 0


def test_nothing_is_said_of_items_that_are_at_work_last() -> None:
    """After the first of seven layers at a time the other six are not done."""
    assert seconds_left(10, done=1, total=7, at_once=7) is None
    assert seconds_left(10, done=7, total=7, at_once=7) == 0


def test_items_pass_through_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr(
        progress_bar, "Console", lambda **_: Console(file=said, force_terminal=True, width=80)
    )
    assert list(shown_in_bar(iter("abc"), "letters", 3)) == ["a", "b", "c"]
    assert "letters" in said.getvalue()
    assert "100%" in said.getvalue()
