"""Finished batches of a text that a model writes, on disk, which an interrupted run need not write again.

A batch has one file. Its name is a hash of all that decides the text: the model, the token that sequences
begin with, and the random numbers that tokens are drawn with. So a batch of another text is not found.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...core.files import load_whole, save_whole


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
        """Return a batch of ids, int64, and entropies (B, T); None if none was saved, or its file is damaged.

        `chance_BT` are the random numbers that decide its tokens, `bos` the first of each sequence.
        """
        found = load_whole(self._file(chance_BT, bos))
        if found is None or found.keys() != {"tokens", "entropy"}:
            return None
        return found["tokens"].long(), found["entropy"]

    def save(self, chance_BT: Tensor, bos: int | None, tokens_BT: Tensor, entropy_BT: Tensor) -> None:
        """Save a batch whole or not at all; arguments are those of `find`, and its result."""
        self.directory.mkdir(exist_ok=True)
        batch = {"tokens": tokens_BT.int().contiguous(), "entropy": entropy_BT.contiguous()}
        save_whole(batch, self._file(chance_BT, bos))

    def _file(self, chance_BT: Tensor, bos: int | None) -> Path:
        deciding = f"{self.model} {bos} {tuple(chance_BT.shape)} ".encode()
        digest = hashlib.sha256(deciding + chance_BT.contiguous().numpy().tobytes())
        return self.directory / f"batch-{digest.hexdigest()}.safetensors"
