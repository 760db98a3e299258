"""The kernel of latent attention: whether it is right, and how near it comes to the memory's speed.

The kernel against float64 at many widths, its speed against FlashAttention over the source's keys and values
(`benchmarks.kernels`), the choices of its tiles, and whole decoding steps with a static cache, eager and by
torch.compile, which records CUDA graphs. Then folds in transformers (`benchmarks.cuda_check`).
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator
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
from .rows import Row, Rows

ROWS = ((16, 1, "none"), (32, 4, "boolean"))  # heads, new tokens and mask, at every width
MORE = (
    (16, 1, "boolean"),
    (16, 1, "added"),
    (32, 4, "none"),
    (32, 4, "added"),
    (40, 3, "none"),
)  # at the first
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (  # ranks and rotary widths of correctness checks
    (512, 64), (16, 0), (24, 8), (64, 32), (128, 32), (192, 64), (256, 0), (256, 32), (384, 64),
    (576, 64), (768, 64), (1024, 64), (256, 256), (1024, 256),
)  # fmt: skip
TIMED = ((512, 64), (256, 64), (384, 64), (1024, 64))
CONTEXTS, BATCHES = (32768, 8192, 131072), (8, 1, 64)
TILES = ((64, 2), (64, 3), (32, 2), (32, 4), (32, 6), (16, 8))  # latents of a tile and tiles on their way
SHAPE = Shape(layers=4, heads=32, head_dim=128, rank=512, rope=64)
STEPS = 12  # timed, of each kind
KINDS = ("mha", "remote")


def kernel(rows: Rows, *, toy: bool) -> None:
    """Measure the rows of the part `kernel`, at toy size on the CPU, where the kernel itself is left out."""
    device, heads, fresh = ("cpu", 4, 2**12) if toy else ("cuda", 32, 2**28)
    widths, contexts = (((24, 8),), ((16, 2),)) if toy else (WIDTHS, ((32768, 8), (8192, 1)))
    for number, (rank, rope) in enumerate(widths):
        checks = [*product(ROWS, DTYPES[:1])]
        if number == 0:
            checks = [*product(ROWS, DTYPES), *product(MORE, DTYPES[:1])]
        for (some, length, mask), dtype in checks:
            label = f"agreement {rank}+{rope}, {some} x {length} rows, mask {mask}, {str(dtype)[6:]}"
            rows.attempt(label, partial(agreed, rank, rope, some, length, mask, dtype, device))
    cells = [(32, 8, 64, 2)]
    if not toy:
        cells = [(*width, context, batch) for width in TIMED for context in CONTEXTS for batch in BATCHES]
    for cell in cells:
        label = "speed {}+{}, {} tokens, batch {}".format(*cell)
        rows.attempt(label, partial(timed, cell, heads, fresh, device))
    for (tile, stages), (context, batch) in product(() if toy else TILES, contexts):
        label = f"tile {tile} x {stages}, {context} tokens, batch {batch}"
        rows.attempt(label, partial(benchmark.tiled, *TIMED[0], context, batch, tile, stages, heads, fresh))
    shape = Shape(layers=1, heads=2, head_dim=8, rank=8, rope=4) if toy else SHAPE
    for (context, batch), kind in product(contexts, KINDS):
        label = f"step {kind}, {context} tokens, batch {batch}"
        rows.attempt(label, partial(decoding_step, kind, shape, context, batch, device))
    with tempfile.TemporaryDirectory() as folder:
        for checked in FOLDS:
            name = f"{checked.source} {checked.options}"
            if not toy or "gpt2 --to mqa" in name:
                rows.attempt(f"check {name}", partial(check, Path(folder), name, device))


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


def timed(cell: tuple[int, int, int, int], heads: int, fresh: int, device: str) -> Row:
    """Return the row of `benchmarks.kernels.measured`.

    Raises:
        RuntimeError: plain products served in place of the kernel.
    """
    row = benchmark.measured(*cell, device=device, heads=heads, fresh=fresh)
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
