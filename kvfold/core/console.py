"""What every command shares: mistakes become one line and exit code 2, long work shows progress, results
become tables.

No heavy import here: `--help` goes through this module.
"""

import atexit
import errno
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import click

from .errors import InvalidInput

T = TypeVar("T")
_DISK = {"ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO"}  # errors for which the system may name no file
PLAIN_INTERVAL = 10.0  # seconds between progress lines where there is no terminal


def is_first() -> bool:
    """Whether this process speaks for all that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


class _Refusal(click.ClickException):
    exit_code = 2


class Command(click.Command):
    """A click command whose `InvalidInput` ends as `Error.

    <sentence>` with exit code 2, without a traceback.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except InvalidInput as mistake:
            raise _Refusal(str(mistake)) from None
        except OSError as error:  # the system's own sentence, with the name of the file
            if error.filename is None and errno.errorcode.get(error.errno or 0) in _DISK:
                raise _Refusal(f"a file cannot be written: {error.strerror}") from None
            if error.filename is None:
                raise
            raise _Refusal(f"{error.filename}: {error.strerror}") from None


def run_as_process(command: click.Command) -> None:
    """Run a command as all that this process does; where a launcher started several, it ends by `leave`."""
    try:
        command()
    except SystemExit as stop:
        if int(os.environ.get("WORLD_SIZE") or 1) > 1 and (stop.code is None or isinstance(stop.code, int)):
            leave(stop.code or 0)
        raise


def leave(code: int = 0) -> NoReturn:
    """End this process without taking the interpreter apart, after what was registered for its end and what
    it printed.

    gloo's threads outlive their group as long as a device mesh refers to it. One that lets go of a tensor
    while the interpreter is taken apart aborts the process, and a launcher takes a run that is whole for one
    that failed.
    """
    threading._shutdown()  # type: ignore[attr-defined] # threads that are no daemons end first, as they do in any process
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def progress(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Yield `items`, showing a bar with the time left on a terminal and a plain line every few seconds
    elsewhere (stderr).
    """
    if not is_first():
        yield from items
        return
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(items, description=description, total=total, console=Console(stderr=True))
        return
    start = shown = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - shown >= PLAIN_INTERVAL:
            shown = now
            left = (now - start) / done * (total - done)
            print(f"{description}: {done}/{total}, {left:.0f} s left", file=sys.stderr, flush=True)


@contextmanager
def loading() -> Iterator[None]:
    """Around a command's heavy imports.

    Looking through what they make, which stays for good, takes a fifth of their time.
    """
    if "torch" in sys.modules:  # somebody else's process, whose own garbage must not stay
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table to stdout.

    The first column and those without a name to the left, the others to the right.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or not column else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # A pipe has no width: never wrap there, so that the lines can be read by grep.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def show_json(value: Any) -> None:
    """Print exactly one JSON object to stdout."""
    click.echo(json.dumps(value, indent=2, sort_keys=False))


_collectors: list[list[str]] = []


@contextmanager
def collected_notices() -> Iterator[list[str]]:
    """Collect the notices of this process for the duration; they are printed as well."""
    collected: list[str] = []
    _collectors.append(collected)
    try:
        yield collected
    finally:
        _collectors.remove(collected)


def notice(text: str) -> None:
    """Say something the user should know, on stderr, so that stdout stays machine-readable."""
    for collected in _collectors:
        collected.append(text)
    if is_first():
        click.echo(f"Note: {text}", err=True)
