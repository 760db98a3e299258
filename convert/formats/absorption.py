"""A loaded stock model that decodes from its latent, without expanding it: `kvfold.absorb(model)`.

Stock transformers expands everything that is cached for each new token. Here the model stays what it is -
weights, cache, what it saves - and only its attention modules change class, to one that computes the same in
another order where that is less.
Legend: attention_kvfold.py.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from ...core.errors import InvalidInput
from ...models.caches import cache_argument
from ...models.fused_attention import level
from ...models.shipped.decoding_kvfold import absorbing_is_less, attend, is_plain, tells
from .stock import NORM_WEIGHT

Model = TypeVar("Model", bound=nn.Module)
_CACHE = cache_argument(v3.DeepseekV3Attention)  # as the stock classes name it


class _Absorbed:
    """A mixin for a stock attention class that decodes a few new tokens from the latent cache."""

    softcap = sinks = None

    def forward(
        self: Any,
        hidden_states: Tensor,
        *,
        position_embeddings: Any,
        attention_mask: Any = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as the stock class does, (B, T, D) to (B, T, D), and return the weights if computed."""
        cache = past_key_values if cache is None else cache  # `cache` from transformers 5.24 on
        if cache is None or self.training or not self._absorbs(hidden_states.shape[1], attention_mask):
            given = {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
            stock: tuple[Tensor, Tensor | None] = super().forward(  # type: ignore[misc]
                hidden_states, **given, **{_CACHE: cache}, **kwargs
            )
            return stock
        query_BNTQ, latent_B1TC, rope_B1TR = self._projected(hidden_states, position_embeddings)
        latent_B1SC, rope_B1SR = cache.update(latent_B1TC, rope_B1TR, self.layer_idx)
        up_NEC = self.kv_b_proj.weight.unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))
        output_BNTV, weights = attend(
            query_BNTQ, latent_B1SC, rope_B1SR, up_NEC, attention_mask, self.scaling, self
        )
        return self.o_proj(output_BNTV.transpose(1, 2).flatten(2)), weights

    def _absorbs(self: Any, length: int, mask: Any) -> bool:
        """Return whether to attend in the latent.

        A single new token always does, without a look at the length of the cache.
        """
        if not (is_plain(self.kv_b_proj) and tells(mask, length)):
            return False
        if length == 1:
            return True
        widths = {"nope": self.qk_nope_head_dim, "rope": self.qk_rope_head_dim, "value": self.v_head_dim}
        return absorbing_is_less(length, mask.shape[-1], **widths, rank=self.kv_lora_rank)

    def _projected(
        self: Any, hidden_states: Tensor, position_embeddings: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, N, T, Q), and the latent (B, 1, T, C) and rotary key (B, 1, T, R) to cache."""
        if self.q_lora_rank is None:
            query_BTE = self.q_proj(hidden_states)
        else:
            query_BTE = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query_BNTQ = query_BTE.unflatten(-1, (-1, self.qk_head_dim)).transpose(1, 2)
        nope_BNTP, turned_BNTR = query_BNTQ.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent_BTC, rope_BTR = self.kv_a_proj_with_mqa(hidden_states).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        turned_BNTR, rope_B1TR = self._turned(turned_BNTR, rope_BTR.unsqueeze(1), position_embeddings)
        return (
            torch.cat([nope_BNTP, turned_BNTR], dim=-1),
            self.kv_a_layernorm(latent_BTC).unsqueeze(1),
            rope_B1TR,
        )


class AbsorbedDeepseekV2Attention(_Absorbed, v2.DeepseekV2Attention):
    """DeepSeek-V2's: interleaved pairs, angles as complex numbers."""

    def _turned(self, query_BNTR: Tensor, key_B1TR: Tensor, angles_BTF: Tensor) -> Any:
        return v2.apply_rotary_emb(query_BNTR, key_B1TR, angles_BTF.to(query_BNTR.device))


