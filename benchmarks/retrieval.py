"""The loss of folds in retrieval: `python -m benchmarks.retrieval DIRECTORY`.

The source is trained into DIRECTORY first, if there is none (`retrieval_source`: 30 minutes of one core, the
same weights each time on one kind of machine). It is then folded by rows of `fidelity`, calibrated with its
own training text, with or without hidden numbers and questions. Evaluation is on modules of the standard
library that nothing was trained or calibrated with: nats lost, and hidden numbers found, by the suite
`retrieval`, as the source finds them.
"""

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import click
import torch
import transformers

from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source
from kvfold.core.console import Command, show_table
from kvfold.core.errors import InvalidInput
from kvfold.eval.options import Options
from kvfold.eval.result import Result
from kvfold.eval.suites.catalogue import DEFAULT
from kvfold.eval.suites.haystack import KINDS
from kvfold.models.causal_lm import load_tokenizer
from kvfold.texts.corpus import read_text
from kvfold.texts.standard_library import stdlib_documents

from .fidelity import BUDGETS, Cell, Trial, chosen, measure
from .retrieval_source import POSITIONS, STAGES, Windows, train
from .saved_rows import SavedRows

ROWS = ("mla", "mla, default effort", "gqa", "gqa, default effort")
LENGTHS = (POSITIONS // 4, POSITIONS // 2, POSITIONS)
WINDOWS = 8  # of the perplexity, each of all positions


def with_questions(text: str, directory: Path, sequences: int, length: int) -> str:
    """Return text with hidden numbers and questions, half as much again as will be read of it."""
    windows, draw = Windows(text, load_tokenizer(directory)), random.Random(1)
    stage = replace(STAGES[-1], length=length, repeats=0.0)
    rows = [windows.row(stage, draw) for _ in range(2 + sequences * 3 // 2)]
    return "\n\n".join(windows.text(row) for row in rows)


def found(result: Result) -> Cell:
    """Return the shares of right answers by role, kind, length and depth, and what the fold loses of them."""
    block: Any = result.suites["retrieval"]
    right = {
        role: {
            kind: dict(zip(map(str, one.lengths), one.accuracy, strict=True))
            for kind, one in getattr(block, role).items()
        }
        for role in ("student", "teacher")
    }
    lost = {
        kind: {"mean": -one.accuracy.mean, "standard_error": one.accuracy.standard_error}
        for kind, one in block.difference.items()
    }
    return {"depths": block.student[KINDS[0]].depths, "right": right, "retrieval_lost": lost}


@click.command(cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--only", multiple=True, help="A row of benchmarks.fidelity; the best and the default effort by default."
)
@click.option(
    "--budget", "budgets", multiple=True, help="A share of the cache; 50%, 25% and 12.5% by default."
)
@click.option("--length", default=POSITIONS, show_default=True, help="Tokens of a calibration sequence.")
@click.option(
    "--calibration",
    type=click.Choice(["text", "questions"]),
    default="text",
    show_default=True,
    help="The training text alone, or with hidden numbers and questions like those of training.",
)
@click.option("--calibration-tokens", default=2**15, show_default=True, help="Of all sequences together.")
@click.option("--samples", default=10, show_default=True, help="Prompts at each depth and length.")
@click.option("--update", is_flag=True, help="Keep the rows of earlier runs that this one does not measure.")
def main(
    directory: Path,
    only: tuple[str, ...],
    budgets: tuple[str, ...],
    length: int,
    calibration: str,
    calibration_tokens: int,
    samples: int,
    update: bool,
) -> None:
    """Print and save nats and hidden numbers lost by folds of a source that retrieves."""
    labels = chosen(only or ROWS, ())
    torch.set_num_threads(1)  # the same sums in the same order on machines of any size
    training_text = "\n\n".join(stdlib_documents(held_out=False))
    if not directory.exists():
        train(directory, training_text)
    saved = SavedRows("retrieval", {"transformers": transformers.__version__}, update=update)
    with tempfile.TemporaryDirectory() as work:
        source, text_file = open_source(directory), Path(work) / "text.txt"
        if source.positions != POSITIONS:
            raise InvalidInput(
                f"{directory} has {source.positions} positions, and the table is of {POSITIONS}; name a "
                "directory that does not exist, and the source is trained there"
            )
        sequences = max(1, calibration_tokens // length)
        if calibration == "questions":
            training_text = with_questions(training_text, directory, sequences, length)
        text_file.write_text(training_text, encoding="utf-8")
        statistics = study(source, str(text_file), sequences=sequences, length=length, seed=0)
        assert statistics is not None, "a file of text gives statistics"
        trial = Trial(
            directory=directory,
            source=source,
            statistics=statistics,
            text=read_text("stdlib"),
            options=Options(window=POSITIONS, max_windows=WINDOWS, teacher_cache=Path(work) / "teacher"),
            work=Path(work),
            suites=(*DEFAULT, "retrieval"),
            settings={"retrieval_lengths": ",".join(map(str, LENGTHS)), "retrieval_samples": samples},
            further=found,
        )
        for label, budget in product(labels, budgets or BUDGETS):
            cell = measure(trial, label, budget)
            if cell is None:
                continue
            name = {"fold": label, "budget": budget, "calibration": [calibration, sequences, length]}
            saved.put("rows", {**name, **cell, **trial.protocol}, *name)
            saved.write()
    show(json.loads(saved.path.read_text(encoding="utf-8"))["rows"])


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print nats lost, and the share of numbers that are found, by kind and length."""
    columns = [(kind, str(length)) for kind in KINDS for length in LENGTHS]

    def shares(row: Mapping[str, Any], role: str) -> list[str]:
        right = row["right"][role]
        return [
            f"{sum(found) / len(found):.3f}" for kind, length in columns for found in [right[kind][length]]
        ]

    lines = [["source", "", "", "", *shares(rows[0], "teacher")]]
    for row in rows:
        kind, sequences, length = row["calibration"]
        about = [row["fold"], row["budget"], f"{kind}, {sequences} of {length}", f"{row['lost']:.4f}"]
        lines.append([*about, *shares(row, "student")])
    head = ["", "cache", "calibration", "nats lost", *(f"{kind} at {length}" for kind, length in columns)]
    show_table("Hidden numbers found", head, lines)


if __name__ == "__main__":
    main()
