"""How far a long piece of work has come.

A bar or a table on a terminal, a plain line every few seconds elsewhere (stderr).
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...core.console import PLAIN_INTERVAL

Show = Callable[[int, str], None]  # how much is done, and a note
_A_MOMENT = 5.0  # seconds; torch's launcher looks ten times a second
Tell = Callable[[int, Mapping[str, float]], None]  # how many steps are done, and what is known by now

# What is shown of a step, in this order: its key, its heading, its form. What is not known is left out.
SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", lambda value: f"{value:.4f}"),
    ("forward_kl", "KL", lambda value: f"{value:.4f}"),
    ("same_top1", "same top-1", lambda value: f"{value:.3f}"),
    ("eval_perplexity", "perplexity", lambda value: f"{value:.4g}"),
    ("recovered_share", "recovered", lambda value: f"{value:.1%}"),
    ("tokens_per_second", "tokens/s", lambda value: f"{value:,.0f}"),
    ("memory_gib", "memory", lambda value: f"{value:.2f} GiB"),
    ("seconds_left", "left", lambda value: duration(value)),
)


def is_main_process() -> bool:
    """Whether this process speaks for all that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


def let_first_speak() -> None:
    """Before telling a mistake: where all processes have met it, a launcher ends the others once the first of
    a machine has told it and is gone; who alone has met it tells it a moment later."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_A_MOMENT)


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


@contextmanager
def progress_bar(description: str, total: int, done: int = 0) -> Iterator[Show]:
    """Yield a function that shows progress towards `total`, from `done` on."""
    if not is_main_process():
        yield lambda done, note: None
    elif sys.stderr.isatty():
        yield from _bar(description, total, done)
    else:
        yield _plain(description, total)


@contextmanager
def stage_table(stage: str, steps: int) -> Iterator[Tell]:
    """Yield a function that shows how a stage of training stands: a table that is renewed, or plain lines."""
    if not is_main_process():
        yield lambda done, values: None
    elif sys.stderr.isatty():
        yield from _table(stage, steps)
    else:
        plain = _plain(stage, steps)
        yield lambda done, values: plain(done, "  ".join(f"{name} {text}" for name, text in shown(values)))


def shown(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Heading and text of all that is known."""
    return [(heading, form(values[key])) for key, heading, form in SHOWN if key in values]


def _bar(description: str, total: int, done: int) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total, completed=done, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)


def _table(stage: str, steps: int) -> Iterator[Tell]:
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), refresh_per_second=4) as live:
        yield lambda done, values: live.update(_render(stage, done, steps, values))


def _render(stage: str, done: int, steps: int, values: Mapping[str, float]) -> Any:
    from rich.table import Table

    cells = [("stage", stage), ("step", f"{done:,}/{steps:,}"), *shown(values)]
    table = Table(*(heading for heading, _ in cells))
    table.add_row(*(text for _, text in cells))
    return table


def _plain(description: str, total: int) -> Show:
    shown_at = time.monotonic()

    def show(done: int, note: str) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if now - shown_at >= PLAIN_INTERVAL:
            shown_at = now
            print(f"{description}: {done}/{total} {note}".rstrip(), file=sys.stderr, flush=True)

    return show
