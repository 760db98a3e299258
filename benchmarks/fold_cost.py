"""Predicted against found cost of folds: `python -m benchmarks.fold_cost MODEL...`.

Each fold is predicted by `kvfold convert --dry-run` and then made by the same command, each in a process of
its own. Generated models (`hidden x layers`, such as 2048x2) have random weights and a tokenizer of numbers.
Folds are made on one thread, so that CPU seconds are the seconds of a machine that does nothing else.
"""

import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from kvfold.core.console import show_table

from .convert_memory import generate, timed
from .machine import RESULTS, save
from .resident import write_words


def measure(command: list[str], out: Path) -> dict[str, Any]:
    """Predict and make one fold; return both costs.

    Args:
        command: of `kvfold convert`, without its output.
        out: the output, which is removed.
    """
    dry = subprocess.run([*command, "--dry-run", "--json"], capture_output=True, check=True, text=True)
    predicted = json.loads(dry.stdout)["fold"]
    found = timed([*command, "--verify", "none", "--out", str(out)])
    shutil.rmtree(out)
    return {
        "predicted_seconds": predicted["seconds"],
        "found_cpu_seconds": found["cpu_seconds"],
        "time_ratio": round(predicted["seconds"] / found["cpu_seconds"], 2),
        "predicted_mb": round(predicted["peak_bytes"] / 1e6),
        "found_mb": found["peak_mb"],
        "memory_ratio": round(predicted["peak_bytes"] / 1e6 / found["peak_mb"], 2),
        "phases": predicted["phases"],
    }


@click.command()
@click.argument("models", nargs=-1, required=True)
@click.option(
    "--options", "given", multiple=True, default=("--to mla --kv-budget 25%",), show_default=True,
    help="Of kvfold convert; repeatable.",
)  # fmt: skip
@click.option("--update", is_flag=True, help="Keep the other rows of the results.")
@click.option("--work", type=click.Path(path_type=Path), help="Where generated models and outputs go.")
def main(models: tuple[str, ...], given: tuple[str, ...], update: bool, work: Path | None) -> None:
    """Print and save predicted and found seconds and memory of folds."""
    kept = RESULTS / "fold-cost.json"
    rows: dict[str, dict[str, Any]] = {}
    if update and kept.exists():
        rows = json.loads(kept.read_text(encoding="utf-8"))["rows"]
    with tempfile.TemporaryDirectory(dir=work) as name:
        for model in models:
            place, label = Path(model), Path(model).name
            if not place.exists():
                hidden, layers = map(int, model.split("x"))
                place = Path(name) / model
                place.mkdir()
                # In a process of its own: a child's peak counts from what its parent held when it was forked.
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    pool.apply(generate, (place, 0), {"hidden": hidden, "layers": layers})
                    pool.apply(write_words, (place, Path(name) / "text.txt", 1000))
            for options in given:
                command = [sys.executable, "-m", "kvfold", "convert", str(place), *shlex.split(options)]
                row = measure([*command, "--jobs", "1"], Path(name) / "out")
                rows[f"{label}, {options}"] = row
                click.echo(f"{label}, {options}: {row}", err=True)
                path = save("fold-cost", {"threads": os.environ.get("OMP_NUM_THREADS"), "rows": rows})
    columns = ("predicted_seconds", "found_cpu_seconds", "time_ratio", "predicted_mb", "found_mb")
    cells = [(label, *(str(row[column]) for column in columns)) for label, row in rows.items()]
    show_table("predicted and found", ("", *columns), cells)
    click.echo(f"saved in {path}")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
