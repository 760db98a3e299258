"""Evaluation of the student while it trains: perplexity on held-out text, KL to the teacher, recovered share.

evaluations.jsonl has one line per evaluation. The first line is of the student before the first stage that
holds it in memory, and has the teacher's losses too; unless other stages came before, that student is as it
was folded. Evaluation draws no random numbers and touches no weight in training, so a run with evaluations
trains to the same bits.

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
from ..stages import state
from ..stages.state import Progress
from ..stages.teacher import Teacher
from .evaluation_lines import read_evaluations
from .held_out import HeldOut
from .metrics import append_line

# The results of `StageWork.measure`: sums over a batch's scored tokens.
MEASURES = ("ce", "teacher_ce", "forward_kl", "same_top1")
Measure = Callable[[Batch, Teacher], dict[str, Tensor]]
Array = NDArray[np.float64]
# Names in the metrics, and the keys of a line.
_METRICS = {
    "eval_perplexity": "perplexity", "eval_kl": "kl", "eval_same_top1": "same_top1",
    "recovered_share": "recovered_share",
}  # fmt: skip


@dataclass(frozen=True)
class TrainingEvaluation:
    """The evaluations of a run.

    Attributes:
        held_out: the text.
        teacher: gives predictions for it.
        accelerator: device, processes.
        settings: the recipe's section `evaluate`.
        partial: the run's working directory.
    """

    held_out: HeldOut
    teacher: Teacher
    accelerator: Accelerator
    settings: Evaluate
    partial: Path

    @property
    def file(self) -> Path:
        """The file with the history."""
        return self.partial / "evaluations.jsonl"

    def history(self) -> list[dict[str, Any]]:
        """Return the lines of all evaluations so far."""
        return read_evaluations(self.file)

    def start(self, measure: Measure, stage: str, progress: Progress) -> None:
        """Evaluate the student before it is trained, and the teacher; once per run. All processes call it.

        Raises:
            InvalidInput: the run was started with another text, or as of `evaluate`.
        """
        history = self.history()
        self.accelerator.wait_for_everyone()  # all have looked before one writes
        if not history:
            self.evaluate(measure, stage, progress)
        elif history[0]["text_sha256"] != self.held_out.described["text_sha256"]:
            raise InvalidInput(
                f"evaluate.source {self.settings.source} is not the text that {self.partial} was started "
                "with; put that text back to resume, or name another output to start over"
            )

    def evaluate(self, measure: Measure, stage: str, progress: Progress) -> dict[str, float]:
        """Evaluate after the step that `progress` has just completed. All processes call it.

        Returns:
            `eval_perplexity`, `eval_kl` (nats per token) and `eval_same_top1` of the student, and
            `recovered_share` unless it is undefined.

        Raises:
            InvalidInput: the student's perplexity, or its divergence from the teacher, is not finite.
        """
        history = self.history()  # before the sums, at which all processes meet, and before a line is written
        sum_NK = self._sums(measure)
        line = {
            "step": progress.total_steps,
            "stage": stage,
            "tokens": progress.tokens,
            **self._found(sum_NK, history),
        }
        for key, called in (("perplexity", "perplexity"), ("kl", "divergence from the teacher")):
            if not math.isfinite(line[key]):
                raise InvalidInput(
                    f"stage {stage} diverged: after step {progress.total_steps} the {called} on the held-out "
                    f"text is {line[key]}; use a lower lr"
                )
        if self.accelerator.is_main_process:
            append_line(self.file, line)
            _warn_of_a_worse(line, history)
        self.accelerator.wait_for_everyone()
        return {name: line[key] for name, key in _METRICS.items() if line[key] is not None}

    def _found(self, sum_NK: Array, history: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the values of a line, computed from the sums."""
        count_N = np.asarray(self.held_out.counts, np.float64)
        nll_N = sum_NK[:, 0] / count_N
        teacher_N = sum_NK[:, 1] / count_N
        kl = sum_NK[:, 2].sum()
        same = sum_NK[:, 3].sum()
        found = {
            "perplexity": _perplexity(nll_N, count_N),
            "kl": kl / count_N.sum(),
            "same_top1": same / count_N.sum(),
            "window_nll": nll_N.tolist(),
        }
        if not history:
            teacher = {"perplexity": _perplexity(teacher_N, count_N), "window_nll": teacher_N.tolist()}
            return {**found, "recovered_share": None, "teacher": teacher, **self.held_out.described}
        start = history[0]
        folded_nll = None if start["step"] else start["window_nll"]
        share = recovered_share(nll_N.tolist(), start["teacher"]["window_nll"], folded_nll, count_N.tolist())
        return {**found, "recovered_share": share.value}

    @torch.no_grad()
    def _sums(self, measure: Measure) -> Array:
        """Return the measures (N, K) of every window, float64.

        Windows are dealt to the processes; with shards, all processes must run equally often.
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
        """Keep the weights if they are the best so far. All processes call it after `evaluate`."""
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
        """Remove weights that can no longer be the best.

        A run that is killed resumes from its last saved state, and needs the best weights up to there.
        """
        states = state.saved(self.partial / "state")
        until = state.read_progress(states[0]).total_steps if states else 0
        safe = best_of([line for line in history if line["step"] <= until])
        kept = {line["step"] for line in (best, safe) if line}
        for directory in state.saved(self.partial / "best"):
            if state.read_progress(directory).total_steps not in kept:
                shutil.rmtree(directory)


@dataclass(frozen=True)
class ChosenWeights:
    """The evaluation whose weights become the output.

    Attributes:
        line: its line of evaluations.jsonl.
        state: the saved weights; None for those that the run started from.
    """

    line: dict[str, Any]
    state: Path | None


def best_of(history: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the evaluation with the lowest perplexity; None without any.

    It is the first one of several, so that a tie keeps the start.
    """
    return min(history, key=lambda line: float(line["perplexity"])) if history else None


