"""The fused kernel of latent attention against plain products and the memory's speed: `python -m
benchmarks.kernels`.

With a GPU: one decoded token, times by replaying CUDA graphs, medians of rounds in turn, over as many layers'
caches as the processor's own cache cannot hold, next to FlashAttention over the source's keys and values.
Without one the kernel is compiled for GPUs all the same, for what a compiler can tell: registers that did not
suffice (spilled bytes) and shared memory (a processor of an A100 has 163 KB, of an H100 227, of most others
99). Both are of bfloat16 and 32 rows, as of 32 heads and one token.
"""

import json
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvfold.core.console import Command
from kvfold.core.errors import InvalidInput
from kvfold.models.shipped import kernels_kvfold as kernels

from .machine import save

HEADS, HEAD = 32, 128  # of the source: Llama-2-7B's
WIDTHS = ((512, 64), (384, 64), (256, 32), (1024, 64))  # rank and rotary width
CELLS = tuple((context, batch) for context in (8192, 32768, 131072) for batch in (1, 8, 64))
CAPABILITIES = (80, 86, 90)
FRESH = 2**28  # bytes of cache that one round reads: several times the largest second-level cache
ROUNDS, REPLAYS = 7, 10


def compiled(capability: int, rank: int, rope: int, masked: bool, tile: int, stages: int) -> dict[str, Any]:
    """Return the compiler's report on the kernel for one generation of GPUs, which need not be present."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    width = max(16, triton.next_power_of_2(rank))
    rows = kernels._block(HEADS, 2 * width)
    constants = {
        "C": rank,
        "C2": width,
        "R": rope,
        "R2": max(16, triton.next_power_of_2(rope)),
        "ROWS": rows,
        "TILE": tile,
    }
    constants["MASK"] = int(masked)
    pointers = {
        "mask": "*i1" if masked else "*bf16",
        "ends": "*i32",
        "sums": "*fp32",
        "logarithms": "*fp32",
        "scale": "fp32",
    }
    pointers |= dict.fromkeys(("query", "turned", "latent", "rope"), "*bf16")
    names = kernels._split_sums.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    aligned = ("query", "turned", "latent", "rope", "sums", "latent_B", "latent_S", "rope_B", "rope_S")
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(
        kernels._split_sums,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        attributes,
    )
    options = {"num_warps": kernels._warps(rows, width), "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    found = {
        "capability": capability,
        "rank": rank,
        "rope": rope,
        "masked": masked,
        "tile": tile,
        "stages": stages,
    }
    reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return found | {"shared_bytes": made.metadata.shared, **_resources(made.asm["cubin"], reader)}


def _resources(binary: bytes, reader: Path) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, where goes what they do not hold."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(reader), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {"registers": r"REG:(\d+)", "spilled_bytes": r"STACK:(\d+)"}
    return {name: int(found[1]) for name, pattern in numbers.items() if (found := re.search(pattern, said))}


def replayed(call: Callable[[], Any]) -> Callable[[], float]:
    """Return a function that replays a recorded graph of `call` and returns its milliseconds.

    The function keeps `call`: a graph does not keep the tensors that it reads, and the next recording returns
    to the driver what nothing keeps.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def run(_reads: Callable[[], Any] = call) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / REPLAYS

    return run


def called(call: Callable[[], Any]) -> Callable[[], float]:
    """Return a function that calls `call` once on a CPU and returns its milliseconds."""

    def run() -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    return run


def flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention by torch's FlashAttention, which is for GPUs only; by what there is on a CPU."""
    if not query.is_cuda:
        return scaled_dot_product_attention(query, key, value)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(query, key, value)


