"""AdamW for a stage: its parameter groups, its learning rates, and one step."""

import math
from collections.abc import Callable

import torch
from torch import nn

from ..recipe.recipe import ScheduleName, Stage

_BETAS = (0.9, 0.95)  # usual for language models: the second moment's half-life is 14 steps
_DECAY = 0.2  # part of a `wsd` stage that decays to zero; 10-20 % is enough (arXiv 2405.18392)

# From progress after the warm-up, in (0, 1], to the rate relative to its peak.
SCHEDULES: dict[ScheduleName, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "wsd": lambda progress: min(1.0, (1 - progress) / _DECAY),
    "constant": lambda progress: 1.0,
}


def adamw(trainable: list[nn.Parameter], stage: Stage) -> torch.optim.Optimizer:
    """Return a fresh optimizer. Norms and biases have no weight decay.

    It changes one tensor at a time. On a GPU torch would otherwise hold the root of every second moment at
    once, four more bytes per trained weight.
    """
    matrices = [parameter for parameter in trainable if parameter.ndim > 1]
    others = [parameter for parameter in trainable if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": stage.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return torch.optim.AdamW(filled, lr=stage.lr, betas=_BETAS, foreach=False)


def take_step(optimizer: torch.optim.Optimizer, rate: float, norm: float) -> float:
    """Take a step at a learning rate, unless the gradient's norm is not finite; return that norm."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return norm


def learning_rate(stage: Stage, step: int, steps: int) -> float:
    """Return the rate of optimizer step `step` (from 0) of a stage of `steps` steps.

    No schedule spends a step at a rate of zero.
    """
    share = stage.warmup if stage.warmup < 1 else stage.warmup / stage.tokens
    warm = min(share, 1.0) * steps
    if step + 1 < warm:
        return stage.lr * (step + 1) / warm
    return stage.lr * SCHEDULES[stage.schedule]((step + 1 - warm) / (steps + 1 - warm))
