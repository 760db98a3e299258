"""Packed documents that attend only to themselves.

Given position ids that start again at 0, and no attention mask, transformers makes a mask that ends where
they do. Some of its classes do not pass the position ids on to where masks are made (in 5.24 OPT, gpt-oss
and AFMoE, before it Falcon); these are given the mask that transformers makes for the others. Its effect is
tested on the model, not looked up.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate

from ...core.errors import InvalidInput
from ...models.caches import CACHE_NAMES, has_other_layers

_FIRST, _SECOND = 5, 6  # tokens of the two documents of the test


def isolate_documents(model: Any, name: str) -> None:
    """Make a model keep documents apart. It is changed in place, its weights are not.

    Raises:
        InvalidInput: a document's results still depend on what is packed before it; has the `name`.
    """
    base = model.base_model
    # A recurrence or a convolution carries a document's end into the next one, however little of it.
    if not has_other_layers(base.config) and "position_ids" in signature(base.forward).parameters:
        if _is_isolating(base):
            return
        handle = base.register_forward_pre_hook(_give_mask, with_kwargs=True)
        if _is_isolating(base):
            return
        handle.remove()
    raise InvalidInput(
        f"{name} ({type(model).__name__}) cannot keep packed documents apart; use --set "
        "data.packing=stream, where attention crosses from one document to the next"
    )


def _give_mask(base: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    position_ids_BS = kwargs.get("position_ids")
    if (
        position_ids_BS is not None
        and kwargs.get("attention_mask") is None
        and all(kwargs.get(name) is None for name in CACHE_NAMES)
    ):
        # Only its shape and dtype are read.
        shape_BS1 = position_ids_BS.new_empty((*position_ids_BS.shape, 1), dtype=base.dtype)
        mask = create_masks_for_generate(base.config, shape_BS1, None, None, position_ids_BS)
        kwargs = {**kwargs, "attention_mask": mask}
    return args, kwargs


@torch.no_grad()
def _is_isolating(base: Any) -> bool:
    """Return whether the second of two packed documents gives the same results after another first one."""
    ids_S = torch.arange(_FIRST + _SECOND, device=base.device) % base.get_input_embeddings().num_embeddings
    pair_2S = torch.stack([ids_S, torch.cat([ids_S[:_FIRST].flip(0), ids_S[_FIRST:]])])
    whole_S = torch.arange(_FIRST + _SECOND, device=base.device)
    packed_S = torch.cat([whole_S[:_FIRST], whole_S[:_SECOND]])

    def second(ids_BS: Tensor, position_S: Tensor) -> Tensor:
        output = base(input_ids=ids_BS, position_ids=position_S.expand(len(ids_BS), -1), use_cache=False)
        hidden_BSD: Tensor = output.last_hidden_state
        return hidden_BSD[:, -_SECOND:].float()

    try:
        packed_2SD, whole_2SD = second(pair_2S, packed_S), second(pair_2S, whole_S)
        alone_1SD = second(ids_S[None, _FIRST:], whole_S[:_SECOND])
    except (TypeError, ValueError, RuntimeError):  # e.g. ALiBi, whose classes take no mask of four dimensions
        return False
    # The same shapes run in the same kernels, so rounding is far below the effect of a first document on a
    # second one that attends to it.
    leaks = (packed_2SD[0] - packed_2SD[1]).norm() > 0.1 * (whole_2SD[0] - whole_2SD[1]).norm()
    rounding = 1e-3 if base.dtype == torch.float32 else 0.1
    is_misplaced = (packed_2SD - alone_1SD).norm() > rounding * alone_1SD.norm()
    return not bool(leaks | is_misplaced)  # NaN is found elsewhere