def source_calls(
    batch: int, context: int, heads: int, groups: int, fresh: int, options: dict[str, Any]
) -> tuple[Callable[[], Any], int, int]:
    """Return attention to as many layers' caches as a round reads, their number, and a layer's bytes.

    The query heads of a group are rows that attend to the same keys: without a mask it is the same function,
    and the cache is read once.
    """
    size = 2 * batch * groups * context * HEAD * 2
    layers = max(1, fresh // size)
    query = torch.randn(batch, groups, heads // groups, HEAD, **options)
    caches = [
        tuple(torch.randn(batch, groups, context, HEAD, **options) for _ in range(2)) for _ in range(layers)
    ]
    return lambda: [flash(query, *cache) for cache in caches], layers, size


@torch.no_grad()
def measured(
    rank: int, rope: int, context: int, batch: int, *, device: str = "cuda", heads: int = HEADS,
    fresh: int = FRESH,
) -> dict[str, Any]:  # fmt: skip
    """Return milliseconds per layer of the kernel, of plain products and of the source's FlashAttention.

    The source has as many key/value heads as heads (`mha`), or a quarter (`gqa`); one that does not fit
    into the GPU's memory is left out. Speeds are in bytes of cache; shares are of a copy's speed, which
    counts bytes read and written.
    """
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    clock = replayed if device == "cuda" else called
    size = batch * context * (rank + rope) * 2
    layers = max(1, fresh // size)
    query = torch.randn(batch, heads, 1, rank, **options)
    turned = torch.randn(batch, heads, 1, rope, **options)
    scale = (HEAD + rope) ** -0.5
    caches = [
        (torch.randn(batch, context, rank, **options), torch.randn(batch, context, rope, **options))
        for _ in range(layers)
    ]
    copied = torch.randn(fresh // 2, **options), torch.empty(fresh // 2, **options)
    runs = {"copy": clock(lambda: copied[1].copy_(copied[0]))}
    if device == "cuda":
        runs["fused"] = clock(
            lambda: [kernels.latent_sums(query, turned, *cache, None, scale) for cache in caches]
        )
    runs["plain"] = clock(lambda: [kernels.plain(query, turned, *cache, None, scale) for cache in caches])
    counts = {"fused": (layers, size), "plain": (layers, size)}
    for name, groups in (("gqa", heads // 4), ("mha", heads)):
        need = max(fresh, 2 * batch * groups * context * HEAD * 2)
        if device == "cuda" and need > 0.9 * torch.cuda.mem_get_info()[0]:
            continue
        call, *counts[name] = source_calls(batch, context, heads, groups, fresh, options)  # type: ignore[assignment]
        runs[name] = clock(call)
    taken = [{name: run() for name, run in runs.items()} for _ in range(ROUNDS)]
    found = {name: statistics.median(one[name] for one in taken) for name in runs}
    spread = {name: max(one[name] for one in taken) / min(one[name] for one in taken) for name in runs}
    copy_speed = 2 * fresh / found["copy"] / 1e6
    timed = {name: count for name, count in counts.items() if name in runs}
    speeds = {name: count * bytes_ / found[name] / 1e6 for name, (count, bytes_) in timed.items()}
    return {
        "rank": rank, "rope": rope, "context": context, "batch": batch, "heads": heads,
        "tile_and_stages": kernels._chosen.get(_key(query, rank, rope, heads)),
        "bytes_per_token": {name: bytes_ // (batch * context) for name, (_, bytes_) in timed.items()},
        "ms_per_layer": {name: found[name] / count for name, (count, _) in timed.items()},
        "cache_gb_per_s": speeds, "copy_gb_per_s": copy_speed,
        "share_of_copy": {name: speed / copy_speed for name, speed in speeds.items()},
        "slowest_over_fastest_round": spread,
    }  # fmt: skip


@torch.no_grad()
def tiled(
    rank: int, rope: int, context: int, batch: int, tile: int, stages: int, heads: int, fresh: int
) -> dict[str, Any]:
    """Return milliseconds per layer of the kernel with one choice of latents per tile and tiles on their way.

    The first of `kernels_kvfold.TILES` should be the fastest that cards have room for; GPU only. As many
    layers' caches are read as make `fresh` bytes, so that none comes from the processor's own cache.
    """
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    query, turned = (torch.randn(batch, heads, 1, width, **options) for width in (rank, rope))
    layers = max(1, fresh // (batch * context * (rank + rope) * 2))
    caches = [
        tuple(torch.randn(batch, context, width, **options) for width in (rank, rope)) for _ in range(layers)
    ]
    how = {"tile": tile, "stages": stages, "processors": kernels._processors(query.device)}
    scale = (HEAD + rope) ** -0.5
    run = replayed(lambda: [kernels.fused(query, turned, *cache, None, scale, **how) for cache in caches])
    return {"tile": tile, "stages": stages, "ms": statistics.median(run() for _ in range(ROUNDS)) / layers}


def _key(query: Tensor, rank: int, rope: int, rows: int, mask: Tensor | None = None) -> tuple[Any, ...]:
    """Return the key under which the kernel keeps its choice of tiles."""
    return query.device, query.dtype, rank, rope, rows <= 16, None if mask is None else mask.dtype


@torch.no_grad()
def agreement(
    rank: int, rope: int, heads: int, length: int, mask: str, dtype: torch.dtype, device: str = "cuda"
) -> dict[str, Any]:
    """Compare the kernel with plain products in float64.

    Args:
        rank: of the latents.
        rope: rotary width.
        heads: of the queries.
        length: new tokens.
        mask: `none`, `boolean` or `added`; each row sees the first of 777 latents, and others at random.
        dtype: of all tensors.
        device: `cuda`; `cpu` compares plain products of that dtype instead, for tests.

    Returns:
        The relative error, the tolerance of the kernel's first use, the tiles chosen (null: it is not used)
        and whether it passes.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    query, turned = normal(2, heads, length, rank), normal(2, heads, length, rope)
    latent, key = normal(2, 777, rank), normal(2, 777, rope)
    kept = torch.rand(2, 1, length, 777, generator=generator, device=device) > 0.3
    kept[..., 0] = True
    added = torch.zeros(kept.shape, dtype=dtype, device=device).masked_fill(~kept, torch.finfo(dtype).min)
    given = {"none": None, "boolean": kept, "added": added}[mask]
    scale = (rank + rope) ** -0.5
    compute = kernels.latent_sums if device == "cuda" else kernels.plain
    found = compute(query, turned, latent, key, given, scale)
    precise = [one.double() for one in (query, turned, latent, key)]
    expected = kernels.plain(*precise, None if given is None else kept, scale)  # type: ignore[arg-type]
    error = float((found.double() - expected).norm() / expected.norm())
    chosen = kernels._chosen.get(_key(query, rank, rope, heads * length, given))
    tolerance = kernels.TOLERANCE[dtype]
    passes = error <= tolerance and (chosen is not None or device == "cpu")  # not, of NaN
    return {
        "rank": rank, "rope": rope, "rows": heads * length, "mask": mask,
        "dtype": str(dtype).removeprefix("torch."), "error": error, "tolerance": tolerance,
        "tile_and_stages": chosen, "passes": passes,
    }  # fmt: skip


@click.command(cls=Command)
@click.option(
    "--rank",
    "ranks",
    type=click.Choice([str(rank) for rank, _ in WIDTHS]),
    multiple=True,
    help="Only these widths.",
)
@click.option("--compile", "compile_only", is_flag=True, help="Only compile, as where there is no GPU.")
@click.option("--save", "saved", is_flag=True, help="Keep the rows in benchmarks/results/kernels-*.json.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(ranks: tuple[str, ...], compile_only: bool, saved: bool, as_json: bool) -> None:
    """Print a row for each width."""
    if kernels.triton is None:
        raise InvalidInput(
            "Triton is not installed, so there is no kernel here; pip install 'kvfold[kernels]'"
        )
    chosen = [widths for widths in WIDTHS if not ranks or str(widths[0]) in ranks]
    if compile_only or not torch.cuda.is_available():
        name = "kernels-compiled"
        rows = [
            compiled(capability, *widths, masked, tile, stages)
            for capability in CAPABILITIES
            for widths in chosen
            for masked in (False, True)
            for tile, stages in kernels.TILES[2]
        ]
    else:
        name = f"kernels-{re.sub(r'[^a-z0-9]+', '-', torch.cuda.get_device_name().lower())}"
        rows = [measured(*widths, *cell) for widths in chosen for cell in CELLS]
    click.echo(json.dumps({"rows": rows}) if as_json else "\n".join(str(row) for row in rows))
    if saved:
        click.echo(f"saved in {save(name, {'rows': rows})}", err=True)


if __name__ == "__main__":
    main()
