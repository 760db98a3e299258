"""Commands that are stopped: the processes, the moment, and what a stopped command may leave.

A command runs in a forked process, which tells of every operation on files before it does it. It is stopped
before the n-th operation below its working directory, or at a moment from outside.
"""

import errno
import hashlib
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from kvfold.cli import main

# Operations that Python tells of; of each the position of the directory that a path starts from.
_EVENTS = {
    "open": None,
    "os.mkdir": 2,
    "os.rename": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.link": 2,
    "os.truncate": None,
}
_SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "pause": signal.SIGSTOP}
_SPEED = re.compile(rb'"(tokens_per_second|peak_memory_gib|seconds)": [0-9.e+-]+')


@dataclass(frozen=True)
class End:
    """The end of a process: its exit code (negative for a signal), and the last line of its output."""

    code: int
    said: str


def start(
    words: Sequence[str], place: Path, hook: Callable[[str], None] | None, environment: dict[str, str]
) -> int:
    """Run a command in a forked process.

    Args:
        words: of `kvfold`.
        place: the directory whose operations count.
        hook: called before each operation with its kind.
        environment: variables of the process.

    Returns:
        The process's id. What it said is written to `place` with the suffix `.said`.
    """
    child = os.fork()
    if child:
        return child
    try:
        os.environ.update(environment)
        if hook is not None:
            sys.addaudithook(lambda event, arguments: _tell(event, arguments, place, hook))
        done = CliRunner().invoke(main, list(words))
        code = done.exit_code if isinstance(done.exception, SystemExit | None) else 70
        said = done.stderr if code != 70 else repr(done.exception)
        said_file(place).write_text(said, encoding="utf-8")
        os._exit(code)
    finally:
        os._exit(71)


def said_file(place: Path) -> Path:
    """Return the file that a process leaves its words in."""
    return place.with_name(f"{place.name}.said")


def finish(child: int, place: Path) -> End:
    """Wait for a process."""
    status = os.waitpid(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    file = said_file(place)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return End(code, lines[-1] if lines else "")


def _tell(event: str, arguments: Sequence[Any], place: Path, hook: Callable[[str], None]) -> None:
    if event not in _EVENTS or not arguments or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    path = os.fsdecode(arguments[0])
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_ACCMODE | os.O_CREAT)):
        return
    position = _EVENTS[event]
    start_fd = arguments[position] if position is not None and len(arguments) > position else None
    if isinstance(start_fd, int) and start_fd >= 0:
        path = os.path.join(os.readlink(f"/proc/self/fd/{start_fd}"), path)
    if os.path.abspath(path).startswith(f"{place}/"):
        hook(f"{event} {os.path.relpath(path, place)}")


def counting(file: Path) -> Callable[[str], None]:
    """Return a hook that writes every operation into a file."""

    def hook(kind: str) -> None:
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(kind + "\n")

    return hook


def stopping(number: int, means: str) -> Callable[[str], None]:
    """Return a hook that stops its process before the operation of a number, counted from 0."""
    seen = [0]

    def hook(kind: str) -> None:
        seen[0] += 1
        if seen[0] - 1 < number:
            return
        if means == "full disk":
            if kind.startswith(("open", "os.mkdir", "os.link")):  # what needs room fails, from now on
                raise OSError(errno.ENOSPC, "No space left on device")
        elif seen[0] - 1 == number:
            os.kill(os.getpid(), _SIGNALS[means])

    return hook


def stop_after(child: int, seconds: float, draw: random.Random) -> None:
    """Send a signal after a while to a process that may have ended."""
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.kill(child, draw.choice((signal.SIGKILL, signal.SIGTERM)))


def bits(place: Path) -> dict[str, str]:
    """Return a hash of every file of a directory, apart from speeds and memory that files hold."""
    found = {}
    for path in sorted(place.rglob("*")):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if path.suffix in {".json", ".jsonl"}:
                content = _SPEED.sub(b"", content)
            found[str(path.relative_to(place))] = hashlib.sha256(content).hexdigest()
        elif path.is_symlink():
            found[str(path.relative_to(place))] = f"link to {os.readlink(path)}"
    return found
