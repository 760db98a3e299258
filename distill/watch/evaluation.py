"""Evaluation of the student while it trains: perplexity on held-out text, KL to the teacher, the share
recovered.

evaluations.jsonl has one line an evaluation; the first is of the student before the first stage that has it
in memory, as it was folded unless other stages came before, and has the teacher's losses too. Nothing here
draws random numbers or touches what is trained, so a run with evaluations trains to the same bits.

Shapes: N windows, K measures.
"""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from ...core.console import notice
from ...core.errors import InvalidInput
from ...eval.suites.perplexity import recovered_share
from ..data.batch import Batch
from ..recipe.watch_section import Evaluate
from ..run import state
from ..run.state import Progress
from ..stages.teacher import Teacher
from .held_out import HeldOut
from .metrics import append_line, read_lines

# What `Work.measure` gives: sums over a batch's scored tokens.
MEASURES = ("ce", "teacher_ce", "forward_kl", "same_top1")
Measure = Callable[[Batch, Teacher], dict[str, Tensor]]
Array = NDArray[np.float64]
# What metrics call the parts of a line.
_METRICS = {
    "eval_perplexity": "perplexity", "eval_kl": "kl", "eval_same_top1": "same_top1",
    "recovered_share": "recovered_share",
}  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """How a run is evaluated.

    Attributes:
        held_out: the text.
        teacher: gives predictions for it.
        accelerator: device, processes.
        settings: of the recipe.
        partial: the run's working directory.
    """

    held_out: HeldOut
    teacher: Teacher
    accelerator: Accelerator
    settings: Evaluate
    partial: Path

    @property
    def file(self) -> Path:
        """Where the history is."""
        return self.partial / "evaluations.jsonl"

    def history(self) -> list[dict[str, Any]]:
        """What was found so far."""
        return read_lines(self.file)

    def start(self, measure: Measure, stage: str, progress: Progress) -> None:
        """Evaluate the student before it is trained, and the teacher; once in a run.

        All processes call it.
        """
        history = self.history()
        self.accelerator.wait_for_everyone()  # all have looked before one writes
        if not history:
            self.evaluate(measure, stage, progress)
        elif history[0]["text_sha256"] != self.held_out.described["text_sha256"]:
            raise InvalidInput(
                f"evaluate.source {self.settings.source} is not the text that {self.partial} was started "
                f"with; put that one "
                "back to go on, or name another output to start anew"
            )

    def evaluate(self, measure: Measure, stage: str, progress: Progress) -> dict[str, float]:
        """Evaluate after the step that `progress` has just completed. All processes call it.

        Returns:
            `eval_perplexity`, `eval_kl` (nats a token) and `eval_same_top1` of the student, and
            `recovered_share`, unless it is undefined.
        """
        history = self.history()  # before the sums, at which all processes meet, and before a line is written
        sum_NK = self._sums(measure)
        line = {
            "step": progress.total_steps,
            "stage": stage,
            "tokens": progress.tokens,
            **self._found(sum_NK, history),
        }
        if not math.isfinite(line["perplexity"]):
            raise InvalidInput(
                f"stage {stage} diverged: after step {progress.total_steps} the perplexity of the "
                f"held-out text is "
                f"{line['perplexity']}; use a lower lr"
            )
        if self.accelerator.is_main_process:
            append_line(self.file, line)
        self.accelerator.wait_for_everyone()
        return {name: line[key] for name, key in _METRICS.items() if line[key] is not None}

    def _found(self, sum_NK: Array, history: list[dict[str, Any]]) -> dict[str, Any]:
        """What a line says of the sums."""
        count_N = np.asarray(self.held_out.counts, np.float64)
        nll_N, teacher_N, kl, same = (
            sum_NK[:, 0] / count_N,
            sum_NK[:, 1] / count_N,
            sum_NK[:, 2].sum(),
            sum_NK[:, 3].sum(),
        )
        found = {
            "perplexity": _perplexity(nll_N, count_N),
            "kl": kl / count_N.sum(),
            "same_top1": same / count_N.sum(),
        }
        found["window_nll"] = nll_N.tolist()
        if not history:
            teacher = {"perplexity": _perplexity(teacher_N, count_N), "window_nll": teacher_N.tolist()}
            return {**found, "recovered_share": None, "teacher": teacher, **self.held_out.described}
        start = history[0]
        folded_nll = None if start["step"] else start["window_nll"]
        share = recovered_share(nll_N.tolist(), start["teacher"]["window_nll"], folded_nll, count_N.tolist())
        return {**found, "recovered_share": share.value}

    @torch.no_grad()
    def _sums(self, measure: Measure) -> Array:
        """The measures (N, K) of every window, float64.

        Windows are dealt out, and shards need all to run equally often.
        """
        accelerator, windows = self.accelerator, len(self.held_out)
        sum_NK = torch.zeros(windows, len(MEASURES), device=accelerator.device)
        for first in range(0, windows, accelerator.num_processes):
            mine = first + accelerator.process_index
            found = measure(
                self.held_out.batch([min(mine, windows - 1)]).to(accelerator.device), self.teacher
            )
            if mine < windows:
                sum_NK[mine] = torch.stack([found[name].float() for name in MEASURES])
        whole_NK: Tensor = accelerator.reduce(sum_NK, "sum")
        return whole_NK.cpu().double().numpy()

    def keep_best(self, model: nn.Module, progress: Progress) -> None:
        """Keep the weights where they are the best so far. All processes call it after `evaluate`."""
        history = self.history()
        best = best_of(history)
        if self.settings.keep != "best" or best is None or best["step"] != progress.total_steps:
            return
        gathered = state.Gathered(model)
        if self.accelerator.is_main_process:
            directory = self.partial / "best"
            state.save(directory, progress, gathered, keep=len(history) + 1)
            self._drop(history, best)
        else:
            gathered.discard()
        self.accelerator.wait_for_everyone()

    def _drop(self, history: list[dict[str, Any]], best: dict[str, Any]) -> None:
        """Remove what can be the best no more: a run that is killed goes on from its last saved state, and
        needs the best up to there."""
        states = state.saved(self.partial / "state")
        until = state.read_progress(states[0]).total_steps if states else 0
        safe = best_of([line for line in history if line["step"] <= until])
        kept = {line["step"] for line in (best, safe) if line}
        for directory in state.saved(self.partial / "best"):
            if state.read_progress(directory).total_steps not in kept:
                shutil.rmtree(directory)


