"""Predicted losses of planned folds: every layer is folded in memory and measured alone.

It is done the same way for every target. With statistics the measure is that of kvfold.json: ½ E[(ô - o)ᵀ G
(ô - o)] at the attention's output on held-back calibration inputs, in nats per token, summed over layers. By
weights alone it is the squared error of that output as a share of its square, on inputs drawn from a normal
distribution, mean over layers. That only ranks, and has no unit of loss, and is of linear latent norms.

Legend: attention.py; B sequences, T tokens, S slots.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..convert.algebra.attention import Attention, LatentAttention
from ..convert.algebra.forward import AnyAttention, Scoring, attend
from ..convert.algebra.target import LatentTarget
from ..convert.decide.norm_choice import settle_norm
from ..convert.decide.plan import Plan
from ..convert.write.layer_fold import fold_attention

# Of the drawn inputs: on so many, a share of two squares is steady to a few percent.
SEQUENCES, LENGTH = 2, 256
NATS, SHARE = "nats", "share"  # units of a prediction


@dataclass
class PredictedLosses:
    """Predicted losses of plans; what is folded alike, whatever it is written as, is folded once."""

    known: dict[Any, float | None] = field(default_factory=dict)

    def of(self, plan: Plan) -> float | None:
        """Return the loss of a plan; None where it cannot be measured.

        It is in nats per token where the plan has statistics, else a share.

        Args:
            plan: its `refine` says what is predicted: the closed form, or what refinement leaves.
        """
        if plan.latent_norm == "auto":
            plan = settle_norm(plan)  # as `kvfold convert` does, whose loss this predicts
        norm = "fitted" if plan.latent_norm == "fitted" else None  # a linear one computes what no norm does
        # Without slots, what is folded depends on the container too (fold.fold_attention).
        form = None if plan.bands else plan.container.architecture
        how = (plan.method, plan.bands, form, norm, plan.folds_biases, plan.refine)
        key = (str(plan.target.to_dict()), *how)
        if key not in self.known:
            self.known[key] = _predict(plan)
        return self.known[key]


def _predict(plan: Plan) -> float | None:
    regresses = plan.container.kind == "stock" and plan.source.family.k_norm is not None
    if plan.statistics is None and (plan.folds_biases or regresses):
        return None  # biases and key norms go into weights by statistics only
    losses = []
    for number in range(plan.source.layers):
        lost = _measured(plan, number) if plan.statistics is not None else _share(plan, number)
        if lost is None:
            return None
        losses.append(lost)
    return sum(losses) if plan.statistics is not None else sum(losses) / len(losses)


def _measured(plan: Plan, number: int) -> float | None:
    """Return the loss of one layer, nats per token.

    It is None where `forward.attend` does not compute its attention.
    """
    _, loss = fold_attention(plan, number)
    return None if loss is None else loss["refined"]


def _share(plan: Plan, number: int) -> float:
    """Return the squared error of one layer's output over its square."""
    source, table_F, scoring = _source(plan, number)
    layer, _ = fold_attention(plan, number)
    scoring = scoring.to(torch.float32)
    generator = torch.Generator().manual_seed(number)
    input_BTD = torch.randn(SEQUENCES, LENGTH, plan.source.geometry.hidden_size, generator=generator)
    with torch.no_grad():
        wanted_BTD = attend(source.to(torch.float32), input_BTD, table_F, scoring)
        given_BTD = attend(
            layer.to(torch.float32), input_BTD, _turning(plan, number, layer, table_F), scoring
        )
    return float((given_BTD - wanted_BTD).square().sum() / wanted_BTD.square().sum())


def _source(plan: Plan, number: int) -> tuple[Attention, Tensor, Scoring]:
    """Return the source's layer, the frequencies of its pairs, and its scoring.

    They are taken as layer_fold.py takes them.
    """
    if isinstance(plan.target, LatentTarget):
        table_F, factor = plan.source.frequencies(number)
        return plan.source.attention(number, factor), table_F, plan.source.scoring(number)
    table_F, factor = plan.source.nominal_frequencies(number)
    return plan.source.attention(number), table_F, plan.source.scoring(number, factor)


def _turning(plan: Plan, number: int, layer: AnyAttention, table_F: Tensor) -> Tensor:
    """Return the frequencies at which a folded layer's pairs, or its slots, turn."""
    if not isinstance(layer, LatentAttention):
        return table_F
    if plan.source.mixed and number not in plan.source.rotating:
        return table_F[:0]
    return torch.tensor(
        [band.frequency for band in plan.bands for _ in range(band.slots)], dtype=torch.float64
    )
