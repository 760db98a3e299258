"""A model read token by token with its own cache, as transformers runs it.

Legend: B sequences, T tokens read at once, K of the last of them whose logits are formed, V vocabulary.
"""

import inspect
from typing import Any

from torch import Tensor

from ...models.causal_lm import Loaded


def read(loaded: Loaded, ids_BT: Tensor, cache: Any = None, last: int | None = None) -> tuple[Tensor, Any]:
    """Read more tokens of B sequences.

    Args:
        loaded: the model.
        ids_BT: token ids.
        cache: what the model gave after the tokens before; None at the start. It is changed, or spent.
        last: form logits for so many of the tokens at the end, 1 or more; None: for all.

    Returns:
        Logits (B, K, V) in the model's dtype, and the cache to go on with.
    """
    fewer = {} if last is None or not _can_keep_fewer(loaded) else {"logits_to_keep": last}
    output = loaded.model(input_ids=ids_BT, past_key_values=cache, use_cache=True, **fewer)
    logits_BKV: Tensor = output.logits if last is None else output.logits[:, -last:]
    return logits_BKV, output.past_key_values


def greedy(logits_BKV: Tensor) -> Tensor:
    """The likeliest next token after the last one read (B, 1)."""
    return logits_BKV[:, -1:].argmax(-1)


def _can_keep_fewer(loaded: Loaded) -> bool:
    return "logits_to_keep" in inspect.signature(loaded.model.forward).parameters
