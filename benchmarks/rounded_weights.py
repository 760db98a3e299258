"""The effect of rounding on a checkpoint's log-probabilities: half precision, and weights of 8 and 4 bits.

Weights of 8 and 4 bits are rounded and computed with in float32, so that the error is that of the weights
alone. It shows what a quantiser leaves of a checkpoint without any engine's kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 64  # numbers of a weight, in a row, that share a scale in 4 bits
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


def in_fp8(weight: Tensor) -> Tensor:
    """Round to float8 (e4m3) with one scale for the tensor."""
    scale = weight.abs().max().clamp(min=1e-30) / _LARGEST_FP8
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def in_four_bits(weight: Tensor) -> Tensor:
    """Round to 15 equal steps (-7 to 7) of a scale for every block of numbers."""
    rows = nn.functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).unflatten(0, (-1, BLOCK))
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7
    return ((rows / scale).round() * scale).flatten()[: weight.numel()].view_as(weight)


def in_dtype(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return a change of a whole model into a dtype."""
    return lambda model: model.to(dtype)


def quantised(rounding: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Return a change of the weights of all linear layers but the head."""

    @torch.no_grad()
    def change(model: Any) -> Any:
        head = model.get_output_embeddings()
        for module in model.modules():
            if isinstance(module, nn.Linear) and module is not head:
                module.weight.copy_(rounding(module.weight))
        return model

    return change


ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "float16": in_dtype(torch.float16),
    "bfloat16": in_dtype(torch.bfloat16),
    "FP8 weights": quantised(in_fp8),
    "4-bit weights": quantised(in_four_bits),
}


@torch.no_grad()
def rounding_errors(load: Callable[[], Any], tokens_BT: Tensor) -> dict[str, float]:
    """Return the mean |change| of log-probabilities, nats, by each of `ROUNDINGS`.

    Args:
        load: returns the model, in float32, anew.
        tokens_BT: text.
    """
    exact = load().eval()(tokens_BT).logits.log_softmax(-1)
    errors = {}
    for name, change in ROUNDINGS.items():
        rounded = change(load().eval())(tokens_BT).logits.float().log_softmax(-1)
        errors[name] = float((rounded - exact).abs().mean())
    return errors
