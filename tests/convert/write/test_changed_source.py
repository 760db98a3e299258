"""A source that is replaced or touched while it is folded."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from kvfold.checkpoints.directory import Checkpoint
from kvfold.checkpoints.identity import hash_unchanged
from kvfold.checkpoints.shards import ShardWriter
from kvfold.convert.settle import preparation
from kvfold.core.errors import InvalidInput

from ...support.commands import run_main
from ...support.folds import convert as attempted
from ...support.tiny import make

WORDS = ["--to", "gqa", "--kv-budget", "50%", "--calibration", "none", "--jobs", "1"]


def convert(source: Path, out: Path, meanwhile: Callable[[], Any], code: int | None = None) -> Result:
    """Run a fold during which something happens when the first tensor is written."""
    write, happened = ShardWriter.write, []

    def writing(self: ShardWriter, *arguments: Any) -> None:
        if not happened:
            happened.append(meanwhile())
        write(self, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ShardWriter, "write", writing)
        return run_main("convert", source, *WORDS, "--out", out, code=code)


def test_a_changing_source_is_refused(tmp_path: Path) -> None:
    source, out = make(tmp_path / "source"), tmp_path / "out"
    weights = source / "model.safetensors"

    def replace() -> None:
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)

    done = convert(source, out, replace, code=2)
    assert f"{weights} changed while it was read; run the same command again" in done.stderr
    assert not list(tmp_path.glob("out*"))
    convert(source, out, lambda: None, code=0)


def test_a_source_that_is_removed_meanwhile_is_refused(tmp_path: Path) -> None:
    source, out = make(tmp_path / "source"), tmp_path / "out"
    done = convert(source, out, (source / "config.json").unlink, code=2)
    assert f"{source / 'config.json'} was removed while it was read" in done.stderr


def test_a_source_that_is_only_touched_meanwhile_is_folded(tmp_path: Path) -> None:
    source, out = make(tmp_path / "source"), tmp_path / "out"

    def touch() -> None:
        for file in source.iterdir():
            os.utime(file, ns=(1, 1))

    convert(source, out, touch, code=0)
    assert out.is_dir()


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, study = make(tmp_path / "source"), preparation.study

    def touching(*arguments: Any, **options: Any) -> Any:
        found = study(*arguments, **options)
        os.utime(source / "model.safetensors", ns=(1, 1))
        return found

    words = ("--to", "gqa", "--kv-budget", "50%", "--sequences", "2", "--length", "16")
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "study", touching)
        done = attempted(source, *words)
    assert done.exit_code == 2, done.output
    assert "model.safetensors changed while it was read; run the same command again" in done.stderr
    assert not (tmp_path / "out").exists()
    again = attempted(source, *words)
    assert again.exit_code == 0, again.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_file_that_is_touched_before_it_is_hashed_counts_as_changed(tmp_path: Path) -> None:
    checkpoint = Checkpoint(make(tmp_path / "source"))
    file = checkpoint.files[0]
    hash_unchanged(checkpoint, file)
    os.utime(file, ns=(1, 1))
    with pytest.raises(InvalidInput, match="changed while it was read"):  # its hash may be another file's
        hash_unchanged(checkpoint, file)


def test_hashing_one_of_many_files_looks_at_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at all of them for each would take hours for the most files that an index can name."""
    checkpoint = Checkpoint(make(tmp_path / "source", shard_size="20KB"))
    files, seen, stat = checkpoint.files, [], Path.stat

    def look(path: Path, **options: Any) -> os.stat_result:
        seen.append(path)
        return stat(path, **options)

    assert len(files) > 2
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", look)
        hash_unchanged(checkpoint, files[1])
    assert set(seen) == {files[1]}
