"""Work that two processes of one group do."""

from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from kvfold.core.console import leave

from .warm_server import WarmServer

_SERVER = WarmServer([__name__, "pytest", "transformers.models.llama.modeling_llama", "datasets"])


def do_as_pair(work: Callable[..., None], directory: Path, *arguments: Any) -> None:
    """Do `work(rank, *arguments)` in two processes that meet in `directory`; fail if one fails."""
    processes = [_SERVER.start(_join, rank, work, str(directory / "store"), arguments) for rank in range(2)]
    while working := [process.sentinel for process in processes if process.exitcode is None]:
        wait(working)
        if any(process.exitcode for process in processes):  # the other would wait for it
            for process in processes:
                process.kill()
                process.join()
    assert [process.exitcode for process in processes] == [0, 0], "its traceback is on stderr"


def _join(rank: int, work: Callable[..., None], store: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    work(rank, *arguments)
    distributed.destroy_process_group()
    leave()
