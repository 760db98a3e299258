"""A temporary dequantised copy of a quantised checkpoint, for a process that cannot import kvfold."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..checkpoints.directory import copy_side_files
from ..checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint, is_quantised
from ..checkpoints.shards import SHARD_SIZE, ShardWriter, TensorSpec


@contextmanager
def dequantised_copy(directory: Path) -> Iterator[Path]:
    """Make a temporary copy with bfloat16 in place of quantised weights; one tensor is in memory at a time.

    Args:
        directory: a checkpoint; one that is not quantised is given back itself. Python files next to its
            weights are copied, so they must be trusted.

    Raises:
        InvalidInput: a weight is damaged.
    """
    if not is_quantised(directory):
        yield directory
        return
    checkpoint = QuantisedCheckpoint(directory)
    specs = {name: checkpoint.spec(name) for name in checkpoint}
    specs |= {name: TensorSpec(torch.bfloat16, specs[name].shape) for name in checkpoint.packed}
    with tempfile.TemporaryDirectory(prefix="kvfold-") as place:
        copy = Path(place)
        with ShardWriter(copy, specs, SHARD_SIZE) as writer:
            for name in checkpoint:
                for first, piece in checkpoint.stream(name):
                    writer.write(name, piece, first)
        (copy / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8")
        copy_side_files(directory, copy)
        for file in directory.glob("*_kvfold.py"):
            shutil.copyfile(file, copy / file.name)
        yield copy
