"""What each fold loses before any training: `python -m benchmarks.fidelity MODEL --text FILE`, methods by budgets.

The source is scored in the same run on the same windows; numbers are nats a token above it, paired by window.
"""

import tempfile
from pathlib import Path

import click

from kvfold.convert.console import show_table
from kvfold.convert.errors import InvalidInput
from kvfold.convert.hub import resolve
from kvfold.convert.plan import make_plan
from kvfold.convert.rewrite import rewrite
from kvfold.convert.source import open_source
from kvfold.convert.study import study
from kvfold.eval.corpus import read_text
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate

from .machine import save

BUDGETS = ("50%", "25%", "12.5%")
# label -> (target, method, whether by statistics)
FOLDS = {
    "gqa mean": ("gqa", "mean", False),
    "gqa aligned": ("gqa", "aligned", False),
    "gqa subspace": ("gqa", "subspace", False),
    "mla, weights only": ("mla", "subspace", False),
    "mla, --calibration self": ("mla", "subspace", True),
}


@click.command()
@click.argument("model")
@click.option("--text", required=True, help="Evaluation text, as for kvfold eval.")
@click.option("--sequences", default=48, show_default=True, help="Calibration sequences.")
@click.option("--length", default=256, show_default=True, help="Tokens of each.")
@click.option("--window", default=256, show_default=True)
@click.option("--max-windows", type=int)
@click.option("--name", required=True, help="Results go to benchmarks/results/fidelity-NAME.json.")
def main(model: str, text: str, sequences: int, length: int, window: int, max_windows: int | None, name: str) -> None:
    """Print and save nats lost by every method at every budget."""
    directory = resolve(model)
    content, options = read_text(text), Options(window=window, max_windows=max_windows)
    statistics = study(open_source(directory), "self", sequences=sequences, length=length, seed=0)
    rows: dict[str, dict[str, dict[str, float | None]]] = {label: {} for label in FOLDS}
    with tempfile.TemporaryDirectory() as work:
        for label, (to, method, calibrated) in FOLDS.items():
            for budget in BUDGETS:
                out = Path(work) / f"{label}-{budget}"
                try:
                    plan = make_plan(directory, to, {"kv_budget": budget}, method, "auto", statistics if calibrated else None)
                except InvalidInput as reason:
                    click.echo(f"{label} {budget}: {reason}", err=True)
                    continue
                rewrite(plan, out, "benchmarks.fidelity")
                result = evaluate(out, directory, content, options)
                assert result.nll_difference is not None
                assert result.teacher is not None
                rows[label][budget] = {
                    "lost": result.nll_difference.mean,
                    "standard_error": result.nll_difference.standard_error,
                    "predicted": plan.predicted,
                }
    protocol = {"protocol": result.protocol.name, "text_sha256": result.protocol.text_sha256}
    source = {"source_perplexity": result.teacher.perplexity, "calibration": [sequences, length]}
    cells = [(label, *(f"{row[b]['lost']:.4f}" if b in row else "" for b in BUDGETS)) for label, row in rows.items()]
    title = f"{protocol['protocol']}, source {source['source_perplexity']:.4g}: nats lost at a share of its cache"
    show_table(title, ("", *BUDGETS), cells)
    click.echo(f"saved in {save(f'fidelity-{name}', {**protocol, **source, 'rows': rows})}")


if __name__ == "__main__":
    main()
