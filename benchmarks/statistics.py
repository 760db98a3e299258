"""Time and memory of taking statistics: `python -m benchmarks.statistics MODEL --tokens 24576`, MODEL a
checkpoint or `300M`.

Whole and layer by layer, against one plain forward and backward pass (mean cross entropy, gradients of all
weights, float32) of the same model over the same tokens. Every run is a process of its own, so that its peak
memory is its own; runs of the three kinds alternate, and medians are kept, also of the ratios within a round.
Seconds are of the passes: loading the whole model is not among them, while layer by layer every layer is read
twice on the way. Where other work shares the cores, CPU seconds tell.
"""

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch

from kvfold.convert.calibration import layerwise, passes
from kvfold.convert.calibration.study import batch_size, layout_of
from kvfold.convert.families.source import open_source
from kvfold.core.hub import resolve
from kvfold.core.system_calls import peak_resident_bytes
from kvfold.models.causal_lm import load_model
from kvfold.models.layered_model import LayeredModel

from .generated import generate
from .machine import save

KINDS = ("plain", "whole", "layerwise")


def run(kind: str, directory: Path, tokens: int, length: int) -> dict[str, float]:
    """Seconds and peak resident megabytes of one pass over random tokens, in this process."""
    source = open_source(directory)
    ids = torch.randint(
        source.config["vocab_size"], (tokens // length, length), generator=torch.Generator().manual_seed(0)
    )
    how: dict[str, Any] = {
        "layout": layout_of(source),
        "batch_size": batch_size(length),
        "calibration": "random",
        "seed": 0,
    }
    if kind == "layerwise":
        layered = LayeredModel(source.checkpoint)
        with measured() as cost, tempfile.TemporaryDirectory() as work:
            layerwise.collect(layered, ids, **how, work=Path(work))
    elif kind == "whole":
        model = load_model(directory)
        with measured() as cost:
            passes.collect(model, ids, **how)
    else:
        model = load_plain(directory)
        with measured() as cost:
            for ids_BT in ids.split(batch_size(length)):
                model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()
    return cost


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Wall and CPU seconds of a block, and the process's peak resident megabytes before it and in the end."""
    cost = {"before_mb": peak_mb()}
    start, cpu = time.monotonic(), time.process_time()
    yield cost
    cost |= {
        "seconds": time.monotonic() - start,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mb": peak_mb(),
    }


def peak_mb() -> float:
    """This process's peak resident megabytes so far."""
    return peak_resident_bytes() / 1e6


def load_plain(directory: Path) -> Any:
    """The model as somebody would train it, float32, with transformers' default attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, trust_remote_code=False
    ).train()


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
        directory = (
            made(model, Path(work)) if model.endswith("M") and not Path(model).exists() else resolve(model)
        )
        command = [sys.executable, "-m", "benchmarks.statistics", str(directory), "--tokens", str(tokens)]
        command += ["--length", str(length), "--name", name, "--once"]
        runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for _ in range(repeats):
            for kind in KINDS:
                done = subprocess.run([*command, kind], check=True, stdout=subprocess.PIPE, text=True)
                runs[kind].append(json.loads(done.stdout.splitlines()[-1]))
        source = open_source(directory)
        parameters = sum(source.checkpoint[key].numel() for key in source.checkpoint)
    rows = {kind: summarised(runs[kind], runs["plain"], tokens) for kind in KINDS}
    size = {"parameters": parameters, "float32_mb": round(4 * parameters / 1e6), "layers": source.layers}
    taken = {
        "tokens": tokens,
        "length": length,
        "batch": batch_size(length),
        "repeats": repeats,
        "threads": torch.get_num_threads(),
    }
    for kind, row in rows.items():
        said = (
            f"{row['seconds_per_million_tokens']:9.1f} s, {row['cpu_seconds_per_million_tokens']:9.1f} "
            f"s CPU a million"
        )
        click.echo(
            f"{kind:10} {said} {row['peak_mb']:7.0f} MB peak, {row['cpu_times_plain']:.2f} times plain"
        )
    click.echo(
        f"saved in "
        f"{save(f'statistics-{name}', {'model': model, **size, **taken, 'rows': rows, 'runs': runs})}"
    )


def summarised(runs: list[dict[str, float]], plain: list[dict[str, float]], tokens: int) -> dict[str, float]:
    """Medians of some runs, and of their ratios to the plain runs of the same rounds."""
    row: dict[str, float] = {"peak_mb": round(statistics.median(one["peak_mb"] for one in runs))}
    for key, name in (("seconds", ""), ("cpu_seconds", "cpu_")):
        row[f"{key}_per_million_tokens"] = round(
            statistics.median(one[key] for one in runs) / tokens * 1e6, 1
        )
        ratios = [one[key] / other[key] for one, other in zip(runs, plain, strict=True)]
        row[f"{name}times_plain"] = round(statistics.median(ratios), 2)
    return row


def made(size: str, directory: Path) -> Path:
    """A random model of about so many million parameters."""
    # In a process of its own: a child's peak counts from what its parent held when it was forked.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(generate, (directory, int(size.removesuffix("M")) * 2e-3))
    return directory


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
