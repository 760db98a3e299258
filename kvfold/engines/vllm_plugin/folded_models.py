"""Outputs with kvfold's own code as models of vLLM.

They run in vLLM's Transformers backend. vLLM recognises that backend by the names of its classes, so these
classes have the same names.
"""

from typing import Any

from vllm.model_executor.models import transformers as backend

from ...models.auto_classes import register_models
from .limits import check_limits


class _Fold:
    """The part that dense models and those with experts have in common."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        if config.kvfold["form"] == "decoupled":
            check_limits(config, vllm_config.model_config.max_model_len)
        register_models(type(config))  # a worker gets the configuration without reading it
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]


class TransformersForCausalLM(_Fold, backend.TransformersForCausalLM):
    """A fold."""


class TransformersMoEForCausalLM(_Fold, backend.TransformersMoEForCausalLM):
    """A fold with experts."""
