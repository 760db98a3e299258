"""Loss of each fold before any training: `python -m benchmarks.fidelity MODEL --text FILE`, methods by
budgets.

The source is scored in the same run on the same windows; numbers are nats per token above it, paired by
window. Published rules
of others have settings: each is swept at each budget, and its row is its best one, chosen on the evaluation
text itself, which favours them.
"""

import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from kvfold.convert.algebra.target import Geometry, budget_elements
from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.decide.plan import make_plan
from kvfold.convert.families.source import Source, open_source
from kvfold.convert.methods.published import PEERS
from kvfold.convert.methods.refinement import STEPS
from kvfold.convert.request import fold_request
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.console import show_table
from kvfold.core.errors import InvalidInput
from kvfold.core.hub import resolve
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.texts.corpus import Text, read_text

from .machine import save

BUDGETS = ("50%", "25%", "12.5%")
Fold = tuple[
    str, str, dict[str, str], int | None
]  # target, method, further options, refinement; None: by weights alone
FOLDS: dict[str, Fold] = {
    "gqa mean": ("gqa", "mean", {}, None),
    "gqa aligned": ("gqa", "aligned", {}, None),
    "gqa, weights only": ("gqa", "subspace", {}, None),
    "gqa, closed form": ("gqa", "subspace", {}, 0),
    "gqa": ("gqa", "subspace", {}, STEPS),
    "mla, weights only": ("mla", "subspace", {}, None),
    "mla uniform, closed form": ("mla", "subspace", {"slots": "uniform"}, 0),
    "mla, closed form": ("mla", "subspace", {}, 0),
    "mla": ("mla", "subspace", {}, STEPS),
    "mla --rope intact, closed form": ("mla", "subspace", {"rope": "intact"}, 0),
    "mla --rope intact": ("mla", "subspace", {"rope": "intact"}, STEPS),
}
RULES = {f"mla {name}": name for name in PEERS if ":" not in name}  # rows that are swept
SHARES = (
    0.25,
    0.5,
    0.75,
    1.0,
)  # rotary widths of a sweep: of a head, or of the cache where every head has pairs of its own

Cell = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A source whose folds are measured on one text.

    Attributes:
        directory, source: the checkpoint.
        statistics: of the source.
        text: that the folds are evaluated on.
        options: of the evaluation.
        work: a directory for folds.
        protocol: what was read, and the source's perplexity on it; filled by the first measurement.
    """

    directory: Path
    source: Source
    statistics: Statistics
    text: Text
    options: Options
    work: Path
    protocol: dict[str, Any] = field(default_factory=dict)

    def measure(
        self, label: str, to: str, method: str, options: Mapping[str, Any], steps: int | None
    ) -> Cell | None:
        """Fold, evaluate and print one cell; None where the fold is refused."""
        statistics = None if steps is None else self.statistics
        try:
            asked = {"model": str(self.directory), "to": to, "method": method, "refine": steps, **options}
            plan = make_plan(self.directory, fold_request(asked), statistics)
        except InvalidInput as reason:
            click.echo(f"{label}: {reason}", err=True)
            return None
        out, start = self.work / "fold", time.monotonic()
        record = rewrite(plan, out)
        seconds = time.monotonic() - start
        result = evaluate(out, self.directory, self.text, self.options)
        shutil.rmtree(out)
        lost = result.ppl.difference
        assert lost is not None
        assert result.ppl.teacher is not None
        assert result.protocol is not None
        self.protocol["protocol"] = result.protocol.name
        self.protocol["text_sha256"] = result.protocol.text_sha256
        self.protocol["source_perplexity"] = result.ppl.teacher.perplexity
        click.echo(f"{label}: {lost.mean:.4f}", err=True)
        return {
            "lost": lost.mean,
            "standard_error": lost.standard_error,
            "predicted": record["predicted_loss"],
            "target": plan.target.to_dict(),
            "fold_seconds": round(seconds, 1),
        }


def widths(method: str, geometry: Geometry, budget: str, shares: Iterable[float]) -> list[int]:
    """Rotary widths of a rule at a budget, of the shares for which there are some."""
    heads, elements, peer = geometry.num_key_value_heads, budget_elements(geometry, budget), PEERS[method]
    whole, step = (elements, 2 * heads) if peer.per_head else (geometry.head_dim, 2)
    found = {int(share * whole) // step * step for share in shares}
    return [width for width in sorted(found) if 0 < width < elements]


def sweep(trial: Trial, rule: str, budget: str) -> Cell | None:
    """The cell of a rule's best setting, with all that were tried; None where it has none.

    Every setting is tried at widths of SHARES, the best one also at shares an eighth to either side.
    """
    geometry, tried = trial.source.geometry, dict[tuple[str, int], Cell]()

    def attempt(method: str, shares: Iterable[float]) -> None:
        for width in widths(method, geometry, budget, shares):
            if (method, width) not in tried:
                options = {"kv_budget": budget, "rope_dim": width}
                cell = trial.measure(
                    f"--method {method} --rope-dim {width}, {budget}", "mla", method, options, 0
                )
                if cell is not None:
                    tried[method, width] = cell

    def best() -> tuple[str, int]:
        return min(tried, key=lambda setting: float(tried[setting]["lost"]))

    for method in PEERS:
        if method.partition(":")[0] == rule:
            attempt(method, SHARES)
    if not tried:
        return None
    method, width = best()
    if PEERS[method].per_head:
        share = width / budget_elements(geometry, budget)
        attempt(method, (share - 0.125, share + 0.125))
    every = {
        f"--method {method} --rope-dim {width}": {key: cell[key] for key in ("lost", "standard_error")}
        for (method, width), cell in tried.items()
    }
    method, width = best()
    return {**tried[method, width], "setting": f"--method {method} --rope-dim {width}", "settings": every}


def measure(trial: Trial, label: str, budget: str) -> Cell | None:
    """The cell of a row of FOLDS, or of RULES at its best setting."""
    if label in RULES:
        return sweep(trial, RULES[label], budget)
    to, method, further, steps = FOLDS[label]
    return trial.measure(f"{label} {budget}", to, method, {"kv_budget": budget, **further}, steps)


@click.command()
@click.argument("model")
@click.option("--text", required=True, help="Evaluation text, as for kvfold eval.")
@click.option("--sequences", default=48, show_default=True, help="Calibration sequences.")
@click.option("--length", default=256, show_default=True, help="Tokens of each.")
@click.option("--calibration", default="self", show_default=True, help="As for kvfold convert.")
@click.option("--only", multiple=True, help="A row's label; all rows by default.")
@click.option("--window", default=256, show_default=True)
@click.option("--max-windows", type=int)
@click.option("--name", required=True, help="Results go to benchmarks/results/fidelity-NAME.json.")
def main(
    model: str,
    text: str,
    sequences: int,
    length: int,
    calibration: str,
    only: tuple[str, ...],
    window: int,
    max_windows: int | None,
    name: str,
) -> None:
    """Print and save nats lost by every method at every budget, published rules at their best setting."""
    directory, labels = resolve(model), [label for label in (*FOLDS, *RULES) if not only or label in only]
    with tempfile.TemporaryDirectory() as work:
        source = open_source(directory)
        trial = Trial(
            directory=directory,
            source=source,
            statistics=study(source, calibration, sequences=sequences, length=length, seed=0),
            text=read_text(text),
            options=Options(window=window, max_windows=max_windows, teacher_cache=Path(work) / "teacher"),
            work=Path(work),
        )
        cells = {label: {budget: measure(trial, label, budget) for budget in BUDGETS} for label in labels}
    rows = {
        label: {budget: cell for budget, cell in row.items() if cell is not None}
        for label, row in cells.items()
    }
    result = {**trial.protocol, "calibration": [calibration, sequences, length], "rows": rows}
    show(result)
    click.echo(f"saved in {save(f'fidelity-{name}', result)}")


def show(result: Mapping[str, Any]) -> None:
    """Print nats lost, the setting of each rule that lost least, and how that compares with the default
    fold.
    """
    rows = result["rows"]
    cells = [
        (label, *(f"{row[b]['lost']:.4f}" if b in row else "" for b in BUDGETS))
        for label, row in rows.items()
    ]
    title = (
        f"{result['protocol']}, source {result['source_perplexity']:.4g}: nats lost at a share of its cache"
    )
    show_table(title, ("", *BUDGETS), cells)
    swept = [label for label in rows if label in RULES]
    if swept:
        best = [
            (label, *(rows[label][b]["setting"] if b in rows[label] else "" for b in BUDGETS))
            for label in swept
        ]
        show_table("the best setting of each published rule", ("", *BUDGETS), best)
    for budget in BUDGETS:
        others = {label: rows[label][budget]["lost"] for label in swept if budget in rows[label]}
        if others and budget in rows.get("mla", {}):
            least, own = min(others, key=lambda label: others[label]), rows["mla"][budget]["lost"]
            click.echo(
                f"{budget}: the best published rule, {least}, loses {others[least]:.4f}, and mla {own:.4f}"
            )


if __name__ == "__main__":
    main()
