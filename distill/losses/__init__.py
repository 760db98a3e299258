"""Losses: sums over tokens and their count, so that the loop divides once per optimizer step.

The teacher is a constant.

vocabulary   distributions over the next token: kl, reverse_kl, jsd, ce, and mixtures over one set of logits
criteria     their values on given logits, with the gradient in closed form
chunks       head and criterion a few tokens at a time, gradients formed in the forward pass
layers       hidden states and attention, layer by layer: hidden_mse, hidden_cosine, attention_output,
             attention_relation
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ..recipe.recipe import LossName
from .layers import attention_output, attention_relation, hidden_cosine, hidden_mse
from .vocabulary import MEASURES, Mixed, ce, jsd, kl, mix, reverse_kl

__all__ = [
    "LOSSES", "MEASURES", "Loss", "Mixed", "attention_output", "attention_relation", "ce", "hidden_cosine",
    "hidden_mse",
    "jsd", "kl", "mix", "reverse_kl",
]  # fmt: skip


class Loss(NamedTuple):
    """A row of `LOSSES`.

    Attributes:
        function: from student and teacher to the sum over tokens and their count. A stage computes losses of
            `logits` by `mix`, all over one set of logits, and the others by `Objective`, layer by layer.
        reads: what it compares: the predictions before the head (`logits`), hidden states, or a layer's
            attention.
    """

    function: Callable[..., tuple[Tensor, int]]
    reads: Literal["logits", "hidden", "attention"]

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, int]:
        """Return the function's result."""
        return self.function(*args, **kwargs)


LOSSES: dict[LossName, Loss] = {
    "kl": Loss(kl, "logits"),
    "reverse_kl": Loss(reverse_kl, "logits"),
    "jsd": Loss(jsd, "logits"),
    "ce": Loss(ce, "logits"),
    "hidden_mse": Loss(hidden_mse, "hidden"),
    "hidden_cosine": Loss(hidden_cosine, "hidden"),
    "attention_output": Loss(attention_output, "attention"),
    "attention_relation": Loss(attention_relation, "attention"),
}
