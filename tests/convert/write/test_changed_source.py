"""A source that is replaced while it is folded."""

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvfold.checkpoints.shards import ShardWriter
from kvfold.cli import main

from ...support.tiny import make


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = make(tmp_path / "source"), tmp_path / "out"
    write = ShardWriter.write

    def touching(self: ShardWriter, *arguments: Any) -> None:
        os.utime(source / "model.safetensors", ns=(1, 1))
        write(self, *arguments)

    words = ["convert", str(source), "--to", "gqa", "--kv-budget", "50%", "--calibration", "none"]
    with monkeypatch.context() as patched:
        patched.setattr(ShardWriter, "write", touching)
        done = CliRunner().invoke(main, [*words, "--out", str(out)])
    assert done.exit_code == 2, done.output
    assert "source changed while it was folded; run the same command again" in done.stderr
    assert not out.exists()
    again = CliRunner().invoke(main, [*words, "--out", str(out)])
    assert again.exit_code == 0, again.output