class AbsorbedDeepseekV3Attention(_Absorbed, v3.DeepseekV3Attention):
    """DeepSeek-V3's: pairs interleaved or in halves."""

    def _turned(self, query_BNTR: Tensor, key_B1TR: Tensor, turned: tuple[Tensor, Tensor]) -> Any:
        rotate = (
            v3.apply_rotary_pos_emb_interleave if self.config.rope_interleave else v3.apply_rotary_pos_emb
        )
        return rotate(query_BNTR, key_B1TR, *turned)


CLASSES: dict[Any, Any] = {
    v2.DeepseekV2Attention: AbsorbedDeepseekV2Attention,
    v3.DeepseekV3Attention: AbsorbedDeepseekV3Attention,
}


def absorb(model: Model) -> Model:
    """Let a loaded DeepSeek-V2 or -V3 model decode without expanding its latent cache.

    The model may be kvfold's or DeepSeek's. The up-projections of keys and values move to the queries and
    outputs of new tokens (arXiv 2405.04434, section 2.1.2) wherever that takes fewer multiplications. In
    decoding it does, also for several tokens at once. Prefill, training and calls without a cache use
    `level_attention` where they used `sdpa`. Weights, the content of the cache and what `save_pretrained`
    writes do not change. Decoding does not change either where weights are available only by calling a module
    (offloading, adapters added later). The model may be on any device and in any dtype; rounding differs from
    the stock order of operations.

    Args:
        model: changed in place. Modules that are absorbed already do not change.

    Returns:
        The model.

    Raises:
        InvalidInput: it is of another class, its up-projections are not plain matrices (quantised, adapters,
            sharded), or it is an output of kvfold's in float16, which cannot hold the scale of its latent.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput(
            f"absorb takes a loaded model, not {type(model).__name__}; load it with AutoModelForCausalLM "
            f"first"
        )
    stock = tuple(CLASSES)
    found: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, stock)
    }
    if not found:
        known = " or ".join(cls.__name__.removesuffix("Attention") + "ForCausalLM" for cls in CLASSES)
        if isinstance(model, PreTrainedModel) and model.config.model_type == "kvfold":
            raise InvalidInput(
                f"{type(model).__name__} decodes from its latent by itself; absorb is for {known}"
            )
        raise InvalidInput(
            f"a {type(model).__name__} has no latent attention that absorb knows; it takes {known}"
        )
    for name, module in found.items():
        _check(name, module)
    for module in found.values():
        if type(module) in CLASSES:
            module.__class__ = CLASSES[type(module)]
            if "_old_forward" in vars(module):  # accelerate's hooks call what they found when they were added
                module._old_forward = type(module).forward.__get__(module)
    return level(model)


def _check(name: str, module: Any) -> None:
    if type(module) not in {*CLASSES, *CLASSES.values()}:
        raise InvalidInput(
            f"{name} is a {type(module).__name__}, which another library changed; absorb the model before "
            f"that"
        )
    up, weight = module.kv_b_proj, getattr(module.kv_b_proj, "weight", None)
    # FP8 lacks its scale; torchao's tensors are instances of Parameter, but of classes of their own.
    is_real = type(weight) is nn.Parameter and weight.is_floating_point() and weight.itemsize > 1
    if type(up) is not nn.Linear or not is_real:
        dtype = str(getattr(weight, "dtype", None)).removeprefix("torch.")
        held = "no weight" if weight is None else f"a {dtype} {type(weight).__name__}"
        raise InvalidInput(
            f"{name}.kv_b_proj is {type(up).__name__} with {held}, not a plain matrix; "
            "load the model without quantisation or sharding, and merge adapters first"
        )
    norm = module.kv_a_layernorm.weight
    if norm.dtype == torch.float16 and not norm.is_meta and bool((norm == NORM_WEIGHT).all()):
        raise InvalidInput(
            f"{name} has a linearised latent, whose scale float16 cannot hold; load the model in bfloat16 "
            f"or float32"
        )