@dataclass(frozen=True)
class Kept:
    """The evaluation whose weights become the output.

    Attributes:
        line: what it found.
        state: where the weights are; None: they are those that the run started from.
    """

    line: dict[str, Any]
    state: Path | None


def best_of(history: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The evaluation with the lowest perplexity, of several the first, so that the start stays where nothing
    beats it; None without any."""
    return min(history, key=lambda line: float(line["perplexity"])) if history else None


def best_kept(partial: Path, settings: Evaluate | None) -> Kept | None:
    """What `keep: best` has chosen.

    None, with a notice, where those weights are not there whole, and where it is not asked.
    """
    best = best_of(read_lines(partial / "evaluations.jsonl"))
    if settings is None or settings.keep != "best" or best is None:
        return None
    if _is_start(best):
        return Kept(best, None)
    for directory in state.saved(partial / "best"):
        if state.is_whole(directory) and state.read_progress(directory).total_steps == best["step"]:
            return Kept(best, directory)
    notice("the best weights are not there any more; the output has the last")
    return None


def summary(history: list[dict[str, Any]], kept: Kept | None) -> dict[str, Any]:
    """What a finished run says of its evaluations.

    Of the teacher, of the start, and of the weights that are the output.
    """
    start, line = history[0], kept.line if kept else history[-1]
    return {
        "text": start["text"],
        "text_sha256": start["text_sha256"],
        "teacher_perplexity": start["teacher"]["perplexity"],
        "start_perplexity": start["perplexity"],
        "kept": "last" if kept is None else "start" if _is_start(line) else "best",
        **{key: line[key] for key in ("step", "perplexity", "kl", "same_top1", "recovered_share")},
    }


def _is_start(line: dict[str, Any]) -> bool:
    return "teacher" in line  # which only the first has


def _perplexity(nll_N: Array, count_N: Array) -> float:
    return math.exp(min(700.0, float(np.average(nll_N, weights=count_N))))  # JSON has no infinity
