"""Rope parameters as configuration classes of transformers complete them from fields of config.json."""

from collections.abc import Mapping
from typing import Any

from ...algebra.rope_fields import stated_rope
from ..config_fields import is_size

_KINDS = ("sliding_attention", "full_attention")


def stretched(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope parameters of a base that a number `alpha` stretches, as Hunyuan's class computes it.

    They are empty where config.json has no such number. The type is called `dynamic` there, although nothing
    depends on the length of the input.

    Args:
        config: a complete one, whose fields were checked and whose sizes may still be anything.
    """
    rope: Any = stated_rope(config)
    if not isinstance(rope, dict) or "dynamic" not in (rope.get("rope_type"), rope.get("type")):
        return {}
    alpha = rope.get("alpha")
    width: Any = config.get("head_dim")
    if width is None and is_size(config["hidden_size"]) and is_size(config["num_attention_heads"]):
        width = config["hidden_size"] // config["num_attention_heads"]
    if not alpha or not is_size(width) or width < 4:
        return {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    base = theta * float(alpha) ** (width / (width - 2))
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}, "rope_scaling": None}


def by_kind(config: Mapping[str, Any], field: str | None, theta: float) -> dict[str, Any]:
    """Return the rope parameters of each kind of layer, where config.json has one set for all, or lacks some.

    Layers with a window then rotate by a base of their own, and unscaled, as the configuration classes of
    Gemma 3 and OLMo 3 have it. They are empty where such a class would not read them.

    Args:
        config: a complete one, whose fields were checked.
        field: the config field with the base of layers with a window.
        theta: that base without the field.
    """
    stated: Any = config.get("rope_parameters") or {}
    scaling: Any = config.get("rope_scaling") or {}
    if not isinstance(stated, dict) or not isinstance(scaling, dict) or not stated.keys() <= set(_KINDS):
        return {}
    window, full = (stated.get(kind) or {} for kind in _KINDS)
    if not isinstance(window, dict) or not isinstance(full, dict):
        return {}
    local = None if field is None else config.get(field)
    made = (
        {"rope_theta": local or theta, **window},
        {"rope_theta": config.get("rope_theta"), **full, **scaling},
    )
    return {"rope_parameters": dict(zip(_KINDS, made, strict=True)), "rope_scaling": None}
