"""Time and memory of taking statistics: `python -m benchmarks.statistics MODEL --tokens 24576`, MODEL a checkpoint or `300M`.

Whole and layer by layer, against one plain forward and backward pass (mean cross entropy, gradients of all weights, float32)
of the same model over the same tokens. Every run is a process of its own, so that its peak memory is its own; runs of the three
kinds alternate, and medians are kept. Seconds are of the passes, without loading.
"""

import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from kvfold.convert import layerwise, passes
from kvfold.convert.hub import resolve
from kvfold.convert.models import LayeredModel, load_model
from kvfold.convert.source import open_source
from kvfold.convert.study import BATCH, layout_of

from .convert_memory import generate
from .machine import save

KINDS = ("plain", "whole", "layerwise")


def run(kind: str, directory: Path, tokens: int, length: int) -> dict[str, float]:
    """Seconds and peak resident megabytes of one pass over random tokens, in this process."""
    source = open_source(directory)
    ids = torch.randint(source.config["vocab_size"], (tokens // length, length), generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"layout": layout_of(source), "batch_size": BATCH, "calibration": "random", "seed": 0}
    if kind == "layerwise":
        layered = LayeredModel(source.checkpoint, how["layout"].projections(0)["o"])
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as work:
            layerwise.collect(layered, ids, **how, work=Path(work))
    elif kind == "whole":
        model = load_model(directory)
        start = time.monotonic()
        passes.collect(model, ids, **how)
    else:
        start = plain(directory, ids)
    seconds = time.monotonic() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"seconds": seconds, "peak_mb": peak / 1e6}


def plain(directory: Path, ids: Tensor) -> float:
    """An ordinary pass, with transformers' default attention; returns when it began."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    start = time.monotonic()
    for ids_BT in ids.split(BATCH):
        model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()
    return start


@click.command()
@click.argument("model")
@click.option("--tokens", default=24576, show_default=True, help="Read in every run.")
@click.option("--length", default=256, show_default=True, help="Tokens of a sequence.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each kind.")
@click.option("--name", required=True, help="Results go to benchmarks/results/statistics-NAME.json.")
@click.option("--once", type=click.Choice(KINDS), hidden=True)
def main(model: str, tokens: int, length: int, repeats: int, name: str, once: str | None) -> None:
    """Print and save seconds per million tokens and peak memory of the three kinds of pass."""
    if once:
        click.echo(json.dumps(run(once, Path(model), tokens, length)))
        return
    with tempfile.TemporaryDirectory() as work:
        directory = made(model, Path(work)) if model.endswith("M") and not Path(model).exists() else resolve(model)
        command = [sys.executable, "-m", "benchmarks.statistics", str(directory), "--tokens", str(tokens)]
        command += ["--length", str(length), "--name", name, "--once"]
        runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for _ in range(repeats):
            for kind in KINDS:
                done = subprocess.run([*command, kind], check=True, stdout=subprocess.PIPE, text=True)
                runs[kind].append(json.loads(done.stdout.splitlines()[-1]))
        source = open_source(directory)
        parameters = sum(source.checkpoint[key].numel() for key in source.checkpoint)
    rows = {}
    for kind in KINDS:
        seconds = statistics.median(one["seconds"] for one in runs[kind]) / tokens * 1e6
        rows[kind] = {
            "seconds_per_million_tokens": round(seconds, 1),
            "peak_mb": round(statistics.median(one["peak_mb"] for one in runs[kind])),
        }
    for kind in KINDS[1:]:
        rows[kind]["times_plain"] = round(
            rows[kind]["seconds_per_million_tokens"] / rows["plain"]["seconds_per_million_tokens"], 2
        )
    size = {"parameters": parameters, "float32_mb": round(4 * parameters / 1e6), "layers": source.layers}
    taken = {"tokens": tokens, "length": length, "batch": BATCH, "repeats": repeats, "threads": torch.get_num_threads()}
    for kind, row in rows.items():
        click.echo(f"{kind:10} {row['seconds_per_million_tokens']:9.1f} s a million tokens  {row['peak_mb']:7.0f} MB peak")
    click.echo(f"saved in {save(f'statistics-{name}', {'model': model, **size, **taken, 'rows': rows, 'runs': runs})}")


def made(size: str, directory: Path) -> Path:
    """A random model of about so many million parameters."""
    # In a process of its own: a child's peak counts from what its parent held when it was forked.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(generate, (directory, int(size.removesuffix("M")) * 2e-3))
    return directory


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
