"""The attention that a loaded model computes with, where the one that transformers chooses is slow or wrong.

Keys wider than values get a faster fused kernel. Bounded scores get the attention that bounds them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from transformers import AttentionMaskInterface, DeepseekV2PreTrainedModel, DeepseekV3PreTrainedModel
from transformers.masking_utils import sdpa_mask

from .shipped.configuration_kvfold import KvfoldConfig
from .shipped.layers_kvfold import LEVEL

Model = TypeVar("Model", bound=nn.Module)
Stock = (DeepseekV2PreTrainedModel, DeepseekV3PreTrainedModel)
AttentionMaskInterface.register(LEVEL, sdpa_mask)


def level(model: Model) -> Model:
    """Switch loaded DeepSeek-V2 and -V3 models from `sdpa` to `level_attention`, which computes the same.

    On a CPU it is much faster. `save_pretrained` does not write its name, and `set_attn_implementation`
    takes it back. kvfold's own classes use it by themselves, and other models stay as they are.

    Args:
        model: one, or what holds one; changed in place.

    Returns:
        The model.
    """
    for module in model.modules():
        stock: Any = module
        if isinstance(module, Stock) and stock.config._attn_implementation == "sdpa":
            stock.set_attn_implementation(LEVEL)
    return model


def keep_bounds(model: Model) -> Model:
    """Switch a model with bounded attention scores (Gemma 2) from `sdpa` to `eager`.

    `sdpa` leaves the bound out: transformers up to 5.19 chooses it for Gemma 2 without a warning, and later
    releases do not choose it. kvfold's own classes bound their scores by themselves.

    Returns:
        The model.
    """
    loaded: Any = model
    text = loaded.config.get_text_config()
    is_bounded = getattr(text, "attn_logit_softcapping", None) is not None
    if is_bounded and text._attn_implementation == "sdpa" and not isinstance(loaded.config, KvfoldConfig):
        loaded.set_attn_implementation("eager")
    return model


@contextmanager
def fused(model: Any) -> Iterator[None]:
    """Let a model with eager attention compute it with `sdpa` for the duration, where its class has that."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # the class has eager attention only, such as one with sinks
        yield
        return
    try:
        keep_bounds(model)
        yield
    finally:
        model.set_attn_implementation(before)
