"""A command that is stopped before every kind of operation on its files: by SIGKILL, SIGTERM, a full disk."""

import errno
import hashlib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from kvfold.cli import main

from .warm_server import WarmServer

# Operations that Python tells of; of each the position of the directory that a path starts from.
_EVENTS = {"open": None, "os.mkdir": 2, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.link": 2}
_FULL = 99  # instead of 2, where the last sentence is about the disk
_STOPPED = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM, _FULL)
_SPEED = re.compile(rb'"(tokens_per_second|peak_memory_gib|seconds|milliseconds)": [0-9.e+-]+')


def operation(event: str, arguments: Sequence[Any], place: Path) -> str | None:
    """Return an operation that changes something below a directory, with its path in it; None for others."""
    if event not in _EVENTS or not arguments or not isinstance(arguments[0], str | bytes | os.PathLike):
        return None
    name = os.fsdecode(arguments[0])
    # Tensors are written by a library that tells nothing; they are opened once more when they are synced.
    if event == "open" and not name.endswith(".safetensors"):
        flags = arguments[2]
        if not (isinstance(flags, int) and flags & (os.O_ACCMODE | os.O_CREAT)):
            return None
    position = _EVENTS[event]
    opened = arguments[position] if position is not None and len(arguments) > position else None
    if isinstance(opened, int) and opened >= 0:
        name = os.path.join(os.readlink(f"/proc/self/fd/{opened}"), name)
    elif os.path.basename(name) == name and event == "open":
        return f"open {name}"  # in a directory that is held, of which Python does not tell
    path = os.path.abspath(name)
    if not path.startswith(f"{place}/") or (event == "os.remove" and not os.path.lexists(path)):
        return None
    return f"{event} {os.path.relpath(path, place)}"


def kind_of(operation: str) -> str:
    """Return an operation without the names of private directories and numbers of many digits."""
    return re.sub(r"-[0-9a-f]{5,}", "", re.sub(r"\.kvfold-\w+", ".kvfold", operation))


def run_and_stop(
    words: Sequence[str], place: Path, known: Sequence[str], told: Path, kinds: Callable[[str], str]
) -> None:
    """Run a command until the first kind of operation that is not known yet; tell of it and of the end."""
    torch.set_num_threads(1)
    stopped: list[str] = []

    def stop(event: str, arguments: Sequence[Any]) -> None:
        found = operation(event, arguments, place)
        kind = None if found is None else kinds(found)
        if kind is None or kind in (*known, *stopped):
            return
        means = (len(known) + len(stopped)) % 3
        stopped.append(kind)
        told.write_text("\n".join(stopped))
        if means == 2 and kind.startswith(("open", "os.mkdir", "os.link")) and len(stopped) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.kill(os.getpid(), signal.SIGTERM if means == 1 else signal.SIGKILL)

    sys.addaudithook(stop)
    done = CliRunner().invoke(main, list(words))
    last = (done.stderr.splitlines() or [""])[-1]
    is_there = done.exit_code == 2 and "exists" in last  # it was stopped when its output had its name
    if done.exit_code == 0 or is_there:
        os._exit(0)
    if done.exit_code == 128 + signal.SIGTERM or (done.exit_code == 2 and "o space left" in last):
        os._exit(_FULL if done.exit_code == 2 else done.exit_code)
    told.write_text(f"{stopped}: {done.stderr}\n{done.exception!r}")
    os._exit(70)


def run_to_the_end(
    server: WarmServer, words: Sequence[str], place: Path, told: Path, kinds: Callable[[str], str] = kind_of
) -> list[str]:
    """Give a command until it ends; return the kinds of operations before which it was stopped."""
    known: list[str] = []
    code = None
    while code != 0:
        told.write_text("")
        code = server.run(run_and_stop, words, place, known, told, kinds)
        said = told.read_text()
        assert code == 0 or (code in _STOPPED and said), f"exit code {code}: {said}, after {known[-1:]}"
        known += said.splitlines()
        assert len(known) < 300, "no end"
    return known


def bits(place: Path) -> dict[str, str]:
    """Return a hash of every file of a directory, without speeds, memory and private directories."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_file() and ".kvfold-" not in name:
            content = path.read_bytes()
            if path.suffix in {".json", ".jsonl"}:
                content = _SPEED.sub(b"", content)
            found[name] = hashlib.sha256(content).hexdigest()
    return found
