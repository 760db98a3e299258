"""The linearised latent norm of `stock`, opened for training and closed again for publishing.

A down-projection scaled by 6e-8 computes the right thing, but an optimizer whose steps have the size of its
learning rate would wipe it out. In training the norm is the identity and the down-projection has its natural
size; only the file has the other form.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from .stock import LATENT_SCALE, NORM_WEIGHT

# Norm and the projection that feeds it; of kv_a_proj_with_mqa only the latent rows pass through the norm.
_PAIRS = {"kv_a_layernorm": "kv_a_proj_with_mqa", "q_a_layernorm": "q_a_proj"}


class LinearNorm(nn.Identity):
    """Stands where a linearised norm of a given width stood."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


def to_trainable(model: nn.Module) -> None:
    """Replace every linearised latent norm by the identity, in place.

    Other models and true norms are left alone.
    """
    for module in list(model.modules()):
        for norm_name, projection_name in _PAIRS.items():
            norm = getattr(module, norm_name, None)
            weight = getattr(norm, "weight", None)
            if not isinstance(weight, Tensor) or not bool((weight == NORM_WEIGHT).all()):
                continue
            projection = cast(nn.Linear, getattr(module, projection_name))
            with torch.no_grad():
                for parameter in (projection.weight, projection.bias):
                    if parameter is not None:
                        parameter[: len(weight)] /= LATENT_SCALE
            setattr(module, norm_name, LinearNorm(len(weight)))


def to_published(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of a model opened by `to_trainable`, in the form that stock classes load."""
    published = dict(state)
    for name, module in model.named_modules():
        if not isinstance(module, LinearNorm):
            continue
        prefix, _, norm_name = name.rpartition(".")
        projection = f"{prefix}.{_PAIRS[norm_name]}"
        for key in (f"{projection}.weight", f"{projection}.bias"):
            if key in published:
                scaled = published[key].clone()
                scaled[: module.width] *= LATENT_SCALE
                published[key] = scaled
        published[f"{name}.weight"] = torch.full(
            (module.width,), NORM_WEIGHT, dtype=published[f"{projection}.weight"].dtype
        )
    return published
