"""AdamW for a stage: its parameter groups, and one step at a learning rate."""

import math

import torch
from torch import nn

from ..recipe.recipe import Stage

_BETAS = (0.9, 0.95)  # usual for language models: the second moment's half-life is 14 steps


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
