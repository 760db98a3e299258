"""The loss of compressed queries: `python -m benchmarks.queries MODEL --text FILE`, metrics by q_lora_rank at
one cache.

The source is scored in the same run on the same windows; numbers are nats per token above it, paired by
window. `none` is the same fold with its queries whole. Predicted is the sum of the losses that were measured
on calibration text for each layer alone, planned what slots, latent and queries are expected to lose before
that.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from scipy.stats import spearmanr
from torch import Tensor

from kvfold.convert.algebra.attention import Attention
from kvfold.convert.algebra.metric import LayerMetric
from kvfold.convert.calibration.statistics import LayerStatistics
from kvfold.convert.calibration.study import study
from kvfold.convert.decide.plan import Plan
from kvfold.convert.families.source import open_source
from kvfold.convert.methods.query_rank import query_metric
from kvfold.convert.methods.refinement import STEPS
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.console import show_table
from kvfold.core.hub import resolve
from kvfold.eval.options import Options
from kvfold.eval.result import Result
from kvfold.eval.run import evaluate
from kvfold.texts.corpus import read_text

from .machine import save

WHOLE = "none"
SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)  # of the hidden size


def _even(
    attention: Attention, taken: LayerStatistics | None, span: int, frequencies_F: Tensor
) -> LayerMetric:
    """Every query costs the same: with the input's moment."""
    metric = query_metric(attention, taken, span, frequencies_F)
    return replace(
        metric,
        query_NHH=torch.eye(metric.query_NHH.shape[-1], dtype=torch.float64).expand_as(metric.query_NHH),
    )


def _plain(*arguments: Any) -> LayerMetric:
    """The singular value decomposition of the weights."""
    return replace(_even(*arguments), input_EE=None)


def _by_weights(
    attention: Attention, _: LayerStatistics | None, span: int, frequencies_F: Tensor
) -> LayerMetric:
    return query_metric(attention, None, span, frequencies_F)


METRICS: dict[str, tuple[Callable[..., LayerMetric] | None, int]] = {
    "plain SVD": (_plain, 0),
    "by weights alone": (_by_weights, 0),
    "activations": (_even, 0),
    "this metric": (None, 0),
    "this metric, refined": (None, STEPS),
}


@click.command()
@click.argument("model")
@click.option("--text", required=True, help="Evaluation text, as for kvfold eval.")
@click.option("--kv-budget", default="25%", show_default=True)
@click.option(
    "--sequences", default=48, show_default=True, help="Calibration sequences, which the source writes."
)
@click.option("--length", default=256, show_default=True, help="Tokens of each.")
@click.option(
    "--only", multiple=True, type=click.Choice(tuple(METRICS)), help="A row's label; all rows by default."
)
@click.option(
    "--share", multiple=True, type=float, default=SHARES, show_default=True, help="Ranks, of the hidden size."
)
@click.option("--window", default=256, show_default=True)
@click.option("--max-windows", type=int)
@click.option("--name", required=True, help="Results go to benchmarks/results/queries-NAME.json.")
def main(
    model: str,
    text: str,
    kv_budget: str,
    sequences: int,
    length: int,
    only: tuple[str, ...],
    share: tuple[float, ...],
    window: int,
    max_windows: int | None,
    name: str,
) -> None:
    """Print and save nats lost by every metric at every rank."""
    directory = resolve(model)
    source = open_source(directory)
    statistics = study(source, "self", sequences=sequences, length=length, seed=0)
    ranks = [str(int(source.geometry.hidden_size * part)) for part in share]
    content = read_text(text)
    how = Options(window=window, max_windows=max_windows)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as work:
        for label, (metric, steps) in METRICS.items():
            if only and label not in only:
                continue
            rows[label] = {}
            for rank in [WHOLE, *ranks] if metric is None else ranks:
                options = {"kv_budget": kv_budget, "q_lora_rank": None if rank == WHOLE else rank}
                asked = {"model": model, "to": "mla", "effort": "best", "refine": steps, **options}
                request = fold_request(asked)
                plan = make_plan(directory, request, statistics)
                out = Path(work) / f"{label}-{rank}"
                record = _rewrite(plan, out, metric)
                result = evaluate(out, directory, content, how)
                rows[label][rank] = _cell(plan, record, result)
                click.echo(f"{label} {rank}: {rows[label][rank]['lost']:.4f}", err=True)
    assert result.ppl.teacher is not None
    assert result.protocol is not None
    cells = [cell for row in rows.values() for cell in row.values()]
    own = [cell for label, row in rows.items() if METRICS[label] == (None, 0) for cell in row.values()]
    agreement = {"predicted": _spearman(cells, "predicted"), "planned": _spearman(own, "planned")}
    protocol = {"protocol": result.protocol.name, "text_sha256": result.protocol.text_sha256}
    about = {
        "source_perplexity": result.ppl.teacher.perplexity,
        "kv_budget": kv_budget,
        "calibration": ["self", sequences, length],
    }
    columns = (WHOLE, *ranks)
    shown = [
        (label, *(f"{row[rank]['lost']:.4f}" if rank in row else "" for rank in columns))
        for label, row in rows.items()
    ]
    title = (
        f"{protocol['protocol']}, cache {kv_budget}, source {about['source_perplexity']:.4g}: nats "
        f"lost by q_lora_rank"
    )
    show_table(title, ("", *columns), shown)
    spearman = "{predicted:.3f} of predicted loss, {planned:.3f} of planned".format(**agreement)
    click.echo(f"Spearman with nats lost: {spearman}")
    saved = save(f"queries-{name}", {**protocol, **about, "spearman": agreement, "rows": rows})
    click.echo(f"saved in {saved}")


def _rewrite(plan: Plan, out: Path, metric: Any) -> dict[str, Any]:
    """Write a fold whose queries are compressed in a metric; None is the product's own."""
    if metric is None:
        return rewrite(plan, out)
    with patch("kvfold.convert.layer.fold.query_metric", metric):
        return rewrite(plan, out)


def _cell(plan: Plan, record: dict[str, Any], result: Result) -> dict[str, Any]:
    assert result.ppl.difference is not None
    return {
        "lost": result.ppl.difference.mean,
        "standard_error": result.ppl.difference.standard_error,
        "predicted": record["predicted_loss"],
        "planned": plan.predicted,
        "query_parameters": plan.to_dict()["query_parameters"],
    }


def _spearman(cells: list[dict[str, Any]], key: str) -> float:
    return float(spearmanr([cell["lost"] for cell in cells], [cell[key] for cell in cells]).statistic)


if __name__ == "__main__":
    main()
