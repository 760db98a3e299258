"""The fused kernel of latent attention against plain products and the memory's speed: `python -m
benchmarks.kernels`.

With a GPU: one decoded token, times by replaying CUDA graphs, medians of rounds in turn, over as many layers'
caches as the processor's own cache cannot hold. Without one the kernel is compiled for GPUs all the same, for
what a compiler can tell: registers that did not suffice (spilled bytes) and shared memory (a processor of an
A100 has 163 KB, of an H100 227, of most others 99). Both are of bfloat16 and 32 rows, as of 32 heads and one
token.
"""

import json
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvfold.core.console import Command
from kvfold.core.errors import InvalidInput
from kvfold.models.shipped import kernels_kvfold as kernels

from .machine import save

HEADS, HEAD = 32, 128  # of the source: Llama-2-7B's
WIDTHS = ((512, 64), (384, 64), (256, 32), (1024, 64))  # rank and rotary width
CELLS = tuple((context, batch) for context in (8192, 32768) for batch in (1, 8))
CAPABILITIES = (80, 86, 90)
FRESH = 2**28  # bytes of cache that one round reads: several times the largest second-level cache
ROUNDS, REPLAYS = 7, 10


def compiled(capability: int, rank: int, rope: int, masked: bool, tile: int, stages: int) -> dict[str, Any]:
    """What the compiler says of the kernel for one generation of GPUs, which need not be there."""
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
    """A function that runs a recorded graph of `call` and returns its milliseconds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def run() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / REPLAYS

    return run


@torch.no_grad()
def measured(rank: int, rope: int, context: int, batch: int) -> dict[str, Any]:
    """Milliseconds a layer of the kernel, of plain products and of the source's attention.

    And the share of copying's speed.
    """
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    size = batch * context * (rank + rope) * 2
    layers = max(1, FRESH // size)
    query, turned = (
        torch.randn(batch, HEADS, 1, rank, **options),
        torch.randn(batch, HEADS, 1, rope, **options),
    )
    caches = [
        (torch.randn(batch, context, rank, **options), torch.randn(batch, context, rope, **options))
        for _ in range(layers)
    ]
    key, value = (torch.randn(batch, HEADS, context, HEAD, **options) for _ in range(2))
    copied = torch.randn(FRESH // 2, **options), torch.empty(FRESH // 2, **options)
    scale = (HEAD + rope) ** -0.5
    calls: dict[str, Callable[[], Any]] = {
        "fused": lambda: [kernels.latent_sums(query, turned, *cache, None, scale) for cache in caches],
        "plain": lambda: [kernels.plain(query, turned, *cache, None, scale) for cache in caches],
        "mha": lambda: scaled_dot_product_attention(query[..., :HEAD].contiguous(), key, value),
        "copy": lambda: copied[1].copy_(copied[0]),
    }
    runs = {name: replayed(call) for name, call in calls.items()}
    taken = [{name: run() for name, run in runs.items()} for _ in range(ROUNDS)]
    found = {name: statistics.median(one[name] for one in taken) for name in runs}
    speed = {name: layers * size / found[name] / 1e6 for name in ("fused", "plain")}
    chosen = kernels._chosen.get((query.device, query.dtype, rank, rope, False, None))
    return {
        "rank": rank, "rope": rope, "context": context, "batch": batch, "tile_and_stages": chosen,
        "ms_per_layer": {"fused": found["fused"] / layers, "plain": found["plain"] / layers,
                         "mha": found["mha"]},
        "cache_gb_per_s": speed, "copy_gb_per_s": 2 * FRESH / found["copy"] / 1e6,
        "share_of_copy": speed["fused"] * found["copy"] * 1e6 / (2 * FRESH),
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
