"""Conversion against the disk: `python -m benchmarks.convert_speed`, and its cost curves with `--curves`.

A generated checkpoint is copied and converted by turns, each time as a process of its own; the folds alone,
on one thread, are timed next to them. Every number is a median of one run, and ratios are of numbers of the
same run.
"""

import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from kvfold.checkpoints.record import sha256
from kvfold.convert.layer.fold import fold
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan

from .convert_memory import generate, timed
from .machine import save
from .statistics import run as read

Cost = dict[str, float]  # seconds, cpu_seconds, peak_mb
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "mla 512+64": ("mla", {"rank": "512"}),
    "gqa-2": ("gqa", {"kv_heads": 2}),
    "gqa-2 mean": ("gqa", {"kv_heads": 2, "method": "mean"}),
}
JOBS = (1, 2)
LAYERS, WIDTHS, RANKS = (4, 8, 16, 32), (512, 1024, 2048), (64, 128, 256, 512)  # of the curves
TOKENS, LENGTH = (2048, 4096, 8192, 16384), 256
NARROW = 512  # hidden size of the curves over layers and tokens


def fold_alone(directory: Path, target: str) -> Cost:
    """Reading and folding all layers on one thread, nothing written."""
    torch.set_num_threads(1)
    to, options = TARGETS[target]
    plan = make_plan(directory, fold_request({"model": str(directory), "to": to, **options}))
    with measured() as cost:
        for layer in plan.layers:
            fold(plan, layer.number)
    return cost


def hash_alone(directory: Path) -> Cost:
    """Hashing the weights."""
    with measured() as cost:
        for path in directory.glob("*.safetensors"):
            sha256(path)
    return cost


@contextmanager
def measured() -> Iterator[Cost]:
    """Seconds of a block, and CPU seconds of this process in it."""
    cost: Cost = {}
    start, cpu = time.monotonic(), time.process_time()
    yield cost
    cost |= {"seconds": time.monotonic() - start, "cpu_seconds": time.process_time() - cpu}


def synced(directory: Path) -> float:
    """Seconds until what was written there is on the disk, which a conversion always waits for."""
    start = time.monotonic()
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.monotonic() - start


def convert(source: Path, out: Path, target: str, *options: str) -> Cost:
    """A whole command."""
    to, given = TARGETS[target]
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [
        sys.executable,
        "-m",
        "kvfold",
        "convert",
        str(source),
        "--to",
        to,
        *words,
        "--calibration",
        "none",
    ]
    return timed([*command, "--out", str(out), *options])


@contextmanager
def apart() -> Iterator[Any]:
    """A process of its own: a child's peak counts from what its parent held when it was forked."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


def against_copy(
    root: Path, gigabytes: float, repeats: int, targets: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Copy, fold and convert by turns; after every round the medians so far."""
    source, copied, out = root / "source", root / "copy", root / "out"
    source.mkdir()
    with apart() as pool:
        layers = pool.apply(generate, (source, gigabytes))
    rounds: list[dict[str, Cost]] = []
    for _ in range(repeats):
        found = {"cp": timed(["cp", "-r", str(source), str(copied)])}
        found["fsync of the copy"] = {"seconds": synced(copied)}
        shutil.rmtree(copied)
        found["sha256"] = hash_alone(source)
        found["start and plan"] = convert(source, out, targets[0], "--dry-run")
        for target in targets:
            with apart() as pool:
                found[f"{target}: folds alone"] = pool.apply(fold_alone, (source, target))
            for jobs in JOBS:
                found[f"{target}: jobs {jobs}"] = convert(source, out, target, "--jobs", str(jobs))
                shutil.rmtree(out)
        rounds.append(found)
        medians = {
            name: {key: _median(row[name][key] for row in rounds) for key in cost}
            for name, cost in found.items()
        }
        shown = {name: _median(values) for name, values in _ratios(rounds, targets).items()}
        yield {
            "gigabytes": gigabytes,
            "layers": layers,
            "repeats": len(rounds),
            "medians": medians,
            "ratios": shown,
        }


def _median(values: Iterable[float]) -> float:
    return round(median(values), 2)


def _ratios(rounds: list[dict[str, Cost]], targets: tuple[str, ...]) -> dict[str, list[float]]:
    """Of every round: what one job costs beyond folds and start, in copies, and what two jobs gain."""
    found: dict[str, list[float]] = {}
    for row in rounds:
        for target in targets:
            one, two, folds = (
                row[f"{target}: jobs 1"],
                row[f"{target}: jobs 2"],
                row[f"{target}: folds alone"],
            )
            for key in ("seconds", "cpu_seconds"):
                beyond = one[key] - folds[key] - row["start and plan"][key]
                found.setdefault(f"{target}: {key} beyond folds and start, in cp", []).append(
                    beyond / max(row["cp"][key], 1e-3)
                )
                allowed = 3 * row["cp"][key] + folds[key]
                found.setdefault(f"{target}: {key} over those of three copies and the folds", []).append(
                    one[key] / allowed
                )
            found.setdefault(f"{target}: speed of two jobs over one", []).append(
                one["seconds"] / two["seconds"]
            )
    return found


