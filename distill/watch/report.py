"""Reports of a stage while it trains: metrics.jsonl, the terminal, trackers, evaluations."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ..display import ShowStep, stage_table
from ..recipe.recipe import Stage
from ..stages.stage_work import StageContext, StageWork
from ..stages.state import Progress
from .evaluation import TrainingEvaluation
from .metrics import Metrics, peak_memory

_RECENT = 20  # steps over which the speed on the terminal is averaged


class StageReport:
    """The reports of one stage. Every process has one; only rank 0 prints and writes.

    Args:
        context: what the stage works with.
        stage: the stage.
        work: trains and measures the student.
        progress: where the stage begins.
        show: the table.
        evaluation: on held-out text; None if there is none.
    """

    def __init__(
        self,
        context: StageContext,
        stage: Stage,
        work: StageWork,
        progress: Progress,
        show: ShowStep,
        evaluation: TrainingEvaluation | None,
    ) -> None:
        self._context = context
        self._stage = stage
        self._work = work
        self._show = show
        self._evaluation = evaluation
        self._steps = context.recipe.steps(stage)
        self._known: dict[str, float] = {}
        if evaluation:
            evaluation.start(work.measure, stage.name, progress)
            last = evaluation.history()[-1]
            known = {"eval_perplexity": last["perplexity"], "recovered_share": last["recovered_share"]}
            self._known = {key: value for key, value in known.items() if value is not None}
        self._metrics = Metrics(context.partial / "metrics.jsonl", stage.name, progress.tokens)
        self._clock = deque([time.monotonic()], _RECENT + 1)

    def record(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Report the step that `progress` has just completed. All processes call it.

        Args:
            progress: how far the run has come.
            values: every loss, the measures, `lr` and `grad_norm`.
        """
        context = self._context
        ends = progress.step == self._steps
        self._clock.append(time.monotonic())
        found = self._evaluate(progress) if ends or self._is_due(progress) else {}
        logs = progress.step == 1 or progress.total_steps % context.recipe.log_every == 0 or ends or found
        values = {**values, **found}
        if logs and context.accelerator.is_main_process:
            context.accelerator.log(self._metrics.append(progress, values), step=progress.total_steps)
        self._show(progress.step, self._shown(progress, values))

    def _is_due(self, progress: Progress) -> bool:
        evaluation = self._evaluation
        return evaluation is not None and progress.total_steps % evaluation.settings.every == 0

    def _evaluate(self, progress: Progress) -> dict[str, float]:
        if self._evaluation is None:
            return {}
        begun = time.monotonic()
        found = self._evaluation.evaluate(self._work.measure, self._stage.name, progress)
        self._evaluation.keep_best(self._context.student, progress)
        self._metrics.leave_out(time.monotonic() - begun)
        self._clock = deque((second + time.monotonic() - begun for second in self._clock), _RECENT + 1)
        return found

    def _shown(self, progress: Progress, values: Mapping[str, float]) -> dict[str, float]:
        """Return the table's values; a value that not every step has is the last known one."""
        weights = {name: weight for name, weight in self._stage.losses.items() if weight}
        self._known |= {key: values[key] for key in ("eval_perplexity", "recovered_share") if key in values}
        self._known |= {
            "loss": sum(weight * values[name] for name, weight in weights.items()),
            "memory_gib": peak_memory(),
        }
        self._known |= {key: values[key] for key in ("forward_kl", "same_top1") if key in values}
        steps = len(self._clock) - 1
        seconds = self._clock[-1] - self._clock[0]
        if steps and seconds:
            recipe = self._context.recipe
            tokens = recipe.step_tokens(self._stage)
            self._known |= {"tokens_per_second": tokens * steps / seconds}
            self._known |= {"seconds_left": (self._steps - progress.step) * seconds / steps}
        return self._known


@contextmanager
def reporting(
    context: StageContext,
    stage: Stage,
    work: StageWork,
    progress: Progress,
    evaluation: TrainingEvaluation | None,
) -> Iterator[StageReport]:
    """Yield a stage's report while it trains; arguments as of `StageReport`."""
    with stage_table(stage.name, context.recipe.steps(stage)) as show:
        yield StageReport(context, stage, work, progress, show, evaluation)
