"""Statistics of a model that is larger than memory: the weights of one decoder layer at a time.

The order is: forward through the layers, the gradient at the last hidden states, then backward through the
layers in reverse, each computed again from its stored input. Hidden states between layers are stored in a
file without a name. The layers, masks and rotary tables are transformers' own. The sums are those of a pass
through the whole model.

Legend: statistics.py; L layers.
"""

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ...core.console import progress
from ...core.disk import is_full
from ...core.errors import InvalidInput
from ...core.processes import together
from ...models.causal_lm import device
from ...models.decoder import CallRecorder, LayerCall
from ...models.layered_model import LayeredModel
from .moments import Layout, Sums, not_finite, watched
from .passes import score, share
from .self_text import check_length
from .statistics import LayerStatistics, Statistics

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Calls:
    """The calls of a model's layers.

    Attributes:
        recorder: has recorded them.
        by_size: the call of each layer, by the number of sequences in a batch.
    """

    recorder: CallRecorder
    by_size: dict[int, list[LayerCall]] = field(default_factory=dict)

    def run(self, block: Any, number: int, hidden_BTD: Tensor) -> Tensor:
        """Return the hidden states after a layer."""
        return self.by_size[len(hidden_BTD)][number].run(block, hidden_BTD)


def collect(
    layered: LayeredModel,
    sequences: Tensor,
    *,
    layout: Layout,
    batch_size: int,
    calibration: str,
    seed: int,
    work: Path,
) -> Statistics:
    """Collect the statistics of `passes.collect` in the memory of one layer; they are the same numbers.

    Args:
        layered: the model; the following arguments are those of `passes.collect`.
        sequences: token ids (sequences, T).
        layout: the places of the model's quantities.
        batch_size: sequences at once.
        calibration: the source of the sequences, for the record.
        seed: of the labels.
        work: a directory for the hidden states between layers, 4 · tokens · D · (L + 1) bytes, and for the
            statistics, which stay on disk; no named file is left in it.

    Raises:
        InvalidInput: as in `passes.collect`, or the disk is too small.
    """
    check_length(layered.model, sequences.shape[1])
    batches = share(sequences, batch_size, seed)
    # Below the first layer that attends nothing is asked for.
    numbers = range(layout.layers[0], len(layered.blocks))
    with _open_store(layered, batches, work) as stored:
        with together():
            calls = enter(layered, batches, lambda at, hidden_BTD: stored.put(0, at, hidden_BTD))
            _forward(layered, len(batches), stored, calls)
            _turn(layered, batches, stored, calls)
        layers: list[LayerStatistics] = []
        steps = len(numbers) * len(batches)
        ticks = progress(range(steps), "statistics, backward", steps)
        for number in reversed(numbers):
            sums = Sums()
            seen = {number: sums} if number in layout.layers else {}
            with together(), layered.block(number) as block, watched(layered.model, seen, layout):
                for at in range(len(batches)):
                    next(ticks)
                    _backward(block, number, at, stored, calls, is_last=number == numbers[0])
                for backward in (False, True):
                    for seen_sums in seen.values():
                        seen_sums.check_finite(number, backward=backward)
            if not seen:
                continue
            sums.over_ranks()
            layers.insert(0, sums.means(sequences.numel()).parked(work))
        next(ticks, None)
    return Statistics(
        layers=tuple(layers), tokens=sequences.numel(), calibration=calibration, seed=seed, ids_BT=sequences
    )


@torch.no_grad()
def _forward(layered: LayeredModel, batches: int, stored: "_Stored", calls: "Calls") -> None:
    """Store every layer's output."""
    steps = len(layered.blocks) * batches
    ticks = progress(range(steps), "statistics, forward", steps)
    for number in range(len(layered.blocks)):
        with layered.block(number) as block:
            for at in range(batches):
                next(ticks)
                output_BTD = calls.run(block, number, stored.get(number, at))
                if not output_BTD.isfinite().all():
                    raise InvalidInput(not_finite(number, "its output"))
                stored.put(number + 1, at, output_BTD)
    next(ticks, None)


