"""Loss of finished outputs on several texts and lengths: `python -m benchmarks.outputs OUTPUT... --text F`.

Each output is scored with its source on the same windows, as `kvfold eval` does it. A row has the stage of
an output and the command of its fold; a training has that of the fold before it.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import transformers

import kvfold
from kvfold.checkpoints.record import read_record
from kvfold.core.console import Command, show_table
from kvfold.core.errors import InvalidInput
from kvfold.texts.corpus import read_text

from .saved_rows import SavedRows

TOKENS = 8192  # of each text, by default


@click.command(cls=Command)
@click.argument("outputs", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--text", "texts", multiple=True, required=True, help="Evaluation text; may be repeated.")
@click.option(
    "--window", "windows", multiple=True, type=click.IntRange(2), default=(256, 2048), show_default=True,
    help="Tokens of a window; may be repeated.",
)  # fmt: skip
@click.option(
    "--tokens", type=click.IntRange(2), default=TOKENS, show_default=True, help="Tokens of each text."
)
@click.option("--update", is_flag=True, help="Keep the rows of earlier runs that this one does not measure.")
@click.option("--name", required=True, help="Results go to benchmarks/results/outputs-NAME.json.")
def main(
    outputs: tuple[Path, ...],
    texts: tuple[str, ...],
    windows: tuple[int, ...],
    tokens: int,
    update: bool,
    name: str,
) -> None:
    """Print and save nats lost by outputs on texts."""
    if tokens < max(windows):
        raise InvalidInput(f"--tokens {tokens} are less than a window of {max(windows)}; ask for more")
    records = {output: _record(output) for output in outputs}
    saved = SavedRows(f"outputs-{name}", {"transformers": transformers.__version__}, update=update)
    with tempfile.TemporaryDirectory() as work:
        for text in texts:
            for window in windows:
                # The teacher's states on one text serve all outputs.
                cache = Path(work) / f"{read_text(text).sha256}-{window}"
                for output, record in records.items():
                    row = measure(output, text, window, tokens // window, cache)
                    about = {
                        "output": output.name,
                        "stage": record["stage"],
                        "command": record.get("command"),
                    }
                    saved.put("rows", {**about, **row}, "output", "text", "window")
                    saved.write()
    show(json.loads(saved.path.read_text(encoding="utf-8"))["rows"])


def _record(output: Path) -> dict[str, Any]:
    record = read_record(output)
    if record is None:
        raise InvalidInput(f"{output} has no kvfold.json; name outputs of kvfold convert or distill")
    return record


def measure(output: Path, text: str, window: int, count: int, teacher_cache: Path) -> dict[str, Any]:
    """Return the row of one output on one text."""
    options = {"window": window, "max_windows": count, "teacher_cache": str(teacher_cache)}
    found = kvfold.evaluate(output, text=text, **options)
    return {
        "text": Path(text).name,
        "text_sha256": read_text(text).sha256,
        "window": window,
        "windows": count,
        "source_perplexity": found["ppl.teacher.perplexity"],
        "lost": found["ppl.difference.mean"],
        "standard_error": found["ppl.difference.standard_error"],
        "kl": found["kl.mean"],
        "cache": found["cache.ratio"],
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print nats lost, and KL divergence in brackets, by output and text."""
    columns = list(dict.fromkeys((row["text"], row["window"]) for row in rows))
    lines: dict[str, dict[tuple[str, int], str]] = {}
    for row in rows:
        cell = f"{row['lost']:.3f} ({row['kl']:.3f})"
        lines.setdefault(row["output"], {})[row["text"], row["window"]] = cell
    head = ["output", *(f"{text}, {window}" for text, window in columns)]
    body = [[output, *(cells.get(column, "") for column in columns)] for output, cells in lines.items()]
    show_table("Nats lost (KL divergence)", head, body)


if __name__ == "__main__":
    main()
