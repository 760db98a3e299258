"""Progress of a run on stderr: a table on a terminal, plain lines every few seconds elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..core.console import PLAIN_INTERVAL, is_first, is_shown, is_terminal, report_progress

Show = Callable[[int, Mapping[str, float]], None]  # takes the amount done and values of `SHOWN`
_A_MOMENT = 5.0  # seconds; torch's launcher checks its processes ten times per second

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
def progress_table(description: str, total: int) -> Iterator[Show]:
    """Yield a function that shows the progress of long work, as a live table or as plain lines."""
    if not is_first():
        yield lambda done, values: None
    elif not is_shown():
        yield lambda done, values: report_progress(description, done, total)
    elif is_terminal(sys.stderr):
        from rich.console import Console
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text  # a stage's name is no markup

        def render(done: int, values: Mapping[str, float]) -> Table:
            cells = [("", description), ("done", f"{done:,}/{total:,}"), *shown(values)]
            table = Table(*(heading for heading, _ in cells))
            table.add_row(*(Text(text) for _, text in cells))
            return table

        with Live(console=Console(stderr=True), refresh_per_second=4) as live:
            yield lambda done, values: live.update(render(done, values))
    else:
        shown_at = time.monotonic()

        def show(done: int, values: Mapping[str, float]) -> None:
            nonlocal shown_at
            now = time.monotonic()
            if now - shown_at >= PLAIN_INTERVAL:
                shown_at = now
                told = "  ".join(f"{name} {text}" for name, text in shown(values))
                print(f"{description}: {done}/{total} {told}".rstrip(), file=sys.stderr, flush=True)

        yield show


def shown(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return heading and text of every known value."""
    return [(heading, form(values[key])) for key, heading, form in SHOWN if key in values]
