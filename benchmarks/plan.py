"""Does the ranking of `kvfold plan` hold? `python -m benchmarks.plan MODEL --text FILE`: predicted against
measured loss.

Every target is predicted from one statistics pass and by weights alone, then folded, by the closed form that
was predicted and with the refinement that `kvfold convert` adds, and scored on the same windows as its
source. Rank correlations are Spearman's.
"""

import tempfile
from pathlib import Path
from typing import Any

import click
from scipy.stats import spearmanr  # type: ignore[import-untyped]

from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import Source, open_source
from kvfold.convert.methods.refinement import STEPS
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.console import show_table
from kvfold.core.hub import resolve
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.planning.candidates import SHARES, find_candidates
from kvfold.planning.demand import Bounds
from kvfold.planning.ranking import Row, place, predict_rows
from kvfold.texts.corpus import read_text

from .machine import save

DEMO = str(Path(__file__).parent.parent / "recipes" / "demo")
_PREDICTED, _MEASURED = ("predicted", "by weights"), ("closed form", "refined")
Table = dict[str, dict[str, float]]


@click.command()
@click.argument("model", default=DEMO)
@click.option("--text", default="stdlib", show_default=True, help="Evaluation text, as for kvfold eval.")
@click.option("--calibration", default="self", show_default=True, help="As for kvfold convert.")
@click.option("--sequences", default=48, show_default=True, help="Calibration sequences.")
@click.option("--length", default=256, show_default=True, help="Tokens of each.")
@click.option("--window", default=256, show_default=True)
@click.option("--max-windows", type=int, default=48, show_default=True)
@click.option("--budgets", default=",".join(SHARES), show_default=True, help="Shares of the cache, for MLA.")
@click.option("--steps", default=STEPS, show_default=True, help="Of refinement.")
@click.option("--name", required=True, help="Results go to benchmarks/results/plan-NAME.json.")
def main(model: str, text: str, calibration: str, name: str, **options: Any) -> None:
    """Print and save predicted and measured losses of every target, nats a token, and how well their ranks
    agree.
    """
    source = open_source(resolve(model))
    taken = {"sequences": options["sequences"], "length": options["length"], "seed": 0}
    statistics = study(source, calibration, **taken)
    assert statistics is not None, "--calibration none leaves nothing to compare"
    rows, by_weights = _predicted(source, options["budgets"].split(","), statistics, options["window"])
    how = Options(window=options["window"], max_windows=options["max_windows"])
    table: Table = {}
    about: dict[str, Any] = {"calibration": [calibration, *taken.values()], "refine": options["steps"]}
    for row in rows:
        one = row.candidate
        assert row.loss is not None, "this source's attention is not one that a loss can be predicted of"
        losses = {"predicted": row.loss, "by weights": by_weights[one.label] or 0.0}
        for label, steps in zip(_MEASURED, (0, options["steps"]), strict=True):
            losses[label], found = _measure(row, statistics, steps, read_text(text), how)
            about |= found
        table[one.label] = {"share": one.plan.cache()["ratio"], **losses}
        click.echo(f"{one.label}: {losses}", err=True)
    _show(table, {**about, "spearman": _agreement(table)}, name)


def _predicted(
    source: Source, shares: list[str], statistics: Statistics, window: int
) -> tuple[list[Row], dict[str, float | None]]:
    """Rows with the loss that statistics predict, and by their options what weights alone do."""
    bounds = Bounds(context=window, batch=1, memory=None)
    found, _ = find_candidates(source, shares)
    # Containers do not change what a fold computes.
    rows = [place(one, bounds) for one in found if one.request.container != "remote"]
    by_weights = {row.candidate.label: row.loss for row in predict_rows(rows, bounds, None)}
    return predict_rows(rows, bounds, statistics), by_weights


def _measure(
    row: Row, statistics: Statistics, steps: int, text: str, how: Options
) -> tuple[float, dict[str, Any]]:
    """Nats a token above the source after a fold, and on what and against which source."""
    one = row.candidate
    directory = one.plan.source.checkpoint.directory
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "out"
        request = one.request.model_copy(update={"effort": "best", "refine": steps})
        rewrite(make_plan(directory, request, statistics), out)
        result = evaluate(out, directory, text, how)
    assert result.ppl.difference is not None
    assert result.ppl.teacher is not None
    assert result.protocol is not None
    protocol = {"protocol": result.protocol.name, "text_sha256": result.protocol.text_sha256}
    return result.ppl.difference.mean, {**protocol, "source_perplexity": result.ppl.teacher.perplexity}


def _agreement(table: Table) -> dict[str, float]:
    columns = {name: [row[name] for row in table.values()] for name in (*_PREDICTED, *_MEASURED)}
    pairs = [(one, other) for one in _PREDICTED for other in _MEASURED]
    return {
        f"{one}, {other}": float(spearmanr(columns[one], columns[other]).statistic) for one, other in pairs
    }


def _show(table: Table, about: dict[str, Any], name: str) -> None:
    columns = ("share", *_PREDICTED, *_MEASURED)
    cells = [(label, *(f"{row[column]:.4f}" for column in columns)) for label, row in table.items()]
    show_table(f"{about['protocol']}: nats a token (by weights: a share)", ("", *columns), cells)
    for pair, correlation in about["spearman"].items():
        click.echo(f"Spearman, {pair}: {correlation:.3f}")
    click.echo(f"saved in {save(f'plan-{name}', {**about, 'rows': table})}")


if __name__ == "__main__":
    main()
