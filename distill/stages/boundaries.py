"""The hidden states between the layers of a streamed model, on disk: a file for each step of a stage.

Boundary n enters layer n. Shapes: B windows of a micro-batch, W of a step, S tokens of a window, D hidden
size.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import InvalidInput
from ...core.files import load_whole, save_whole

_DTYPES = (torch.float32, torch.bfloat16)


class Boundaries:
    """The boundaries of a stage; two of them exist at a time.

    Args:
        work: their directory.
        dtype: of the hidden states.
    """

    def __init__(self, work: Path, dtype: torch.dtype) -> None:
        self._work = work
        self._dtype = dtype

    def store(self, number: int, step: int, hidden: Iterable[Tensor]) -> None:
        """Write the hidden states (B, S, D) of a step's micro-batches, of which one at a time is on a GPU."""
        place = self._place(number)
        place.mkdir(parents=True, exist_ok=True)
        hidden_WSD = torch.cat([hidden_BSD.to("cpu", self._dtype) for hidden_BSD in hidden])
        save_whole({"hidden": hidden_WSD}, place / f"step-{step:05d}.safetensors")

    def read(self, number: int, step: int, shape: tuple[int, ...]) -> Tensor:
        """Return the hidden states of a step, on the CPU.

        An earlier start on another machine may have stored them in another precision. Layers that are aligned
        already keep the precision of the earlier start.

        Args:
            number: of the boundary.
            step: of the stage.
            shape: (W, S, D), which they must have.

        Raises:
            InvalidInput: the file is missing or damaged.
        """
        file = self._place(number) / f"step-{step:05d}.safetensors"
        hidden_WSD = (load_whole(file) or {}).get("hidden")
        if hidden_WSD is None or tuple(hidden_WSD.shape) != shape or hidden_WSD.dtype not in _DTYPES:
            raise InvalidInput(f"{file} is damaged; remove {self._work} to begin the stage again")
        return hidden_WSD.to(self._dtype)

    def remove(self, number: int) -> None:
        """Remove a boundary."""
        shutil.rmtree(self._place(number), ignore_errors=True)

    def check_room(self, tokens: int, width: int) -> None:
        """Refuse a stage whose two boundaries the disk cannot hold.

        Raises:
            InvalidInput: names both sizes.
        """
        need = 2 * self._dtype.itemsize * tokens * width
        held = sum(file.stat().st_size for file in self._work.rglob("*") if file.is_file())
        free = shutil.disk_usage(self._work).free + held
        if need > free:
            raise InvalidInput(
                f"mode: stream stores hidden states between layers on disk, which takes {need:,} bytes, but "
                f"{self._work} has {free:,}; give the stage fewer tokens, or name an output on a larger disk"
            )

    def _place(self, number: int) -> Path:
        return self._work / f"boundary-{number:05d}"
