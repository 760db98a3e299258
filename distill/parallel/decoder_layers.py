"""A model's decoder layers: recomputed in the backward pass, or compiled."""

from collections.abc import Callable
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
            layer.forward = _recomputed(layer.forward)
        if compiling:
            layer.compile()


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that keeps only its inputs. It draws no random numbers."""

    # A function of our own: torch.compile does not look into a partial of torch's.
    def recompute(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recompute
