"""The whole way for one checkpoint: `python -m benchmarks.pipeline MODEL --text EVAL --train TEXT.jsonl`.

Folds it to every target at 50, 25 and 12.5 % of its cache, distils each with the same few tokens, and
evaluates source, folded and distilled in one run on the same windows.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.errors import InvalidInput
from kvfold.core.hub import resolve
from kvfold.distill.recipe.recipe import Recipe
from kvfold.distill.run.job import distill
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.texts.corpus import read_text

from .machine import save

BUDGETS = ("50%", "25%", "12.5%")


def recipe(student: Path, train: str, tokens: str, window: int, lr: float) -> Recipe:
    """Forward KL only, one stage: what this compares is the starts."""
    return Recipe.model_validate(
        {
            "schema": 1,
            "student": str(student),
            "output": f"{student}-distilled",
            "data": {"source": train, "seq_len": window},
            "stages": [
                {"name": "kl", "tokens": tokens, "lr": lr, "batch_tokens": 16 * window, "micro_batch": 16}
            ],
        }
    )


@click.command()
@click.argument("model")
@click.option("--text", required=True, help="Evaluation text, as for kvfold eval.")
@click.option("--train", required=True, help="Training text, as data.source of a recipe.")
@click.option("--tokens", default="300k", show_default=True)
@click.option("--lr", default=5e-4, show_default=True)
@click.option("--window", default=256, show_default=True)
@click.option("--max-windows", type=int)
@click.option("--name", required=True, help="Results go to benchmarks/results/pipeline-NAME.json.")
def main(
    model: str, text: str, train: str, tokens: str, lr: float, window: int, max_windows: int | None, name: str
) -> None:
    """Print and save the table of source, folded and distilled perplexity and KL."""
    source = resolve(model)
    content, options = read_text(text), Options(window=window, max_windows=max_windows)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for to in ("gqa", "mla"):
            for budget in BUDGETS:
                out = Path(work) / f"{to}-{budget}"
                try:
                    plan = make_plan(source, fold_request({"model": model, "to": to, "kv_budget": budget}))
                except InvalidInput as reason:
                    click.echo(f"{to} {budget}: {reason}")
                    continue
                rewrite(plan, out)
                distill(recipe(out, train, tokens, window, lr))
                result = evaluate(Path(f"{out}-distilled"), source, content, options, out)
                folded = evaluate(out, source, content, options)
                assert result.ppl.teacher is not None
                assert result.ppl.parent is not None
                assert result.fidelity is not None
                assert folded.fidelity is not None
                assert folded.protocol is not None
                rows.append(
                    {
                        "target": to,
                        "cache": result.cache.ratio,
                        "sizes": plan.target.to_dict(),
                        "source": result.ppl.teacher.perplexity,
                        "folded": result.ppl.parent.perplexity,
                        "distilled": result.ppl.student.perplexity,
                        "kl_folded": folded.fidelity.kl.mean,
                        "kl_distilled": result.fidelity.kl.mean,
                        "recovered": result.ppl.recovered_share.value,
                    }
                )
                click.echo(json.dumps(rows[-1]))
    measured_on = {"protocol": folded.protocol.name, "text_sha256": folded.protocol.text_sha256}
    click.echo(
        f"saved in {save(f'pipeline-{name}', {**measured_on, 'tokens': tokens, 'lr': lr, 'rows': rows})}"
    )


if __name__ == "__main__":
    main()
