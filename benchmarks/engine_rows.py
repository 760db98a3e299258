"""Folds run by an engine through `kvfold verify`, as a table: for benchmarks.vllm and benchmarks.mlx."""

import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from kvfold.checkpoints.record import read_record
from kvfold.core.console import show_table
from kvfold.core.errors import InvalidInput
from kvfold.engines.fresh_process import NEAR, ROUNDED
from kvfold.engines.verify import verify

from .folds import FOLDS, Fold, make_folds
from .saved_rows import SavedRows

ONLY = click.option(
    "--only",
    metavar="WORDS",
    default="",
    help="Folds whose source or options contain these words; saves nothing without --update.",
)
UPDATE = click.option(
    "--update", is_flag=True, help="Keep saved rows, run the other folds, and save after each of them."
)


def run_fold(fold: Fold, source: Path, out: Path, engine: str, near: float = NEAR) -> dict[str, Any]:
    """Return a fold's row.

    It says what the engine answers, against the source where the fold is exact, else against the fold in
    transformers.

    Args:
        fold: how it was made.
        source, out: its directories.
        engine: of `fresh_process.PROBES`.
        near: nats by which log-probabilities may differ in float32.
    """
    start = time.monotonic()
    report = verify(out, [engine], source)
    told = report.measured.get(engine, {})
    row: dict[str, Any] = {
        "source": fold.source,
        "options": fold.options,
        "class": report.measured.get("class"),
    }
    row |= {"against": "source" if fold.exact else "fold", "seconds": round(time.monotonic() - start, 1)}
    if "own" not in told:
        unrun = [check.detail for check in report.checks if check.name == engine]
        why = report.failures or [*unrun, *report.unasked]
        return row | {"failures": why or [f"{engine} gave no answer"]}
    answer = told["source" if fold.exact else "own"]
    cache = next(check for check in report.checks if check.name == f"{engine} cache")
    failures = report.failures + _held(told["own"], "transformers", told["dtype"], near)
    if fold.exact:
        failures += _held(answer, "the source", told["dtype"], near)
    if (cache.passed is True) != fold.as_claimed:
        failures.append(cache.detail)
    record = read_record(out)
    assert record is not None, "kvfold convert has just written it"
    sizes = {side: record["cache"][side]["elements_per_token_per_layer"] for side in ("before", "after")}
    return row | {
        "dtype": told["dtype"],
        **answer,
        "cache": {**sizes, engine: told["cache"]},
        "failures": failures,
    }


def _held(answer: dict[str, float], other: str, dtype: str, near: float) -> list[str]:
    """Return what of an engine's answers is not another's.

    Rounding to 16 bits also chooses between tokens that are as good.
    """
    precise = dtype == "float32"
    is_near = answer["max_difference"] <= near if precise else answer["mean_difference"] <= ROUNDED
    wrong = [] if is_near else [f"log-probabilities are {answer['max_difference']:.1e} from {other}'s"]
    if precise and answer["same_tokens"] < answer["tokens"]:
        wrong.append(f"its greedy tokens are not {other}'s")
    return wrong


def run_folds(
    engine: str,
    folds: Iterable[Fold],
    only: str,
    near: float,
    name: str,
    packages: Iterable[str],
    *,
    update: bool = False,
) -> None:
    """Run folds, print their table, and save it where all were run and none failed.

    Args:
        engine: that runs them.
        folds: to run.
        only: words that a fold's source or options must contain; then nothing is saved without `update`.
        near: of `run_fold`.
        name: of the file in benchmarks/results.
        packages: whose versions are saved with it.
        update: keep saved rows and save each new one that does not fail; without `only`, run no fold that has
            a row.
    """
    versions = {package: version(package) for package in (*packages, "transformers")}
    saved = SavedRows(name, {"versions": versions}, update=update)
    chosen = [fold for fold in folds if only in f"{fold.source} {fold.options}"]
    if not chosen:
        names = ", ".join(fold.source for fold in FOLDS)
        raise InvalidInput(f"--only {only!r} names no fold; these are: {names}")
    if update and not only:
        chosen = [fold for fold in chosen if saved.find("rows", **_key(fold)) is None]
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for fold, source, out in make_folds(Path(work), folds=tuple(chosen)):
            rows.append(run_fold(fold, source, out, engine, near))
            words = "; ".join(rows[-1]["failures"]) or "ok"
            click.echo(f"{len(rows)} {fold.source} {fold.options}: {words}", err=True)
            if not rows[-1]["failures"]:
                saved.put("rows", rows[-1], *_key(fold))
                if update:
                    saved.write()
    _show(rows, engine)
    finish(saved, rows, only, update)


def finish(saved: SavedRows, rows: list[dict[str, Any]], only: str, update: bool) -> None:
    """Save the rows where all were made and none failed, count them, and exit with 1 where one failed."""
    failed = sum(bool(row["failures"]) for row in rows)
    if not only and not update and not failed:
        saved.write()
    if update or not (only or failed):
        click.echo(f"saved in {saved.path}")
    click.echo(f"{len(rows) - failed} passed, {failed} failed")
    if failed:
        raise SystemExit(1)


def _key(fold: Fold) -> dict[str, str]:
    return {"source": fold.source, "options": fold.options}


def _show(rows: list[dict[str, Any]], engine: str) -> None:
    columns = ("source", "fold", "class", "log-probabilities", "greedy tokens", "cache", "against", "")
    cells = [
        (
            row["source"],
            row["options"],
            str(row["class"]),
            f"{row['max_difference']:.1e}" if "cache" in row else "-",
            f"{row['same_tokens']}/{row['tokens']}" if "cache" in row else "-",
            f"{row['cache']['before']} -> {row['cache'][engine]:g}" if "cache" in row else "-",
            row["against"],
            "FAILS" if row["failures"] else "ok",
        )
        for row in rows
    ]
    show_table(f"{engine} against transformers", columns, cells)
