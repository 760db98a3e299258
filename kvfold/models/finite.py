"""Search for the first module of a model whose output holds an infinity or NaN."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.errors import InvalidInput
from .causal_lm import Loaded


@torch.no_grad()
def refuse(role: str, loaded: Loaded, ids_1W: Tensor, window: int) -> InvalidInput:
    """Return the error for a model whose logits are not finite in a window of ids (1, W).

    It names the innermost module whose output is the first that is not finite, such as
    `model.layers.3.mlp.down_proj`.
    """
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if isinstance(output, Mapping):
                output = tuple(output.values())
            values = output if isinstance(output, tuple | list) else (output,)
            tensor = next((value for value in values if isinstance(value, Tensor)), None)
            if not found and tensor is not None and not bool(tensor.isfinite().all()):
                found.append(name)

        return hook

    hooks = [
        module.register_forward_hook(look(name)) for name, module in loaded.model.named_modules() if name
    ]
    try:
        loaded.model(input_ids=ids_1W.to(loaded.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    blame = f"; the first output that is not finite is that of {found[0]}" if found else ""
    return InvalidInput(
        f"the {role}, {loaded.path}, gives logits that are not finite in window {window}{blame}"
    )
