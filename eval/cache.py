"""What a token costs in the KV cache, counted in the cache object of the running model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .models import Loaded


@dataclass(frozen=True)
class CacheSize:
    """The growth of the cache from one token to the next, one sequence.

    Attributes:
        elements_per_token_per_layer: mean over layers.
        elements_per_token: all layers.
        bytes_per_token: all layers, in `dtype`.
        dtype: what the cache holds, as the model was loaded here (a CPU run loads float32 by default).
        lengths: the two sequence lengths whose difference was taken, so that what does not grow cancels.
    """

    elements_per_token_per_layer: float
    elements_per_token: float
    bytes_per_token: float
    dtype: str
    lengths: tuple[int, int]


@torch.inference_mode()
def measure(loaded: Loaded, ids_W: Tensor) -> CacheSize:
    """Run the model on the first half of W tokens, then on all of them, and count what its cache holds."""
    lengths = (len(ids_W) // 2, len(ids_W))
    (short, layers), (long, _) = (_tensors(loaded, ids_W[:length]) for length in lengths)
    tokens = lengths[1] - lengths[0]
    elements = (sum(map(Tensor.numel, long)) - sum(map(Tensor.numel, short))) / tokens
    size = (sum(tensor.nbytes for tensor in long) - sum(tensor.nbytes for tensor in short)) / tokens
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in long if tensor.is_floating_point()})
    return CacheSize(elements / layers, elements, size, "+".join(dtypes), lengths)


def _tensors(loaded: Loaded, ids_W: Tensor) -> tuple[list[Tensor], int]:
    """Every tensor in the cache after reading W tokens (keys and values, or MLA's latents and rotary keys), and its layers."""
    ids_1W = ids_W[None].to(loaded.model.device)
    layers = loaded.model.base_model(input_ids=ids_1W, use_cache=True).past_key_values.layers
    return [value for layer in layers for value in vars(layer).values() if isinstance(value, Tensor)], len(layers)
