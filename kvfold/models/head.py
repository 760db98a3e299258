"""The step from last hidden states to logits, which kvfold forms a few tokens at a time.

Shapes: B windows, W tokens of a window, C any number of tokens, D hidden size, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import InvalidInput
from .causal_lm import Loaded

# Fields of config.json with which a family bounds its logits: Gemma 2 and later, RecurrentGemma.
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")


class HeadForm(NamedTuple):
    """The step from the output embedding's output to logits: soft_cap · tanh(scale · output / soft_cap).

    Attributes:
        scale: a factor.
        soft_cap: the bound that no logit exceeds; None where there is none.
    """

    scale: float = 1.0
    soft_cap: float | None = None

    def logits(self, output_CV: Tensor) -> Tensor:
        """Return the logits, in the dtype of `output_CV`, which stays as it is."""
        logits_CV = output_CV if self.scale == 1 else output_CV * self.scale
        if self.soft_cap is None:
            return logits_CV
        return (logits_CV / self.soft_cap).tanh() * self.soft_cap


def head_form(model: Any) -> HeadForm:
    """Read the form from the configuration of a transformers causal language model.

    `check_head` compares it with the model.
    """
    config = model.config.get_text_config()
    scale = _number(config, "logit_scale") or 1.0  # Cohere
    scale /= _number(config, "logits_scaling") or 1.0  # Granite
    caps = [cap for name in _SOFT_CAPS if (cap := _number(config, name))]
    return HeadForm(scale, caps[0] if caps else None)


def head_logits(model: Any, hidden_CD: Tensor) -> Tensor:
    """Return the logits (C, V) of last hidden states, in the model's dtype."""
    return head_form(model).logits(model.get_output_embeddings()(hidden_CD))


def last_hidden(loaded: Loaded, ids_BW: Tensor) -> Tensor:
    """Return the last hidden states (B, W, D), in the model's dtype and on its device."""
    output = loaded.model.base_model(input_ids=ids_BW.to(loaded.device), use_cache=False)
    hidden_BWD: Tensor = output.last_hidden_state
    return hidden_BWD


@torch.no_grad()
def check_head(loaded: Loaded, ids_1W: Tensor) -> None:
    """Check on a few tokens that `head_logits` of the last hidden states are the model's own logits.

    Raises:
        InvalidInput: they are not, so that kvfold would compute another distribution than the model's.
    """
    own = loaded.model(input_ids=ids_1W.to(loaded.device), use_cache=False).logits
    short = head_logits(loaded.model, last_hidden(loaded, ids_1W))
    # The same operations on the same shapes, but for x / s as x · (1/s): non-deterministic kernels may round
    # differently too.
    tolerance = 4 * torch.finfo(short.dtype).eps * float(short.abs().nan_to_num().max())
    if not torch.allclose(own.float(), short.float(), rtol=0, atol=tolerance, equal_nan=True):
        raise InvalidInput(
            f"{loaded.path} ({type(loaded.model).__name__}) scales or caps its logits after the output "
            "embedding in a way of its own, which kvfold does not score yet"
        )


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else None
