"""Where hidden states become logits, kept apart so that a loss can form logits a few tokens at a time."""

from typing import Any, NamedTuple

from torch import Tensor


class Predictions(NamedTuple):
    """A model's predictions for T tokens, before the head.

    Attributes:
        hidden_TD: last hidden states, after the final norm.
        weight_VD: the head.
        bias_V: its bias, if it has one.
    """

    hidden_TD: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None


def predict(model: Any, input_ids_BS: Tensor) -> Predictions:
    """Run a causal language model up to its head; tokens of all B windows of S in one row of T = B S."""
    hidden_BSD = model.base_model(input_ids=input_ids_BS, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    return Predictions(hidden_BSD.flatten(0, 1), head.weight, getattr(head, "bias", None))
