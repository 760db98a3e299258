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
from kvfold.verification.fresh_process import NEAR, ROUNDED
from kvfold.verification.verify import verify

from .folds import FOLDS, Fold, make_folds
from .machine import save


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
    engine: str, folds: Iterable[Fold], only: str, near: float, saved: str, packages: Iterable[str]
) -> None:
    """Run folds, print their table, and save it where all were run and none failed.

    Args:
        engine: that runs them.
        folds: to run.
        only: words that a fold's source or options must contain; then nothing is saved.
        near: of `run_fold`.
        saved: name of the file in benchmarks/results.
        packages: whose versions are saved with it.
    """
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for fold, source, out in make_folds(Path(work), only, tuple(folds)):
            rows.append(run_fold(fold, source, out, engine, near))
            words = "; ".join(rows[-1]["failures"]) or "ok"
            click.echo(f"{len(rows)} {fold.source} {fold.options}: {words}", err=True)
    if not rows:
        names = ", ".join(fold.source for fold in FOLDS)
        raise InvalidInput(f"--only {only!r} names no fold; these are: {names}")
    _show(rows, engine)
    failed = sum(bool(row["failures"]) for row in rows)
    if not only and not failed:
        versions = {name: version(name) for name in (*packages, "transformers")}
        click.echo(f"saved in {save(saved, {'versions': versions, 'rows': rows})}")
    click.echo(f"{len(rows) - failed} passed, {failed} failed")
    if failed:
        raise SystemExit(1)


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
