"""What each fold loses before any training: `python -m benchmarks.fidelity MODEL --text FILE`, methods by
budgets.

The source is scored in the same run on the same windows; numbers are nats a token above it, paired by window.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import click

from kvfold.convert.calibration.study import study
from kvfold.convert.decide.plan import make_plan
from kvfold.convert.families.source import open_source
from kvfold.convert.methods.refinement import STEPS
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.console import show_table
from kvfold.core.errors import InvalidInput
from kvfold.core.hub import resolve
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.texts.corpus import read_text

from .machine import save

BUDGETS = ("50%", "25%", "12.5%")
Fold = tuple[
    str, str, dict[str, str], int | None
]  # target, method, further options, refinement; None: by weights alone
FOLDS: dict[str, Fold] = {
    "gqa mean": ("gqa", "mean", {}, None),
    "gqa aligned": ("gqa", "aligned", {}, None),
    "gqa, weights only": ("gqa", "subspace", {}, None),
    "gqa, closed form": ("gqa", "subspace", {}, 0),
    "gqa": ("gqa", "subspace", {}, STEPS),
    "mla svd": ("mla", "svd", {}, 0),
    "mla transmla": ("mla", "transmla", {}, 0),
    "mla mha2mla": ("mla", "mha2mla", {}, 0),
    "mla care": ("mla", "care", {}, 0),
    "mla xecomla": ("mla", "xecomla", {}, 0),
    "mla, weights only": ("mla", "subspace", {}, None),
    "mla uniform, closed form": ("mla", "subspace", {"slots": "uniform"}, 0),
    "mla, closed form": ("mla", "subspace", {}, 0),
    "mla": ("mla", "subspace", {}, STEPS),
    "mla --rope intact, closed form": ("mla", "subspace", {"rope": "intact"}, 0),
    "mla --rope intact": ("mla", "subspace", {"rope": "intact"}, STEPS),
}


@click.command()
@click.argument("model")
@click.option("--text", required=True, help="Evaluation text, as for kvfold eval.")
@click.option("--sequences", default=48, show_default=True, help="Calibration sequences.")
@click.option("--length", default=256, show_default=True, help="Tokens of each.")
@click.option("--calibration", default="self", show_default=True, help="As for kvfold convert.")
@click.option("--only", multiple=True, help="A row's label; all rows by default.")
@click.option("--window", default=256, show_default=True)
@click.option("--max-windows", type=int)
@click.option("--name", required=True, help="Results go to benchmarks/results/fidelity-NAME.json.")
def main(
    model: str,
    text: str,
    sequences: int,
    length: int,
    calibration: str,
    only: tuple[str, ...],
    window: int,
    max_windows: int | None,
    name: str,
) -> None:
    """Print and save nats lost by every method at every budget."""
    directory = resolve(model)
    content, how = read_text(text), Options(window=window, max_windows=max_windows)
    statistics = study(open_source(directory), calibration, sequences=sequences, length=length, seed=0)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as work:
        for label, (to, method, further, steps) in FOLDS.items():
            if only and label not in only:
                continue
            rows[label] = {}
            for budget in BUDGETS:
                out, options = Path(work) / f"{label}-{budget}", {"kv_budget": budget, **further}
                try:
                    plan = make_plan(
                        directory,
                        to,
                        options,
                        method,
                        "auto",
                        None if steps is None else statistics,
                        steps or 0,
                    )
                except InvalidInput as reason:
                    click.echo(f"{label} {budget}: {reason}", err=True)
                    continue
                start = time.monotonic()
                record = rewrite(plan, out, "benchmarks.fidelity")
                seconds = time.monotonic() - start
                result = evaluate(out, directory, content, how)
                assert result.ppl.difference is not None
                assert result.ppl.teacher is not None
                assert result.protocol is not None
                rows[label][budget] = {
                    "lost": result.ppl.difference.mean,
                    "standard_error": result.ppl.difference.standard_error,
                    "predicted": record["predicted_loss"],
                    "target": plan.target.to_dict(),
                    "fold_seconds": round(seconds, 1),
                }
                click.echo(f"{label} {budget}: {result.ppl.difference.mean:.4f}", err=True)
    protocol = {"protocol": result.protocol.name, "text_sha256": result.protocol.text_sha256}
    source = {
        "source_perplexity": result.ppl.teacher.perplexity,
        "calibration": [calibration, sequences, length],
    }
    cells = [
        (label, *(f"{row[b]['lost']:.4f}" if b in row else "" for b in BUDGETS))
        for label, row in rows.items()
    ]
    title = (
        f"{protocol['protocol']}, source {source['source_perplexity']:.4g}: nats lost at a share of its cache"
    )
    show_table(title, ("", *BUDGETS), cells)
    click.echo(f"saved in {save(f'fidelity-{name}', {**protocol, **source, 'rows': rows})}")


if __name__ == "__main__":
    main()
