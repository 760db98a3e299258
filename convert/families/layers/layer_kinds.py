"""The kind of every layer: what it reads, and in families in which only some layers attend, whether it does.

The others have a mixer whose cache does not grow: a recurrence or a convolution. Such families differ in the
fields of config.json that say which layers attend: a rule for each.
"""

from collections.abc import Callable, Mapping
from typing import Any

ATTENTION, RECURRENCE, CONVOLUTION = "full_attention", "linear_attention", "conv"
KINDS = (ATTENTION, RECURRENCE, CONVOLUTION)
SLIDING, CHUNKED = "sliding_attention", "chunked_attention"
_FORMER = {"attention": ATTENTION, "mamba": RECURRENCE}  # names of transformers 4

Rule = Callable[[Mapping[str, Any], int], list[str]]


def _where(attends: Callable[[int], bool], layers: int, other: str = RECURRENCE) -> list[str]:
    return [ATTENTION if attends(layer) else other for layer in range(layers)]


def _every_fourth(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kinds of Qwen3-Next: the last layer of every four attends."""
    interval = config.get("full_attention_interval") or 4
    return _where(lambda layer: (layer + 1) % interval == 0, layers)


def _every_fourth_or_last(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kinds of OLMo Hybrid, where at least the last layer attends."""
    return _where(lambda layer: layer % 4 == 3 or (layers < 4 and layer == layers - 1), layers)


def _every_other(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kinds of MiniMax: every other layer attends."""
    return _where(lambda layer: (layer + 1) % 2 != 0, layers)


def _convolutions(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kinds of LFM2, whose other layers are short convolutions."""
    attending = config.get("full_attn_idxs")
    return _where(lambda layer: attending is None or layer in attending, layers, CONVOLUTION)


def _none(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kinds of Granite 4, where no layer attends unless layer_types says so."""
    return _where(lambda layer: False, layers)


def _indices(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kinds of Bamba, which lists the layers that attend."""
    attending = config.get("attn_layer_indices") or []
    return _where(lambda layer: layer in attending, layers)


def _period(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kinds of Jamba, of a period and an offset."""
    period, offset = config.get("attn_layer_period"), config.get("attn_layer_offset")
    period, offset = period or 8, 4 if offset is None else offset
    return _where(lambda layer: layer % period == offset, layers)


# By name, and whether layer_types overrides the rule.
RULES: dict[str, tuple[Rule, bool]] = {
    "every fourth": (_every_fourth, True),
    "every fourth or last": (_every_fourth_or_last, True),
    "every other": (_every_other, True),
    "convolutions": (_convolutions, True),
    "none": (_none, True),
    "indices": (_indices, False),
    "period": (_period, False),
}


def reach_of(config: Mapping[str, Any], layer: int) -> int | None:
    """Return the most positions that a query of a layer reads; None where it reads all before it.

    Args:
        config: a complete one.
        layer: its number.
    """
    kinds = config.get("layer_types") or []
    kind = kinds[layer] if layer < len(kinds) else SLIDING
    width = None
    if kind == SLIDING and config.get("use_sliding_window", True):
        width = config.get("sliding_window")
    elif kind == CHUNKED:
        width = config.get("attention_chunk_size")
    return width if isinstance(width, int) and width > 0 else None


def dense_first(config: Mapping[str, Any], pattern: str, layers: int) -> dict[str, Any]:
    """Return a config whose lists of layers follow from the number of first layers without experts.

    What each of both groups of layers reads follows a pattern of its own (transformers' Cohere2MoeConfig).

    Args:
        config: a complete one, which may have the lists.
        pattern: the field with the first group's pattern.
        layers: number of layers.
    """
    dense = min(config.get("first_k_dense_replace") or 0, layers)
    blocks = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    counted = [(layer, pattern) for layer in range(dense)]
    counted += [(layer, "sliding_window_pattern") for layer in range(layers - dense)]
    kinds = [
        ATTENTION if (layer + 1) % (config.get(field) or 1) == 0 else SLIDING for layer, field in counted
    ]
    lists = {"layer_types": kinds, "mlp_layer_types": blocks}
    return {**config, **{name: config.get(name) or made for name, made in lists.items()}}


def kinds_of(rule: str, config: Mapping[str, Any], layers: int) -> Any:
    """Return the kind of every layer, under transformers' present names.

    Args:
        rule: a key of RULES.
        config: a complete config.json, whose own layer_types may be anything.
        layers: number of layers.
    """
    made, is_stated = RULES[rule]
    stated = config.get("layer_types")
    if not is_stated or stated is None:
        return made(config, layers)
    if not isinstance(stated, list):
        return stated
    return [_FORMER.get(kind, kind) if isinstance(kind, str) else kind for kind in stated]
