"""Kinds of layers by what they read, under the names of transformers."""

from collections.abc import Mapping
from typing import Any

ATTENTION, RECURRENCE, CONVOLUTION = "full_attention", "linear_attention", "conv"
SLIDING, CHUNKED = "sliding_attention", "chunked_attention"


def reach_of(config: Mapping[str, Any], layer: int) -> int | None:
    """Return the most positions that a query of a layer reads; None where it reads all before it."""
    kinds = config.get("layer_types") or []
    kind = kinds[layer] if layer < len(kinds) else SLIDING
    width = None
    if kind == SLIDING and config.get("use_sliding_window", True):
        width = config.get("sliding_window")
    elif kind == CHUNKED:
        width = config.get("attention_chunk_size")
    return width if isinstance(width, int) and width > 0 else None
