"""Training and rounding of outputs with ordinary tools: `python -m benchmarks.trainable MODEL --text A
--eval-text B`.

The source and its folds with a fitted latent norm, and at one size with a linear one and with code of their
own, are trained for ten steps by AdamW with clipped gradients, by `transformers.Trainer` with gradient
checkpointing, and by PEFT's LoRA on all linear layers. Losses are on the same held-out windows before and
after. Rounding is the mean change of log-probabilities against float32.
"""

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.efforts import EFFORTS
from kvfold.convert.families.source import open_source
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.console import show_table
from kvfold.core.hub import resolve
from kvfold.texts.documents import read_sequences

from .machine import save
from .rounded_weights import ROUNDINGS, rounding_errors
from .ways_of_training import BATCH, STEPS, WAYS, held_out_loss

FITTED = {"container": "stock", "latent_norm": "fitted"}
OTHERS = {"linear": {"container": "stock", "latent_norm": "linear"}, "remote": {"container": "remote"}}
WITHIN = 0.02  # nats that a fold's gain in training may fall behind its source's
ROUNDED = 4  # held-out windows

Row = dict[str, float]


def load(directory: Path) -> Any:
    """Return a checkpoint's model in float32, as a user of transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=True)


def measure(directory: Path, train_BT: Tensor, held_BT: Tensor) -> Row:
    """Return one checkpoint's losses before and after every way of training, and its rounding errors."""
    found = {"before": held_out_loss(load(directory), held_BT)}
    for way, (train, rate) in WAYS.items():
        found[way] = held_out_loss(train(load(directory), train_BT, rate), held_BT)
    return found | rounding_errors(lambda: load(directory), held_BT[:ROUNDED])


def behind(row: Row, source: Row) -> float:
    """Return by how much a fold gained less than its source in the way that suits it worst, nats."""
    return max((row[way] - row["before"]) - (source[way] - source["before"]) for way in WAYS)


def rounds_worse(row: Row, source: Row) -> float:
    """Return a fold's rounding error over its source's, in the rounding that suits it worst."""
    return max(row[name] / source[name] for name in ROUNDINGS)


def labels(budgets: Sequence[str], contrast: str | None) -> dict[str, dict[str, Any]]:
    """Return the options of every row by its label; the source has none.

    Args:
        budgets: of the folds with a fitted norm.
        contrast: the budget at which the other folds are measured.
    """
    rows: dict[str, dict[str, Any]] = {"source": {}}
    rows |= {f"fitted {budget}": {**FITTED, "kv_budget": budget} for budget in budgets}
    if contrast is not None:
        rows |= {f"{label} {contrast}": {**form, "kv_budget": contrast} for label, form in OTHERS.items()}
    return rows


def measure_row(
    directory: Path,
    work: Path,
    label: str,
    options: dict[str, Any],
    statistics: Callable[[], Statistics],
    effort: dict[str, Any],
    train_BT: Tensor,
    held_BT: Tensor,
) -> Row:
    """Return one row; what an earlier run left in `work`, its fold or all of it, is not made again.

    Args:
        directory: the source.
        work: where folds and rows are kept.
        label: of the row.
        options: of the fold.
        statistics: returns those of the source.
        effort: options of the fold's effort, such as `effort` and `refine`.
        train_BT: windows to train on.
        held_BT: windows to measure on.
    """
    place = work / re.sub(r"\W+", "_", label).strip("_")
    file = work / f"{place.name}.json"
    if file.exists():
        return dict(json.loads(file.read_text()))
    row: Row = {}
    if options:
        if not place.exists():
            asked = {"model": str(directory), "to": "mla", "dtype": "float32", **options, **effort}
            rewrite(make_plan(directory, fold_request(asked), statistics()), place)
        row["predicted"] = json.loads((place / "kvfold.json").read_text())["predicted_loss"]
    row |= measure(place if options else directory, train_BT, held_BT)
    file.write_text(json.dumps(row))
    click.echo(f"{label}: {row}", err=True)
    return row


def show(rows: dict[str, Row]) -> None:
    """Print the rows, and whether every fold with a fitted norm can be trained as its source can."""
    columns = ("before", *WAYS, *ROUNDINGS)
    table = [(label, *(f"{row[column]:.4f}" for column in columns)) for label, row in rows.items()]
    show_table(f"held-out loss after {STEPS} steps, and rounding errors", ("", *columns), table)
    for label, row in rows.items():
        if label != "source":
            worst = behind(row, rows["source"])
            click.echo(
                f"{label}: falls {max(worst, 0):.4f} nats behind the source ({WITHIN} are allowed); rounds "
                f"at most {rounds_worse(row, rows['source']):.2f} times as badly"
            )


@click.command()
@click.argument("model")
@click.option("--text", required=True, help="Training text, as for kvfold convert --calibration.")
@click.option("--eval-text", required=True, help="Held-out text, likewise.")
@click.option("--calibration", default="self", show_default=True, help="As for kvfold convert.")
@click.option("--kv-budget", multiple=True, default=["50%", "25%", "12.5%"], show_default=True)
@click.option(
    "--contrast", default="25%", show_default=True, help="Budget of a linear norm and of own code; none."
)
@click.option("--window", default=256, show_default=True, help="Tokens of a window.")
@click.option("--windows", default=32, show_default=True, help="Held-out windows.")
@click.option("--effort", type=click.Choice(list(EFFORTS)), default="default", show_default=True)
@click.option("--refine", type=int, help="As for kvfold convert; left out, as the effort says.")
@click.option("--only", multiple=True, help="A row's label; all rows by default.")
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory that keeps folds and rows for a later run; a temporary one by default.",
)
@click.option("--name", required=True, help="Results go to benchmarks/results/trainable-NAME.json.")
def main(
    model: str,
    text: str,
    eval_text: str,
    calibration: str,
    kv_budget: tuple[str, ...],
    contrast: str,
    window: int,
    windows: int,
    effort: str,
    refine: int | None,
    only: tuple[str, ...],
    work: Path | None,
    name: str,
) -> None:
    """Print and save what training and rounding make of a source and its folds."""
    directory = resolve(model)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    train_BT = read_sequences(text, tokenizer, sequences=STEPS * BATCH, length=window, seed=0)
    held_BT = read_sequences(eval_text, tokenizer, sequences=windows, length=window, seed=0)
    taken: dict[str, Any] = {"effort": effort} | ({} if refine is None else {"refine": refine})
    wanted = labels(kv_budget, None if contrast == "none" else contrast)
    with tempfile.TemporaryDirectory() as temporary:
        place = work or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)

        @cache
        def statistics() -> Statistics:
            return study(open_source(directory), calibration, sequences=48, length=window, seed=0)

        rows = {
            label: measure_row(directory, place, label, options, statistics, taken, train_BT, held_BT)
            for label, options in wanted.items()
            if not only or label in only
        }
    if "source" not in rows:
        return
    show(rows)
    about = {
        "model": Path(model).name,
        "text": Path(text).name,
        "eval_text": Path(eval_text).name,
        "steps": STEPS,
        "batch": BATCH,
        "window": window,
        "windows": windows,
        **taken,
    }
    click.echo(f"saved in {save(f'trainable-{name}', {**about, 'rows': rows})}")


if __name__ == "__main__":
    main()
