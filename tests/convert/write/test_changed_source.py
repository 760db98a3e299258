"""A source that is replaced while it is folded."""

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvfold.checkpoints.shards import ShardWriter
from kvfold.cli import main
from kvfold.convert.decide import preparation

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
    assert "source changed while it was read; run the same command again" in done.stderr
    assert not out.exists()
    assert not list(tmp_path.glob("out*"))
    again = CliRunner().invoke(main, [*words, "--out", str(out)])
    assert again.exit_code == 0, again.output


def test_a_source_that_changes_while_it_is_calibrated_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, study = make(tmp_path / "source"), preparation.study

    def touching(*arguments: Any, **options: Any) -> Any:
        found = study(*arguments, **options)
        os.utime(source / "model.safetensors", ns=(1, 1))
        return found

    monkeypatch.setattr(preparation, "study", touching)
    words = [
        "convert",
        str(source),
        "--to",
        "gqa",
        "--kv-budget",
        "50%",
        "--sequences",
        "2",
        "--length",
        "16",
    ]
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2, done.output
    assert "source changed while it was read; run the same command again" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
