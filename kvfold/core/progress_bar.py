"""The bar that shows the progress of long work on a terminal."""

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn
from rich.text import Text

from .units import seconds_left

T = TypeVar("T")


def shown_in_bar(items: Iterable[T], description: str, total: int, at_once: int = 1) -> Iterator[T]:
    """Yield `items` under a bar on stderr, with the time left.

    `at_once` of them are worked on side by side.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), _TimeLeft(at_once))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield from bar.track(items, total=total, description=description)


class _TimeLeft(ProgressColumn):
    """The time that the rest takes; the time that all took when it is done."""

    max_refresh = 0.5

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self.at_once = at_once

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(_clock(task.finished_time), style="progress.elapsed")
        left = None
        if task.elapsed and task.completed and task.total:
            left = seconds_left(task.elapsed, int(task.completed), int(task.total), self.at_once)
        return Text(_clock(left), style="progress.remaining")


def _clock(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))
