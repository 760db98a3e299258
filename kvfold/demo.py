"""`kvfold demo`: fold, distil and evaluate the bundled checkpoint, in a few minutes and without a network."""

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .core.console import Command, show_json, show_table, show_text
from .core.errors import InvalidInput
from .core.signals import Interrupted
from .core.units import parse_tokens
from .core.untrusted import shorten
from .core.version import __version__
from .core.work import claimed, working_directory

if TYPE_CHECKING:
    from .convert.calibration.statistics import Statistics
    from .eval.result import Result

WINDOW, WINDOWS = 256, 128  # evaluation: enough for a standard error of about 1 % of the perplexity
CALIBRATION: dict[str, Any] = {"calibration": "self", "sequences": 48, "length": WINDOW, "seed": 0}
REFINE = 30  # steps; the default loses a tenth less, and a quarter of a minute more goes by
TARGETS: dict[str, dict[str, Any]] = {
    "gqa": {"kv_budget": "25%"},
    "mqa": {},
    "mla": {"kv_budget": "25%"},
}


@click.command("demo", cls=Command)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory for the checkpoints; a stopped demonstration in it resumes.  [default: a new temporary "
    "directory]",
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
    start = time.monotonic()
    try:  # before a directory is made, which would be in the way of the right command
        length = parse_tokens(tokens)
    except ValueError as error:
        raise InvalidInput(f"--tokens is {shorten(tokens)}; {error}") from None
    if type(length) is not int or length < 1:
        raise InvalidInput(f"--tokens is {shorten(tokens)}; it should be a whole number of at least 1")
    work = Path(tempfile.mkdtemp(prefix="kvfold-demo-")) if out is None else out
    try:
        with nullcontext() if out is None else _claimed(work, tokens):
            results, text_hash = _run(work, tokens)
    except (Interrupted, KeyboardInterrupt) as stop:
        advice = (
            "give --out, and the same command resumes"
            if out is None
            else "run the same command again to resume"
        )
        click.echo(f"Interrupted: {stop or 'stopped by SIGINT'}; {advice}.", err=True)
        sys.exit(128 + getattr(stop, "signum", signal.SIGINT))
    seconds = round(time.monotonic() - start)
    if as_json:
        measured = {name: result.to_json() for name, result in results.items()}
        show_json({"seconds": seconds, "out": str(work), **measured})
        return
    last = results["mla, distilled"]
    assert last.ppl.teacher is not None
    assert last.protocol is not None
    rows = [
        ("source (mha)", "100.0%", f"{last.ppl.teacher.perplexity:.2f}", "0", ""),
        *(_row(*item) for item in results.items()),
    ]
    columns = ("", "cache", "perplexity", "KL to source, nats", "recovered")
    show_table(f"{last.protocol.name}, text sha256 {text_hash[:16]}", columns, rows)
    show_text(f"Checkpoints are in {work}; {seconds} s.\n{_conclusion(results['mla, distilled'])}")


@contextmanager
def _claimed(out: Path, tokens: str) -> Iterator[None]:
    """Make the directory of the checkpoints, or take up that of a stopped run of the same command.

    `<out>.partial` marks it until the block has ended well.

    Raises:
        InvalidInput: there is something else, another run is writing there, or the stopped run was of other
            tokens or another version.
    """
    path = working_directory(out)
    with claimed(path, "demonstration", keeps=lambda work: bool(work.units)) as work:
        work.begin({"--tokens": tokens, "the version of kvfold": __version__})
        if not work.units and (out.exists() or out.is_symlink()):
            raise InvalidInput(f"{out} exists and nothing is overwritten; name another with --out")
        work.unit("begun", lambda: True)
        out.mkdir(parents=True, exist_ok=True)
        yield
        work.is_finished = True


def _run(work: Path, tokens: str) -> tuple[dict[str, "Result"], str]:
    """Fold, distil and evaluate in a directory; return the evaluations by name and the hash of the text."""
    from .convert.calibration.study import study
    from .convert.families.source import open_source
    from .distill.recipe.recipe_file import as_recipe
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
        settings = {
            "student": folded["mla"],
            "teacher": source,
            "output": distilled,
            "stages.0.tokens": tokens,
        }
        if not distilled.exists():
            distill(as_recipe(source / "distill.yaml", settings))
        results = {to: evaluate(path, source, text, options) for to, path in folded.items()}
        results["mla, distilled"] = evaluate(distilled, source, text, options, folded["mla"])
    return results, text.sha256


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
    from .convert.request import fold_request
    from .convert.settle.settle import make_plan
    from .convert.write.rewrite import rewrite

    if out.exists():  # a stopped run has written it, and outputs have their names only when they are whole
        return out
    request = fold_request(
        {"model": str(source), "to": to, **sizes, **CALIBRATION, "effort": "best", "refine": REFINE}
    )
    rewrite(make_plan(source, request, statistics), out, source_name="kvfold-demo")
    return out
