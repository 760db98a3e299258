"""Attention of a loaded stock model whose keys are wider than its values, by torch's fused kernel."""

from typing import Any, TypeVar

from torch import nn
from transformers import AttentionMaskInterface, DeepseekV2PreTrainedModel, DeepseekV3PreTrainedModel
from transformers.masking_utils import sdpa_mask

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
