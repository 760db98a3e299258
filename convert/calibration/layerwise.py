"""The statistics of a model that is larger than memory: one decoder layer's weights at a time.

What goes from one layer to the next lies in a file without a name: forward through the layers in order, then
the gradient at the last hidden states, then backward through the layers in reverse, each computed again from
its stored input. The layers, masks and rotary tables are transformers' own, and the sums those of a pass
through the whole model.

Legend: statistics.py; L layers.
"""

import errno
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ...core.console import progress
from ...core.errors import InvalidInput
from ...core.processes import together
from ...models.loading import LayeredModel, device
from .moments import Layout, Sums, not_finite, watched
from .passes import score, share
from .self_text import check_length
from .statistics import LayerStatistics, Statistics

Batches = list[tuple[Tensor, Tensor]]


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
    """What `passes.collect` collects, in the memory of one layer: the same numbers.

    Args:
        layered: the model.
        sequences, layout, batch_size, calibration, seed: as in `passes.collect`.
        work: a directory for what goes between layers, 4 · tokens · D · (L + 1) bytes, and for the
            statistics, which stay on disk; nothing is left in it.

    Raises:
        InvalidInput: as in `passes.collect`, or the disk is too small.
    """
    check_length(layered.model, sequences.shape[1])
    batches = share(sequences, batch_size, seed)
    numbers = range(len(layered.blocks))
    with _open_store(layered, batches, work) as stored:
        with together():
            calls = _enter(layered, batches, stored)
            _forward(layered, len(batches), stored, calls)
            _turn(layered, batches, stored, calls)
        layers: list[LayerStatistics] = []
        ticks = progress(
            range(len(numbers) * len(batches)), "statistics, backward", len(numbers) * len(batches)
        )
        for number in reversed(numbers):
            sums = Sums()
            with together(), layered.block(number) as block, watched(layered.model, {number: sums}, layout):
                for at in range(len(batches)):
                    next(ticks)
                    _backward(block, number, at, stored, calls)
                for backward in (False, True):
                    sums.check_finite(number, backward=backward)
            sums.over_ranks()
            layers.insert(0, sums.means(sequences.numel()).parked(work))
        next(ticks, None)
    return Statistics(layers=tuple(layers), tokens=sequences.numel(), calibration=calibration, seed=seed)


@torch.no_grad()
def _forward(layered: LayeredModel, batches: int, stored: "_Stored", calls: "_Calls") -> None:
    """Store every layer's output."""
    ticks = progress(
        range(len(layered.blocks) * batches), "statistics, forward", len(layered.blocks) * batches
    )
    for number in range(len(layered.blocks)):
        with layered.block(number) as block:
            for at in range(batches):
                next(ticks)
                output_BTD = calls.run(block, number, stored.get(number, at))
                if not output_BTD.isfinite().all():
                    raise InvalidInput(not_finite(number, "its output"))
                stored.put(number + 1, at, output_BTD)
    next(ticks, None)


def _backward(block: Any, number: int, at: int, stored: "_Stored", calls: "_Calls") -> None:
    """Put the gradient at a layer's input in the place of that input."""
    input_BTD = stored.get(number, at).requires_grad_(number > 0)
    calls.run(block, number, input_BTD).backward(stored.get(number + 1, at))
    if number > 0:
        assert input_BTD.grad is not None
        stored.put(number, at, input_BTD.grad)


class _Calls:
    """How the model calls its layers.

    What they get beside the hidden states, by the number of sequences in a batch.
    """

    def __init__(self) -> None:
        self._given: dict[tuple[int, int], tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._beside: tuple[None, ...] | None = (
            None  # a layer may give a tuple of which only the first item goes on
        )

    def keep(
        self, number: int, hidden_BTD: Tensor, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._given[number, len(hidden_BTD)] = (arguments, named)

    def run(self, block: Any, number: int, hidden_BTD: Tensor) -> Tensor:
        """The hidden states after a layer."""
        arguments, named = self._given[number, len(hidden_BTD)]
        output = block(hidden_BTD, *arguments, **named)
        hidden = output[0] if isinstance(output, tuple) else output
        assert isinstance(hidden, Tensor)
        return hidden

    def learn(self, output: Any) -> None:
        """See from a layer's own output what the model expects."""
        self._beside = (None,) * (len(output) - 1) if isinstance(output, tuple) else None

    def as_output(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """What a layer gives that changes nothing."""
        return hidden_states if self._beside is None else (hidden_states, *self._beside)


@torch.no_grad()
def _enter(layered: LayeredModel, batches: Batches, stored: "_Stored") -> _Calls:
    """Store what the first layer gets, and keep how each layer is called."""
    calls, trunk, at = _Calls(), layered.model.get_decoder(), 0
    blocks = layered.blocks

    def stand_in(number: int) -> Any:
        def forward(hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
            calls.keep(number, hidden_states, arguments, named)
            if number == 0:
                stored.put(0, at, hidden_states)
            return calls.as_output(hidden_states)

        return forward

    with layered.rest(without="head"), ExitStack() as stack:
        with layered.block(0) as first, _replaced(blocks[1:], [calls.as_output] * len(blocks[1:])):
            hook = first.register_forward_hook(lambda *seen: calls.learn(seen[-1]))
            stack.callback(hook.remove)
            trunk(input_ids=batches[0][0][:1, :2].to(device()), use_cache=False)
            hook.remove()
        stack.enter_context(_replaced(blocks, [stand_in(number) for number in range(len(blocks))]))
        for at, (ids_BT, _) in enumerate(batches):  # noqa: B007 - the stand-ins read it
            trunk(input_ids=ids_BT.to(device()), use_cache=False)
    return calls


def _turn(layered: LayeredModel, batches: Batches, stored: "_Stored", calls: _Calls) -> None:
    """Put the gradient of the log likelihood at the last layer's output in the place of that output."""
    trunk, last = layered.model.get_decoder(), len(layered.blocks)
    with layered.rest(without="embedding"), torch.enable_grad():
        for at, (_, chance_BT) in enumerate(batches):
            output_BTD = stored.get(last, at).requires_grad_()
            with _replaced(layered.blocks, [lambda *_, **__: calls.as_output(output_BTD)] * last):  # noqa: B023 - used here
                hidden_BTD = trunk(inputs_embeds=output_BTD.detach(), use_cache=False).last_hidden_state
            hidden_BTD.backward(score(layered.model, hidden_BTD, chance_BT.to(device())))
            assert output_BTD.grad is not None
            stored.put(last, at, output_BTD.grad)


@contextmanager
def _replaced(blocks: list[Any], forwards: list[Any]) -> Iterator[None]:
    """Decoder layers that do something else, for the duration."""
    for block, forward in zip(blocks, forwards, strict=True):
        block.forward = forward
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


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
    """A file without a name, which is gone with the process however that ends.

    Raises:
        InvalidInput: the disk is too small.
    """
    width = layered.model.config.get_text_config().hidden_size
    need = 4 * width * sum(ids_BT.numel() for ids_BT, _ in batches) * (len(layered.blocks) + 1)
    free = shutil.disk_usage(work).free
    if need > free:
        raise InvalidInput(
            f"layer by layer, the statistics take {need:,} bytes on disk and {work} has {free:,}; take "
            f"fewer --sequences, "
            "or set TMPDIR to a larger disk"
        )
    try:
        with tempfile.TemporaryFile(dir=work) as file:
            yield _Stored(file, batches, width)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise InvalidInput(
            f"layer by layer, the statistics take {need:,} bytes on disk, and {work} is full"
        ) from None
