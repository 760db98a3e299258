"""Loss of MLA with and without key norms: `python -m benchmarks.twins MODEL DIRECTORY --train F --text F`.

A small Llama checkpoint is trained on as Llama, as Qwen3 and as OLMo 2 (`twin_sources`), into DIRECTORY,
unless the twins are there. Each is folded to MLA in several forms at several shares of its cache, and scored
on the same windows of the same text. A ratio compares the nats that a fold loses with those that the fold of
the Llama twin in the stock class loses at the same share.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
import transformers

from kvfold.convert.calibration.study import study
from kvfold.convert.efforts import EFFORTS
from kvfold.convert.families.source import open_source
from kvfold.core.console import Command, show_table
from kvfold.core.errors import InvalidInput
from kvfold.core.hub import resolve
from kvfold.eval.options import Options
from kvfold.texts.corpus import read_text

from .fidelity import BUDGETS, Trial
from .saved_rows import SavedRows
from .twin_sources import KINDS, train

FORMS: dict[str, dict[str, str]] = {
    "--container stock": {"container": "stock"},
    "--rope decoupled": {"rope": "decoupled", "container": "remote"},
    "--rope intact": {"rope": "intact"},
}
BASE = {"twin": "llama", "form": "--container stock"}


@click.command(cls=Command)
@click.argument("model")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--train", "training", required=True, type=click.Path(path_type=Path), help="Text that twins train on."
)
@click.option("--text", required=True, help="Evaluation text, as for kvfold eval.")
@click.option(
    "--twin", "twins", multiple=True, type=click.Choice(KINDS), help="A family; all three by default."
)
@click.option("--form", "forms", multiple=True, type=click.Choice([*FORMS]), help="All by default.")
@click.option(
    "--budget", "budgets", multiple=True, help="A share of the cache; 50%, 25% and 12.5% by default."
)
@click.option("--effort", default="default", show_default=True, type=click.Choice([*EFFORTS]))
@click.option("--max-windows", type=int, help="Of 256 tokens; all by default.")
@click.option("--update", is_flag=True, help="Keep the rows of earlier runs that this one does not measure.")
@click.option("--name", required=True, help="Results go to benchmarks/results/twins-NAME.json.")
def main(
    model: str,
    directory: Path,
    training: Path,
    text: str,
    twins: tuple[str, ...],
    forms: tuple[str, ...],
    budgets: tuple[str, ...],
    effort: str,
    max_windows: int | None,
    update: bool,
    name: str,
) -> None:
    """Print and save nats lost by MLA folds of the same model with and without key norms."""
    torch.set_num_threads(1)  # the same sums in the same order on machines of any size
    saved = SavedRows(f"twins-{name}", {"transformers": transformers.__version__}, update=update)
    measured = 0
    for twin in twins or KINDS:
        place = directory / twin
        if not place.exists():
            directory.mkdir(parents=True, exist_ok=True)
            train(place, twin, resolve(model), read_text(str(training)).joined)
        with tempfile.TemporaryDirectory() as work:
            source = open_source(place)
            statistics = study(source, "self", sequences=EFFORTS[effort].sequences, length=256, seed=0)
            assert statistics is not None, "a source writes its calibration text"
            trial = Trial(
                directory=place,
                source=source,
                statistics=statistics,
                text=read_text(text),
                options=Options(window=256, max_windows=max_windows, teacher_cache=Path(work) / "teacher"),
                work=Path(work),
            )
            for budget in budgets or BUDGETS:
                for form in forms or FORMS:
                    asked = {"kv_budget": budget, "effort": effort, **FORMS[form]}
                    label = f"{twin} {form} {budget}"
                    cell = trial.measure(label, "mla", "subspace", asked, EFFORTS[effort].steps)
                    if cell is not None:
                        key = {"twin": twin, "form": form, "budget": budget, "effort": effort}
                        saved.put("rows", {**key, **cell, **trial.protocol}, *key)
                        saved.write()
                        measured += 1
    if measured == 0:
        raise InvalidInput("every fold asked for is refused, for the reasons above; nothing is saved")
    show(json.loads(saved.path.read_text(encoding="utf-8"))["rows"])


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print nats lost, and how many times those of the Llama twin in the stock class they are."""
    base = {
        (row["budget"], row["effort"]): row["lost"]
        for row in rows
        if all(row[field] == value for field, value in BASE.items())
    }
    lines = []
    for row in rows:
        key = row["budget"], row["effort"]
        times = row["lost"] / base[key] if key in base else None
        about = [row["twin"], f"{row['source_perplexity']:.4g}", row["form"], row["effort"], row["budget"]]
        lines.append([*about, f"{row['lost']:.4f}", "" if times is None else f"{times:.2f}"])
    head = ["twin", "perplexity", "form", "effort", "cache", "nats lost", "times Llama's"]
    show_table("Nats lost as MLA before any training", head, lines)


if __name__ == "__main__":
    main()
