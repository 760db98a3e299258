"""Rates of this machine, by a micro-benchmark of about a second."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention

SECONDS = 0.15  # of each measurement
_SIDES = 256, 1024  # of the decomposition, at least and at most
_FEW = 48  # rows of the products of decoding
_MANY = 512  # rows of the products of a pass
_TOKENS, _WIDTH = 256, 32  # of attention


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of a machine.

    Attributes:
        products: FLOP per second of float32 products with many rows, on all threads.
        decoding: the same with few rows.
        single: the same with many rows, on one thread.
        mixing: FLOP per second of fused causal attention, counted over half of all pairs, on one thread.
        double: FLOP per second of float64 products, on one thread.
        decomposition: n³ per second of the decomposition of a symmetric matrix of n rows, on one thread.
        stream: bytes per second that an elementwise function reads and writes, on one thread.
        call: seconds of a small operation, mostly of Python's.
        threads: of torch.
    """

    products: float
    decoding: float
    single: float
    mixing: float
    double: float
    decomposition: float
    stream: float
    call: float
    threads: int

    def of_calls(self) -> "Rates":
        """Return the same rates with all but small operations infinitely fast."""
        free = math.inf
        return replace(
            self, products=free, decoding=free, single=free, mixing=free, double=free, decomposition=free,
            stream=free,
        )  # fmt: skip


@cache
def measure_rates(hidden: int) -> Rates:
    """Return the rates of this machine's CPU, measured once per process.

    Args:
        hidden: the hidden size of the source, since small products are slower.
    """
    side = max(64, min(hidden, 2048))
    generator = torch.Generator().manual_seed(0)
    weight_DD = torch.randn(side, side, generator=generator)
    many_XD, few_XD = (torch.randn(rows, side, generator=generator) for rows in (_MANY, _FEW))
    threads = torch.get_num_threads()
    products = 2 * _MANY * side**2 / _seconds(lambda: many_XD @ weight_DD)
    decoding = 2 * _FEW * side**2 / _seconds(lambda: few_XD @ weight_DD)
    torch.set_num_threads(1)
    try:
        single = products if threads == 1 else 2 * _MANY * side**2 / _seconds(lambda: many_XD @ weight_DD)
        heads_BNTH = torch.randn(1, 8, _TOKENS, _WIDTH, generator=generator)
        mixing = (
            2
            * heads_BNTH.numel()
            * _TOKENS
            / _seconds(
                lambda: scaled_dot_product_attention(heads_BNTH, heads_BNTH, heads_BNTH, is_causal=True)
            )
        )
        narrow_DD = weight_DD[: min(side, 512), : min(side, 512)].double()
        double = 2 * len(narrow_DD) ** 3 / _seconds(lambda: narrow_DD @ narrow_DD)
        # A number of a larger matrix takes less time: at 1,024 rows half of that at 256.
        rows = max(_SIDES[0], min(hidden // 2, _SIDES[1]))
        square_SS = torch.randn(rows, rows, generator=generator, dtype=torch.float64)
        square_SS = square_SS @ square_SS.mT
        decomposition = rows**3 / _seconds(lambda: torch.linalg.eigh(square_SS))
        long_X = torch.randn(2**22, generator=generator)
        stream = 2 * long_X.nbytes / _seconds(lambda: long_X.mul(2.0))
        small_X = torch.randn(64, generator=generator)
        call = _seconds(lambda: small_X.mul(2.0), 200)
    finally:
        torch.set_num_threads(threads)
    return Rates(
        products=products,
        decoding=decoding,
        single=single,
        mixing=mixing,
        double=double,
        decomposition=decomposition,
        stream=stream,
        call=call,
        threads=threads,
    )


def _seconds(act: Callable[[], object], times: int = 1) -> float:
    """Return the median time of an operation.

    On one thread it is CPU time, which other processes of a busy machine do not count into.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    act()
    # On the same clock: the first calls are slow, and a busy machine would end the time before others.
    found, end = list[float](), clock() + SECONDS
    while not found or clock() < end:
        start = clock()
        for _ in range(times):
            act()
        found.append((clock() - start) / times)
    return max(median(found), 1e-9)
