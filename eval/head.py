"""Where hidden states become logits: kvfold forms logits a few tokens at a time, so it must know the whole way to them.

Shapes: B windows, W tokens of a window, D hidden size.
"""

import torch
from torch import Tensor

from ..convert.errors import InvalidInput
from .models import Loaded


def last_hidden(loaded: Loaded, ids_BW: Tensor) -> Tensor:
    """What the output embedding is applied to (B, W, D), in the model's dtype and on its device."""
    output = loaded.model.base_model(input_ids=ids_BW.to(loaded.model.device), use_cache=False)
    hidden_BWD: Tensor = output.last_hidden_state
    return hidden_BWD


@torch.no_grad()
def check_head(loaded: Loaded, ids_1W: Tensor) -> None:
    """Compare the short way to the logits, output embedding of last hidden states, with the model's own on a few tokens.

    Raises:
        InvalidInput: the model does more (Cohere scales its logits, Gemma 2 caps them): what would be computed is another
            distribution than its own.
    """
    own = loaded.model(input_ids=ids_1W.to(loaded.model.device), use_cache=False).logits
    short = loaded.model.get_output_embeddings()(last_hidden(loaded, ids_1W))
    # The same operations on the same shapes: only non-deterministic kernels may round differently.
    tolerance = 4 * torch.finfo(short.dtype).eps * float(short.abs().nan_to_num().max())
    if not torch.allclose(own.float(), short.float(), rtol=0, atol=tolerance, equal_nan=True):
        raise InvalidInput(
            f"{loaded.path} ({type(loaded.model).__name__}) scales or caps its logits after the output embedding, "
            "which kvfold does not score yet"
        )