def curves(root: Path, repeats: int) -> dict[str, Any]:
    """Time and memory against layers, hidden size, rank and tokens, each with the fitted exponent.

    By weights alone they are those of a conversion above those of its plan; over tokens, those of the
    statistics pass above the loaded model.
    """
    axes: dict[str, list[tuple[int, dict[str, int], int]]] = {
        "layers": [(n, {"layers": n, "hidden": NARROW}, 128) for n in LAYERS],
        "hidden size": [(width, {"layers": 2, "hidden": width}, 128) for width in WIDTHS],
        "rank": [(rank, {"layers": 2, "hidden": 1024}, rank) for rank in RANKS],
    }
    found = {
        axis: [{axis: value} | _point(root, shape, rank, repeats) for value, shape, rank in points]
        for axis, points in axes.items()
    }
    found["tokens"] = _over_tokens(root, repeats)
    return {axis: {"points": rows, **_exponents(axis, rows)} for axis, rows in found.items()}


def _exponents(axis: str, rows: list[dict[str, float]]) -> dict[str, float]:
    sizes = [row[axis] for row in rows]
    return {
        f"exponent of {key}": exponent(sizes, [row[key] for row in rows])
        for key in ("cpu_seconds", "megabytes")
    }


def _over_tokens(root: Path, repeats: int) -> list[dict[str, float]]:
    """The statistics pass over more and more random tokens, the whole model in memory."""
    source = root / "point"
    source.mkdir()
    with apart() as pool:
        pool.apply(generate, (source, 0), {"layers": 2, "hidden": NARROW})
    rows: list[dict[str, float]] = []
    for tokens in TOKENS:
        costs = []
        for _ in range(repeats):
            with apart() as pool:
                costs.append(pool.apply(read, ("whole", source, tokens, LENGTH)))
        seconds = median(cost["cpu_seconds"] for cost in costs)
        above = median(cost["peak_mb"] - cost["before_mb"] for cost in costs)
        rows.append({"tokens": tokens, "cpu_seconds": round(seconds, 2), "megabytes": round(above, 1)})
    shutil.rmtree(source)
    return rows


def _point(root: Path, shape: dict[str, int], rank: int, repeats: int) -> dict[str, float]:
    source, out = root / "point", root / "out"
    source.mkdir()
    with apart() as pool:
        pool.apply(generate, (source, 0), shape)
    rows = []
    for _ in range(repeats):
        TARGETS["curve"] = ("mla", {"rank": str(rank), "rope_dim": 64})
        plan = convert(source, out, "curve", "--dry-run")
        row = convert(source, out, "curve", "--jobs", "1", "--verify", "none")
        rows.append((row["cpu_seconds"] - plan["cpu_seconds"], row["peak_mb"] - plan["peak_mb"]))
        shutil.rmtree(out)
    shutil.rmtree(source)
    del TARGETS["curve"]
    return {
        "cpu_seconds": round(median(row[0] for row in rows), 2),
        "megabytes": round(median(row[1] for row in rows), 1),
    }


def exponent(sizes: list[float], costs: list[float]) -> float:
    """b of the least-squares fit cost = a · size^b over the upper half of the points, where constants
    matter least.
    """
    pairs = [(math.log(size), math.log(max(cost, 1e-3))) for size, cost in zip(sizes, costs, strict=True)][
        len(sizes) // 2 - 1 :
    ]
    mean_x, mean_y = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    return round(
        sum((x - mean_x) * (y - mean_y) for x, y in pairs) / sum((x - mean_x) ** 2 for x, _ in pairs), 2
    )


@click.command()
@click.option("--gigabytes", default=1.0, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option(
    "--target", "targets", type=click.Choice(list(TARGETS)), multiple=True, help="Repeatable; all by default."
)
@click.option("--curves", "curved", is_flag=True, help="Cost against layers, hidden size and rank instead.")
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    help="Where to put the checkpoints; a temporary directory by default.",
)
@click.option("--json", "as_json", is_flag=True)
def main(
    gigabytes: float, repeats: int, targets: tuple[str, ...], curved: bool, work: Path | None, as_json: bool
) -> None:
    """Time conversions of a generated checkpoint by weights alone."""
    about = {"load before": round(os.getloadavg()[0], 1), "threads": os.environ.get("OMP_NUM_THREADS")}
    with tempfile.TemporaryDirectory(dir=work) as name:
        root, chosen = Path(name), targets or tuple(TARGETS)
        for result in [curves(root, repeats)] if curved else against_copy(root, gigabytes, repeats, chosen):
            path = save("convert-curves" if curved else "convert-speed", {**about, **result})
    click.echo(
        json.dumps({**about, **result}) if as_json else f"{json.dumps(result, indent=2)}\nsaved in {path}"
    )


if __name__ == "__main__":
    main()
