"""Reports of a stage while it trains: metrics.jsonl, the terminal, trackers, evaluations."""

import time
from collections import deque
from collections.abc import Mapping

from ..display import ShowStep
from ..recipe.recipe import Stage
from ..stages.stage_work import StageContext, StageWork
from ..stages.state import Progress
from .evaluation import TrainingEvaluation
from .metrics import Metrics, peak_memory

_RECENT = 20  # steps over which the speed on the terminal is averaged


class StageReport:
    """The reports of one stage. Every process has one; only rank 0 prints and writes.

    Args:
        context, stage, work: what trains.
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
        """Report the step that `progress` has just completed: every loss, the measures, `lr`, `grad_norm`.

        All processes call it.
        """
        context = self._context
        ends = progress.step == self._steps
        self._clock.append(time.monotonic())
        found: dict[str, float] = {}
        if self._evaluation and (ends or progress.total_steps % self._evaluation.settings.every == 0):
            begun = time.monotonic()
            found = self._evaluation.evaluate(self._work.measure, self._stage.name, progress)
            self._evaluation.keep_best(context.student, progress)
            lost = time.monotonic() - begun
            self._metrics.leave_out(lost)
            self._clock = deque((second + lost for second in self._clock), _RECENT + 1)
        logs = progress.step == 1 or progress.total_steps % context.recipe.log_every == 0 or ends or found
        values = {**values, **found}
        if logs and context.accelerator.is_main_process:
            context.accelerator.log(self._metrics.append(progress, values), step=progress.total_steps)
        self._show(progress.step, self._shown(progress, values))

    def _shown(self, progress: Progress, values: Mapping[str, float]) -> dict[str, float]:
        """Return the table's values; a value that not every step has is the last known one."""
        kept = ("eval_perplexity", "recovered_share", "forward_kl", "same_top1")
        self._known |= {key: values[key] for key in kept if key in values}
        weights = self._stage.losses
        self._known |= {
            "loss": sum(weights[name] * values[name] for name in self._stage.learnt),
            "memory_gib": peak_memory(),
        }
        steps = len(self._clock) - 1
        seconds = self._clock[-1] - self._clock[0]
        if steps and seconds:
            tokens = self._context.recipe.step_tokens(self._stage)
            self._known |= {"tokens_per_second": tokens * steps / seconds}
            self._known |= {"seconds_left": (self._steps - progress.step) * seconds / steps}
        return self._known
