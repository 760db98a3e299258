"""A pretrained source by kvfold's own commands: seconds of folds, what they lose, and training of some."""

import json
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from kvfold.core.errors import InvalidInput

from .distil import child
from .ledger import Ledger, NotRun, Row
from .sizes import Sizes

STATISTICS = "pretrained.safetensors"
KEPT = (
    "tokens",
    "kl",
    "eval_perplexity",
    "eval_kl",
    "recovered_share",
    "tokens_per_second",
    "peak_memory_gib",
)


def pretrained(ledger: Ledger, sizes: Sizes, work: Path, source: Path, text: Path, data: Path) -> None:
    """Fold a source, evaluate the folds, and train some of them; rows of the part `pretrained`.

    The first fold takes the statistics that the others read. Each training has an equal part of the time that
    is left; one that this ends is a row with the points until then, and is not resumed.

    Args:
        ledger: of the part.
        sizes: of the day.
        work: gets statistics, folds and runs.
        source: a checkpoint.
        text: that folds are evaluated on.
        data: that they are trained on, as `data.source` of a recipe.
    """
    for label in sizes.pretrained:
        ledger.attempt(f"fold {label}", partial(folded, ledger, sizes, work, source, text, label))
    for number, label in enumerate(sizes.trained):
        seconds = ledger.left() / (len(sizes.trained) - number)
        given = (seconds, sizes, work, source, text, data, label)
        ledger.attempt(f"training {label}", partial(trained, *given))


def folded(ledger: Ledger, sizes: Sizes, work: Path, source: Path, text: Path, label: str) -> Row:
    """Return seconds of one fold, and the nats that it loses in windows of every length.

    Raises:
        NotRun: the time ended, or there are no statistics.
        RuntimeError: a command failed.
    """
    out, saved = place(work, label), work / STATISTICS
    for left in work.glob(f"{out.name}*"):  # a fold that was stopped would be resumed in less time
        shutil.rmtree(left, ignore_errors=True)
    if label == next(iter(sizes.pretrained)):
        saved.unlink(missing_ok=True)
    elif not saved.exists():
        raise NotRun("the first fold has not left its statistics")
    options = sizes.pretrained[label].split()
    options += ["--calibration", str(saved)] if saved.exists() else ["--save-statistics", str(saved)]
    start = time.monotonic()
    record = said(ledger, "convert", str(source), *options, "--verify", "none", "--out", str(out))
    row = {
        "options": sizes.pretrained[label],
        "target": record["target"],
        "predicted": record["predicted_loss"],
        "fold_seconds": round(time.monotonic() - start, 1),
        "losses": {},
    }
    for window, count in sizes.pretrained_windows:
        reading = ["--window", str(window), "--max-windows", str(count), "--dtype", "float32"]
        found = said(
            ledger, "eval", str(out), "--teacher", str(source), "--text", str(text), *reading,
            "--trust-remote-code",
        )  # fmt: skip
        loss = found["suites"]["ppl"]
        row["losses"][str(window)] = {
            "protocol": found["protocol"]["name"],
            "lost": loss["difference"]["mean"],
            "standard_error": loss["difference"]["standard_error"],
            "source_perplexity": loss["teacher"]["perplexity"],
            "kl": found["suites"]["fidelity"]["kl"]["mean"],
        }
    return row


def trained(
    seconds: float, sizes: Sizes, work: Path, source: Path, text: Path, data: Path, label: str
) -> Row:
    """Return the points of one training, as far as it got in so many seconds.

    Raises:
        InvalidInput: there is no fold of that name.
        RuntimeError: the command failed.
    """
    if not place(work, label).exists():
        raise InvalidInput(f"there is no fold {label} to train, since its row was not measured")
    own, out, file = sizes.training, work / f"trained-{place(work, label).name}", work / "recipe.yaml"
    for left in work.glob(f"{out.name}*"):
        shutil.rmtree(left, ignore_errors=True)
    stage = {"name": "kl", "losses": {"kl": 1.0}, "train": "all", "schedule": "wsd", **own["stage"]}
    recipe = {
        "schema": 1,
        "student": str(place(work, label)),
        "teacher": str(source),
        "output": str(out),
        "data": {"source": str(data), "seq_len": own["window"], "seed": 0},
        "stages": [stage],
        "evaluate": {"source": str(text), "seq_len": own["window"], **own["evaluate"]},
        "log_every": 8,
    }
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    is_stopped = False
    try:
        child([sys.executable, "-m", "kvfold", "distill", str(file)], seconds)
    except subprocess.TimeoutExpired:
        is_stopped = True
    # A run that was stopped has its files next to where the output would be.
    lines = next(work.glob(f"{out.name}*/metrics.jsonl"), None)
    if lines is None:
        raise RuntimeError("the training was stopped before its first step")
    written = lines.read_text(encoding="utf-8").splitlines(keepends=True)
    points = [json.loads(line) for line in written if line.endswith("\n")]  # a run may be stopped in a line
    return {
        "stopped": is_stopped,
        "recipe": stage,
        "points": [{key: point[key] for key in KEPT if key in point} for point in points],
    }


def place(work: Path, label: str) -> Path:
    """Return the directory of a fold."""
    return work / label.replace("%", "").replace(" ", "-")


def said(ledger: Ledger, *words: str) -> dict[str, Any]:
    """Run a command of kvfold in a process of its own; return the object that it prints.

    Raises:
        NotRun: the time ended.
        RuntimeError: the command failed.
    """
    try:
        printed = child([sys.executable, "-m", "kvfold", *words, "--json"], ledger.left())
    except subprocess.TimeoutExpired as late:
        raise NotRun("the time ended; the same command measures it") from late
    found: dict[str, Any] = json.loads(printed)
    return found
