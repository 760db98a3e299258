"""What a distilled output keeps of the training: `python -m benchmarks.saved_students FOLD --text FILE --name
NAME`.

Trains a fold once, as `kvfold distill FOLD` does but for `--set`, and writes its weights in three ways: in
float32, rounded to the nearest number of the fold's dtype, and as kvfold rounds them. All three are evaluated
like the fold, on the same windows. A row says how many nats each loses to the source, and which share of the
weights that training moved were rounded back.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

import kvfold
from kvfold.core.console import show_table
from kvfold.distill.stages import student

from .machine import save

Weights = dict[str, Tensor]


def trained(fold: Path, work: Path, settings: dict[str, Any]) -> tuple[Path, Weights]:
    """Train a fold and return its output, and what was written before it was rounded, float32."""
    whole: Weights = {}
    round_fairly = student.round_fairly

    def keep(weight: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        whole[name] = weight.detach().float().clone()
        return round_fairly(weight, dtype, name)

    student.round_fairly = keep
    try:
        run = kvfold.train(str(fold), settings={**settings, "output": str(work / "fair")})
    finally:
        student.round_fairly = round_fairly
    return run.directory, whole


def variant(output: Path, weights: Weights, place: Path) -> Path:
    """Write an output again with other weights, in their dtype."""
    shutil.copytree(output, place, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((place / "config.json").read_text())
    config["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    (place / "config.json").write_text(json.dumps(config))
    return place


def taken_back(start: Weights, whole: Weights, written: Weights) -> float:
    """Return the share of the weights that training moved which were written as they had been."""
    back = moved = 0
    for name in whole.keys() & start.keys():
        changed = whole[name] != start[name].float()
        moved += int(changed.sum())
        back += int((changed & (written[name] == start[name])).sum())
    return back / moved


def measure(fold: Path, text: str, work: Path, settings: dict[str, Any], **windows: int) -> dict[str, Any]:
    """Return a row: nats that the fold and each way to write its student lose, and shares rounded back."""
    output, whole = trained(fold, work, settings)
    start, fair = load_file(fold / "model.safetensors"), load_file(output / "model.safetensors")
    nearest = {name: weight.to(fair[name].dtype) for name, weight in whole.items()}
    places = {
        "fold": fold,
        "float32": variant(output, whole, work / "float32"),
        "nearest": variant(output, nearest, work / "nearest"),
        "fair": output,
    }
    lost = {}
    for label, place in places.items():
        found = kvfold.evaluate(place, text=text, trust_remote_code=True, **windows)
        lost[label] = found["ppl.student.nll.mean"] - found["ppl.teacher.nll.mean"]
    back = {"nearest": taken_back(start, whole, nearest), "fair": taken_back(start, whole, fair)}
    return {"lost": lost, "taken_back": back, "dtype": str(next(iter(fair.values())).dtype)}


@click.command(help=__doc__)
@click.argument("fold", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--text", required=True, help="Evaluation text, as of kvfold eval.")
@click.option("--window", default=256, show_default=True, help="Tokens per window.")
@click.option("--max-windows", default=48, show_default=True, help="Number of windows.")
@click.option("--set", "given", multiple=True, metavar="KEY=VALUE", help="As of kvfold distill.")
@click.option("--name", required=True, help="The result becomes benchmarks/results/saved-students-NAME.json.")
def main(fold: Path, text: str, window: int, max_windows: int, given: tuple[str, ...], name: str) -> None:
    """Measure, show and save one row."""
    settings = {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in given)}
    with tempfile.TemporaryDirectory() as made:
        row = measure(fold, text, Path(made), settings, window=window, max_windows=max_windows)
    lines = [
        (label, f"{nats:.4f}", f"{row['taken_back'].get(label, 0):.1%}")
        for label, nats in row["lost"].items()
    ]
    show_table("", ["weights", "nats lost", "rounded back"], lines)
    about = {
        "fold": fold.name,
        "text": Path(text).name,
        "window": window,
        "max_windows": max_windows,
        "set": given,
    }
    save(f"saved-students-{name}", {**about, **row})


if __name__ == "__main__":
    main()
