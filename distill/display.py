"""How far a long piece of work has come: a bar on a terminal, a plain line every few seconds elsewhere. On stderr."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..convert.console import PLAIN_INTERVAL

Show = Callable[[int, str], None]  # how much is done, and a note


def is_main_process() -> bool:
    """Whether this process speaks for all that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def progress_bar(description: str, total: int, done: int = 0) -> Iterator[Show]:
    """Yield a function that shows progress towards `total`, from `done` on."""
    if not is_main_process():
        yield lambda done, note: None
    elif sys.stderr.isatty():
        yield from _bar(description, total, done)
    else:
        yield _plain(description, total)


def _bar(description: str, total: int, done: int) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total, completed=done, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)


def _plain(description: str, total: int) -> Show:
    shown = time.monotonic()

    def show(done: int, note: str) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= PLAIN_INTERVAL:
            shown = now
            print(f"{description}: {done}/{total} {note}".rstrip(), file=sys.stderr, flush=True)

    return show
