"""Folds of a source by every method: time and memory of each phase, nats and retrieval lost."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvfold.convert.calibration.statistics import Statistics
from kvfold.convert.calibration.study import study
from kvfold.convert.families.source import open_source
from kvfold.eval.options import Options
from kvfold.eval.suites.catalogue import DEFAULT
from kvfold.texts.corpus import read_text

from ..fidelity import FOLDS, RULES, Trial, sweep
from ..phases import Phases
from .ledger import Ledger, NotRun, Row
from .sizes import Sizes
from .source import retrieved
from .text import HELD, TRAIN
from .tokens import CALIBRATION

STATISTICS = "statistics.safetensors"
TRIALS = 8  # folds that the sweep of a published rule makes, about


def fold(ledger: Ledger, sizes: Sizes, work: Path, directory: Path, device: str) -> None:
    """Measure every row at every budget, by what matters most; rows of the part `fold`.

    Args:
        ledger: of the part.
        sizes: of the day.
        work: of the part `train`, which wrote the texts; gets statistics and folds.
        directory: the source.
        device: `cuda` or `cpu`.
    """
    saved = work / STATISTICS
    if ledger.attempt("statistics", lambda: statistics(sizes, work, directory)) is None:
        return
    count, window = sizes.windows
    trial = Trial(
        directory=directory,
        source=open_source(directory),
        statistics=Statistics.load(saved),
        text=read_text(str(work / HELD)),
        options=Options(
            window=window, max_windows=count, teacher_cache=work / "teacher", device=device, dtype="float32"
        ),
        work=work,
        suites=(*DEFAULT, "retrieval"),
        settings=sizes.retrieval,
        further=lambda result: {"retrieval": retrieved(result)},
    )
    longest = 0.0  # of single folds, in seconds
    for label in sizes.folds:
        for budget in sizes.budgets:
            needs = (TRIALS if label in RULES else 1) * longest
            row = ledger.attempt(f"{label} {budget}", partial(cell, trial, sizes, label, budget), needs)
            if row and label not in RULES:
                longest = max(longest, row["wall_seconds"])


def statistics(sizes: Sizes, work: Path, directory: Path) -> Row:
    """Read calibration text and keep the statistics; return time and memory.

    The text is what the source was trained on, with its copies and questions; of another source, the
    training text.
    """
    saved, phases = work / STATISTICS, Phases()
    saved.unlink(missing_ok=True)  # of another source
    sequences, length = sizes.calibration
    options: dict[str, Any] = {"sequences": sequences, "length": length, "seed": 0, "save": saved}
    own = directory.resolve().parent == work.resolve() and (work / CALIBRATION).exists()
    text = work / (CALIBRATION if own else TRAIN)
    phases.run("statistics", lambda: study(open_source(directory), str(text), **options))
    return {**phases.found, "sequences": sequences, "length": length}


def cell(trial: Trial, sizes: Sizes, label: str, budget: str) -> Row:
    """Return one row.

    Raises:
        NotRun: the fold is refused, as where there is no such number of heads.
    """
    if label in RULES:
        found = sweep(trial, RULES[label], budget, sizes.rule_shares)
    else:
        to, method, further, steps = FOLDS[label]
        options: Mapping[str, Any] = {"kv_budget": budget, **further}
        steps = steps and min(steps, sizes.refine_steps)
        found = trial.measure(f"{label} {budget}", to, method, options, steps)
    if found is None:
        raise NotRun("kvfold refuses this fold of this source; its reason is printed above")
    return {**found, "source_perplexity": trial.protocol["source_perplexity"]}
