"""Perplexity against tokens, from every start by every recipe: `python -m benchmarks.recovery recipes/demo
--name demo`.

A checkpoint is folded to MLA at 25 and 12.5 % of its cache and to GQA with 4, 2 and 1 heads, the usual way
(`svd`, `mean`: the plain start) and as kvfold does it (the best start). Each fold is trained by cross entropy
alone, by KL alone, and by alignment followed by KL; the source itself is trained on the same tokens as
control. All runs of a seed read the same tokens, and every evaluation is of the same windows, the source's in
the same run.

First every recipe gets its learning rates from each start: the best of five, by perplexity on the second half
of the held-out text; all that is reported is measured on the first half. Alignment's rate is chosen first,
then that of the KL after it.

Every finished run is a row of benchmarks/results/recovery-NAME.json; runs that have theirs are left out, so
that a stopped grid resumes when the same command is given again.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvfold.core.console import show_table
from kvfold.core.errors import InvalidInput
from kvfold.core.hub import resolve
from kvfold.core.units import parse_tokens

from .machine import RESULTS, save
from .reached import PLAIN, SHARES, Row, summarise
from .recovery_runs import (
    BEST,
    CALIBRATION,
    RECIPES,
    SOURCE,
    TARGETS,
    TUNED,
    Grid,
    Run,
    Setting,
    drop,
    fold_all,
    split,
    train,
)

CONTROL = "ce"  # the source cannot learn from itself
ALIGNMENT, AFTER = "attention_output", "align+kl"
# Tried for every loss; a layer alone bears more than the whole model.
RATES = {
    "ce": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
    "kl": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
    ALIGNMENT: (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
}
TUNED_ON = "mla 12.5%"
CELLS = [f"{start}:{recipe}" for start in (PLAIN, BEST) for recipe in RECIPES]
Rates = dict[str, dict[str, dict[str, float]]]  # of every loss, by start and recipe


def tuning_runs() -> Iterator[Run]:
    """Every loss alone from every start at every rate that is tried."""
    for loss, rates in RATES.items():
        for start in (PLAIN, BEST, *([SOURCE] if loss == CONTROL else [])):
            target = SOURCE if start == SOURCE else TUNED_ON
            for rate in rates:
                yield Run(target=target, start=start, recipe=f"{TUNED} {loss}", seed=0, rates={loss: rate})


def tuning_after(rates: Rates) -> Iterator[Run]:
    """KL after alignment, from every start at every rate that is tried."""
    for start in (PLAIN, BEST):
        for rate in RATES["kl"]:
            both = {**rates[start][ALIGNMENT], "kl": rate}
            yield Run(target=TUNED_ON, start=start, recipe=f"{TUNED} {AFTER}", seed=0, rates=both)


def chosen_rates(rows: list[Row], start: str) -> dict[str, dict[str, float]]:
    """The best rates of every loss alone and of every recipe that were tried from a start."""
    best: dict[str, Row] = {}
    for row in rows:
        if row["start"] == start and row["recipe"].startswith(TUNED):
            tuned = row["recipe"].removeprefix(TUNED).strip()
            best[tuned] = min(
                best.get(tuned, row), row, key=lambda one: float(one["points"][-1]["perplexity"])
            )
    return {tuned: row["rates"] for tuned, row in best.items()}


def grid_runs(
    targets: list[str], seeds: list[int], rates: Rates, wanted: tuple[str, ...] = ()
) -> Iterator[Run]:
    """The grid, a seed at a time: the control, then every target, start and recipe.

    Or those that are wanted alone.
    """
    for seed in seeds:
        cells = [(SOURCE, SOURCE, CONTROL)]
        cells += [
            (target, start, recipe) for target in targets for recipe in RECIPES for start in (PLAIN, BEST)
        ]
        for target, start, recipe in cells:
            if not wanted or f"{start}:{recipe}" in wanted:
                yield Run(target=target, start=start, recipe=recipe, seed=seed, rates=rates[start][recipe])


def read_rows(name: str, setting: Setting) -> list[Row]:
    """The rows that an earlier command has left.

    Raises:
        InvalidInput: they are of another setting.
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    earlier = json.loads(path.read_text(encoding="utf-8"))
    for key, value in asdict(setting).items():
        if earlier["setting"][key] != value:
            raise InvalidInput(
                f"{path} has runs with {key} {earlier['setting'][key]}, not {value}; choose another --name"
            )
    rows: list[Row] = earlier["rows"]
    return rows


def rates_of(rows: list[Row]) -> Rates:
    """The learning rates chosen."""
    return {start: chosen_rates(rows, start) for start in (PLAIN, BEST, SOURCE)}


def write(name: str, setting: Setting, rows: list[Row]) -> Path:
    """Save everything that is known."""
    finished = [row for row in rows if not row["recipe"].startswith(TUNED)]
    result = {"setting": asdict(setting), "calibration": CALIBRATION, "rates": rates_of(rows)}
    return save(name, {**result, "summary": summarise(finished), "rows": rows})


