"""Rates of this machine, measured in a fraction of a second."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median

import torch

_SECONDS = 0.08  # of each measurement
_ROWS = 512  # of the products
_SIDES = 256, 1024  # of the decomposition, at least and at most


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one thread of a machine.

    Attributes:
        products: FLOP per second of float32 products with many rows.
        decomposition: n³ per second of the decomposition of a symmetric float64 matrix of n rows.
        stream: bytes per second that an elementwise function reads and writes.
        call: seconds of a small operation, mostly of Python's.
        threads: of torch.
    """

    products: float
    decomposition: float
    stream: float
    call: float
    threads: int


@cache
def measure_rates(hidden: int) -> Rates:
    """Return the rates of this machine's CPU, measured once per process.

    Small products are slower, so the source's hidden size matters.
    """
    side, threads = max(64, min(hidden, 2048)), torch.get_num_threads()
    draw = torch.Generator().manual_seed(0)
    rows_XD, weight_DD = (torch.randn(rows, side, generator=draw) for rows in (_ROWS, side))
    # A number of a larger matrix takes less time: at 1,024 rows half of that at 256.
    rows = max(_SIDES[0], min(hidden // 2, _SIDES[1]))
    square_SS = torch.randn(rows, rows, generator=draw, dtype=torch.float64)
    square_SS = square_SS @ square_SS.mT
    long_X, short_X = torch.randn(2**22, generator=draw), torch.randn(64, generator=draw)
    torch.set_num_threads(1)
    try:
        return Rates(
            products=2 * _ROWS * side**2 / _seconds(lambda: rows_XD @ weight_DD),
            decomposition=rows**3 / _seconds(lambda: torch.linalg.eigh(square_SS)),
            stream=2 * long_X.nbytes / _seconds(lambda: long_X.mul(2.0)),
            call=_seconds(lambda: [short_X.mul(2.0) for _ in range(200)]) / 200,
            threads=threads,
        )
    finally:
        torch.set_num_threads(threads)


def _seconds(act: Callable[[], object]) -> float:
    """Return the median CPU time of an operation; other processes do not count into it."""
    act()
    found, end = list[float](), time.process_time() + _SECONDS
    while not found or time.process_time() < end:
        start = time.process_time()
        act()
        found.append(time.process_time() - start)
    return max(median(found), 1e-9)
