"""Folds served by vLLM, held against their sources in transformers: `make test-vllm`, or `python -m
benchmarks.vllm`.

Each fold is checked by `kvfold verify --engine vllm`, in float32 on a CPU and bfloat16 on a GPU:
log-probabilities of text that the source writes, greedy tokens, and what vLLM's own cache specification
allocates. Exit code 1 where something is wrong.
"""

import os
import tempfile
import time
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch

from kvfold.checkpoints.record import read_record
from kvfold.core.console import Command, show_table
from kvfold.core.errors import InvalidInput
from kvfold.verification.fresh_process import NEAR, ROUNDED
from kvfold.verification.verify import verify

from .folds import FOLDS, Fold, make_folds
from .machine import save


def run(fold: Fold, source: Path, out: Path) -> dict[str, Any]:
    """A fold's row.

    What vLLM answers, against the source where the fold is exact, else against the fold in transformers.
    """
    start = time.monotonic()
    report = verify(out, ["vllm"], source)
    told = report.measured.get("vllm", {})
    row: dict[str, Any] = {
        "source": fold.source,
        "options": fold.options,
        "class": report.measured.get("class"),
    }
    row |= {"against": "source" if fold.exact else "fold", "seconds": round(time.monotonic() - start, 1)}
    if "own" not in told:
        why = report.failures or [
            *(check.detail for check in report.checks if check.name == "vllm"),
            *report.unasked,
        ]
        return row | {"failures": why or ["vLLM gave no answer"]}
    answer = told["source" if fold.exact else "own"]
    cache = next(check for check in report.checks if check.name == "vllm cache")
    failures = report.failures
    if fold.exact:
        failures += _held(answer, precise=told["dtype"] == "float32")
    if (cache.passed is True) != fold.as_claimed:
        failures.append(cache.detail)
    record = read_record(out)
    assert record is not None, "kvfold convert has just written it"
    sizes = {side: record["cache"][side]["elements_per_token_per_layer"] for side in ("before", "after")}
    return row | {
        "dtype": told["dtype"],
        **answer,
        "cache": {**sizes, "vllm": told["cache"]},
        "failures": failures,
    }


def _held(answer: dict[str, float], precise: bool) -> list[str]:
    """What of an exact fold's answers is not the source's.

    Rounding to 16 bits also chooses between tokens that are as good.
    """
    near = answer["max_difference"] <= NEAR if precise else answer["mean_difference"] <= ROUNDED
    wrong = [] if near else [f"log-probabilities are {answer['max_difference']:.1e} from the source's"]
    if precise and answer["same_tokens"] < answer["tokens"]:
        wrong.append("its greedy tokens are not the source's")
    return wrong


@click.command(cls=Command)
@click.option(
    "--only",
    metavar="WORDS",
    default="",
    help="Folds whose source or options contain these words; saves nothing.",
)
def main(only: str) -> None:
    """Serve every fold, print the table, and save it in benchmarks/results/vllm-cpu.json (vllm-cuda.json on
    a GPU).
    """
    if find_spec("vllm") is None:
        raise InvalidInput("vLLM is not installed in this environment; `make test-vllm` makes one of its own")
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for fold, source, out in make_folds(Path(work), only):
            rows.append(run(fold, source, out))
            click.echo(
                f"{len(rows)} {fold.source} {fold.options}: {'; '.join(rows[-1]['failures']) or 'ok'}",
                err=True,
            )
    if not rows:
        raise InvalidInput(
            f"--only {only!r} names no fold; these are: {', '.join(fold.source for fold in FOLDS)}"
        )
    _show(rows)
    failed = sum(bool(row["failures"]) for row in rows)
    if not only and not failed:
        versions = {name: version(name) for name in packages_distributions()["vllm"] + ["transformers"]}
        name = "vllm-cuda" if torch.cuda.is_available() else "vllm-cpu"
        click.echo(f"saved in {save(name, {'versions': versions, 'rows': rows})}")
    click.echo(f"{len(rows) - failed} passed, {failed} failed")
    if failed:
        raise SystemExit(1)


def _show(rows: list[dict[str, Any]]) -> None:
    columns = ("source", "fold", "class", "log-probabilities", "greedy tokens", "cache", "against", "")
    cells = [
        (
            row["source"],
            row["options"],
            str(row["class"]),
            f"{row['max_difference']:.1e}" if "cache" in row else "-",
            f"{row['same_tokens']}/{row['tokens']}" if "cache" in row else "-",
            "{before} -> {vllm:g}".format(**row["cache"]) if "cache" in row else "-",
            row["against"],
            "FAILS" if row["failures"] else "ok",
        )
        for row in rows
    ]
    show_table("vLLM against transformers", columns, cells)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
