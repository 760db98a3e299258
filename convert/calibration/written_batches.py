"""Finished batches of a text that a model writes, on disk, which an interrupted run need not write again.

A batch has one file. Its name is a hash of all that decides the text: the model, the token that sequences
begin with, and the random numbers that tokens are drawn with. So a batch of another text is not found. The
file also holds a hash of that name and its content, because it could have been cut off by a power failure.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ...checkpoints.shards import TensorSpec, read_header
from ...core.errors import InvalidInput
from ...core.files import save_whole

_DIGEST = 32  # bytes of a SHA-256


@dataclass(frozen=True)
class WrittenBatches:
    """A directory with finished batches of a text.

    Attributes:
        directory: belongs to kvfold; it is made when the first batch is saved.
        model: says which model writes, and in which precision on which kind of device.
    """

    directory: Path
    model: str

    def find(self, chance_BT: Tensor, bos: int | None) -> tuple[Tensor, Tensor] | None:
        """Return a batch that was saved; None if there is none, or if its file is damaged.

        Args:
            chance_BT: the random numbers of the batch.
            bos: the first token of each sequence, or None.

        Returns:
            Token ids (B, T), int64, and the entropy of each one's prediction (B, T), float32.
        """
        file = self._file(chance_BT, bos)
        if file.is_symlink() or not file.is_file():
            return None
        shape = tuple(chance_BT.shape)
        wanted = {
            "tokens": TensorSpec(torch.int32, shape),
            "entropy": TensorSpec(torch.float32, shape),
            "digest": TensorSpec(torch.uint8, (_DIGEST,)),
        }
        try:
            if {name: entry.spec for name, entry in read_header(file).items()} != wanted:
                return None
        except InvalidInput:
            return None
        found = load_file(file)
        if not torch.equal(found["digest"], _digest(file, found["tokens"], found["entropy"])):
            return None
        return found["tokens"].long(), found["entropy"]

    def save(self, chance_BT: Tensor, bos: int | None, tokens_BT: Tensor, entropy_BT: Tensor) -> None:
        """Save a batch, whole or not at all.

        Args:
            chance_BT: the random numbers of the batch.
            bos: the first token of each sequence, or None.
            tokens_BT: token ids, on the CPU.
            entropy_BT: entropy of the prediction of each, float32, on the CPU.

        Raises:
            OSError: the directory cannot be written.
        """
        self.directory.mkdir(exist_ok=True)
        file = self._file(chance_BT, bos)
        tokens_BT = tokens_BT.int().contiguous()
        entropy_BT = entropy_BT.contiguous()
        digest = _digest(file, tokens_BT, entropy_BT)
        save_whole({"tokens": tokens_BT, "entropy": entropy_BT, "digest": digest}, file)

    def _file(self, chance_BT: Tensor, bos: int | None) -> Path:
        deciding = f"{self.model} {bos} {tuple(chance_BT.shape)} ".encode()
        digest = hashlib.sha256(deciding + chance_BT.contiguous().numpy().tobytes())
        return self.directory / f"batch-{digest.hexdigest()}.safetensors"


def _digest(file: Path, tokens_BT: Tensor, entropy_BT: Tensor) -> Tensor:
    """Return a hash of a file's name and content as a tensor of bytes."""
    content = file.name.encode() + tokens_BT.numpy().tobytes() + entropy_BT.numpy().tobytes()
    return torch.frombuffer(bytearray(hashlib.sha256(content).digest()), dtype=torch.uint8)
