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
from .ledger import Ledger, Row
from .sizes import Sizes

STATISTICS = "pretrained.safetensors"


def pretrained(ledger: Ledger, sizes: Sizes, work: Path, source: Path, text: Path, data: Path) -> None:
    """Fold a source, evaluate the folds, and train some of them; rows of the part `pretrained`.

    The first fold takes the statistics that the others read. A training ends when the time does.

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
    for label in sizes.trained:
        ledger.attempt(f"training {label}", partial(trained, ledger, sizes, work, source, text, data, label))


def folded(ledger: Ledger, sizes: Sizes, work: Path, source: Path, text: Path, label: str) -> Row:
    """Return seconds of one fold, and the nats that it loses in windows of every length.

    Raises:
        RuntimeError: a command failed.
    """
    out, saved = place(work, label), work / STATISTICS
    shutil.rmtree(out, ignore_errors=True)
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
        }
    return row


def trained(
    ledger: Ledger, sizes: Sizes, work: Path, source: Path, text: Path, data: Path, label: str
) -> Row:
    """Return the points of one training, as far as it got.

    Raises:
        InvalidInput: there is no fold of that name.
        RuntimeError: the command failed.
    """
    if not place(work, label).exists():
        raise InvalidInput(f"there is no fold {label} to train, since its row was not measured")
    own, out, file = sizes.training, work / f"{place(work, label).name}-trained", work / "recipe.yaml"
    shutil.rmtree(out, ignore_errors=True)
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
        child([sys.executable, "-m", "kvfold", "distill", str(file)], ledger.left())
    except subprocess.TimeoutExpired:
        is_stopped = True
    # A run that was stopped has its files next to where the output would be.
    lines = next(work.glob(f"{out.name}*/metrics.jsonl"), None)
    if lines is None:
        raise RuntimeError("the training was stopped before its first step")
    points = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    kept = (
        "tokens",
        "kl",
        "eval_perplexity",
        "eval_kl",
        "recovered_share",
        "tokens_per_second",
        "peak_memory_gib",
    )
    return {
        "stopped": is_stopped,
        "recipe": stage,
        "points": [{key: point[key] for key in kept if key in point} for point in points],
    }


def place(work: Path, label: str) -> Path:
    """Return the directory of a fold."""
    return work / label.replace("%", "").replace(" ", "-")


def said(ledger: Ledger, *words: str) -> dict[str, Any]:
    """Run a command of kvfold in a process of its own; return the object that it prints."""
    found: dict[str, Any] = json.loads(
        child([sys.executable, "-m", "kvfold", *words, "--json"], ledger.left())
    )
    return found
