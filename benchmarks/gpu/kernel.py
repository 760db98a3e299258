"""The kernel of latent attention: whether it is right, and how near it comes to the memory's speed.

The width that engines take comes first: the kernel against float64, its speed against FlashAttention over the
source's keys and values (`benchmarks.kernels`), the choices of its tiles, and whole decoding steps with a
static cache, eager and by torch.compile, which records CUDA graphs. Then other widths, and folds in
transformers (`benchmarks.cuda_check`), which take longest.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.models.caches import cache_argument

from .. import kernels as benchmark
from ..cuda_check import implementations, run
from ..decode_models import Shape, build, fill
from ..folds import FOLDS, make_folds
from .ledger import Ledger, Row
from .sizes import Sizes

ROWS = ((16, 1, "none"), (32, 4, "boolean"))  # heads, new tokens and mask, at every width
MORE = (
    (16, 1, "boolean"),
    (16, 1, "added"),
    (32, 4, "none"),
    (32, 4, "added"),
    (40, 3, "none"),
)  # at the first
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STEPS = 12  # timed, of each kind
KINDS = ("mha", "remote")


def kernel(ledger: Ledger, sizes: Sizes, device: str) -> None:
    """Measure the rows of the part `kernel`.

    Args:
        ledger: of the part.
        sizes: of the day.
        device: `cuda` or `cpu`, where the kernel itself is left out.
    """
    first = sizes.speeds[0][:2]
    _agreements(ledger, sizes.agreements[:1], ROWS, DTYPES, device)
    _agreements(ledger, sizes.agreements[:1], MORE, DTYPES[:1], device)
    _speeds(ledger, [cell for cell in sizes.speeds if cell[:2] == first], sizes, device)
    for tile, stages in sizes.tiles:
        for context, batch in sizes.steps:
            label = f"tile {tile} x {stages}, {context} tokens, batch {batch}"
            given = (*first, context, batch, tile, stages, sizes.heads, sizes.fresh)
            ledger.attempt(label, partial(benchmark.tiled, *given))
    shape, needs = Shape(**sizes.step_shape), 30.0 if device == "cuda" else 0.0
    for context, batch in sizes.steps:
        for kind in KINDS:
            label = f"step {kind}, {context} tokens, batch {batch}"
            ledger.attempt(label, partial(decoding_step, kind, shape, context, batch, device), needs)
    _agreements(ledger, sizes.agreements[1:], ROWS, DTYPES[:1], device)
    _speeds(ledger, [cell for cell in sizes.speeds if cell[:2] != first], sizes, device)
    with tempfile.TemporaryDirectory() as folder:
        for checked in FOLDS:
            name = f"{checked.source} {checked.options}"
            if sizes.checks in name:
                ledger.attempt(f"check {name}", partial(check, Path(folder), name, device))


def _agreements(
    ledger: Ledger,
    widths: Iterable[tuple[int, int]],
    rows: Iterable[tuple[int, int, str]],
    dtypes: Iterable[torch.dtype],
    device: str,
) -> None:
    """Compare the kernel with float64 at ranks and rotary widths, rows and dtypes."""
    for (rank, rope), (heads, length, mask), dtype in product(widths, rows, dtypes):
        label = f"agreement {rank}+{rope}, {heads} x {length} rows, mask {mask}, {str(dtype)[6:]}"
        ledger.attempt(label, partial(agreed, rank, rope, heads, length, mask, dtype, device))


def _speeds(ledger: Ledger, cells: Iterable[tuple[int, int, int, int]], sizes: Sizes, device: str) -> None:
    for cell in cells:
        ledger.attempt("speed {}+{}, {} tokens, batch {}".format(*cell), partial(timed, cell, sizes, device))


def check(folder: Path, name: str, device: str) -> Row:
    """Return the row of `benchmarks.cuda_check` for one fold.

    Raises:
        RuntimeError: the fold is wrong.
    """
    ((made, source, out),) = [
        found for found in make_folds(folder, name) if f"{found[0].source} {found[0].options}" == name
    ]
    row = run(made, source, out, device, implementations(device))
    if row["failures"]:
        raise RuntimeError("; ".join(row["failures"]))
    return row


def agreed(*given: Any) -> Row:
    """Return the row of `benchmarks.kernels.agreement`.

    Raises:
        RuntimeError: the kernel does not agree, or is not used.
    """
    row = benchmark.agreement(*given)
    if not row["passes"]:
        raise RuntimeError(
            f"error {row['error']:.1e}, allowed {row['tolerance']:.1e}, tiles {row['tile_and_stages']}"
        )
    return row


def timed(cell: tuple[int, int, int, int], sizes: Sizes, device: str) -> Row:
    """Return the row of `benchmarks.kernels.measured`.

    Raises:
        RuntimeError: plain products served in place of the kernel.
    """
    row = benchmark.measured(*cell, device=device, heads=sizes.heads, fresh=sizes.fresh)
    if device == "cuda" and row["tile_and_stages"] is None:
        raise RuntimeError("the kernel was not used; the warning above says why")
    return row


@torch.no_grad()
def decoding_step(kind: str, shape: Shape, context: int, batch: int, device: str) -> Row:
    """Return milliseconds of a decoding step over a static cache, eager and compiled.

    Args:
        kind: of `benchmarks.decode_models.KINDS`.
        shape: of the model.
        context: tokens that are cached.
        batch: sequences.
        device: `cuda`, where torch.compile records CUDA graphs, or `cpu`, where it only traces.
    """
    from transformers import StaticCache

    model = build((kind,), shape, torch.bfloat16, device)[kind]
    cache = StaticCache(config=model.config, max_cache_len=context + 8)
    fill(cache, kind, shape, batch, context, torch.bfloat16, device)
    ids_B1 = torch.zeros(batch, 1, dtype=torch.long, device=device)
    position_B1 = torch.full((batch, 1), context, device=device)

    named = {cache_argument(model): cache}

    def step(forward: Callable[..., Any]) -> Tensor:
        for layer in cache.layers:
            # Every step writes the same place, so that none is beyond the end.
            layer.cumulative_length.fill_(context)
        logits: Tensor = forward(input_ids=ids_B1, position_ids=position_B1, use_cache=True, **named).logits
        return logits

    eager_BTV = step(model).float().clone()
    row: Row = {"kind": kind, "context": context, "batch": batch, **vars(shape)}
    row["eager_ms"] = _median_ms(lambda: step(model), device)
    with _fresh_compiler():
        options = {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "eager"}
        compiled = torch.compile(model, dynamic=False, **options)
        for _ in range(3):  # traces, records, replays
            found_BTV = step(compiled).float().clone()
        row["compiled_ms"] = _median_ms(lambda: step(compiled), device)
        row["cudagraph_skips"] = _cudagraph_skips() if device == "cuda" else None
    row["logits_apart"] = float((found_BTV - eager_BTV).norm() / eager_BTV.norm())
    if not row["logits_apart"] < 0.05:
        raise RuntimeError(f"compiled logits are {row['logits_apart']:.1e} from eager ones")
    return row


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    """Forget compiled code and recorded graphs before and after."""
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def _cudagraph_skips() -> int:
    """Return how often torch.compile left out CUDA graphs; 0: all steps were replayed."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def _median_ms(call: Callable[[], Any], device: str) -> float:
    if device != "cuda":
        return statistics.median(benchmark.called(call)() for _ in range(3))
    taken = []
    for _ in range(STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        taken.append(float(start.elapsed_time(end)))
    return statistics.median(taken)
