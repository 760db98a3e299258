"""`kvfold demo`: fold, distil and evaluate the bundled checkpoint, in a few minutes and without a network."""

import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .core.console import Command, show_json, show_table
from .core.errors import InvalidInput
from .core.units import parse_tokens
from .core.untrusted import shorten

if TYPE_CHECKING:
    from .convert.calibration.statistics import Statistics
    from .eval.result import Result

WINDOW, WINDOWS = 256, 128  # evaluation: enough for a standard error of about 1 % of the perplexity
CALIBRATION: dict[str, Any] = {"calibration": "self", "sequences": 48, "length": WINDOW, "seed": 0}
REFINE = 30  # steps; the default gains a little more and takes three times as long
TARGETS: dict[str, dict[str, Any]] = {
    "gqa": {"kv_budget": "25%"},
    "mqa": {},
    "mla": {"kv_budget": "25%"},
}


@click.command("demo", cls=Command)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory for the checkpoints.  [default: a new temporary directory]",
)
@click.option(
    "--tokens", default="350k", show_default=True, help="Length of the distillation, e.g. 100k or 1M."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def main(out: Path | None, tokens: str, as_json: bool) -> None:
    """Fold the bundled checkpoint to GQA, MQA and MLA, distil the MLA one, and compare all with their source.

    The checkpoint is a Llama of 1.5 million parameters trained on Python's standard library; it is evaluated
    on modules of that library which it has not seen.
    """
    from .checkpoints.directory import check_output

    start = time.monotonic()
    _check_tokens(tokens)  # before a directory is made, which would be in the way of the right command
    if out is not None:
        check_output(out)
        out.mkdir(parents=True)
    work = out or Path(tempfile.mkdtemp(prefix="kvfold-demo-"))
    results, text_hash = _run(work, tokens)
    seconds = round(time.monotonic() - start)
    if as_json:
        measured = {name: result.to_json() for name, result in results.items()}
        show_json({"seconds": seconds, "out": str(work), **measured})
        return
    _show(results, text_hash)
    click.echo(f"Checkpoints are in {work}; {seconds} s.\n{_conclusion(results['mla, distilled'])}")


def _check_tokens(tokens: str) -> None:
    """Refuse a length of the distillation that its recipe would refuse, minutes later.

    Args:
        tokens: as the option has it.

    Raises:
        InvalidInput: it is no positive whole number.
    """
    try:
        found = parse_tokens(tokens)
    except ValueError as error:
        raise InvalidInput(f"--tokens is {shorten(tokens)}; {error}") from None
    if type(found) is not int or found < 1:
        raise InvalidInput(f"--tokens is {shorten(tokens)}; it should be a whole number of at least 1")


def _run(work: Path, tokens: str) -> tuple[dict[str, "Result"], str]:
    """Fold, distil and evaluate in a directory; return the evaluations by name and the hash of the text."""
    from .convert.calibration.study import study
    from .convert.families.source import open_source
    from .distill.recipe.recipe_file import read_recipe
    from .distill.run.job import distill
    from .eval.options import Options
    from .eval.run import evaluate
    from .texts.corpus import read_text

    text = read_text("stdlib")
    options = Options(window=WINDOW, max_windows=WINDOWS)
    with resources.as_file(resources.files("kvfold") / "recipes" / "demo") as source:
        statistics = study(open_source(source), **CALIBRATION)
        folded = {
            to: _fold(source, to, sizes, statistics, work / f"demo-{to}") for to, sizes in TARGETS.items()
        }
        distilled = work / "demo-mla-distilled"
        settings = (
            f"student={folded['mla']}",
            f"teacher={source}",
            f"output={distilled}",
            f"stages.0.tokens={tokens}",
        )
        distill(read_recipe(source / "distill.yaml", settings))
        results = {to: evaluate(path, source, text, options) for to, path in folded.items()}
        results["mla, distilled"] = evaluate(distilled, source, text, options, folded["mla"])
    return results, text.sha256


def _show(results: dict[str, "Result"], text_hash: str) -> None:
    """Print a row for the source and one for each evaluation."""
    last = results["mla, distilled"]
    assert last.ppl.teacher is not None
    assert last.protocol is not None
    rows = [
        ("source (mha)", "100.0%", f"{last.ppl.teacher.perplexity:.2f}", "0", ""),
        *(_row(*item) for item in results.items()),
    ]
    columns = ("", "cache", "perplexity", "KL to source, nats", "recovered")
    show_table(f"{last.protocol.name}, text sha256 {text_hash[:16]}", columns, rows)


def _conclusion(last: "Result") -> str:
    """Return the perplexities of source, fold and student, and the recovered share, in one line."""
    teacher, parent, share = last.ppl.teacher, last.ppl.parent, last.ppl.recovered_share
    assert teacher is not None
    assert parent is not None
    recovered = f"recovered share {share.reason}"
    if share.value is not None:
        recovered = f"recovered {share.value:.1%} of the loss"
    return (
        f"MLA at {last.cache.ratio:.0%} of the cache: perplexity {teacher.perplexity:.2f} (source), "
        f"{parent.perplexity:.2f} (folded), {last.ppl.student.perplexity:.2f} (distilled): {recovered}."
    )


def _row(name: str, result: "Result") -> tuple[str, ...]:
    share = result.ppl.recovered_share.value
    assert result.fidelity is not None
    return (
        name,
        f"{result.cache.ratio:.1%}",
        f"{result.ppl.student.perplexity:.2f}",
        f"{result.fidelity.kl.mean:.3f}",
        "" if share is None else f"{share:.1%}",
    )


def _fold(source: Path, to: str, sizes: dict[str, Any], statistics: "Statistics | None", out: Path) -> Path:
    from .convert.decide.plan import make_plan
    from .convert.request import fold_request
    from .convert.write.rewrite import rewrite

    request = fold_request(
        {"model": str(source), "to": to, **sizes, **CALIBRATION, "effort": "best", "refine": REFINE}
    )
    rewrite(make_plan(source, request, statistics), out, source_name="kvfold-demo")
    return out
