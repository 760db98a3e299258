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
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from ...checkpoints.eval_json import parsed
from ...checkpoints.quality_blocks import FiniteNumbers
from ...core.console import notice
from ...core.errors import InvalidInput
from ...core.files import write_json
from ...eval.suites.perplexity import recovered_share
from ..data.batch import Batch
from ..recipe.recipe import Evaluate
from ..stages import state
from ..stages.stage_work import Run
from ..stages.state import Progress
from ..stages.teacher import Teacher
from .held_out import HeldOut
from .metrics import append_line, read_lines

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
class _Model(FiniteNumbers):
    """Numbers of the student in every line, and of the teacher in the first one."""

    perplexity: Annotated[float, Field(gt=0)]
    window_nll: list[float]


@dataclass(frozen=True)
class _Line(_Model):
    """A line of evaluations.jsonl."""

    step: int
    stage: str
    tokens: int
    kl: float
    same_top1: float
    recovered_share: float | None


@dataclass(frozen=True)
class _FirstLine(_Line):
    """The line before any training, with what does not change."""

    teacher: _Model
    text: str
    text_sha256: str


def read_evaluations(file: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run so far, the one before any training first; none if there is no file.

    Raises:
        InvalidInput: a line is damaged.
    """
    lines = read_lines(file)
    for number, line in enumerate(lines):
        parsed(_Line if number else _FirstLine, line, file, f"remove {file.parent} to start over")
    return lines


@dataclass(frozen=True)
class TrainingEvaluation:
    """The evaluations of a run on held-out text, with its teacher's predictions for it."""

    run: Run
    settings: Evaluate
    held_out: HeldOut
    teacher: Teacher

    def history(self) -> list[dict[str, Any]]:
        """Return the lines of all evaluations so far."""
        return read_evaluations(self.run.partial / "evaluations.jsonl")

    def start(self, measure: Measure, stage: str, progress: Progress) -> None:
        """Evaluate the student before it is trained, and the teacher; once per run. All processes call it.

        Raises:
            InvalidInput: the run was started with another text, or as of `evaluate`.
        """
        history = self.history()
        self.run.accelerator.wait_for_everyone()  # all have looked before one writes
        if not history:
            self.evaluate(measure, stage, progress)
        elif history[0]["text_sha256"] != self.held_out.described["text_sha256"]:
            raise InvalidInput(
                f"evaluate.source {self.settings.source} is not the text that {self.run.partial} was started "
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
        if self.run.accelerator.is_main_process:
            append_line(self.run.partial / "evaluations.jsonl", line)
            start = history[0]["perplexity"] if history else math.inf
            if line["perplexity"] > start >= max(before["perplexity"] for before in history):
                when = f"after step {history[0]['step']}" if history[0]["step"] else "before training"
                notice(
                    f"after step {line['step']} the perplexity of the held-out text is "
                    f"{line['perplexity']:.5g}, and it was {start:.5g} {when}; if it stays above, the lr of "
                    f"stage {line['stage']} is too high"
                )
        self.run.accelerator.wait_for_everyone()
        return {name: line[key] for name, key in _METRICS.items() if line[key] is not None}

    def _found(self, sum_NK: Array, history: list[dict[str, Any]]) -> dict[str, Any]:
        count_N = np.asarray(self.held_out.counts, np.float64)
        nll_N, teacher_N = sum_NK[:, 0] / count_N, sum_NK[:, 1] / count_N
        found = {
            "perplexity": _perplexity(nll_N, count_N),
            "kl": sum_NK[:, 2].sum() / count_N.sum(),
            "same_top1": sum_NK[:, 3].sum() / count_N.sum(),
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
        accelerator, windows = self.run.accelerator, len(self.held_out)
        sum_NK = torch.zeros(windows, len(MEASURES), device=accelerator.device)
        for first in range(0, windows, accelerator.num_processes):
            mine = first + accelerator.process_index
            batch = self.held_out.batch([min(mine, windows - 1)]).to(accelerator.device)
            found = measure(batch, self.teacher)
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
        partial, accelerator = self.run.partial, self.run.accelerator
        writes = accelerator.is_main_process
        state.save(partial / "best", progress, state.Gathered(model), keep=len(history) + 1, writes=writes)
        if writes:
            # A run that is killed resumes from its last saved state, and needs the best weights up to there.
            states = state.saved(partial / "state")
            until = state.read_progress(states[0]).total_steps if states else 0
            safe = best_of([line for line in history if line["step"] <= until])
            kept = {line["step"] for line in (best, safe) if line}
            for directory in state.saved(partial / "best"):
                if state.read_progress(directory).total_steps not in kept:
                    shutil.rmtree(directory)
        accelerator.wait_for_everyone()


# The line of the evaluation whose weights become the output, and their state; None for the run's start.
Chosen = tuple[dict[str, Any], Path | None]


def best_of(history: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the evaluation with the lowest perplexity; None without any.

    It is the first one of several, so that a tie keeps the start.
    """
    return min(history, key=lambda line: float(line["perplexity"])) if history else None


def best_kept(partial: Path, settings: Evaluate | None) -> Chosen | None:
    """Return the choice of `keep: best`.

    It is None where the recipe does not ask for it, and, with a notice, where those weights are no longer
    whole.
    """
    best = best_of(read_evaluations(partial / "evaluations.jsonl"))
    if settings is None or settings.keep != "best" or best is None:
        return None
    if "teacher" in best:  # the first line
        return best, None
    for directory in state.saved(partial / "best"):
        if state.is_whole(directory) and state.read_progress(directory).total_steps == best["step"]:
            return best, directory
    notice("the best weights are no longer there, so the output has the last ones")
    return None


def summary(history: list[dict[str, Any]], chosen: Chosen | None) -> dict[str, Any]:
    """Return the record of a finished run's evaluations: of teacher, start, and the weights of the output."""
    start = history[0]
    line = history[-1]
    which = "last"
    if chosen:
        line = chosen[0]
        # A stage of mode stream before the first evaluation has trained the weights already.
        which = "start" if "teacher" in line and not line["step"] else "best"
    return {
        "text": start["text"],
        "text_sha256": start["text_sha256"],
        "teacher_perplexity": start["teacher"]["perplexity"],
        "start_perplexity": start["perplexity"],
        "kept": which,
        **{key: line[key] for key in ("step", "perplexity", "kl", "same_top1", "recovered_share")},
    }


def write_curve(directory: Path, history: list[dict[str, Any]]) -> None:
    """Write the perplexity against tokens into the output: curve.json, and curve.png with matplotlib."""
    kept = ("step", "stage", "tokens", "perplexity", "kl", "same_top1", "recovered_share")
    curve: dict[str, Any] = {
        "text": history[0]["text"],
        "text_sha256": history[0]["text_sha256"],
        "teacher_perplexity": history[0]["teacher"]["perplexity"],
        "points": [{key: line[key] for key in kept} for line in history],
    }
    write_json(directory / "curve.json", curve)
    if find_spec("matplotlib") is None:
        notice(
            "no curve.png: matplotlib is not installed (pip install 'kvfold[report]'); curve.json has the "
            "numbers"
        )
        return
    from matplotlib.figure import Figure

    points = curve["points"]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for stage in dict.fromkeys(point["stage"] for point in points):
        own = [at for at, point in enumerate(points) if point["stage"] == stage]
        # The line of each stage begins where the one before it ends.
        part = points[max(0, own[0] - 1) : own[-1] + 1]
        tokens, perplexities = zip(*((point["tokens"], point["perplexity"]) for point in part), strict=True)
        axes.plot(tokens, perplexities, marker="o", markersize=3, label=stage)
    axes.axhline(curve["teacher_perplexity"], color="black", linestyle="--", linewidth=1, label="teacher")
    axes.axhline(points[0]["perplexity"], color="grey", linestyle=":", linewidth=1, label="start")
    share = points[-1]["recovered_share"]
    title = curve["text"] if share is None else f"{curve['text']}: {share:.1%} recovered"
    axes.set(xlabel="tokens trained on", ylabel="perplexity", yscale="log", title=title)
    axes.yaxis.set_major_formatter("{x:.4g}")
    axes.yaxis.set_minor_formatter("{x:.4g}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(directory / "curve.png", dpi=150)


def _perplexity(nll_N: Array, count_N: Array) -> float:
    return math.exp(min(700.0, float(np.average(nll_N, weights=count_N))))  # JSON has no infinity
