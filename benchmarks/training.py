"""Time and memory of a distillation step: `python -m benchmarks.training MODEL --name NAME`.

The same student (MODEL folded to MLA at a quarter of its cache, by its weights alone) is trained on the same
tokens by plain fine-tuning, which is transformers' own cross entropy and torch's AdamW and has no teacher,
and by kvfold's KL with a separate teacher, with one that shares the student's frozen weights, and with its
hidden states read from a disk. Two sets of weights: all, and the attention alone, without which nothing can
be shared. Every run is a process of its own, the kinds take turns, and medians are kept. Seconds are the
processor's on a CPU, where other work on the machine must not count; memory is the peak above what the
process held before it loaded a model.

What a teacher in memory must cost at least: of N weights in products a token takes 2 N operations forward, as
many for the gradients of what a layer reads, and as many for those of its weights. A teacher as large as the
student adds 2 N to 6 N (1.33 times the plain step), or to the 4 N and a little that are left where few
weights are trained (up to 1.5).

`--profile` prints the dearest operations of one KL step, and of one pass of statistics over as many tokens,
instead.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from torch import Tensor

from kvfold.convert.request import FoldRequest
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.console import show_table
from kvfold.core.hub import resolve
from kvfold.core.system_calls import peak_resident_bytes
from kvfold.distill.data.order import Stream, TrainingWindows
from kvfold.distill.data.token_documents import SCORED
from kvfold.distill.parallel.accelerator import make_accelerator
from kvfold.distill.recipe.recipe import Recipe
from kvfold.distill.stages.cached_teacher import cache_for, cached_teacher
from kvfold.distill.stages.end_to_end import EndToEnd
from kvfold.distill.stages.isolation import isolate_documents
from kvfold.distill.stages.stage_work import Run, StageContext
from kvfold.distill.stages.student import load_student
from kvfold.distill.stages.teacher import Online, Teacher, open_teacher
from kvfold.distill.stages.weights import set_trainable

from .machine import save

PLAIN, CACHE = "plain", "cache"
# What is trained, and by what: plain, the `teacher` of a recipe, or its `teacher_cache`.
KINDS = (
    *(("all", how) for how in (PLAIN, "online", CACHE)),
    *(("attention", how) for how in (PLAIN, "online", "shared", CACHE)),
)
STEPS = 3  # the first is not timed


def make_recipe(teacher: Path, student: Path, train: str, how: str, tokens: int, length: int) -> Recipe:
    """A recipe of forward KL; nothing is read from its data source, or written."""
    stage = {
        "name": "kl",
        "tokens": STEPS * tokens,
        "lr": 1e-5,
        "batch_tokens": tokens,
        "micro_batch": 4,
        "train": train,
    }
    named = str(teacher) if how in ("online", CACHE) else how
    data = {"source": "none", "seq_len": length}
    return Recipe.model_validate(
        {
            "schema": 1,
            "student": str(student),
            "teacher": named,
            "output": "none",
            "data": data,
            "stages": [stage],
            "teacher_cache": str(student.with_name(CACHE)) if how == CACHE else None,
        }
    )


def random_windows(recipe: Recipe, vocabulary: int) -> TrainingWindows:
    """Random tokens for all steps, all of them scored, in one document."""
    count = recipe.windows * recipe.data.seq_len + 1
    tokens = torch.randint(
        vocabulary, (count,), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    ).numpy()
    return TrainingWindows(
        [Stream(tokens, torch.full((count,), SCORED, dtype=torch.uint8).numpy())], recipe.data
    )


def distilling(recipe: Recipe, teacher: Path) -> Callable[[int], float]:
    """The models of a recipe, ready for the step of a number by kvfold's loop.

    A step returns the gradient's norm.
    """
    (stage,), accelerator = recipe.stages, make_accelerator(recipe)
    student = load_student(Path(recipe.student), recipe.data.seq_len, accelerator.device)
    isolate_documents(student.model, recipe.student)
    windows = random_windows(recipe, student.vocabulary)
    cache = cache_for(stage, recipe)

    def online() -> Online:
        return open_teacher(teacher, stage, recipe, accelerator, student)

    if cache:
        needed = [(windows, recipe.windows)]
        source: Teacher = cached_teacher(cache, needed, recipe, teacher, accelerator, online)
    else:
        source = online()
    run = Run(recipe, accelerator, Path("none"), Path("none"), Path("none"), [])
    context = StageContext(run, recipe.stages[0], student.model, source, windows)
    work = EndToEnd(context, None)

    def step(number: int) -> float:
        work.accumulate(number * recipe.step_windows(stage))
        return work.step(stage.lr)

    return step


def fine_tuning(recipe: Recipe) -> Callable[[int], float]:
    """The same student, ready for a plain step.

    No teacher, no windows of several documents, transformers' own loss.
    """
    (stage,) = recipe.stages
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_student(Path(recipe.student), recipe.data.seq_len, device).model
    optimizer = torch.optim.AdamW(set_trainable(model, stage), lr=stage.lr)
    windows = random_windows(recipe, model.config.vocab_size)

    def step(number: int) -> float:
        mine = range(number * recipe.step_windows(stage), (number + 1) * recipe.step_windows(stage))
        for first in range(0, len(mine), stage.micro_batch):
            part = mine[first : first + stage.micro_batch]
            ids_BS = windows.batch(part).input_ids_BS.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss: Tensor = model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss
            (loss * len(part) / len(mine)).backward()
        norm = torch.nn.utils.clip_grad_norm_(
            [weight for group in optimizer.param_groups for weight in group["params"]], 1.0
        )
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    return step


def run(recipe: Recipe, teacher: Path) -> dict[str, float]:
    """Seconds of a step after the first, and the peak bytes of a run, in this process."""
    on_gpu = torch.cuda.is_available()
    before = psutil.Process().memory_info().rss
    clock = time.monotonic if on_gpu else time.process_time
    step = fine_tuning(recipe) if recipe.teacher == PLAIN else distilling(recipe, teacher)
    step(0)
    if on_gpu:
        torch.cuda.synchronize()  # the first step's update may still run
    start = clock()
    for number in range(1, STEPS):
        step(number)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = (clock() - start) / (STEPS - 1)
    if on_gpu:
        return {"seconds": seconds, "peak_bytes": torch.cuda.max_memory_allocated()}
    peak = peak_resident_bytes()
    return {"seconds": seconds, "peak_bytes": peak - before}


@click.command()
@click.argument("model")
@click.option("--tokens", default=4096, show_default=True, help="Of a step.")
@click.option("--length", default=256, show_default=True, help="Tokens of a window.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each kind.")
@click.option("--name", required=True, help="Results go to benchmarks/results/training-NAME.json.")
@click.option("--once", nargs=3, hidden=True)
def main(
    model: str,
    tokens: int,
    length: int,
    repeats: int,
    name: str,
    once: tuple[str, str, str] | None,
) -> None:
    """Print and save seconds and memory of every kind of step, and their ratios to plain fine-tuning."""
    source = resolve(model)
    if once:
        train, how, student = once
        click.echo(json.dumps(run(make_recipe(source, Path(student), train, how, tokens, length), source)))
        return
    setting = {"model": model, "tokens": tokens, "length": length, "threads": torch.get_num_threads()}
    with tempfile.TemporaryDirectory() as work:
        fold = Path(work) / "fold"
        rewrite(make_plan(source, FoldRequest(model=str(source), to="mla", kv_budget="25%")), fold)
        command = [
            sys.executable,
            "-m",
            "benchmarks.training",
            str(source),
            f"--tokens={tokens}",
            f"--length={length}",
        ]

        def measure(kind: tuple[str, str]) -> dict[str, float]:
            once_more = [*command, f"--name={name}", "--once", *kind, str(fold)]
            done = subprocess.run(once_more, check=True, stdout=subprocess.PIPE, text=True)
            return dict(json.loads(done.stdout.splitlines()[-1]))

        measure(("all", CACHE))  # writes the cache, which the others read
        rounds = [{kind: measure(kind) for kind in KINDS} for _ in range(repeats)]
    rows = [summarise(kind, rounds) for kind in KINDS]
    lines = [
        tuple(f"{value:g}" if isinstance(value, float) else str(value) for value in row.values())
        for row in rows
    ]
    show_table("a step", [key.replace("_", " ") for key in rows[0]], lines)
    click.echo(f"saved in {save(f'training-{name}', {**setting, 'repeats': repeats, 'rows': rows})}")


def summarise(kind: tuple[str, str], rounds: list[dict[tuple[str, str], dict[str, float]]]) -> dict[str, Any]:
    """Medians of one kind; ratios are to plain steps of the same round, so that what else the machine does
    weighs on both.

    `times_plain` compares with fine-tuning of the same weights, `times_plain_all` with that of all weights.
    """
    train, how = kind

    def times(key: str, trained: str) -> float:
        return round(statistics.median(one[kind][key] / one[trained, PLAIN][key] for one in rounds), 2)

    return {
        "train": train,
        "teacher": how,
        "seconds": round(statistics.median(one[kind]["seconds"] for one in rounds), 3),
        "times_plain": times("seconds", train),
        "times_plain_all": times("seconds", "all"),
        "peak_mb": round(statistics.median(one[kind]["peak_bytes"] for one in rounds) / 1e6, 1),
        "memory_times_plain": times("peak_bytes", train),
        "memory_times_plain_all": times("peak_bytes", "all"),
    }


if __name__ == "__main__":
    main()
