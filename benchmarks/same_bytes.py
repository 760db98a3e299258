"""Two revisions that must fold alike: `python -m benchmarks.same_bytes --before REV [--after REV]`.

The same commands (ROWS) run with both revisions, each in an environment of its own (see revisions.py),
through the command line only: `python -m kvfold convert|distill|eval`. Every file that they write is compared
as differences.py says: weights, configurations and tokenizers by SHA-256, kvfold.json and eval.json by value.

Both revisions read the same tiny sources, which this benchmark makes, and run at the same path one after the
other, so that no path that they record can differ. One thread and no GPU: another order of a sum would be
another result.

Exit code 3 unless every row is equal. A row in which a command fails is an error, also if it fails with both.
"""

import json
import resource
import shlex
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from .differences import Differences, compare
from .revisions import WORKING_TREE, Revision, prepare
from .tiny_sources import Sources

EQUAL, DIFFERENT, ERROR = "equal", "different", "error"
UNMET = 3  # exit code
_SELF = "--calibration self --sequences 4 --length 48 --refine 4"
_CLOSED = "--calibration self --sequences 4 --length 48 --refine 0"
_NONE = "--calibration none"
_STATISTICS = "--to mla --kv-budget 30% --refine 4"


@dataclass(frozen=True)
class Row:
    """Commands that run one after the other in an empty folder.

    Attributes:
        name: of the row.
        commands: arguments of `python -m kvfold`; `{NAME}` is a path of `Sources`.
    """

    name: str
    commands: tuple[str, ...]


@dataclass(kw_only=True)
class Outcome:
    """The result of a row.

    Attributes:
        name: of the row.
        commands: as the row has them.
        result: EQUAL, DIFFERENT or ERROR.
        different: a text for each difference.
        errors: a text for each revision that failed.
        notes: a text for each change that is allowed.
        weights: SHA-256 of every weight file.
        cpu_seconds: that the row took with both revisions.
    """

    name: str
    commands: tuple[str, ...]
    result: str
    different: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    cpu_seconds: float = 0.0


def _fold(name: str, source: str, options: str) -> Row:
    return Row(name, (f"convert {{{source}}} {options} --out folded",))


ROWS = (
    _fold("gqa", "llama", f"--to gqa --kv-heads 2 {_SELF}"),
    _fold("gqa-mean", "llama", "--to gqa --kv-heads 2 --method mean"),
    _fold("gqa-aligned", "heads", "--to gqa --kv-heads 2 --method aligned"),
    _fold("gqa-none", "heads", f"--to gqa --kv-heads 4 {_NONE}"),
    _fold("mqa", "llama", f"--to mqa {_SELF}"),
    _fold("mla-stock", "llama", f"--to mla --rank 32 --container stock {_SELF}"),
    _fold("mla-none", "llama", f"--to mla --kv-budget 30% {_NONE}"),
    _fold("mla-full", "llama", f"--to mla --rank full {_NONE}"),
    _fold("mla-allocated", "heads", f"--to mla --rank 24 --container remote --slots allocated {_SELF}"),
    _fold("mla-budget", "heads", f"--to mla --kv-budget 25% --container remote {_CLOSED}"),
    _fold("mla-intact", "heads", f"--to mla --rank 24 --rope intact {_CLOSED}"),
    _fold("mla-queries", "llama", f"--to mla --rank 32 --q-lora-rank 24 {_CLOSED}"),
    _fold("mla-vllm", "wide", f"--to mla --rank 512 --engine vllm {_NONE}"),
    _fold("svd", "heads", "--to mla --rank 24 --method svd"),
    _fold("transmla", "heads", f"--to mla --rank 24 --method transmla {_CLOSED}"),
    _fold("mha2mla", "heads", f"--to mla --rank 24 --method mha2mla {_CLOSED}"),
    _fold("care", "heads", f"--to mla --rank 24 --method care {_CLOSED}"),
    _fold("xecomla", "heads", "--to mla --rank 24 --method xecomla"),
    _fold("qwen2-gqa", "qwen2", f"--to gqa --kv-heads 2 {_SELF}"),
    _fold("qwen2-mla", "qwen2", f"--to mla --kv-budget 30% {_SELF}"),
    _fold("qwen3-gqa", "qwen3", f"--to gqa --kv-heads 2 {_SELF}"),
    _fold("qwen3-mla", "qwen3", f"--to mla --kv-budget 30% {_SELF}"),
    _fold("moe-gqa", "mixtral", f"--to gqa --kv-heads 2 --shard-size 50kB {_CLOSED}"),
    _fold("moe-mla", "mixtral", f"--to mla --rank 24 {_NONE}"),
    _fold(
        "text",
        "llama",
        "--to mla --rank 32 --calibration {text} --sequences 4 --length 48 --layerwise --refine 4",
    ),
    Row(
        "saved-statistics",
        (
            f"convert {{llama}} {_STATISTICS} --sequences 4 --length 48 --save-statistics s.safetensors "
            f"--out self",
            f"convert {{llama}} {_STATISTICS} --calibration s.safetensors --out saved",
        ),
    ),
    Row(
        "distillation",
        (
            f"convert {{llama}} --to mla --rank 24 --container stock {_NONE} --out folded",
            "distill {recipe}",
            "eval distilled --text {held_out} --window 64 --max-windows 8 --device cpu --out eval.json",
        ),
    ),
)


