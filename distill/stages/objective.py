"""The training objective of a stage: the weighted sum of its losses over one micro-batch.

Shapes: B windows, S tokens of a window, T scored tokens, D hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import InvalidInput
from ..data.batch import IGNORED, Batch
from ..losses.criteria import CRITERIA
from ..losses.layers import attention_relation, hidden_cosine, hidden_mse, power_of
from ..losses.predictions import Predictions, predict
from ..losses.vocabulary import mix
from ..recipe.recipe import LossName, Stage
from .capture import Captured, capturing
from .teacher import Online, Teacher


@dataclass(frozen=True)
class TeacherView:
    """The teacher's values that a stage compares the student with; constants.

    Attributes:
        predictions: for all B S tokens.
        layers: the outputs of its layers; empty if no loss reads them.
    """

    predictions: Predictions
    layers: Captured


class Objective(nn.Module):
    """A module that all processes run together. Its forward is the loss, where the head is read."""

    def __init__(self, model: Any, stage: Stage) -> None:
        super().__init__()
        self.model = model
        self._stage = stage
        self._compares_attention = "attention_relation" in stage.learnt
        self._powers: list[Tensor] = []

    @torch.no_grad()
    def view(self, teacher: Teacher, batch: Batch) -> TeacherView:
        """Return the teacher's values that the losses need."""
        if not self._stage.of_layers:
            return TeacherView(teacher.predictions(batch), Captured())
        assert isinstance(teacher, Online), "a cache of last hidden states has no layers"
        return TeacherView(*teacher.captured(batch, attention=self._compares_attention))

    def calibrate(self, teacher: Teacher, batch: Batch) -> None:
        """Measure the size of the teacher's hidden states on one batch; their errors are relative to it.

        It is a constant of the stage. If each micro-batch had its own, the result would depend on how a step
        is cut into them.
        """
        self._powers = [
            power_of(hidden_BSD.flatten(0, 1)) for hidden_BSD in self.view(teacher, batch).layers.hidden
        ]

    def forward(self, batch: Batch, teacher: TeacherView, measuring: bool = False) -> dict[str, Tensor]:
        """Return sums over the T scored tokens of a batch.

        Args:
            batch: B windows of S tokens.
            teacher: the result of `view` on the same batch.
            measuring: whether to return only `ce` and the measures, whatever the stage's losses; there is no
                `loss` then.

        Returns:
            `loss`, the weighted sum, differentiable; every loss by name; and the measures. All but the first
            are constants, in nats if they compare distributions.

        Raises:
            InvalidInput: student and teacher have layers that cannot be compared.
        """
        labels_T = batch.labels_BS.flatten()
        scored_T = labels_T != IGNORED
        if measuring:
            student = predict(self.model, batch).at(scored_T)
            return mix(student, teacher.predictions.at(scored_T), labels_T[scored_T], {"ce": 1.0})[1]
        layers = None
        if self._stage.of_layers:
            with capturing(self.model, attention=self._compares_attention) as layers:
                student = predict(self.model, batch)
        else:
            student = predict(self.model, batch)
        loss, sums = mix(
            student.at(scored_T),
            teacher.predictions.at(scored_T),
            labels_T[scored_T],
            {name: weight for name, weight in self._stage.losses.items() if name in CRITERIA},
            temperature=self._stage.temperature,
            beta=self._stage.jsd_beta,
        )
        if layers is not None:
            for name, value in self._of_layers(layers, teacher.layers, batch, scored_T).items():
                loss = loss + self._stage.losses[name] * value
                sums[name] = value.detach()
        return {"loss": loss, **sums}

    def _of_layers(
        self, student: Captured, teacher: Captured, batch: Batch, scored_T: Tensor
    ) -> dict[LossName, Tensor]:
        """Return the losses of the layers, each the mean over layers of a sum over tokens.

        Of `attention_relation` it is also the mean over queries, keys and values.
        """
        check_layers(len(student.hidden), len(teacher.hidden))
        ours, theirs = (
            [hidden_BSD.flatten(0, 1)[scored_T] for hidden_BSD in one.hidden] for one in (student, teacher)
        )
        scored_BS = scored_T.view_as(batch.labels_BS)
        # Their order decides how their sum is rounded.
        of_layer: dict[LossName, Callable[[int], list[Tensor]]] = {
            "hidden_mse": lambda layer: [
                hidden_mse(ours[layer], theirs[layer], power=self._powers[layer])[0]
            ],
            "hidden_cosine": lambda layer: [hidden_cosine(ours[layer], theirs[layer])[0]],
            "attention_relation": lambda layer: [
                attention_relation(mine, its, position_ids_BS=batch.position_ids_BS, scored_BS=scored_BS)[0]
                for mine, its in zip(student.attention[layer], teacher.attention[layer], strict=True)
            ],
        }
        found: dict[LossName, Tensor] = {}
        for name, losses in of_layer.items():
            if name in self._stage.learnt:
                values = [value for layer in range(len(ours)) for value in losses(layer)]
                found[name] = torch.stack(values).mean()
        return found


def check_layers(ours: int, theirs: int) -> None:
    """Refuse to compare layers without counterparts.

    Raises:
        InvalidInput: student and teacher have different numbers of layers.
    """
    if ours != theirs:
        raise InvalidInput(
            f"the student has {ours} layers and the teacher {theirs}; losses that compare layers need the "
            "same number, so use kl with this teacher"
        )
