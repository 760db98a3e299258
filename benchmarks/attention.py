"""Attention of latent students on a CPU: `python -m benchmarks.attention MODEL --name NAME`.

MODEL is folded to stock MLA at a quarter of its cache, by its weights alone. Its layers go forwards and
backwards over windows of several lengths, as many tokens each time, once with transformers' `sdpa` and once
with `level_attention`. The kinds take turns, each in a process of its own on one thread; medians of CPU
seconds, the most memory above the loaded model, and how far the gradients are apart.
"""

import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file, save_file

from kvfold.convert.formats import to_trainable
from kvfold.convert.request import FoldRequest
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.console import show_table
from kvfold.core.hub import resolve
from kvfold.eval.options import Options
from kvfold.models.causal_lm import load
from kvfold.models.shipped.layers_kvfold import LEVEL

from .machine import save
from .sharded import peak_above

KINDS = ("sdpa", LEVEL)


def step(directory: Path, kind: str, windows: int, length: int, gradients: Path) -> tuple[float, float]:
    """CPU seconds of one pass and the peak in MB; the gradients go to a file."""
    torch.set_num_threads(1)
    model = load(directory, Options(device="cpu", dtype="float32")).model
    to_trainable(model)
    model.set_attn_implementation(kind)
    ids = torch.randint(
        model.config.vocab_size, (windows, length), generator=torch.Generator().manual_seed(0)
    )
    with peak_above() as peak:
        start = time.process_time()
        model.model(input_ids=ids, use_cache=False).last_hidden_state.square().mean().backward()
        seconds = time.process_time() - start
    whole = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    save_file({"gradients": whole}, gradients)
    return seconds, peak[0] / 1e6


def compare(directory: Path, windows: int, length: int, rounds: int, work: Path) -> dict[str, Any]:
    """One line of the table."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for _ in range(rounds):
            for kind in KINDS:
                found[kind].append(pool.apply(step, (directory, kind, windows, length, work / kind)))
    line: dict[str, Any] = {"windows": windows, "length": length}
    for kind, costs in found.items():
        seconds, peaks = zip(*costs, strict=True)
        line[kind] = {
            "cpu_seconds": round(statistics.median(seconds), 3),
            "peak_mb": round(statistics.median(peaks)),
        }
    plain, ours = (load_file(work / kind)["gradients"] for kind in KINDS)
    line["gradients_apart"] = float((ours - plain).norm() / plain.norm())
    return line


@click.command()
@click.argument("model")
@click.option("--tokens", default=2048, show_default=True, help="Of a pass.")
@click.option("--lengths", default="256,1024,2048", show_default=True, help="Of a window.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--name", required=True, help="Results go to benchmarks/results/attention-NAME.json.")
def main(model: str, tokens: int, lengths: str, rounds: int, name: str) -> None:
    """Measure, print and save."""
    with tempfile.TemporaryDirectory() as work:
        fold = Path(work) / "fold"
        rewrite(make_plan(resolve(model), FoldRequest(model=model, to="mla", kv_budget="25%")), fold)
        lines = [
            compare(fold, tokens // int(length), int(length), rounds, Path(work))
            for length in lengths.split(",")
        ]
    cells = [
        (
            f"{line['windows']} x {line['length']}",
            *(str(line[kind][cost]) for cost in ("cpu_seconds", "peak_mb") for kind in KINDS),
        )
        for line in lines
    ]
    show_table(name, ("windows", "CPU s, sdpa", "level", "peak MB, sdpa", "level"), cells)
    click.echo(f"saved in {save(f'attention-{name}', {'model': model, 'lines': lines})}")


if __name__ == "__main__":
    main()
