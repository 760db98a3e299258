"""The places where vLLM looks for a model's class, its shape, its attention and its settings."""

import logging
from typing import Any

from vllm import ModelRegistry
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)

from ...models.auto_classes import register_auto_classes
from ...models.remote_code import MODEL_TYPE

logger = logging.getLogger("vllm.kvfold")  # below vLLM's own, which prints

_PACKAGE = __name__.rpartition(".")[0]
_BACKEND = f"{_PACKAGE}.any_width.AnyWidthBackend"
_CLASSES = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
# The widths of a cache that vLLM has kernels for; on CPUs they are compiled for one.
_KERNELS = (576,) if current_platform.is_cpu() else (320, 512, 576)
_BLOCK = 128  # tokens of a block of the cache, as vLLM's CPU platform chooses for other attention


def register_folds() -> None:
    """Register folds with vLLM, and wrap two methods of its platform that decide by the model.

    The wrapped methods choose an attention backend and adjust the settings. Registering a backend of
    vLLM's name instead would also replace it for other models.
    """
    register_auto_classes()
    MODEL_ARCH_CONFIG_CONVERTORS[MODEL_TYPE] = FoldShape
    for name in _CLASSES:
        ModelRegistry.register_model(_architecture(name), f"{_PACKAGE}.folded_models:{name}")
    platform = type(current_platform)
    choose, adjust = platform.get_attn_backend_cls, platform.check_and_update_config

    def get_attn_backend_cls(selected: Any, attn_selector_config: Any, num_heads: int | None = None) -> Any:
        if attn_selector_config.use_mla and needs_plugin(get_current_vllm_config().model_config):
            return _BACKEND
        return choose(selected, attn_selector_config, num_heads)

    def check_and_update_config(vllm_config: Any) -> None:
        if not needs_plugin(vllm_config.model_config):
            adjust(vllm_config)
            return
        adjust_settings(vllm_config, adjust)

    platform.get_attn_backend_cls = staticmethod(get_attn_backend_cls)
    platform.check_and_update_config = staticmethod(check_and_update_config)


def _architecture(name: str) -> str:
    return name.replace("Transformers", "Kvfold")


class FoldShape(ModelArchConfigConvertorBase):
    """The shape of an output with kvfold's own code, as vLLM plans by it."""

    def get_architectures(self) -> list[str]:
        """Return the class of this package that serves it, and set it where vLLM's loader looks."""
        self.hf_config.architectures = [_architecture(_CLASSES[self.get_num_experts() > 0])]
        return list(self.hf_config.architectures)

    def get_head_size(self) -> int:
        """Return the width of what a layer caches of a token; of a head, with `--rope intact`."""
        config = self.hf_text_config
        if config.kvfold["form"] == "intact":
            return int(super().get_head_size())
        return int(config.kv_lora_rank + config.qk_rope_head_dim)


def needs_plugin(model: Any) -> bool:
    """Return whether a model of vLLM's configuration is a fold to MLA that vLLM has no kernel for.

    Folds in the stock class are known by having no layer of experts, which no model of DeepSeek's does.
    """
    if model is None or not model.use_mla or model.get_head_size() in _KERNELS:
        return False
    config = model.hf_text_config
    is_dense = config.model_type == "deepseek_v3" and config.first_k_dense_replace >= config.num_hidden_layers
    return bool(is_dense or config.model_type == MODEL_TYPE)


def adjust_settings(vllm_config: Any, adjust: Any) -> None:
    """Adjust the settings for a fold by the platform's `adjust`, and undo what only its own kernel wants.

    That is blocks of 16 tokens, and neither chunked prefill nor prefix caching. Queries are rotated by torch,
    because the CPU's kernel turns those of several heads wrongly.

    Raises:
        NotImplementedError: there is no CPU, or a fold in the stock class has biases.
    """
    if not current_platform.is_cpu():
        raise NotImplementedError(
            f"kvfold's plugin serves a cache of {vllm_config.model_config.get_head_size()} numbers per token "
            "on CPUs only; on this device serve a fold made with --engine vllm (512+64)"
        )
    config = vllm_config.model_config.hf_text_config
    if config.model_type != MODEL_TYPE and config.attention_bias:
        raise NotImplementedError(
            "the attention of this fold has biases, and vLLM's DeepSeek class drops them; fold with "
            "--engine vllm+kvfold"
        )
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    block = cache.block_size if cache.user_specified_block_size else _BLOCK
    prefixes = cache.enable_prefix_caching
    chunks, tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
    adjust(vllm_config)
    cache.block_size, cache.enable_prefix_caching = block, prefixes
    scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunks, tokens
    logger.info("kvfold's plugin keeps chunked prefill and prefix caching as they were")
    operators = vllm_config.compilation_config.custom_ops
    if "-rotary_embedding" not in operators:
        operators.append("-rotary_embedding")
