"""The writer and the reader of weight files, without a model."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from kvfold.checkpoints import shards
from kvfold.checkpoints.directory import Checkpoint
from kvfold.checkpoints.shards import HEADER_LIMIT, INDEX, ShardWriter, TensorSpec, read_header
from kvfold.core.errors import InvalidInput


def write_header(file: Path, content: bytes) -> Path:
    """Write a safetensors file of a header alone."""
    file.write_bytes(len(content).to_bytes(8, "little") + content)
    return file


def test_a_writer_that_does_not_open_holds_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is open keeps its space on a full disk, also once it is removed."""
    opened: list[int] = []

    def full(descriptor: int, size: int) -> None:
        opened.append(descriptor)
        if len(opened) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shards, "reserve", full)
    specs = {name: TensorSpec(torch.float32, (4,)) for name in "abcd"}
    with pytest.raises(OSError, match="No space left"):
        ShardWriter(tmp_path, specs, shard_size=16)
    assert len(opened) == 3
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_header_that_would_fill_the_memory(tmp_path: Path) -> None:
    file = write_header(tmp_path / "model.safetensors", b" " * (HEADER_LIMIT + 1))
    with pytest.raises(InvalidInput, match=r"at most 33554432 .* read; save the checkpoint in more files"):
        read_header(file)


def test_no_shard_is_read_after_one_that_the_index_contradicts(tmp_path: Path) -> None:
    """Otherwise links to one file could fill the memory, each with the tensors of that file."""
    (tmp_path / "config.json").write_text("{}")
    write_header(tmp_path / "1.safetensors", b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}')
    (tmp_path / "2.safetensors").write_bytes(b"not read")
    index = {"metadata": {}, "weight_map": {"b": "1.safetensors", "c": "2.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match=r"about b, which 1.safetensors lacks, and are of different saves"):
        Checkpoint(tmp_path)
