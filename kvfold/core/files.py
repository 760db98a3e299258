"""Files of tensors that are there whole or not at all."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_whole(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a safetensors file; one of that name is replaced.

    Raises:
        OSError, SafetensorError: the disk is full or cannot be written.
    """
    unfinished = file.with_name(file.name + ".partial")
    save_file(dict(tensors), unfinished)
    unfinished.replace(file)
