"""Learning rates as pure functions of progress."""

import math
from collections.abc import Callable

from ..recipe.recipe import ScheduleName, Stage

_DECAY = 0.2  # part of a `wsd` stage that decays to zero; 10-20 % is enough (arXiv 2405.18392)

# From progress after the warm-up, in (0, 1], to the rate relative to its peak.
SCHEDULES: dict[ScheduleName, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "wsd": lambda progress: min(1.0, (1 - progress) / _DECAY),
    "constant": lambda progress: 1.0,
}


def learning_rate(stage: Stage, step: int, steps: int) -> float:
    """Return the rate of optimizer step `step` (from 0) of a stage of `steps` steps.

    No schedule spends a step at a rate of zero.
    """
    share = stage.warmup if stage.warmup < 1 else stage.warmup / stage.tokens
    warm = min(share, 1.0) * steps
    if step + 1 < warm:
        return stage.lr * (step + 1) / warm
    return stage.lr * SCHEDULES[stage.schedule]((step + 1 - warm) / (steps + 1 - warm))