def run_row(row: Row, revisions: tuple[Revision, Revision], work: Path, sources: Sources) -> Outcome:
    """Run a row with both revisions and compare what they wrote."""
    commands = [shlex.split(command.format_map(sources)) for command in row.commands]
    outcome, begun = Outcome(name=row.name, commands=row.commands, result=ERROR), _cpu_seconds()
    places = []
    for side, revision in zip(("before", "after"), revisions, strict=True):
        folder = work / "run"
        folder.mkdir()
        outcome.errors += _run(revision, commands, folder, side)
        places.append(folder.rename(work / f"{row.name}-{side}"))
    found = Differences() if outcome.errors else compare(*places)
    if not (outcome.errors or found.weights):
        outcome.errors.append("before: no weight file was written")
    if not outcome.errors:
        outcome.result = DIFFERENT if found.found else EQUAL
    outcome.different, outcome.notes, outcome.weights = found.found, found.notes, found.weights
    outcome.cpu_seconds = round(_cpu_seconds() - begun, 1)
    return outcome


def _run(revision: Revision, commands: list[list[str]], folder: Path, side: str) -> list[str]:
    """Run commands until one fails; return a text for the one that failed, if any."""
    for command in commands:
        done = revision.run(["-m", "kvfold", *command], folder)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            return [f"{side}: kvfold {command[0]} exits with {done.returncode}: {''.join(said)}"]
    return []


def _cpu_seconds() -> float:
    """Return the processor time of all commands so far, which sleeping and other work do not add to."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _choose(names: tuple[str, ...]) -> tuple[Row, ...]:
    known = {row.name for row in ROWS}
    for name in names:
        if name not in known:
            raise click.BadParameter(
                f"{name} is no row; choose from {', '.join(sorted(known))}", param_hint="--only"
            )
    return tuple(row for row in ROWS if not names or row.name in names)


def _show(outcome: Outcome) -> None:
    files = f"{len(outcome.weights)} weight file{'s' if len(outcome.weights) != 1 else ''}"
    click.echo(f"{outcome.name:<18}{outcome.result:<11}{outcome.cpu_seconds:>6.1f} CPU s  {files}")
    for text in (*outcome.errors, *outcome.different, *(f"note: {note}" for note in outcome.notes)):
        click.echo(f"    {text}")


def _report(revisions: tuple[Revision, Revision], outcomes: list[Outcome]) -> dict[str, Any]:
    sides = zip(("before", "after"), revisions, strict=True)
    named = {side: {"revision": revision.name, "commit": revision.commit} for side, revision in sides}
    return {**named, "rows": [asdict(outcome) for outcome in outcomes]}


@click.command(help=__doc__)
@click.option("--before", required=True, metavar="REV", help="Revision to compare with.")
@click.option(
    "--after", default=WORKING_TREE, show_default=True, metavar="REV", help="Revision that is compared."
)
@click.option("--only", multiple=True, metavar="NAME", help="Run this row only; may be repeated.")
@click.option("--venv", "install", is_flag=True, help="Install each revision into its environment by pip.")
@click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report there too."
)
def main(before: str, after: str, only: tuple[str, ...], install: bool, file: Path | None) -> None:
    rows, outcomes = _choose(only), []
    with tempfile.TemporaryDirectory(prefix="kvfold-bytes-") as name:
        work = Path(name).resolve()
        sources = Sources(work / "sources")
        sources.folder.mkdir()
        revisions = (
            prepare(before, work / "revisions" / "before", install=install),
            prepare(after, work / "revisions" / "after", install=install),
        )
        for row in rows:
            outcomes.append(run_row(row, revisions, work, sources))
            _show(outcomes[-1])
        if file is not None:
            file.write_text(json.dumps(_report(revisions, outcomes), indent=2) + "\n", encoding="utf-8")
    failed = [f"{outcome.name} ({outcome.result})" for outcome in outcomes if outcome.result != EQUAL]
    if failed:
        click.echo(f"{len(failed)} of {len(outcomes)} rows are not equal: {', '.join(failed)}", err=True)
        raise SystemExit(UNMET)
    click.echo(f"all {len(outcomes)} rows are equal")


if __name__ == "__main__":
    main()
