"""The hidden states between the layers of a streamed model, on disk: a file for each step of a stage.

Boundary n enters layer n. Shapes: B windows of a micro-batch, W of a step, S tokens of a window, D hidden
size.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ...core.errors import InvalidInput
from ...core.files import save_whole


class Boundaries:
    """The boundaries of a stage; two of them exist at a time.

    Args:
        work: their directory.
    """

    def __init__(self, work: Path) -> None:
        self._work = work

    def store(self, number: int, step: int, hidden: Sequence[Tensor]) -> None:
        """Write the hidden states (B, S, D) of a step's micro-batches."""
        place = self._place(number)
        place.mkdir(parents=True, exist_ok=True)
        hidden_WSD = torch.cat([hidden_BSD.float().cpu() for hidden_BSD in hidden])
        save_whole({"hidden": hidden_WSD}, place / f"step-{step:05d}.safetensors")

    def read(self, number: int, step: int) -> Tensor:
        """Return the hidden states (W, S, D) of a step, float32, on the CPU."""
        return load_file(self._place(number) / f"step-{step:05d}.safetensors")["hidden"]

    def remove(self, number: int) -> None:
        """Remove a boundary."""
        shutil.rmtree(self._place(number), ignore_errors=True)

    def check_room(self, tokens: int, width: int) -> None:
        """Refuse a stage that the disk cannot hold: 8 bytes per token and number of a hidden state.

        Raises:
            InvalidInput: names both sizes.
        """
        need = 2 * 4 * tokens * width
        held = sum(file.stat().st_size for file in self._work.rglob("*") if file.is_file())
        free = shutil.disk_usage(self._work).free + held
        if need > free:
            raise InvalidInput(
                f"mode: stream stores hidden states between layers on disk, which takes {need:,} bytes, but "
                f"{self._work} has {free:,}; give the stage fewer tokens, or name an output on a larger disk"
            )

    def _place(self, number: int) -> Path:
        return self._work / f"boundary-{number:05d}"
