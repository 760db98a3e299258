"""What a stage tells while it trains: metrics.jsonl, the table on the terminal, trackers, evaluations."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..recipe.recipe import Stage
from ..run.state import Progress
from .display import Tell, stage_table
from .metrics import Metrics, peak_memory

if TYPE_CHECKING:
    from ..stages.loop import Run, Work

_RECENT = 20  # steps that the speed on the terminal is the mean of


class Report:
    """Of one stage; every process has one, and the first one speaks.

    Args:
        run: what the stage is given.
        stage: the stage.
        work: how it is trained, and measured.
        progress: where it begins.
        show: the table.
    """

    def __init__(self, run: "Run", stage: Stage, work: "Work", progress: Progress, show: Tell) -> None:
        self._run, self._stage, self._work, self._show = run, stage, work, show
        self._steps = run.recipe.steps(stage)
        self._known: dict[str, float] = {}
        if run.evaluation:
            run.evaluation.start(work.measure, stage.name, progress)
            last = run.evaluation.history()[-1]
            known = {"eval_perplexity": last["perplexity"], "recovered_share": last["recovered_share"]}
            self._known = {key: value for key, value in known.items() if value is not None}
        self._metrics = Metrics(run.partial / "metrics.jsonl", stage.name, progress.tokens)
        self._clock = deque([time.monotonic()], _RECENT + 1)

    def tell(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Tell of the step that `progress` has just completed. All processes call it.

        Args:
            progress: how far the run has come.
            values: every loss, what is measured beside them, `lr` and `grad_norm`.
        """
        run, ends = self._run, progress.step == self._steps
        self._clock.append(time.monotonic())
        found = self._evaluate(progress) if ends or self._is_due(progress) else {}
        logs = progress.step == 1 or progress.total_steps % run.recipe.log_every == 0 or ends or found
        values = {**values, **found}
        if logs and run.accelerator.is_main_process:
            run.accelerator.log(self._metrics.append(progress, values), step=progress.total_steps)
        self._show(progress.step, self._seen(progress, values))

    def _is_due(self, progress: Progress) -> bool:
        return (
            self._run.evaluation is not None
            and progress.total_steps % self._run.evaluation.settings.every == 0
        )

    def _evaluate(self, progress: Progress) -> dict[str, float]:
        if self._run.evaluation is None:
            return {}
        begun = time.monotonic()
        found = self._run.evaluation.evaluate(self._work.measure, self._stage.name, progress)
        self._run.evaluation.keep_best(self._run.student, progress)
        self._metrics.leave_out(time.monotonic() - begun)
        self._clock = deque((second + time.monotonic() - begun for second in self._clock), _RECENT + 1)
        return found

    def _seen(self, progress: Progress, values: Mapping[str, float]) -> dict[str, float]:
        """What the table shows; of what is not known of every step the last."""
        weights = {name: weight for name, weight in self._stage.losses.items() if weight}
        self._known |= {key: values[key] for key in ("eval_perplexity", "recovered_share") if key in values}
        self._known |= {
            "loss": sum(weight * values[name] for name, weight in weights.items()),
            "memory_gib": peak_memory(),
        }
        self._known |= {key: values[key] for key in ("forward_kl", "same_top1") if key in values}
        steps, seconds = len(self._clock) - 1, self._clock[-1] - self._clock[0]
        if steps and seconds:
            tokens = self._run.recipe.step_windows(self._stage) * self._run.recipe.data.seq_len
            self._known |= {"tokens_per_second": tokens * steps / seconds}
            self._known |= {"seconds_left": (self._steps - progress.step) * seconds / steps}
        return self._known


@contextmanager
def reporting(run: "Run", stage: Stage, work: "Work", progress: Progress) -> Iterator[Report]:
    """A stage's report while it trains."""
    with stage_table(stage.name, run.recipe.steps(stage)) as show:
        yield Report(run, stage, work, progress, show)
