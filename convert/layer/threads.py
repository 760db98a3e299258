"""Threads that fold layers side by side."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch

# The remedy where memory is full while layers are folded.
FEWER = (
    "fold fewer layers at once with --jobs 1, or measure them on fewer or shorter sequences with --sequences "
    "or --length"
)


@contextmanager
def fold_threads(jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Open a pool of threads that compute on one core each.

    When an error ends the block, units that have not begun are cancelled.
    """
    usual = torch.get_num_threads()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    if device is not None and jobs > 1:
        # The first decomposition on a GPU loads a library, which torch refuses to do in two threads at once.
        with suppress(RuntimeError):  # where the GPU is full, layers that need it say so
            torch.linalg.inv(torch.ones(1, 1, device="cuda"))

    def prepare() -> None:
        torch.set_num_threads(1)
        if device is not None:
            torch.cuda.set_device(device)  # a new thread's is the first one

    pool = ThreadPoolExecutor(jobs, thread_name_prefix="fold", initializer=prepare)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(usual)
