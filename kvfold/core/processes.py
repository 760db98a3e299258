"""The processes of one command under `accelerate launch`: each reads and folds its share, the first alone
speaks.

A process that fails while others wait for its numbers would leave them waiting: hence `together` around the
work before every exchange. Nothing heavy is imported before there is a group.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import click

from .console import is_first
from .errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

# All wait while the first one folds and writes, which may take far longer than the usual limit of ten
# minutes.
_PATIENCE = timedelta(days=1)


class _Shared(InvalidInput):
    """A mistake that all processes have heard of."""


@contextmanager
def processes() -> Iterator[None]:
    """Join the processes that a launcher started, for the duration; alone, nothing happens.

    The first one's exit code becomes everybody's, and only the first one says why.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
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
    dist.broadcast_object_list(code)  # the others wait here while the first one writes
    dist.destroy_process_group()
    if is_first() and refusal is not None:
        raise refusal
    if code[0]:
        sys.exit(code[0])


def place() -> tuple[int, int]:
    """This process's number and how many there are: (0, 1) when there is one."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def check_enough(sequences: int) -> None:
    """Refuse fewer calibration sequences than processes.

    Raises:
        InvalidInput: says how many processes there are.
    """
    _, ranks = place()
    if sequences < ranks:
        raise InvalidInput(
            f"{sequences} calibration sequences are fewer than the {ranks} processes; take at least one each"
        )


@contextmanager
def together() -> Iterator[None]:
    """Work that each process does by itself; a mistake of one ends it for all.

    Raises:
        InvalidInput: in every process, when any of them raised it.
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
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, None if mistake is None else str(mistake))
    first = next((sentence for sentence in said if sentence is not None), None)
    if first is not None:
        raise _Shared(first) from mistake


def sum_over_ranks(total: "Tensor") -> "Tensor":
    """A CPU tensor summed over all processes, in place."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def from_first(value: T) -> T:
    """The first process's value, in every process: none goes on before the first has it."""
    import torch.distributed as dist

    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def union(own: dict[str, T]) -> dict[str, T]:
    """The entries of all processes."""
    import torch.distributed as dist

    parts = [own] * place()[1]
    if dist.is_initialized():
        dist.all_gather_object(parts, own)
    return {name: value for part in parts for name, value in part.items()}


def gather_rows(own: "Tensor", rows: int) -> "Tensor":
    """CPU rows of all processes, of which number r has rows r, r + R, r + 2R, ...

    Of R processes, in their order.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return own
    parts: list[Tensor] = [own] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    whole = own.new_empty(rows, *own.shape[1:])
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole
