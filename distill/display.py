"""Progress of long work on stderr: a bar or table on a terminal, plain lines every few seconds elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..core.console import PLAIN_INTERVAL, is_shown, is_terminal, report_progress

Show = Callable[[int, str], None]  # takes the amount done and a note
_A_MOMENT = 5.0  # seconds; torch's launcher checks its processes ten times per second
ShowStep = Callable[[int, Mapping[str, float]], None]  # takes the number of steps done and their values

# The columns of a step, in this order: key, heading, format. Unknown values are left out.
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

LOSS_COLUMNS = ("stage", "loss", "first step", "last tenth")


def loss_rows(stages: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return the rows of a table of every loss of every stage at both ends, as a run's record has them."""

    def shown(value: float | None) -> str:
        return "unknown" if value is None else f"{value:.4f}"

    return [
        (stage["name"], name, shown(stage["first"][name]), shown(stage["last"][name]))
        for stage in stages
        for name in stage["last"]
    ]


def is_main_process() -> bool:
    """Return whether this process is rank 0, which prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def wait_for_rank_0() -> None:
    """Give rank 0 time to report a mistake before this process reports it too.

    When all processes meet the same mistake, the launcher ends the others once rank 0 of the machine has
    reported it and ended. A mistake that only this process has met is reported a moment later.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_A_MOMENT)


def duration(seconds: float) -> str:
    """Return seconds as `45 s`, `12 min`, `3 h 05 min` or `2 d 4 h`."""
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
    """Yield a function that shows progress towards `total`, beginning at `done`."""
    if not is_main_process():
        yield lambda done, note: None
    elif not is_shown():
        yield lambda done, note: report_progress(description, done, total)
    elif is_terminal(sys.stderr):
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as bar:
            task = bar.add_task(escape(description), total=total, completed=done, note="")
            yield lambda done, note: bar.update(task, completed=done, note=note)
    else:
        yield _plain(description, total)


@contextmanager
def stage_table(stage: str, steps: int) -> Iterator[ShowStep]:
    """Yield a function that shows the progress of a training stage, as a live table or as plain lines."""
    if not is_main_process():
        yield lambda done, values: None
    elif not is_shown():
        yield lambda done, values: report_progress(stage, done, steps)
    elif is_terminal(sys.stderr):
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(stderr=True), refresh_per_second=4) as live:
            yield lambda done, values: live.update(_render(stage, done, steps, values))
    else:
        plain = _plain(stage, steps)
        yield lambda done, values: plain(done, "  ".join(f"{name} {text}" for name, text in shown(values)))


def shown(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return heading and text of every known value."""
    return [(heading, form(values[key])) for key, heading, form in SHOWN if key in values]


def _render(stage: str, done: int, steps: int, values: Mapping[str, float]) -> Any:
    from rich.table import Table
    from rich.text import Text  # a stage's name is no markup

    cells = [("stage", stage), ("step", f"{done:,}/{steps:,}"), *shown(values)]
    table = Table(*(heading for heading, _ in cells))
    table.add_row(*(Text(text) for _, text in cells))
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
