"""SHA-256 of files, several at once."""

import hashlib
import io
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvfold.checkpoints.record import hashes, sha256


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    contents = {"empty": b"", "small": b"abc", "large": b"x" * (2**20 + 5)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    found = hashes({name: tmp_path / name for name in ("known", *contents)}, {"known": "0"})
    assert found == {
        "known": "0",
        **{name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }


def test_interruptions_do_not_wait_for_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without an end is read until another one fails, and its hash is no result."""
    endless, begun, found = tmp_path / "endless", Event(), []
    endless.touch()

    class Endless(io.BytesIO):
        blocks = 0

        def readinto(self, block: Any) -> int:
            self.blocks += 1
            begun.set()
            assert self.blocks < 10**6, "it is read on after the interruption"
            return len(block[:1])

    def opened(path: Path, *mode: Any, **options: Any) -> Any:
        if path == endless:
            return Endless()
        assert begun.wait(60)
        raise KeyboardInterrupt

    def kept(*given: Any) -> str:
        try:
            found.append(sha256(*given))
        except CancelledError:
            found.append("cancelled")
            raise
        return found[-1]

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr("kvfold.checkpoints.record.sha256", kept)
    with pytest.raises(KeyboardInterrupt):
        hashes({"failing": tmp_path / "failing", "endless": endless})
    assert found == ["cancelled"]
