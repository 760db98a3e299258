"""AdamW for a stage: its parameter groups, and one step at a learning rate."""

import math

import torch
from torch import nn

from ..recipe.recipe import Stage

_BETAS = (0.9, 0.95)  # usual for language models: the second moment's half-life is 14 steps


def adamw(trainable: list[nn.Parameter], stage: Stage) -> torch.optim.Optimizer:
    """Return a fresh optimizer. Norms and biases have no weight decay."""
    matrices = [parameter for parameter in trainable if parameter.ndim > 1]
    others = [parameter for parameter in trainable if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": stage.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=stage.lr, betas=_BETAS)


def take_step(optimizer: torch.optim.Optimizer, rate: float, norm: float) -> float:
    """Take a step at a learning rate, unless the gradient's norm is not finite; return that norm."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return norm