def _backward(block: Any, number: int, at: int, stored: "_Stored", calls: "Calls", *, is_last: bool) -> None:
    """Replace a layer's stored input by the gradient there, unless no layer below needs it."""
    input_BTD = stored.get(number, at).requires_grad_(not is_last)
    calls.run(block, number, input_BTD).backward(stored.get(number + 1, at))
    if not is_last:
        assert input_BTD.grad is not None
        stored.put(number, at, input_BTD.grad)


@torch.no_grad()
def enter(layered: LayeredModel, batches: Batches, put: Callable[[int, Tensor], None]) -> Calls:
    """Give `put` the inputs of the first layer by batch, and record how each layer is called.

    A batch is a pair: token ids (B, T), and a tensor that is not used here.
    """
    decoder = layered.model.get_decoder()

    def record(ids_BT: Tensor) -> tuple[Tensor, list[LayerCall]]:
        ids_BT = ids_BT.to(device())
        return recorder.record(layered.blocks, lambda: decoder(input_ids=ids_BT, use_cache=False))

    recorder = CallRecorder()
    calls = Calls(recorder)
    with layered.rest(without="head"):
        with layered.block(0):
            record(batches[0][0][:1, :2])
        for at, (ids_BT, _) in enumerate(batches):
            hidden_BTD, calls.by_size[len(ids_BT)] = record(ids_BT)
            put(at, hidden_BTD)
    return calls


def _turn(layered: LayeredModel, batches: Batches, stored: "_Stored", calls: Calls) -> None:
    """Replace the last layer's output by the gradient of the log likelihood there."""
    decoder = layered.model.get_decoder()
    last = len(layered.blocks)
    with layered.rest(without="embedding"), torch.enable_grad():
        for at, (_, chance_BT) in enumerate(batches):
            output_BTD = stored.get(last, at).requires_grad_()
            with calls.recorder.giving(layered.blocks, output_BTD):
                hidden_BTD = decoder(inputs_embeds=output_BTD.detach(), use_cache=False).last_hidden_state
            hidden_BTD.backward(score(layered.model, hidden_BTD, chance_BT.to(device())))
            assert output_BTD.grad is not None
            stored.put(last, at, output_BTD.grad)


class _Stored:
    """Hidden states (B, T, D), float32, between layers, by boundary and batch.

    Boundary n is the input of layer n.
    """

    def __init__(self, file: IO[bytes], batches: Batches, width: int) -> None:
        self._file = file
        self._shapes = [(*ids_BT.shape, width) for ids_BT, _ in batches]
        self._starts = [0, *accumulate(4 * math.prod(shape) for shape in self._shapes)]

    def put(self, boundary: int, at: int, hidden_BTD: Tensor) -> None:
        self._seek(boundary, at)
        self._file.write(hidden_BTD.detach().cpu().contiguous().numpy().data)

    def get(self, boundary: int, at: int) -> Tensor:
        self._seek(boundary, at)
        hidden_BTD = torch.empty(self._shapes[at])
        self._file.readinto(hidden_BTD.numpy().data)  # type: ignore[attr-defined]
        return hidden_BTD.to(device())

    def _seek(self, boundary: int, at: int) -> None:
        self._file.seek(boundary * self._starts[-1] + self._starts[at])


@contextmanager
def _open_store(layered: LayeredModel, batches: Batches, work: Path) -> Iterator[_Stored]:
    """Open a file without a name, which is gone with the process however that ends."""
    width = layered.model.config.get_text_config().hidden_size
    need = 4 * width * sum(ids_BT.numel() for ids_BT, _ in batches) * (len(layered.blocks) + 1)
    free = shutil.disk_usage(work).free
    if need > free:
        raise InvalidInput(
            f"layer by layer, the statistics take {need:,} bytes on disk and {work} has {free:,}; take "
            "fewer --sequences, or set TMPDIR to a larger disk"
        )
    try:
        with tempfile.TemporaryFile(dir=work) as file:
            yield _Stored(file, batches, width)
    except OSError as error:
        if not is_full(error):
            raise
        raise InvalidInput(
            f"layer by layer, the statistics take {need:,} bytes on disk, and {work} is full; make room "
            "there, or set TMPDIR to a larger disk"
        ) from None