def best_kept(partial: Path, settings: Evaluate | None) -> ChosenWeights | None:
    """Return the choice of `keep: best`.

    It is None where the recipe does not ask for it, and, with a notice, where those weights are no longer
    whole.
    """
    best = best_of(read_evaluations(partial / "evaluations.jsonl"))
    if settings is None or settings.keep != "best" or best is None:
        return None
    if _is_start(best):
        return ChosenWeights(best, None)
    for directory in state.saved(partial / "best"):
        if state.is_whole(directory) and state.read_progress(directory).total_steps == best["step"]:
            return ChosenWeights(best, directory)
    notice("the best weights are no longer there, so the output has the last ones")
    return None


def summary(history: list[dict[str, Any]], kept: ChosenWeights | None) -> dict[str, Any]:
    """Return the record of a finished run's evaluations: of teacher, start, and the weights of the output."""
    start = history[0]
    line = history[-1]
    which = "last"
    if kept:
        line = kept.line
        # A stage of mode stream before the first evaluation has trained the weights already.
        which = "start" if _is_start(line) and not line["step"] else "best"
    return {
        "text": start["text"],
        "text_sha256": start["text_sha256"],
        "teacher_perplexity": start["teacher"]["perplexity"],
        "start_perplexity": start["perplexity"],
        "kept": which,
        **{key: line[key] for key in ("step", "perplexity", "kl", "same_top1", "recovered_share")},
    }


def _warn_of_a_worse(line: dict[str, Any], history: list[dict[str, Any]]) -> None:
    """Give notice of the first evaluation of a run that finds the student worse than it started."""
    if not history or any(before["perplexity"] > history[0]["perplexity"] for before in history[1:]):
        return
    start = history[0]
    if line["perplexity"] > start["perplexity"]:
        when = f"after step {start['step']}" if start["step"] else "before training"
        notice(
            f"after step {line['step']} the perplexity of the held-out text is {line['perplexity']:.5g}, and "
            f"it was {start['perplexity']:.5g} {when}; if it stays above, the lr of stage "
            f"{line['stage']} is too high"
        )


def _is_start(line: dict[str, Any]) -> bool:
    return "teacher" in line  # which only the first has


def _perplexity(nll_N: Array, count_N: Array) -> float:
    return math.exp(min(700.0, float(np.average(nll_N, weights=count_N))))  # JSON has no infinity
