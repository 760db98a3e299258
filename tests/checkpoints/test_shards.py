"""The writer of weight files, without a model."""

import errno
import os
from pathlib import Path

import pytest
import torch

from kvfold.checkpoints import shards
from kvfold.checkpoints.shards import ShardWriter, TensorSpec


def test_a_writer_that_cannot_be_opened_holds_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
