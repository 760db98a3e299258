"""`kvfold eval`: perplexity, distance to the teacher, cache and more, measured on a checkpoint."""

from pathlib import Path
from typing import Any

import click

from ..core.cache_dtypes import CACHE_DTYPES
from ..core.console import is_first, show_json, show_table
from ..core.processes import Launched
from ..core.units import ByteSize
from ..models.load_options import DEVICE_MAPS, DEVICES, DTYPES
from .assertions import ALIASES, check, parse
from .options import Options
from .suites.catalogue import DEFAULT, SUITES, check_settings, chosen, with_storage

_SUITES = "; ".join(f"{name}: {suite.summary}" for name, suite in SUITES.items())


@click.command(
    "eval",
    cls=Launched,
    epilog=f"Short paths for --assert: {', '.join(f'{short} ({path})' for short, path in ALIASES.items())}. "
    "In the JSON report these paths are below `suites`: jq .suites.fidelity.kl.mean eval.json.",
)
@click.argument("model")
@click.option(
    "--suite",
    default=",".join(DEFAULT),
    show_default=True,
    metavar="NAME,...",
    help=f"Suites to run. {_SUITES}.",
)
@click.option(
    "--text",
    metavar="PROTOCOL|FILE|stdlib",
    help="wikitext2-gptq-2048 (or another window), lm-eval:wikitext, the held-out part of Python's library, "
    "or a text: UTF-8 of any suffix, or .txt, .jsonl, .json, .parquet with documents in a field `text`, also "
    "compressed.",
)
@click.option(
    "--rows",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Rows of WikiText-2 as JSON, instead of those from the Hub.",
)
@click.option(
    "--teacher", metavar="MODEL", help="Model to compare with.  [default: the source named in kvfold.json]"
)
@click.option(
    "--window",
    type=click.IntRange(min=2),
    metavar="N",
    help="Tokens per window.  [default: the models' positions, at most 2048]",
)
@click.option(
    "--bos/--no-bos", default=None, help="Start each window with BOS.  [default: if the tokenizer has one]"
)
@click.option("--max-windows", type=click.IntRange(min=1), metavar="N", help="Read only the first N windows.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=Options.batch_size,
    show_default=True,
    metavar="N",
    help="Windows read at once.",
)
@click.option(
    "--device", type=click.Choice(DEVICES), default="auto", help="auto: cuda where it is available."
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    help="auto: the checkpoint's own on cuda, float32 on cpu.",
)
@click.option(
    "--device-map",
    type=click.Choice(DEVICE_MAPS),
    default=Options.device_map,
    show_default=True,
    help="auto: spread a model that does not fit one device over all devices, then memory, then disk.",
)
@click.option(
    "--offload-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="With --device-map auto: directory for weights that cannot be read from the checkpoint directly.",
)
@click.option(
    "--cpu-memory",
    type=ByteSize(),
    metavar="SIZE",
    help="With --device-map auto: most memory for weights.",
)
@click.option(
    "--one-at-a-time/--together",
    default=None,
    help="Load student, teacher and parent one after the other.  [default: only where they do not fit "
    "together]",
)
@click.option(
    "--teacher-cache",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep the teacher's hidden states in DIR, for this student and others.",
)
@click.option(
    "--cache-dtype",
    type=click.Choice(list(CACHE_DTYPES)),
    help="Store the student's cache in this number format: each token is rounded when it is written and read "
    "rounded at every later step. Also measures the student without it. It leaves the teacher as it is.",
)
@click.option("--trust-remote-code", is_flag=True, help="Allow Python files of the checkpoints to run.")
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
def main(
    model: str,
    suite: str,
    text: str | None,
    rows: Path | None,
    teacher: str | None,
    assertions: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Evaluate the checkpoint MODEL, a directory or a Hub id, and its teacher on the same windows.

    It measures the perplexity of both, KL(teacher || student), how often both find the same next token most
    probable, the KV cache of the running models and, for a distilled checkpoint, the share of the
    conversion's loss that was recovered.
    """
    names = with_storage(chosen(suite), options["cache_dtype"])
    settings = _settings(options, names)
    wanted = [parse(expression, names) for expression in assertions]
    from .request import EvalRequest, run_request

    request = EvalRequest(
        model=model,
        teacher=teacher,
        text=text,
        rows=rows,
        suites=names,
        settings=settings,
        options=Options(**options),
        assertions=tuple(wanted),
    )
    result = run_request(request, out)
    if not is_first():
        return
    report = result.to_json()
    if as_json:
        show_json(report)
    else:
        show_table(result.title, result.columns, result.rows)
    check(wanted, report)


for _suite in SUITES.values():
    main.params += _suite.options


def _settings(options: dict[str, Any], suites: tuple[str, ...]) -> dict[str, Any]:
    """Take the suites' own options out of `options`; check that each given one belongs to a chosen suite."""
    own = [str(option.name) for row in SUITES.values() for option in row.options]
    ctx, default = click.get_current_context(), click.core.ParameterSource.DEFAULT
    settings = {name: options.pop(name) for name in own}
    check_settings(suites, [name for name in own if ctx.get_parameter_source(name) != default])
    return settings
