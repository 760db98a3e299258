"""The processes of one command under `accelerate launch`: each does its share of the work, and rank 0 prints.

A process that fails while others wait for its numbers would leave them waiting forever. So the work before
every exchange is done inside `together`, where an error of one process becomes an error of all. torch is only
imported when there is a group to join.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .console import Command, is_first, processes_in_all
from .errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

# Rank 0 may fold and write for far longer than the usual limit of ten minutes, while the others wait.
_PATIENCE = timedelta(days=1)


class _Shared(InvalidInput):
    """An error that every process has received."""


class Launched(Command):
    """A click command that may run in several processes under `accelerate launch`; only rank 0 prints."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command in the process group, if a launcher started one."""
        with processes():
            return super().invoke(ctx)


@contextmanager
def processes() -> Iterator[None]:
    """Join the processes that a launcher started, for the duration of a block.

    Rank 0's exit code becomes the exit code of all, and only rank 0 reports why. Without a launcher nothing
    happens.
    """
    if processes_in_all() < 2:
        yield
        return
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(timeout=_PATIENCE)
    refusal: click.ClickException | None = None
    try:
        yield
    except click.ClickException as mistake:
        refusal = mistake
    code = [0 if refusal is None else refusal.exit_code]
    dist.broadcast_object_list(code)  # the others wait here while rank 0 writes
    dist.destroy_process_group()
    if is_first() and refusal is not None:
        raise refusal
    if code[0]:
        sys.exit(code[0])


def place() -> tuple[int, int]:
    """Return the rank of this process and the number of processes: (0, 1) without a group."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def check_enough(sequences: int) -> None:
    """Refuse fewer calibration sequences than processes.

    Raises:
        InvalidInput: there are fewer than processes.
    """
    _, ranks = place()
    if sequences < ranks:
        raise InvalidInput(
            f"{sequences} calibration sequences are fewer than the {ranks} processes; take at least one each"
        )


@contextmanager
def together() -> Iterator[None]:
    """Do work in each process by itself; an error of one ends it in all.

    Every process must enter the block, also one that has nothing to do in it.

    Raises:
        InvalidInput: in every process, if any of them raised it.
    """
    mistake: InvalidInput | None = None
    try:
        yield
    except _Shared:
        raise
    except InvalidInput as found:
        mistake = found
    import torch.distributed as dist

    if not dist.is_initialized():
        if mistake is not None:
            raise mistake
        return
    sentences = from_every(None if mistake is None else str(mistake))
    first = next((sentence for sentence in sentences if sentence is not None), None)
    if first is not None:
        raise _Shared(first) from mistake


@contextmanager
def released_together() -> Iterator[None]:
    """Let an error that every process has received leave a block only once all of them have left it.

    When rank 0 then removes files, every process has released the locks that it held inside the block.
    """
    try:
        yield
    except _Shared:
        from_every(None)
        raise


def sum_over_ranks(total: "Tensor") -> "Tensor":
    """Sum a CPU tensor over all processes, in place.

    It has the same shape and dtype in each. The same tensor is returned.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def from_first(value: T) -> T:
    """Return the value of rank 0 in every process; each waits until rank 0 has it.

    The value must be picklable.
    """
    import torch.distributed as dist

    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def from_every(own: T) -> list[T]:
    """Return the values of all processes, in the order of their ranks.

    The values must be picklable.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return [own]
    parts = [own] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return parts


def union(own: dict[str, T]) -> dict[str, T]:
    """Return the entries of all processes' dictionaries.

    Of equal keys the highest rank's value stays.
    """
    return {name: value for part in from_every(own) for name, value in part.items()}


def gather_rows(own: "Tensor", rows: int) -> "Tensor":
    """Return the rows of all processes in one CPU tensor.

    Args:
        own: (n, ...) on the CPU; of R processes, rank r has rows r, r + R, r + 2R, ...
        rows: number of rows of all processes together.

    Returns:
        (rows, ...), in order.
    """
    parts = from_every(own)
    if len(parts) == 1:
        return own
    whole = own.new_empty(rows, *own.shape[1:])
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole
