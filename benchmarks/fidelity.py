"""Loss of each fold before any training: `python -m benchmarks.fidelity MODEL --text FILE`, methods by
budgets.

The source is scored in the same run on the same windows; numbers are nats per token above it, paired by
window. Published rules of others have settings: each is swept at each budget, and its row is its best one,
chosen on the evaluation text itself, which favours them.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import click

from kvfold.convert.algebra.target import Geometry, budget_elements
from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.efforts import EFFORTS
from kvfold.convert.families.source import Source, open_source
from kvfold.convert.methods.published import PEERS, peer
from kvfold.convert.methods.shared_key import DECOMPOSITIONS
from kvfold.convert.methods.table import reads_statistics
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.convert.write.rewrite import rewrite
from kvfold.core.console import show_table
from kvfold.core.errors import InvalidInput
from kvfold.core.hub import resolve
from kvfold.eval.options import Options
from kvfold.eval.result import Result
from kvfold.eval.run import evaluate
from kvfold.eval.suites.catalogue import DEFAULT, SuiteSettings
from kvfold.texts.corpus import Text, read_text

from .machine import RESULTS, Phases, save

BUDGETS = ("50%", "25%", "12.5%")
SAME = 1e-6  # relative difference of perplexities up to which two runs measured one thing
# Target, method, further options, refinement; None: by weights alone.
Fold = tuple[str, str, dict[str, str], int | None]
SHORT, LONG = (EFFORTS[name].steps for name in ("default", "best"))
FOLDS: dict[str, Fold] = {
    "gqa mean": ("gqa", "mean", {}, None),
    "gqa aligned": ("gqa", "aligned", {}, None),
    "gqa aligned:grouped": ("gqa", "aligned:grouped", {}, None),
    "gqa, weights only": ("gqa", "subspace", {}, None),
    "gqa, closed form": ("gqa", "subspace", {}, 0),
    "gqa, default effort": ("gqa", "subspace", {"effort": "default"}, SHORT),
    "gqa": ("gqa", "subspace", {}, LONG),
    "mla, weights only": ("mla", "subspace", {}, None),
    "mla uniform, closed form": ("mla", "subspace", {"slots": "uniform"}, 0),
    "mla, closed form": ("mla", "subspace", {}, 0),
    "mla, default effort": ("mla", "subspace", {"effort": "default"}, SHORT),
    "mla": ("mla", "subspace", {}, LONG),
    "mla, linear norm": ("mla", "subspace", {"latent_norm": "linear"}, LONG),
    "mla --rope decoupled, own code": ("mla", "subspace", {"rope": "decoupled", "container": "remote"}, LONG),
    "mla --rope intact, closed form": ("mla", "subspace", {"rope": "intact"}, 0),
    "mla --rope intact, default effort": ("mla", "subspace", {"rope": "intact", "effort": "default"}, SHORT),
    "mla --rope intact": ("mla", "subspace", {"rope": "intact"}, LONG),
}
RULES = {f"mla {name}": name for name in PEERS if ":" not in name}  # rows that are swept
# Rotary widths of a sweep: shares of a head, or of the cache where every head has pairs of its own.
SHARES = (0.25, 0.5, 0.75, 1.0)
FURTHEST = 8.0  # by how much keys may be larger or smaller next to values

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
        suites, settings: of the evaluation, and the suites' own options.
        further: returns what a cell keeps of an evaluation in addition.
        only: settings of published rules, METHOD@WIDTH, that are tried; empty: those of a sweep.
        protocol: what was read, and the source's perplexity on it; filled by the first measurement.
    """

    directory: Path
    source: Source
    statistics: Statistics
    text: Text
    options: Options
    work: Path
    suites: tuple[str, ...] = DEFAULT
    settings: Mapping[str, Any] = field(default_factory=dict)
    further: Callable[[Result], Cell] = lambda _: {}
    only: tuple[str, ...] = ()
    protocol: dict[str, Any] = field(default_factory=dict)

    def measure(
        self, label: str, to: str, method: str, options: Mapping[str, Any], steps: int | None
    ) -> Cell | None:
        """Fold, evaluate and print one cell; None where the fold is refused."""
        statistics = None if steps is None else self.statistics
        phases, out = Phases(), self.work / "fold"
        try:
            asked: dict[str, Any] = {"model": str(self.directory), "to": to, "method": method}
            if steps is not None:
                asked |= {"effort": "best", "refine": steps}
            if statistics is not None and method == "subspace":  # for texts like those of the calibration
                asked |= {"context": statistics.origin()["length"]}
            asked |= options
            plan = phases.run("plan", lambda: make_plan(self.directory, fold_request(asked), statistics))
        except InvalidInput as reason:
            click.echo(f"{label}: {reason}", err=True)
            return None
        shutil.rmtree(out, ignore_errors=True)  # of a stopped measurement
        record = phases.run("fold", lambda: rewrite(plan, out))
        result = phases.run("evaluate", lambda: self._evaluate(out))
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
            "target": record["target"],
            **phases.found,
            **self.further(result),
        }

    def _evaluate(self, out: Path) -> Result:
        return evaluate(
            out,
            self.directory,
            self.text,
            self.options,
            suites=self.suites,
            settings=SuiteSettings.read(self.settings),
        )


def widths(method: str, geometry: Geometry, budget: str, shares: Iterable[float]) -> list[int]:
    """Rotary widths of a rule at a budget, of the shares for which there are some."""
    heads, elements, peer = geometry.num_key_value_heads, budget_elements(geometry, budget), PEERS[method]
    whole, step = (elements, 2 * heads) if peer.per_head else (geometry.head_dim, 2)
    found = {int(share * whole) // step * step for share in shares}
    return [width for width in sorted(found) if 0 < width < elements]


def sweep(trial: Trial, rule: str, budget: str, shares: Iterable[float] = SHARES) -> Cell | None:
    """The cell of a rule's best setting, with all that were tried; None where it has none.

    Every setting is tried at widths of `shares`; the best of pairs per head also at shares an eighth to
    either side. Rules of merged heads are then tried with more pairs folded, and with smaller and larger keys
    as long as that gains.
    """
    geometry, tried = trial.source.geometry, dict[tuple[str, int], Cell]()

    def attempt(method: str, shares: Iterable[float]) -> None:
        for width in widths(method, geometry, budget, shares):
            if (method, width) not in tried:
                attempt_at(width, [method])

    def attempt_at(width: int, methods: Iterable[str]) -> None:
        for method in methods:
            # As published, a rule has no norm that its latent is fitted to.
            options = {"kv_budget": budget, "rope_dim": width, "latent_norm": "linear"}
            cell = trial.measure(f"--method {method} --rope-dim {width}, {budget}", "mla", method, options, 0)
            if cell is not None:
                tried[method, width] = cell

    def best() -> tuple[str, int]:
        return min(tried, key=lambda setting: float(tried[setting]["lost"]))

    for method in () if trial.only else PEERS:
        if method.partition(":")[0] == rule:
            attempt(method, shares)
    for method, _, wanted in (setting.partition("@") for setting in trial.only):
        if method.partition(":")[0] == rule:
            attempt_at(int(wanted), [method])
    if not tried:
        return None
    method, width = best()
    if not trial.only and rule in DECOMPOSITIONS:  # FreqFold's search, then the balance
        attempt_at(width, [f"{rule}:fold{multiple}" for multiple in (2, 4, 8)])
        fold, width = best()
        for step in (0.5, 2.0):
            weight = step
            while 1 / FURTHEST <= weight <= FURTHEST:
                setting = f"{fold}:balance{weight:g}"
                attempt_at(width, [setting])
                if best()[0] != setting:
                    break
                weight *= step
    elif not trial.only and PEERS[method].per_head:
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
@click.option(
    "--save-statistics",
    type=click.Path(path_type=Path),
    help="Keep the statistics in this file, or use those that an earlier run has kept there.",
)
@click.option("--only", multiple=True, help="A row's label; all rows by default.")
@click.option("--setting", "settings", multiple=True, help="METHOD@WIDTH, tried instead of a sweep.")
@click.option(
    "--method",
    "methods",
    multiple=True,
    help="Only rows of this method, as for kvfold convert; all: every row.",
)
@click.option(
    "--budget", "budgets", multiple=True, help="A share of the cache; 50%, 25% and 12.5% by default."
)
@click.option(
    "--update", is_flag=True, help="Keep other cells of earlier results, if the source scores alike."
)
@click.option("--window", default=256, show_default=True)
@click.option("--max-windows", type=int)
@click.option("--name", required=True, help="Results go to benchmarks/results/fidelity-NAME.json.")
def main(
    model: str,
    text: str,
    sequences: int,
    length: int,
    calibration: str,
    save_statistics: Path | None,
    only: tuple[str, ...],
    settings: tuple[str, ...],
    methods: tuple[str, ...],
    budgets: tuple[str, ...],
    update: bool,
    window: int,
    max_windows: int | None,
    name: str,
) -> None:
    """Print and save nats lost by every method at every budget, published rules at their best setting."""
    for setting in settings:
        if not setting.partition("@")[2].isdecimal() or peer(setting.partition("@")[0]) is None:
            raise InvalidInput(
                f"--setting {setting} is no rule and width; write care:balance2@16 for example"
            )
    directory, labels = resolve(model), chosen(only, methods)
    for label in labels:
        if not reads_statistics(method_of(label)):
            told = (
                f"--calibration {calibration} is ignored: --method {method_of(label)} folds by weights alone"
            )
            click.echo(f"{label}: {told}", err=True)
    with tempfile.TemporaryDirectory() as work:
        source = open_source(directory)
        asked: dict[str, Any] = {"sequences": sequences, "length": length, "seed": 0, "save": save_statistics}
        statistics = study(source, calibration, **asked)
        if statistics is None:
            raise InvalidInput("--calibration none leaves rows without statistics; name a text, or self")
        trial = Trial(
            directory=directory,
            source=source,
            statistics=statistics,
            text=read_text(text),
            options=Options(window=window, max_windows=max_windows, teacher_cache=Path(work) / "teacher"),
            work=Path(work),
            only=settings,
        )
        rows: dict[str, dict[str, Cell]] = {}
        for label, budget in product(labels, budgets or BUDGETS):
            cell = measure(trial, label, budget)
            if cell is not None:  # a stopped run keeps what it has measured
                rows.setdefault(label, {})[budget] = cell
                result = {**trial.protocol, "calibration": [calibration, sequences, length], "rows": rows}
                result = updated(name, result) if update else result
                saved = save(f"fidelity-{name}", result)
    if not rows:
        raise InvalidInput("every row that was asked for is refused; the reasons are printed above")
    show(result)
    click.echo(f"saved in {saved}")


def method_of(label: str) -> str:
    """Return the method of a row, without its settings."""
    return RULES[label] if label in RULES else FOLDS[label][1]


def chosen(only: Collection[str], methods: Collection[str]) -> list[str]:
    """Return the labels of the rows that are measured.

    Args:
        only: labels; all where there are none.
        methods: names of methods; all where there are none, or one of them is `all`.

    Raises:
        InvalidInput: there is no such row or method.
    """
    rows = (*FOLDS, *RULES)
    known = {"all", *map(method_of, rows)}
    for option, names, allowed in (("--only", only, rows), ("--method", methods, sorted(known))):
        for name in names:
            if name not in allowed:
                raise InvalidInput(f"{option} {name} names no row; choose from {', '.join(allowed)}")
    every = not methods or "all" in methods
    return [row for row in rows if (not only or row in only) and (every or method_of(row) in methods)]


def updated(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Put new cells into the results of an earlier run on the same windows.

    A cell of a swept rule keeps every setting that either run tried, and is the best of them.

    Raises:
        InvalidInput: the earlier run read another text or other windows, was calibrated otherwise, or its
            source scored differently.
    """
    file = RESULTS / f"fidelity-{name}.json"
    if not file.exists():
        return result
    earlier = json.loads(file.read_text(encoding="utf-8"))
    for key in ("protocol", "text_sha256", "calibration"):
        if earlier[key] != result[key]:
            raise InvalidInput(f"fidelity-{name}.json has {key} {earlier[key]}, and this run {result[key]}")
    scores = earlier["source_perplexity"], result["source_perplexity"]
    if abs(scores[0] / scores[1] - 1) > SAME:
        raise InvalidInput(
            f"fidelity-{name}.json has a source of perplexity {scores[0]}, and this run {scores[1]}"
        )
    rows = {label: dict(row) for label, row in earlier["rows"].items()}
    for label, row in result["rows"].items():
        for budget, cell in row.items():
            rows.setdefault(label, {})[budget] = better(rows.get(label, {}).get(budget), cell)
    order = dict.fromkeys((*(label for label in (*FOLDS, *RULES) if label in rows), *rows))
    kept = {key: value for key, value in earlier.items() if key not in ("machine", "date")}
    return {**kept, "rows": {label: rows[label] for label in order}}


def better(earlier: Cell | None, cell: Cell) -> Cell:
    """Return the cell of a rule after two sweeps, or the new cell of a fold that has no settings."""
    if earlier is None or "settings" not in earlier or "settings" not in cell:
        return cell
    every = {**earlier["settings"], **cell["settings"]}
    best = min(every, key=lambda setting: float(every[setting]["lost"]))
    taken = cell if best in cell["settings"] else earlier
    return {**taken, "settings": every}


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
        best = [(label, *(rows[label].get(b, {}).get("setting", "") for b in BUDGETS)) for label in swept]
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
