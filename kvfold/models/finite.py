"""Search for the first module of a model whose output holds an infinity or NaN."""

from typing import Any

import torch
from torch import Tensor

from ..core.errors import InvalidInput
from .causal_lm import Loaded


def refuse(role: str, loaded: Loaded, ids_1W: Tensor, window: int) -> InvalidInput:
    """Return the error for a model whose logits are not finite in a window of ids (1, W)."""
    module = first_broken(loaded, ids_1W)
    blame = "" if module is None else f"; the first output that is not finite is that of {module}"
    return InvalidInput(
        f"the {role}, {loaded.path}, gives logits that are not finite in window {window}{blame}"
    )


@torch.no_grad()
def first_broken(loaded: Loaded, ids_1W: Tensor) -> str | None:
    """Return the name of the innermost module whose output is the first that is not finite.

    For example `model.layers.3.mlp.down_proj`; None where all outputs are finite.
    """
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            tensor = next((value for value in _values(output) if isinstance(value, Tensor)), None)
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
    return found[0] if found else None


def _values(output: Any) -> tuple[Any, ...]:
    if isinstance(output, Tensor):
        return (output,)
    if hasattr(output, "values"):
        return tuple(output.values())
    return tuple(output) if isinstance(output, tuple | list) else ()
