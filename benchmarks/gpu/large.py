"""Folds of a model of a real size: seconds to each line that the command prints, and the GPU's memory.

The model has random weights, since none of that size is at hand; its tokenizer and the calibration text are
those of the part `train`. Each fold is one command of kvfold in a process of its own, as a user runs it.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from kvfold.convert.decide.costs.fold_cost import cost_of
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan

from ..fold_cost import options_of
from .distil import ROOT
from .ledger import Ledger, Row
from .sizes import Sizes
from .text import TRAIN, write_text
from .tokens import make_tokenizer

MODEL = "large"
NEEDED = 60.0  # seconds that a fold takes at least
TOKENIZER = 16384  # tokens of the text's tokenizer; the model's vocabulary is as large as the sizes say


def large(ledger: Ledger, sizes: Sizes, work: Path, device: str) -> None:
    """Write the model and fold it; rows of the part `large`.

    Args:
        ledger: of the part.
        sizes: of the day.
        work: of the part `train`, whose text and tokenizer are made here where they are missing.
        device: `cuda` or `cpu`.
    """
    if not (work / MODEL / "config.json").exists():  # rows of an earlier call are kept
        ledger.rows.pop("model", None)
    if ledger.attempt("model", partial(_model, sizes, work, device)) is None:
        return
    needs = NEEDED if device == "cuda" else 0.0
    for label, options in sizes.large_folds.items():
        ledger.attempt(f"fold {label}", partial(_fold, ledger, work, label, options, device), needs)


def _model(sizes: Sizes, work: Path, device: str) -> Row:
    from transformers import LlamaConfig, LlamaForCausalLM

    write_text(work, sizes)
    out, unfinished = work / MODEL, work / f"{MODEL}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    tokenizer = make_tokenizer(work, min(sizes.vocabulary, TOKENIZER))
    torch.manual_seed(0)
    with torch.device(device):
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        model = LlamaForCausalLM(LlamaConfig(**sizes.large, **ends)).to(torch.bfloat16)
    count = sum(weight.numel() for weight in model.parameters())
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(out)
    return {"parameters": count, "config": sizes.large}


def _fold(ledger: Ledger, work: Path, label: str, options: str, device: str) -> Row:
    """Return the lines of a fold with the seconds at which they came, its time, memory and prediction.

    Raises:
        RuntimeError: the command fails, or the time ends; its lines are shown.
    """
    model, out = work / MODEL, work / f"{MODEL}-{label.replace(' ', '-').replace('%', '')}"
    for left in work.glob(f"{out.name}*"):  # a fold that was stopped would be resumed in less time
        shutil.rmtree(left, ignore_errors=True)
    words = ["convert", str(model), *options.split(), "--calibration", str(work / TRAIN)]
    words += ["--verify", "none", "--json", "--out", str(out)]
    given = {"model": str(model), "calibration": str(work / TRAIN), **options_of(options)}
    predicted = cost_of(make_plan(model, fold_request(given))).to_dict()
    lines, seconds, peak = _watched([sys.executable, "-m", "kvfold", *words], ledger.left(), device)
    shutil.rmtree(out)
    return {
        "options": options, "seconds": seconds, "peak_gpu_mb": peak, "lines": lines,
        "predicted_cpu_seconds": predicted["seconds"], "predicted_peak_mb": predicted["peak_bytes"] / 1e6,
        "predicted_phases": predicted["phases"],
    }  # fmt: skip


def _watched(command: list[str], limit: float, device: str) -> tuple[list[list[Any]], float, float | None]:
    """Run a command; return its lines with their seconds, the seconds of all, and the GPU's most MB taken."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    lines: list[list[Any]] = []
    start, free = time.monotonic(), _free(device)
    least = free
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as running:
        stopper = threading.Timer(max(1.0, limit), running.kill)
        sampler = threading.Thread(target=_read, args=(running, lines, start), daemon=True)
        stopper.start()
        sampler.start()
        while running.poll() is None:
            time.sleep(0.25)
            least = min(least, _free(device))
        sampler.join()
        stopper.cancel()
    seconds = round(time.monotonic() - start, 1)
    if running.returncode:
        for when, line in lines:
            click.echo(f"{when} s: {line}", err=True)
        raise RuntimeError(f"the fold was stopped after {seconds} s, with code {running.returncode}")
    return lines, seconds, round((free - least) / 1e6, 1) if device == "cuda" else None


def _read(running: "subprocess.Popen[str]", lines: list[list[Any]], start: float) -> None:
    assert running.stderr is not None
    for line in running.stderr:
        if line.strip():
            lines.append([round(time.monotonic() - start, 1), line.strip()])


def _free(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0
