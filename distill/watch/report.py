"""Reports of a stage while it trains: metrics.jsonl, the terminal, trackers, evaluations."""

import time
from collections import deque
from collections.abc import Mapping

from ..display import Show
from ..stages.stage_work import StageContext, StageWork
from ..stages.state import Progress
from .evaluation import TrainingEvaluation
from .metrics import append_step, peak_memory

_RECENT = 20  # steps over which the speed on the terminal is averaged


class StageReport:
    """The reports of one stage. Every process has one; only rank 0 prints and writes.

    Args:
        context, work: what trains.
        progress: where the stage begins.
        show: the table.
        evaluation: on held-out text; None if there is none.
    """

    def __init__(
        self,
        context: StageContext,
        work: StageWork,
        progress: Progress,
        show: Show,
        evaluation: TrainingEvaluation | None,
    ) -> None:
        self._context, self._work, self._show, self._evaluation = context, work, show, evaluation
        self._steps = context.run.recipe.steps(context.stage)
        self._known: dict[str, float] = {}
        if evaluation:
            evaluation.start(work.measure, context.stage.name, progress)
            last = evaluation.history()[-1]
            known = {"eval_perplexity": last["perplexity"], "recovered_share": last["recovered_share"]}
            self._known = {key: value for key, value in known.items() if value is not None}
        self._logged = time.monotonic(), progress.tokens  # of the line before, from which speed is counted
        self._clock = deque([time.monotonic()], _RECENT + 1)

    def record(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Report the step that `progress` has just completed: every loss, the measures, `lr`, `grad_norm`.

        All processes call it.
        """
        run, stage = self._context.run, self._context.stage
        ends = progress.step == self._steps
        self._clock.append(time.monotonic())
        found: dict[str, float] = {}
        if self._evaluation and (ends or progress.total_steps % self._evaluation.settings.every == 0):
            begun = time.monotonic()
            found = self._evaluation.evaluate(self._work.measure, stage.name, progress)
            self._evaluation.keep_best(self._context.student, progress)
            lost = time.monotonic() - begun  # nothing was trained
            self._logged = self._logged[0] + lost, self._logged[1]
            self._clock = deque((second + lost for second in self._clock), _RECENT + 1)
        logs = progress.step == 1 or progress.total_steps % run.recipe.log_every == 0 or ends or found
        values = {**values, **found}
        if logs and run.accelerator.is_main_process:
            then, tokens = self._logged
            self._logged = time.monotonic(), progress.tokens
            speed = round((progress.tokens - tokens) / (self._logged[0] - then), 1)
            line = {**values, "tokens_per_second": speed, "peak_memory_gib": peak_memory()}
            append_step(run.partial / "metrics.jsonl", stage.name, progress, line)
            run.accelerator.log(line, step=progress.total_steps)
        self._show(progress.step, self._shown(progress, values))

    def _shown(self, progress: Progress, values: Mapping[str, float]) -> dict[str, float]:
        """Return the table's values; a value that not every step has is the last known one."""
        stage = self._context.stage
        kept = ("eval_perplexity", "recovered_share", "forward_kl", "same_top1")
        self._known |= {key: values[key] for key in kept if key in values}
        self._known |= {
            "loss": sum(stage.losses[name] * values[name] for name in stage.learnt),
            "memory_gib": peak_memory(),
        }
        steps = len(self._clock) - 1
        seconds = self._clock[-1] - self._clock[0]
        if steps and seconds:
            self._known |= {
                "tokens_per_second": self._context.run.recipe.step_tokens(stage) * steps / seconds,
                "seconds_left": (self._steps - progress.step) * seconds / steps,
            }
        return self._known
