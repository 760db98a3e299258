"""Token-by-token forward passes of a model with its own cache in transformers.

Legend: B sequences, P tokens of a prompt, T tokens read at once, K of the last of them whose logits are
formed, V vocabulary.
"""

import inspect
from typing import Any

from torch import Tensor

from ...models.caches import cache_argument, cache_of, positions_behind
from ...models.causal_lm import Loaded
from ...models.finite import refuse


def read(loaded: Loaded, ids_BT: Tensor, cache: Any = None, last: int | None = None) -> tuple[Tensor, Any]:
    """Read more tokens of B sequences.

    Args:
        loaded: the model.
        ids_BT: token ids.
        cache: the cache from the tokens before, which is changed in place; None at the start.
        last: form logits for this many tokens at the end, at least 1; None: for all.

    Returns:
        Logits (B, K, V) in the model's dtype, and the cache after these tokens.
    """
    can_keep_fewer = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters
    fewer = {} if last is None or not can_keep_fewer else {"logits_to_keep": last}
    place = {**positions_behind(loaded.model, cache, ids_BT), cache_argument(loaded.model): cache}
    output = loaded.model(input_ids=ids_BT, use_cache=True, **place, **fewer)
    logits_BKV: Tensor = output.logits if last is None else output.logits[:, -last:]
    return logits_BKV, cache_of(output)


def read_prompts(loaded: Loaded, ids_BP: Tensor, role: str) -> tuple[Tensor, Any]:
    """Read prompts of one length, and return the logits (B, 1, V) after them and the cache.

    Raises:
        InvalidInput: the logits are not finite.
    """
    logits_BKV, cache = read(loaded, ids_BP, last=1)
    for row, finite in enumerate(logits_BKV.isfinite().all(-1).all(-1).tolist()):
        if not finite:
            raise refuse(role, loaded, ids_BP[row : row + 1], row)
    return logits_BKV, cache


def greedy(logits_BKV: Tensor) -> Tensor:
    """Return the likeliest token (B, 1) after the last one read."""
    return logits_BKV[:, -1:].argmax(-1)
