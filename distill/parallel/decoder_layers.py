"""A model's decoder layers: recomputed in the backward pass, or compiled."""

from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from ...models.decoder import decoder_layers


def rework_layers(model: Any, *, checkpointing: bool, compiling: bool) -> None:
    """Have each layer recomputed in the backward pass, or compiled.

    The model is changed in place, and its weights keep their names. transformers' own switch for gradient
    checkpointing works in training mode only, and students are trained in evaluation mode.
    """
    if not (checkpointing or compiling):
        return
    for layer in decoder_layers(model):
        if checkpointing:
            # The layer draws no random numbers.
            recomputed = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
            layer.forward = recomputed
        if compiling:
            layer.compile()
