"""Runs of benchmarks.recovery.

How a checkpoint is folded, on what its folds are trained, and what of that is kept.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.errors import InvalidInput
from kvfold.distill.recipe.recipe import Recipe
from kvfold.distill.run.job import distill
from kvfold.texts.corpus import read_text

from .reached import PLAIN, Row

BEST, SOURCE = "best", "source"
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "mla 12.5%": ("mla", {"kv_budget": "12.5%"}),
    "mla 25%": ("mla", {"kv_budget": "25%"}),
    "gqa 2 heads": ("gqa", {"kv_heads": 2}),
    "gqa 1 head": ("gqa", {"kv_heads": 1}),
    "gqa 4 heads": ("gqa", {"kv_heads": 4}),
}
PLAIN_METHODS = {"mla": "svd", "gqa": "mean"}
# Losses in order, with their shares of the tokens; alignment is soon at its floor, so it gets the first
# quarter.
RECIPES: dict[str, dict[str, float]] = {
    "ce": {"ce": 1.0},
    "kl": {"kl": 1.0},
    "align+kl": {"attention_output": 0.25, "kl": 0.75},
}
TUNED = "tuned"  # before a recipe: a run that tries a rate, measured on the text that rates are chosen by
CALIBRATION: dict[str, Any] = {"calibration": "self", "sequences": 48, "seed": 0}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        target: of TARGETS, or `source`.
        start: `plain`, `best`, or `source`.
        recipe: of RECIPES, or `tuned ` and one of them, or `tuned ` and a loss alone.
        seed: of the order of the data.
        rates: learning rate of every loss.
    """

    target: str
    start: str
    recipe: str
    seed: int
    rates: dict[str, float]

    @property
    def label(self) -> str:
        """Its name."""
        return f"{self.target}, {self.start}, {self.recipe}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings that all runs of a grid share; part of its results."""

    model: str
    text: str
    data: str
    tokens: int
    tuning_tokens: int
    batch_tokens: int
    window: int
    evaluations: int
    windows: int


@dataclass(frozen=True)
class Grid:
    """The places of a grid's files.

    Attributes:
        setting: the settings that its runs share.
        source: the checkpoint.
        work: directory of texts, folds and unfinished runs.
        keeps_teacher: whether the teacher's hidden states are kept on the disk for the other runs of a seed.
    """

    setting: Setting
    source: Path
    work: Path
    keeps_teacher: bool = True

    def fold(self, target: str, start: str) -> Path:
        """Directory of a start."""
        return self.source if start == SOURCE else self.work / "folds" / slug(f"{target} {start}")


def slug(words: str) -> str:
    """As a file name."""
    return words.replace("%", "").replace(",", "").replace(" ", "-")


def split(setting: Setting, work: Path) -> None:
    """Write the first half of the held-out text as evaluated.txt, and the second, by which rates are chosen,
    as tuned.txt.

    Both are new to the source as well. On text that the source was trained on, whatever moves the student
    away from it looks worse than it is, and rates come out too low.
    """
    text = read_text(setting.text).joined
    middle = text.find("\n", len(text) // 2) + 1 or len(text) // 2
    for name, part in (("evaluated", text[:middle]), ("tuned", text[middle:])):
        (work / f"{name}.txt").write_text(part, encoding="utf-8")


def fold_all(grid: Grid, targets: list[str], statistics: Statistics | None = None) -> list[str]:
    """Make the folds that are not there yet; return the targets that the source has.

    Args:
        grid: the runs.
        targets: of TARGETS.
        statistics: of the source; None: taken where a fold reads them, as CALIBRATION says.
    """
    made = []
    for target in targets:
        to, options = TARGETS[target]
        try:
            for start in (PLAIN, BEST):
                place = grid.fold(target, start)
                if place.exists():
                    continue
                if start == BEST and statistics is None:
                    statistics = study(open_source(grid.source), length=grid.setting.window, **CALIBRATION)
                method = PLAIN_METHODS[to] if start == PLAIN else None
                request = fold_request({"model": str(grid.source), "to": to, "method": method, **options})
                rewrite(make_plan(grid.source, request, statistics if start == BEST else None), place)
            made.append(target)
        except InvalidInput as reason:
            click.echo(f"{target}: {reason}", err=True)
    return made


def make_recipe(grid: Grid, run: Run) -> Recipe:
    """A run as a recipe.

    Rates are constant but for the last fifth, so that a curve's points can be compared.
    """
    setting, work = grid.setting, grid.work
    is_tuning = run.recipe.startswith(TUNED)
    name = run.recipe.removeprefix(TUNED).strip()
    losses = RECIPES.get(name, {name: 1.0})
    steps = max(1, (setting.tuning_tokens if is_tuning else setting.tokens) // setting.batch_tokens)
    stages: list[dict[str, Any]] = []
    left = steps
    for loss, share in losses.items():
        own = left if loss == list(losses)[-1] else round(share * steps)
        left -= own
        stages.append(
            {
                "name": loss,
                "losses": {loss: 1.0},
                "train": "attention" if loss == "attention_output" else "all",
                "lr": run.rates[loss],
                "schedule": "wsd",
                "tokens": own * setting.batch_tokens,
                "batch_tokens": setting.batch_tokens,
                "micro_batch": 8,
            }
        )
    # Of windows that all runs of a seed read.
    cache = work / f"teacher-{steps * setting.batch_tokens}-{run.seed}"
    every = steps if is_tuning else max(1, steps // setting.evaluations)
    return Recipe.model_validate(
        {
            "schema": 1,
            "student": str(grid.fold(run.target, run.start)),
            "teacher": str(grid.source),
            "teacher_cache": str(cache) if grid.keeps_teacher else None,
            "output": str(
                work / "runs" / slug(run.label + "".join(f" {rate:g}" for rate in run.rates.values()))
            ),
            "data": {"source": setting.data, "seq_len": setting.window, "seed": run.seed},
            "stages": stages,
            "evaluate": {
                "source": str(work / ("tuned.txt" if is_tuning else "evaluated.txt")),
                "every": every,
                "windows": setting.windows,
                "seq_len": setting.window,
            },
        }
    )


def train(grid: Grid, run: Run) -> Row:
    """Run it, or resume it; return its row, with the perplexity and KL after so many tokens."""
    recipe = make_recipe(grid, run)
    output = Path(recipe.output)
    if not output.exists():
        distill(recipe)
    curve = json.loads((output / "curve.json").read_text(encoding="utf-8"))
    points = [{key: point[key] for key in ("tokens", "perplexity", "kl")} for point in curve["points"]]
    found = {"source": curve["teacher_perplexity"], "text_sha256": curve["text_sha256"], "points": points}
    return {**asdict(run), **found}


def drop(grid: Grid, run: Run) -> None:
    """Remove what a finished run has left."""
    shutil.rmtree(make_recipe(grid, run).output, ignore_errors=True)
