"""CPU time against nats lost, by effort: `python -m benchmarks.effort MODEL --text FILE --name NAME`.

Every fold is a process of its own with one thread, from the start of Python to the finished output, with its
own calibration text. `--before DIR` is a checkout of an earlier revision, whose default is measured in the
same run. Published rules are run with as much text as the default effort.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from kvfold.convert.efforts import EFFORTS
from kvfold.core.console import show_table
from kvfold.core.hub import resolve
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.texts.corpus import read_text

from .generated import timed
from .machine import RESULTS, save

TARGETS = {
    "gqa 50%": ["--to", "gqa", "--kv-budget", "50%"],
    "mla 50%": ["--to", "mla", "--kv-budget", "50%"],
    "mla 25%": ["--to", "mla", "--kv-budget", "25%"],
    "mla 12.5%": ["--to", "mla", "--kv-budget", "12.5%"],
}
RULES = {"--method transmla": "transmla", "--method care": "care"}
BEFORE = "before"
Row = dict[str, float]


def kinds(target: str, before: Path | None) -> dict[str, list[str]]:
    """Return the options of each kind of fold, by name."""
    found = {f"--effort {effort}": ["--effort", effort] for effort in EFFORTS}
    if target.startswith("mla"):
        found |= {label: ["--method", rule] for label, rule in RULES.items()}
    return found if before is None else {BEFORE: [], **found}


def fold(model: Path, options: list[str], out: Path, checkout: Path | None) -> Row:
    """Fold in a process of its own; return its CPU seconds.

    Args:
        model: the source.
        options: of `kvfold convert`.
        out: the output.
        checkout: of another revision, or None.
    """
    python = [sys.executable, "-m", "kvfold", "convert", str(model), *options, "--verify", "none"]
    if checkout is not None:
        python = ["env", "-C", str(checkout), f"PYTHONPATH={checkout}", *python]
    cost = timed([*python, "--jobs", "1", "--out", str(out)])
    return {"cpu_seconds": cost["cpu_seconds"]}


@click.command()
@click.argument("model")
@click.option("--text", required=True, help="Evaluation text, as for kvfold eval.")
@click.option("--window", default=256, show_default=True)
@click.option("--max-windows", type=int)
@click.option("--only", "targets", type=click.Choice(tuple(TARGETS)), multiple=True)
@click.option("--kind", "wanted", multiple=True, help="A label, such as '--effort quick'; all by default.")
@click.option("--before", type=click.Path(path_type=Path), help="A checkout of an earlier revision.")
@click.option("--update", is_flag=True, help="Keep the other rows of the results.")
@click.option("--name", required=True, help="Results go to benchmarks/results/effort-NAME.json.")
def main(
    model: str,
    text: str,
    window: int,
    max_windows: int | None,
    targets: tuple[str, ...],
    wanted: tuple[str, ...],
    before: Path | None,
    update: bool,
    name: str,
) -> None:
    """Print and save what every effort costs and loses."""
    directory, content = resolve(model), read_text(text)
    kept = RESULTS / f"effort-{name}.json"
    rows: dict[str, dict[str, Row]] = {}
    if update and kept.exists():
        rows = json.loads(kept.read_text(encoding="utf-8"))["rows"]
    about: dict[str, Any] = {"threads": os.environ.get("OMP_NUM_THREADS")}
    with tempfile.TemporaryDirectory() as work:
        options = Options(window=window, max_windows=max_windows, teacher_cache=Path(work) / "teacher")
        for target in targets or TARGETS:
            rows.setdefault(target, {})
            for label, added in kinds(target, before).items():
                if wanted and label not in wanted:
                    continue
                out = Path(work) / "out"
                checkout = before if label == BEFORE else None
                cost = fold(directory, [*TARGETS[target], *added], out, checkout)
                result = evaluate(out, directory, content, options, suites=("ppl",))
                shutil.rmtree(out)
                lost, source, protocol = result.ppl.difference, result.ppl.teacher, result.protocol
                assert lost is not None
                assert source is not None
                assert protocol is not None
                about |= {"protocol": protocol.name, "text_sha256": protocol.text_sha256}
                about["source_perplexity"] = source.perplexity
                rows[target][label] = {
                    **cost,
                    "lost": lost.mean,
                    "standard_error": lost.standard_error or 0.0,
                }
                click.echo(f"{target}, {label}: {rows[target][label]}", err=True)
                path = save(f"effort-{name}", {**about, "rows": rows})
    cells = [
        (target, label, f"{row['cpu_seconds']:.1f}", f"{row['lost']:.4f}")
        for target, found in rows.items()
        for label, row in found.items()
    ]
    show_table(about["protocol"], ("", "", "CPU s", "nats lost"), cells)
    click.echo(f"saved in {path}")


if __name__ == "__main__":
    main()
