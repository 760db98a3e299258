"""Distillation: tokens to a share of what a fold lost, steps, FSDP 2 in one process, fused losses."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import click
import yaml

from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.request import FoldRequest
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite

from ..reached import SHARES, tokens_to, wanted
from ..recovery_runs import (
    PLAIN,
    RECIPES,
    Grid,
    Run,
    Setting,
    drop,
    fold_all,
    make_recipe,
    split,
    train,
)
from .fold import STATISTICS, statistics
from .ledger import Ledger, Row
from .sizes import Sizes
from .text import HELD, TRAIN

RATES = {"ce": 1e-4, "kl": 3e-4, "attention_output": 3e-3}  # not tuned here; the same for every start
ROOT = Path(__file__).parent.parent.parent
FSDP = ("single", "fsdp2")
_ERROR = re.compile(
    r"(\[rank\d+\]: )?(Error|[\w.]+(Error|Exception)): "
)  # kvfold's, or a traceback's last line


def distil(ledger: Ledger, sizes: Sizes, work: Path, directory: Path, device: str) -> None:
    """Measure profiles, steps, losses and, with the time that is left, recoveries; rows of `distil`.

    Args:
        ledger: of the part.
        sizes: of the day.
        work: of the part `train`, which wrote the texts.
        directory: the source.
        device: `cuda` or `cpu`.
    """
    grid = make_grid(sizes, work, directory)
    student = work / "stepped"
    if ledger.attempt("student", partial(quarter, directory, student)) is not None:
        for profile in FSDP if device == "cuda" else ():
            ledger.attempt(f"profile {profile}", partial(launched, ledger, grid, directory, student, profile))
        for kind in sizes.kinds:
            ledger.attempt(
                "step {}, {}".format(*kind), partial(one_step, ledger, sizes, directory, student, kind)
            )
    ledger.attempt("losses", partial(losses, ledger, sizes))
    targets = list(dict.fromkeys(target for target, *_ in sizes.cells))
    if not (work / STATISTICS).exists():
        ledger.attempt("statistics", partial(statistics, sizes, work, directory))
    if ledger.attempt("folds", partial(_folds, grid, targets, work / STATISTICS)) is not None:
        _recoveries(ledger, grid, sizes.cells)


def _recoveries(ledger: Ledger, grid: Grid, cells: Iterable[tuple[str, str, str]]) -> None:
    """Measure recoveries; none is begun in less time than the longest before it took."""
    longest = 0.0
    for target, start, recipe in cells:
        rates = {loss: RATES[loss] for loss in RECIPES[recipe]}
        run = Run(target=target, start=start, recipe=recipe, seed=0, rates=rates)
        row = ledger.attempt(f"recovery {run.label}", partial(recovery, grid, run), needs=longest)
        longest = max(longest, row["wall_seconds"] if row else 0.0)


def make_grid(sizes: Sizes, work: Path, directory: Path) -> Grid:
    """Return the setting of all recoveries, and write their evaluation text."""
    own = sizes.recovery
    setting = Setting(
        model=directory.name, text=str(work / HELD), data=str(work / TRAIN), tokens=own["tokens"],
        tuning_tokens=own["tokens"], batch_tokens=own["batch_tokens"], window=own["window"],
        evaluations=own["evaluations"], windows=own["windows"],
    )  # fmt: skip
    place = work / "recovery"
    for folder in (place / "folds", place / "runs"):
        folder.mkdir(parents=True, exist_ok=True)
    split(setting, place)
    return Grid(setting, directory.resolve(), place.resolve(), keeps_teacher=False)


def _folds(grid: Grid, targets: list[str], saved: Path) -> Row:
    return {"targets": fold_all(grid, targets, Statistics.load(saved))}


def recovery(grid: Grid, run: Run) -> Row:
    """Distil once; return the curve, and the tokens to shares of what this start lost."""
    start = time.monotonic()
    row = train(grid, run)
    seconds = time.monotonic() - start
    drop(grid, run)
    first = row["points"][0]["perplexity"]
    row["own_reached"] = {
        f"{share:.0%}": tokens_to(row["points"], wanted(first, row["source"], share)) for share in SHARES
    }
    return {**row, "seconds": round(seconds, 1)}


def quarter(directory: Path, out: Path) -> Row:
    """Fold the source to MLA at a quarter of its cache, by weights alone: the student of timed steps."""
    shutil.rmtree(out, ignore_errors=True)
    plan = make_plan(directory, FoldRequest(model=str(directory), to="mla", kv_budget="25%"))
    rewrite(plan, out)
    return {"target": plan.target.to_dict()}


def one_step(ledger: Ledger, sizes: Sizes, directory: Path, student: Path, kind: tuple[str, str]) -> Row:
    """Return seconds and peak bytes of a step, by `benchmarks.training` in a process of its own."""
    tokens, length = sizes.step_tokens
    options = [f"--tokens={tokens}", f"--length={length}", "--name=gpu", "--once", *kind, str(student)]
    return last_object(["benchmarks.training", str(directory), *options], ledger.left())


def losses(ledger: Ledger, sizes: Sizes) -> Row:
    """Return the rows of `benchmarks.losses`: dense, ours, and Liger's where it is installed."""
    found = last_object(["benchmarks.losses", *sizes.losses, "--json"], ledger.left())
    return {
        "tokens": found["tokens"],
        "vocabulary": found["vocabulary"],
        "hidden": found["hidden"],
        "losses": found["rows"],
    }


def launched(ledger: Ledger, grid: Grid, directory: Path, student: Path, profile: str) -> Row:
    """Distil a few steps by `kvfold distill --profile`; return its losses, time and memory by step.

    With one process FSDP 2 shards nothing: both profiles should have the same
    losses, and what differs is its cost.
    """
    work = grid.work / f"profile-{profile}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    file = write_recipe(grid, directory, student, work)
    words = ["distill", str(file), "--profile", profile]
    words += ["--", "--num_processes", "1"] if profile != "single" else []
    start = time.monotonic()
    child([sys.executable, "-m", "kvfold", *words], ledger.left())
    lines = [
        json.loads(line) for line in (work / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    shutil.rmtree(work)
    return {"seconds": round(time.monotonic() - start, 1), "metrics": lines}


def write_recipe(grid: Grid, directory: Path, student: Path, work: Path) -> Path:
    """Write the recipe of eight steps of KL; return its file."""
    run = Run(target="mla 25%", start=PLAIN, recipe="kl", seed=0, rates={"kl": RATES["kl"]})
    recipe = make_recipe(grid, run).resolved()
    recipe |= {"student": str(student), "teacher": str(directory), "output": str(work / "out")}
    recipe |= {"evaluate": None, "teacher_cache": None, "log_every": 1}
    recipe["stages"][0]["tokens"] = 8 * recipe["stages"][0]["batch_tokens"]
    file = work / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


def last_object(words: list[str], seconds: float) -> Row:
    """Run a module of Python in a process of its own; return the JSON object of its last line."""
    found: dict[str, Any] = json.loads(child([sys.executable, "-m", *words], seconds).splitlines()[-1])
    return found


def child(command: list[str], seconds: float) -> str:
    """Run a command in the repository for at most so many seconds; return its output.

    Raises:
        RuntimeError: it fails; the message ends with what it said last.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=max(30.0, seconds)
    )
    if done.returncode:
        click.echo(done.stderr, err=True)
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        # A launcher writes a report of its own below the error.
        raise RuntimeError(next((line for line in said if _ERROR.match(line)), said[-1]))
    return done.stdout
