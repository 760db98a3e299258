"""The optimizer of a stage."""

import pytest
import torch
from torch import nn
from torch.optim import adam

from kvfold.distill.recipe.recipe import Stage
from kvfold.distill.stages.optimizer import adamw, take_step


def test_a_step_holds_intermediates_of_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, torch by default makes a copy of all second moments in every step."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("all tensors are changed at once")

    monkeypatch.setattr(adam, "_default_to_fused_or_foreach", lambda *_, **__: (False, True))
    monkeypatch.setattr(adam, "_multi_tensor_adam", refuse)
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = adamw([weight], Stage(name="all", tokens=1, lr=0.1))
    weight.sum().backward()
    take_step(optimizer, 0.1, 1.0)
    assert weight.max() < 1
