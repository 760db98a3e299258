"""The positions of new tokens behind a cache, for models in which only some layers attend.

Some classes of transformers count them from a layer that has no keys (MiniMax), or not at all (Bamba), when
they are called without positions.
"""

from typing import Any

import torch
from torch import Tensor

_OTHERS = {"linear_attention", "conv"}  # kinds of layers that do not attend


def has_other_layers(config: Any) -> bool:
    """Return whether some layers of a model do not attend, by its configuration of transformers.

    None, of a model without one, has none.
    """
    if config is None:
        return False
    return not _OTHERS.isdisjoint(getattr(config.get_text_config(), "layer_types", None) or [])


def positions_behind(model: Any, cache: Any, ids_BT: Tensor) -> dict[str, Tensor]:
    """Return the argument that gives a model the positions of new tokens; empty where all layers attend.

    Args:
        model: a transformers causal language model.
        cache: of the tokens before, none of them padding; None at the start.
        ids_BT: the new tokens.
    """
    if cache is None or not has_other_layers(getattr(model, "config", None)):
        return {}
    keys = (getattr(layer, "keys", None) for layer in cache.layers)
    seen = next((key.shape[-2] for key in keys if key is not None), 0)
    place_T = torch.arange(seen, seen + ids_BT.shape[1], device=ids_BT.device)
    return {"position_ids": place_T.expand_as(ids_BT)}
