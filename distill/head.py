"""Where hidden states become logits, kept apart so that a loss can form logits a few tokens at a time."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..convert.errors import InvalidInput
from ..eval.models import Loaded


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


@torch.no_grad()
def check_head(loaded: Loaded) -> None:
    """Refuse a model whose logits are not its head applied to its last hidden states.

    Raises:
        InvalidInput: it scales or caps its logits (e.g. Cohere, Gemma 2); every loss here would be of another distribution.
    """
    model = loaded.model
    input_ids_BS = torch.arange(4, device=model.device)[None]
    logits_TV = model(input_ids=input_ids_BS, use_cache=False).logits[0]
    tolerance = 1e-3 if logits_TV.dtype == torch.float32 else 2e-2
    if not torch.allclose(linear(*predict(model, input_ids_BS)), logits_TV, rtol=tolerance, atol=tolerance):
        raise InvalidInput(
            f"{loaded.path} changes its logits after the head (a scale or a cap), which the losses here do not know yet"
        )
