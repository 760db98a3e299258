"""Peak memory and time of converting generated checkpoints of several sizes: `python -m
benchmarks.convert_memory`.

A conversion runs as a process of its own; its peak resident set is what the operating system says of it.
Copying the same directory is timed as well, since conversion should cost little more than reading and
writing. 16 GB take 32 GB of disk.
"""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch

from kvfold.checkpoints.shards import ShardWriter, TensorSpec

from .machine import save

HIDDEN, HEAD, FEED_FORWARD, VOCABULARY = (
    2048,
    128,
    2.75,
    32000,
)  # the feed-forward width as a multiple of the hidden size
TARGETS = {
    "gqa-2 mean": ["--to", "gqa", "--kv-heads", "2", "--method", "mean"],
    "gqa-2 subspace": ["--to", "gqa", "--kv-heads", "2"],
    "mla 512+64": ["--to", "mla", "--rank", "512"],
}


def generate(directory: Path, gigabytes: float, *, hidden: int = HIDDEN, layers: int | None = None) -> int:
    """Write a random bfloat16 Llama of about that size, or of so many layers, tensor by tensor.

    Returns their number.
    """
    wide = int(FEED_FORWARD * hidden)
    layer = 4 * hidden * hidden + 3 * hidden * wide + 2 * hidden
    layers = layers or max(1, round((gigabytes * 1e9 / 2 - 2 * VOCABULARY * hidden) / layer))
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (VOCABULARY, hidden) for name in ("model.embed_tokens", "lm_head")
    }
    shapes["model.norm.weight"] = (hidden,)
    for number in range(layers):
        prefix = f"model.layers.{number}."
        shapes |= {f"{prefix}self_attn.{role}_proj.weight": (hidden, hidden) for role in "qkvo"}
        shapes |= {f"{prefix}mlp.{role}_proj.weight": (wide, hidden) for role in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (hidden, wide)}
        shapes |= {f"{prefix}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
    specs = {name: TensorSpec(torch.bfloat16, shape) for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(directory, specs, 10**9) as writer:
        for name, shape in shapes.items():
            writer.write(name, torch.randn(shape, generator=generator) * 0.02)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": hidden // HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return layers


def timed(command: list[str]) -> dict[str, float]:
    """Wall seconds, CPU seconds and peak resident megabytes of a command."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command} failed")
    cpu = usage.ru_utime + usage.ru_stime
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in kilobytes on Linux
    return {
        "seconds": round(time.monotonic() - start, 3),
        "cpu_seconds": round(cpu, 3),
        "peak_mb": round(usage.ru_maxrss * unit / 1e6),
    }


@click.command()
@click.option(
    "--gigabytes", "sizes", multiple=True, default=(1.0, 4.0, 16.0), show_default=True, help="Repeatable."
)
@click.option(
    "--target", "targets", type=click.Choice(list(TARGETS)), multiple=True, help="Repeatable; all by default."
)
@click.option("--jobs", default=1, show_default=True, help="Layers folded at once.")
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    help="Where to put the checkpoints; a temporary directory by default.",
)
@click.option("--json", "as_json", is_flag=True)
def main(
    sizes: tuple[float, ...], targets: tuple[str, ...], jobs: int, work: Path | None, as_json: bool
) -> None:
    """Convert generated checkpoints of several sizes, and copy them, each in a process of its own."""
    rows: list[dict[str, Any]] = []
    for gigabytes in sizes:
        with tempfile.TemporaryDirectory(dir=work) as name:
            for row in measure(Path(name), gigabytes, targets or tuple(TARGETS), jobs):
                rows.append(row)
                line = (
                    f"{row['gigabytes']:6.2f} GB, {row['layers']:3} layers, {row['what']:16} "
                    f"{row['seconds']:8.1f} s"
                )
                click.echo(
                    f"{line} {row['cpu_seconds']:8.1f} s CPU {row['peak_mb']:6.0f} MB peak", err=as_json
                )
    result = {
        "hidden_size": HIDDEN,
        "jobs": jobs,
        "rows": rows,
        "peak_of_largest_over_smallest": flatness(rows),
    }
    path = save("convert-memory", result)
    click.echo(json.dumps(result) if as_json else f"saved in {path}")


def measure(root: Path, gigabytes: float, targets: tuple[str, ...], jobs: int) -> Iterator[dict[str, Any]]:
    """Measure a copy and every conversion of a checkpoint of this size."""
    source, out = root / "source", root / "out"
    source.mkdir()
    # In a process of its own: a child's peak counts from what its parent held when it was forked.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        layers = pool.apply(generate, (source, gigabytes))
    size = {
        "gigabytes": round(sum(path.stat().st_size for path in source.iterdir()) / 1e9, 2),
        "layers": layers,
    }
    kvfold = [
        sys.executable,
        "-m",
        "kvfold",
        "convert",
        str(source),
        "--calibration",
        "none",
        "--jobs",
        str(jobs),
    ]
    commands = {"cp": ["cp", "-r", str(source), str(out)]}
    commands |= {target: [*kvfold, *TARGETS[target], "--out", str(out)] for target in targets}
    for what, command in commands.items():
        yield {**size, "what": what, **timed(command)}
        shutil.rmtree(out)


def flatness(rows: list[dict[str, Any]]) -> dict[str, float]:
    """For each target the peak at the largest size over that at the smallest."""
    peaks: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: float(row["gigabytes"])):
        peaks.setdefault(row["what"], []).append(row["peak_mb"])
    return {what: round(found[-1] / found[0], 3) for what, found in peaks.items() if what != "cp"}


if __name__ == "__main__":
    main()
