"""Work that two processes of one group do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing import spawn

from kvfold.core.console import leave


def do_as_pair(work: Callable[..., None], directory: Path, *arguments: Any) -> None:
    """Do `work(rank, *arguments)` in two processes that meet in `directory`.

    What one raises is raised here.
    """
    spawn(_join, (work, str(directory / "store"), arguments), nprocs=2)


def _join(rank: int, work: Callable[..., None], store: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    work(rank, *arguments)
    distributed.destroy_process_group()
    leave()
