"""SHA-256 of files, several at once."""

import hashlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from kvfold.checkpoints.record import hashes


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    contents = {"empty": b"", "small": b"abc", "large": b"x" * (2**20 + 5)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    found = hashes({name: tmp_path / name for name in ("known", *contents)}, {"known": "0"})
    assert found == {
        "known": "0",
        **{name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }


def test_an_interruption_does_not_wait_for_large_files(tmp_path: Path) -> None:
    """Two sparse files that take some tens of seconds of a core."""
    files = {name: tmp_path / name for name in ("a", "b")}
    for file in files.values():
        with file.open("wb") as stream:
            stream.truncate(2**34)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.process_time()
    with pytest.raises(KeyboardInterrupt):
        hashes(files)
    assert time.process_time() - began < 4
