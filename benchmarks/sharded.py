"""Peak memory of processes that share a student and a teacher: `python -m benchmarks.sharded --gigabytes 1
--processes 2`.

A generated teacher and its pooled copy are loaded and sharded (FSDP 2, gloo) in processes of their own: each
of the two alone, both, and in a whole run of two steps that saves its state and writes a checkpoint. `whole`
loads a model whole in every process and then keeps the shards, as is still done where a model cannot be read
by the unit; `by unit` is what kvfold does. Memory is what a process holds above what it held before it loaded
anything, without the pages of files, which the system may take back; it is looked at every 5 ms. Next to a
run stands what `kvfold distill explain` predicts for it.
"""

import json
import multiprocessing
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from kvfold.checkpoints.directory import copy_side_files
from kvfold.convert.request import FoldRequest
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.console import show_table
from kvfold.distill.parallel.accelerator import make_accelerator
from kvfold.distill.parallel.sharding import distribute, shard_teacher
from kvfold.distill.recipe.recipe import Recipe
from kvfold.distill.run.footprint import footprint, skeleton
from kvfold.distill.run.job import distill
from kvfold.distill.stages import student, teacher
from kvfold.eval.options import Options
from kvfold.models.causal_lm import describe

from .generated import generate
from .machine import save

HOW = ("whole", "by unit")
WHAT = ("teacher", "student", "both", "run")
DEMO = Path(__file__).parents[1] / "recipes" / "demo"  # for its tokenizer
LENGTH, STEPS = 128, 2


class Around(nn.Module):
    """The surroundings of a student in a stage."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def make_recipe(directory: Path, processes: int, output: Path) -> Recipe:
    """Two steps of one window a process."""
    tokens = processes * LENGTH
    stage = {"name": "kl", "tokens": STEPS * tokens, "lr": 1e-5, "batch_tokens": tokens, "micro_batch": 1}
    return Recipe.model_validate(
        {
            "schema": 1,
            "student": str(directory / "fold"),
            "teacher": str(directory / "source"),
            "output": str(output),
            "data": {"source": str(directory / "text.jsonl"), "seq_len": LENGTH},
            "stages": [stage],
            "save": {"every": 1},
            "device": "cpu",
            "precision": "fp32",
        }
    )


def work(
    rank: int, environment: dict[str, str], how: str, what: str, recipe: dict[str, Any], answer: Any
) -> None:
    """One process: load, shard or run, and put its peak into `answer`."""
    os.environ |= {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    if how == "whole":
        for module in (student, teacher):
            module.open_in_units = lambda *_, **__: None  # type: ignore[attr-defined]
    settings = Recipe.model_validate(recipe)
    start = time.monotonic()
    with peak_above() as peak:
        if what == "run":
            distill(settings)
        else:
            load(settings, what)
    answer.put((rank, peak[0], time.monotonic() - start))


def load(recipe: Recipe, what: str) -> None:
    """Load as a stage does."""
    accelerator, (stage,) = make_accelerator(recipe), recipe.stages
    kept: list[Any] = []
    units, opened = (
        None,
        describe(Path(recipe.student), Options()),
    )  # all that a teacher alone needs of a student
    if what != "teacher":
        opened, units = student.open_student(Path(recipe.student), None, stage, recipe, accelerator)
    if what in ("teacher", "both"):
        online = teacher.open_teacher(Path(str(recipe.teacher)), stage, recipe, accelerator, opened)
        shard_teacher(online)
        kept.append(online)
    if what in ("student", "both"):
        kept.append(distribute(accelerator, Around(opened.model), opened.model, units))
    accelerator.wait_for_everyone()
    accelerator.end_training()


@contextmanager
def peak_above() -> Iterator[list[int]]:
    """A list whose item is, in the end, the most bytes that this process held above what it holds now."""
    before, found, done = anonymous(), [0], threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            found[0] = max(found[0], anonymous() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def anonymous() -> int:
    """Resident bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def measure(directory: Path, processes: int, how: str, what: str) -> dict[str, Any]:
    """Peak of the process that holds most, and seconds of the slowest."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory(dir=directory) as place:
        recipe = make_recipe(directory, processes, Path(place) / "out").resolved()
        context = multiprocessing.get_context("spawn")
        answer = context.Queue()
        arguments = (environment, how, what, recipe, answer)
        workers = [context.Process(target=work, args=(rank, *arguments)) for rank in range(processes)]
        for worker in workers:
            worker.start()
        found = [answer.get() for _ in workers]
        for worker in workers:
            worker.join()
    return {
        "peak_mb": [round(peak / 1e6) for _, peak, _ in sorted(found)],
        "seconds": round(max(row[2] for row in found), 1),
    }


def prepare(directory: Path, gigabytes: float, hidden: int) -> None:
    """A teacher, a student and a text."""
    (directory / "source").mkdir()
    layer = 4 * hidden**2 + 3 * hidden * int(2.75 * hidden)
    layers = max(2, round((gigabytes * 1e9 / 2 - 2 * 32000 * hidden) / layer))
    generate(directory / "source", gigabytes, hidden=hidden, layers=layers)
    copy_side_files(DEMO, directory / "source")
    request = FoldRequest(model=str(directory / "source"), to="gqa", kv_heads=2, method="mean")
    rewrite(make_plan(directory / "source", request), directory / "fold")
    draw = random.Random(0)
    documents = [
        " ".join(draw.choices(["key", "value", "cache", "head", "fold", "rank"], k=200)) for _ in range(100)
    ]
    text = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    (directory / "text.jsonl").write_text(text, encoding="utf-8")


def predict(directory: Path, processes: int) -> dict[str, int]:
    """Megabytes of one process by what they are for, as `explain` tells them."""
    recipe = make_recipe(directory, processes, directory / "out")
    models = skeleton(directory / "fold"), skeleton(directory / "source")
    found = footprint(recipe, recipe.stages[0], *models, bf16=False, processes=processes)
    return {name: round(size / 1e6) for name, size in found.memory.items()}


@click.command()
@click.option("--gigabytes", default=1.0, show_default=True, help="Of the teacher's checkpoint, in bfloat16.")
@click.option("--hidden", default=1024, show_default=True)
@click.option("--processes", default=2, show_default=True)
@click.option("--what", type=click.Choice(WHAT), multiple=True, default=WHAT, show_default=True)
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    help="Where to put the checkpoints; a temporary directory by default.",
)
def main(gigabytes: float, hidden: int, processes: int, what: tuple[str, ...], work: Path | None) -> None:
    """Measure, print and save."""
    with tempfile.TemporaryDirectory(dir=work) as name:
        directory = Path(name)
        prepare(directory, gigabytes, hidden)
        size = sum(file.stat().st_size for file in (directory / "source").glob("*.safetensors"))
        rows = {item: {how: measure(directory, processes, how, item) for how in HOW} for item in what}
        predicted = predict(directory, processes)
    result = {"gigabytes": round(size / 1e9, 2), "hidden_size": hidden, "processes": processes, "rows": rows}
    result |= {"predicted_run_mb": {**predicted, "total": sum(predicted.values())}}
    cells = [
        (item, how, str(row["peak_mb"]), str(row["seconds"]))
        for item, found in rows.items()
        for how, row in found.items()
    ]
    show_table("Peak MB of each process above its start", ("what", "loaded", "peak", "seconds"), cells)
    click.echo(f"predicted for a run: {result['predicted_run_mb']}")
    click.echo(f"saved in {save(f'sharded-{gigabytes:g}gb-{processes}', result)}")


if __name__ == "__main__":
    main()
