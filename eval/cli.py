"""`kvfold eval`: perplexity, distance to the teacher, cache and more, measured on a checkpoint."""

from pathlib import Path
from typing import Any

import click

from ..core.command_options import read_options, takes
from ..core.console import is_first, show_json, show_table
from ..core.processes import Launched
from .assertions import ALIASES, check, parse
from .options import EvalRequest, Options
from .suites.catalogue import SuiteSettings


@click.command(
    "eval",
    cls=Launched,
    epilog=f"Short paths for --assert: {', '.join(f'{short} ({path})' for short, path in ALIASES.items())}. "
    "In the JSON report these paths are below `suites`: jq .suites.fidelity.kl.mean eval.json.",
)
@click.argument("model")
@takes(EvalRequest, without=("model", *Options.model_fields, *SuiteSettings.model_fields))
@takes(Options)
@click.option(
    "--assert",
    "assertions",
    multiple=True,
    metavar="EXPR",
    help="Exit with code 3 unless this holds, e.g. 'kl.mean<0.1'. Takes any path of the JSON report; may "
    "be repeated.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write the JSON report to FILE; the same command resumes an interrupted run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the JSON report instead of the table.")
@takes(SuiteSettings)
def main(assertions: tuple[str, ...], out: Path | None, as_json: bool, **options: Any) -> None:
    """Evaluate the checkpoint MODEL, a directory or a Hub id, and its teacher on the same windows.

    It measures the perplexity of both, KL(teacher || student), how often both find the same next token most
    probable, the KV cache of the running models and, for a distilled checkpoint, the share of the
    conversion's loss that was recovered.
    """
    request = read_options(EvalRequest, options)
    wanted = [parse(expression, request.all_suites()) for expression in assertions]
    from .request import run_request

    result = run_request(request, out, wanted)
    if not is_first():
        return
    report = result.to_json()
    if as_json:
        show_json(report)
    else:
        show_table(result.title, result.columns, result.rows)
    check(wanted, report)
