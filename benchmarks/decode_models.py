"""Random one-shape models for decode.py, and caches that are full without a prefill.

All have the hidden size and heads of the source, and next to nothing apart from attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import kvfold
from kvfold.models.shipped.configuration_kvfold import KvfoldConfig
from kvfold.models.shipped.modeling_kvfold import KvfoldForCausalLM


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Widths of a stack: `heads` of `head_dim` in the source; `rank` and `rope` cached by its fold.

    Sources with key norms have `groups` key heads, by default as many as heads; other sources have as many.
    """

    layers: int
    heads: int
    head_dim: int
    rank: int
    rope: int
    groups: int | None = None

    def cached(self, kind: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and width of the two tensors that a layer caches."""
        if kind == "mha":
            return (self.heads, self.head_dim), (self.heads, self.head_dim)
        return (1, self.rank), (1, 3 if kind.endswith("intact") else self.rope)

    def bytes_per_token(self, kind: str, dtype: torch.dtype) -> int:
        """Of the cache of one layer."""
        return int(sum(heads * width for heads, width in self.cached(kind)) * dtype.itemsize)

    def peak_bytes(self, kind: str, tokens: int, dtype: torch.dtype) -> int:
        """Estimate the bytes that a decoding step needs in addition to the weights.

        The cache, a layer of it grown, what is expanded and its copy.
        """
        expanded = self.heads * (4 * self.head_dim + self.rope) * dtype.itemsize if kind == "expanded" else 0
        return tokens * (self.bytes_per_token(kind, dtype) * (self.layers + 1) + expanded)


def _common(shape: Shape) -> dict[str, Any]:
    return {
        "hidden_size": shape.heads * shape.head_dim,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "intermediate_size": 64,
        "vocab_size": 64,
        "max_position_embeddings": 2**20,
    }


def _mha(shape: Shape) -> Any:
    return LlamaForCausalLM(LlamaConfig(**_common(shape), head_dim=shape.head_dim))


def _expanded(shape: Shape) -> Any:
    widths = {"kv_lora_rank": shape.rank, "qk_rope_head_dim": shape.rope}
    heads = {"qk_nope_head_dim": shape.head_dim, "v_head_dim": shape.head_dim, "q_lora_rank": None}
    dense = {
        "first_k_dense_replace": shape.layers,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**_common(shape), **widths, **heads, **dense))


def _remote(shape: Shape, form: str, *, normed: bool = False) -> Any:
    """The source's class with kvfold's attention; `normed`: Qwen3's instead of Llama's."""
    groups = (shape.groups or shape.heads) if normed else shape.heads
    pairs = (shape.rope if form == "decoupled" else shape.head_dim) // 2
    kvfold_fields = {
        "form": form,
        "source_model_type": "qwen3" if normed else "llama",
        "source_architecture": "Qwen3ForCausalLM" if normed else "LlamaForCausalLM",
        "attention": "model.layers.{layer}.self_attn",
        "frequencies": [[1e4 ** (-pair / pairs) for pair in range(pairs)]],
        "tables": [],
        "scale": shape.head_dim**-0.5,
        "biases": [],
    }
    written = {**_common(shape), "model_type": "kvfold", "v_head_dim": shape.head_dim, "q_lora_rank": None}
    if normed or form == "intact":
        kvfold_fields |= {"head_dim": shape.head_dim, "key_heads": groups}
    if normed:
        kvfold_fields |= {"norm_widths": [shape.head_dim, shape.head_dim]}
    if form == "intact":
        written |= {"latent_rank": shape.rank, "head_dim": shape.head_dim}
    else:
        written |= {
            "kv_lora_rank": shape.rank,
            "qk_rope_head_dim": shape.rope,
            "qk_nope_head_dim": shape.head_dim,
        }
        written |= {"head_dim": shape.rank + shape.rope}
    return KvfoldForCausalLM(KvfoldConfig.from_dict({**written, "kvfold": kvfold_fields}))


KINDS: dict[str, Callable[[Shape], Any]] = {
    "mha": _mha,
    "expanded": _expanded,
    "absorbed": _expanded,
    "remote": lambda shape: _remote(shape, "decoupled"),
    "intact": lambda shape: _remote(shape, "intact"),
    "normed": lambda shape: _remote(shape, "decoupled", normed=True),
    "normed-intact": lambda shape: _remote(shape, "intact", normed=True),
}


def build(kinds: tuple[str, ...], shape: Shape, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """A model of each kind, with weights of its own.

    Shared ones would be warm in the processor's cache for the second.
    """
    torch.manual_seed(0)
    made = {kind: KINDS[kind](shape).to(device, dtype).eval() for kind in kinds}
    return {kind: kvfold.absorb(model) if kind == "absorbed" else model for kind, model in made.items()}


def fill(
    cache: DynamicCache, kind: str, shape: Shape, batch: int, context: int, dtype: torch.dtype, device: str
) -> None:
    """Put `context` random tokens of each sequence into an empty cache."""
    for layer in range(shape.layers):
        made = [
            torch.randn(batch, heads, context, width, dtype=dtype, device=device)
            for heads, width in shape.cached(kind)
        ]
        if kind.endswith("intact"):
            # Digits of positions, by the first layer.
            made[1] = made[1].zero_() if layer == 0 else made[1][..., :0]
        cache.update(*made, layer)
