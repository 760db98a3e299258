"""The input of a model: a batch of windows.

Shapes: B windows, S tokens of a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

IGNORED = -100  # label that no loss counts; the value is transformers'


@dataclass(frozen=True)
class Batch:
    """Windows of packed documents. All are int64 (B, S).

    Attributes:
        input_ids_BS: the tokens.
        labels_BS: the token after each, or `IGNORED`.
        position_ids_BS: 0 where a window or a document in it starts. Without an attention mask, transformers
            takes such a start as the limit of attention (`isolation.isolate_documents` handles the classes
            that do not).
    """

    input_ids_BS: Tensor
    labels_BS: Tensor
    position_ids_BS: Tensor

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The arguments that a model takes the windows by."""
        return {"input_ids": self.input_ids_BS, "position_ids": self.position_ids_BS}

    def to(self, device: torch.device | str) -> "Batch":
        """Return the same batch on a device."""
        return Batch(self.input_ids_BS.to(device), self.labels_BS.to(device), self.position_ids_BS.to(device))

    @property
    def count(self) -> int:
        """The number of scored labels."""
        return int((self.labels_BS != IGNORED).sum())


class Batches(Protocol):
    """Windows addressed by number: those of a run, or of a held-out text."""

    def batch(self, cursors: Sequence[int]) -> Batch:
        """Return the windows of these numbers."""
