"""Losses that compare a student's predictions with a teacher's, or with the text.

All of them, in any mixture, are sums over tokens in nats, form the student's logits once and never hold
[tokens, vocabulary].

Shapes: T tokens, C tokens of a chunk, V vocabulary, K sums.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..recipe.recipe import LossName
from .chunks import compute_dtype, in_chunks
from .criteria import CRITERIA, Pair
from .predictions import Predictions

# Measured in addition to the losses when there is a teacher.
MEASURES = ("forward_kl", "same_top1", "teacher_ce")


def mix(
    student: Predictions,
    teacher: Predictions | None,
    labels_T: Tensor,
    weights: Mapping[LossName, float],
    *,
    temperature: float = 1.0,
    beta: float = 0.5,
    chunk: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a weighted sum of losses of the vocabulary, over one set of logits.

    The two heads may have different padding beyond the tokenizer's entries. Distributions are compared over
    the entries that both heads have, each normalised over these; cross entropy to the text is over all
    entries of the model, as in transformers' own loss and in `kvfold eval`.

    Args:
        student: predictions for the scored tokens (`Predictions.at` leaves out the others).
        teacher: predictions for the same tokens, a constant; its hidden size may differ. None if only `ce` is
            asked for.
        labels_T: the next tokens of the text, int64.
        weights: by name: `kl` (forward, KL(teacher || student)), `reverse_kl`, `jsd`, `ce`; those of weight 0
            are not computed. Without any, only the measures are computed and the loss is a constant 0.
        temperature: τ. Both distributions are softmax(logits / τ), and the divergence is multiplied by τ², so
            that gradients keep their size (Hinton et al., arXiv 1503.02531). Cross entropy to the text and
            the measures are always at 1.
        beta: of `jsd`, from 0 (forward KL) to 1 (reverse KL); see `criteria.jsd`.
        chunk: tokens at a time; by default as many as give `chunks.chunk_elements` logits.

    Returns:
        The weighted sum over all tokens, differentiable once with respect to the student, and constants:
        every loss by name, without its weight. With a teacher also `forward_kl` (KL(teacher || student) at
        temperature 1, nats), `same_top1` (number of tokens at which both find the same next one most
        probable) and `teacher_ce` (the teacher's cross entropy to the text, nats).
    """
    weights = {name: weight for name, weight in weights.items() if weight}
    theirs = None if teacher is None else teacher.computed_in(compute_dtype(teacher))
    mixture = _Mixture(theirs, labels_T, weights, temperature, beta)
    loss, sums_K = in_chunks(student, mixture, 1 + len(mixture.keys), chunk)
    return loss, dict(zip(mixture.keys, sums_K[1:], strict=True))


@dataclass(frozen=True)
class _Mixture:
    """The criterion of `mix` on a chunk of tokens."""

    teacher: Predictions | None
    labels_T: Tensor
    weights: Mapping[LossName, float]
    temperature: float
    beta: float

    @property
    def keys(self) -> list[str]:
        """The names of the sums after the first one."""
        return [*self.weights, *(() if self.teacher is None else MEASURES)]

    def __call__(self, logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
        teacher_CV = None if self.teacher is None else self.teacher.logits(rows)
        sums: dict[str, Tensor] = {}
        total = None
        # Losses at one temperature use one pair of distributions; the measures are at 1.
        for temperature in dict.fromkeys((1.0, self.temperature)):
            names = [
                name for name in self.weights if temperature == (1 if name == "ce" else self.temperature)
            ]
            if names or (temperature == 1 and teacher_CV is not None):
                gradient_CV = self._costs(names, temperature, logits_CV, teacher_CV, rows, sums)
                total = gradient_CV if total is None or gradient_CV is None else total.add_(gradient_CV)
        loss = sum((weight * sums[name] for name, weight in self.weights.items()), logits_CV.new_zeros(()))
        return torch.stack([loss, *(sums[key] for key in self.keys)]), total

    def _costs(
        self,
        names: list[LossName],
        temperature: float,
        logits_CV: Tensor,
        teacher_CV: Tensor | None,
        rows: slice,
        sums: dict[str, Tensor],
    ) -> Tensor | None:
        """Add the costs at one temperature to `sums`.

        Returns:
            The gradient of their weighted sum with respect to the logits.
        """
        if temperature != 1:
            logits_CV = logits_CV / temperature
            teacher_CV = None if teacher_CV is None else teacher_CV / temperature
        pair = Pair(logits_CV, teacher_CV, self.labels_T[rows])
        if temperature == 1 and teacher_CV is not None:
            sums |= {
                "forward_kl": pair.forward_kl,
                "same_top1": pair.same_top1(),
                "teacher_ce": pair.teacher_ce(),
            }
        total = None
        for name in names:
            cost, gradient_CV = CRITERIA[name](pair, self.beta)
            sums[name] = cost * temperature**2
            factor = self.weights[name] * temperature
            if factor != 1:
                gradient_CV.mul_(factor)
            padding = logits_CV.shape[-1] - gradient_CV.shape[-1]
            if padding:  # entries that the teacher lacks, which the loss does not read
                gradient_CV = functional.pad(gradient_CV, (0, padding))
            total = gradient_CV if total is None else total.add_(gradient_CV)
        return total
