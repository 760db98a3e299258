"""Outputs with kvfold's own code as models of vLLM.

They run in vLLM's Transformers backend. vLLM recognises that backend by the names of its classes, so these
classes have the same names.
"""

from typing import Any

from vllm.model_executor.models import transformers as backend

from ...models.auto_classes import register_models


class _Fold:
    """The part that dense models and those with experts have in common."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        check_limits(config, vllm_config.model_config.max_model_len)
        register_models(type(config))  # a worker gets the configuration without reading it
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]


def check_limits(config: Any, longest: int) -> None:
    """Refuse limits on attention that vLLM's latent attention would silently leave out.

    Raises:
        NotImplementedError: it has a sliding window below `longest` tokens, or bounded scores.
    """
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    cap = getattr(config, "attn_logit_softcapping", None)
    found = ""
    if window and window < longest and (kinds is None or "sliding_attention" in kinds):
        found = f"a window of {window} tokens"
    elif cap is not None:
        found = f"scores bounded by {cap}"
    if found:
        raise NotImplementedError(
            f"the attention of this fold has {found}, and vLLM's latent attention has no such limit; use "
            "transformers, or fold with --rope intact"
        )


class TransformersForCausalLM(_Fold, backend.TransformersForCausalLM):
    """A fold."""


class TransformersMoEForCausalLM(_Fold, backend.TransformersMoEForCausalLM):
    """A fold with experts."""