def show(rows: list[Row]) -> None:
    """Print a line for every target, start and recipe."""
    lines = []
    for line in summarise([row for row in rows if not row["recipe"].startswith(TUNED)]):
        cells = [f"{line['target']}, {line['start']}, {line['recipe']}", len(line["seeds"])]
        cells += [f"{line['perplexity_at_start']:.2f}", "{least:.2f}-{most:.2f}".format(**line["perplexity"])]
        if "reached" in line:
            cells += ["{median:.1%}".format(**line["recovered"])]
            reached = [*line["reached"].values(), line["as_usual"]]
            cells += ["-" if one is None or one["median"] is None else one["median"] for one in reached]
        lines.append(tuple(str(cell) for cell in cells) + ("",) * (6 + len(SHARES) - len(cells)))
    goals = [f"tokens to {share:.0%}" for share in SHARES] + ["to the end of plain CE"]
    show_table("perplexity", ("", "seeds", "at the start", "at the end", "recovered", *goals), lines)


@click.command()
@click.argument("model")
@click.option("--text", default="stdlib", show_default=True, help="Held-out text: a .txt file, or stdlib.")
@click.option(
    "--data", default="stdlib", show_default=True, help="Training text, as data.source of a recipe."
)
@click.option("--tokens", default="200k", show_default=True, help="Of a run.")
@click.option("--tuning-tokens", help="Of a run that tries a learning rate. Default: --tokens.")
@click.option("--batch-tokens", default=4096, show_default=True, help="Of an optimizer step.")
@click.option("--window", default=256, show_default=True, help="Tokens of a window.")
@click.option("--evaluations", default=8, show_default=True, help="Of a run, apart from that of its start.")
@click.option("--windows", default=32, show_default=True, help="Of the evaluation text.")
@click.option("--seeds", default="0,1,2", show_default=True, help="Of the order of the data.")
@click.option("--only", multiple=True, type=click.Choice(list(TARGETS)), help="A target; all by default.")
@click.option(
    "--run",
    "cells",
    multiple=True,
    type=click.Choice(CELLS),
    help="A start and recipe; all and the control by default.",
)
@click.option(
    "--rates", help="Take learning rates from benchmarks/results/recovery-NAME.json instead of trying some."
)
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    help="For folds and unfinished runs. Default: out/recovery-NAME.",
)
@click.option("--name", required=True, help="Results go to benchmarks/results/recovery-NAME.json.")
def main(
    model: str,
    tokens: str,
    tuning_tokens: str | None,
    seeds: str,
    only: tuple[str, ...],
    cells: tuple[str, ...],
    rates: str | None,
    work: Path | None,
    name: str,
    **same: Any,
) -> None:
    """Run what is missing of the grid; print and save all of it."""
    name, work = f"recovery-{name}", work or Path("out") / f"recovery-{name}"
    whole = int(str(parse_tokens(tokens)))
    part = int(str(parse_tokens(tuning_tokens))) if tuning_tokens else whole
    tuned: list[Row] = []
    if rates:
        other = json.loads((RESULTS / f"recovery-{rates}.json").read_text(encoding="utf-8"))
        part, tuned = (
            other["setting"]["tuning_tokens"],
            [row for row in other["rows"] if row["recipe"].startswith(TUNED)],
        )
    setting = Setting(model=model, tokens=whole, tuning_tokens=part, **same)
    rows = read_rows(name, setting) or tuned
    (work / "folds").mkdir(parents=True, exist_ok=True)
    (work / "runs").mkdir(exist_ok=True)
    grid = Grid(setting, resolve(model), work.resolve())
    split(setting, grid.work)
    targets = fold_all(grid, list(only or TARGETS))
    if not rates:
        run_all(grid, tuning_runs(), name, rows)
        run_all(grid, tuning_after(rates_of(rows)), name, rows)
    run_all(
        grid, grid_runs(targets, [int(seed) for seed in seeds.split(",")], rates_of(rows), cells), name, rows
    )
    show(rows)
    click.echo(f"saved in {write(name, setting, rows)}")


def run_all(grid: Grid, runs: Iterator[Run], name: str, rows: list[Row]) -> None:
    """Run those that have no row yet, and save each one's as soon as it is there."""
    for run in runs:
        if any(asdict(run) == {key: row[key] for key in asdict(run)} for row in rows):
            continue
        rows.append(train(grid, run))
        write(name, grid.setting, rows)
        drop(grid, run)
        ends = rows[-1]["points"][0], rows[-1]["points"][-1]
        click.echo(f"{run.label}: " + " -> ".join(f"{point['perplexity']:.3f}" for point in ends), err=True)


if __name__ == "__main__":
    main()
