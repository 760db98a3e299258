"""Classes that compute what a family computes, and hold fewer key/value heads than its own can: one row each.

GPT-NeoX is written as Falcon's new decoder (two norms in parallel, fused heads), GPT-2 as GPTBigCode with one
key/value head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .config_fields import former_rope
from .family import Family
from .rows import FAMILIES


@dataclass(frozen=True, kw_only=True)
class Host:
    """A class to move into.

    Attributes:
        family: names and layout of its attention.
        needs: fields of the source's config.json with the values that the class computes.
        modules: its names of the source's modules apart from attention, without prefixes; `{layer}` stands
            for the layer's number.
        config: config.json from the source's complete one, the key/value heads and the rope parameters.
        any_heads: it holds any number of key/value heads; otherwise one, or as many as query heads.
    """

    family: Family
    needs: Mapping[str, Any]
    modules: Mapping[str, str]
    config: Callable[[Mapping[str, Any], int, Mapping[str, Any]], dict[str, Any]]
    any_heads: bool


def _taken(source: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {theirs: source[ours] for ours, theirs in names.items() if ours in source}


_SAME = (
    "vocab_size", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache",
    "tie_word_embeddings",
)  # fmt: skip


def _falcon(source: Mapping[str, Any], kv_heads: int, rope: Mapping[str, Any]) -> dict[str, Any]:
    same = (*_SAME, "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
            "hidden_dropout",
            "attention_dropout")  # fmt: skip
    renamed = {
        "layer_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation",
        "intermediate_size": "ffn_hidden_size",
    }
    return {
        "model_type": "falcon",
        **_taken(source, dict(zip(same, same, strict=True)) | renamed),
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2,
        "parallel_attn": True,
        "multi_query": False,
        "bias": True,
        "alibi": False,
        "rope_parameters": dict(rope),
        **former_rope({"rope_parameters": rope}),
    }


def _bigcode(source: Mapping[str, Any], kv_heads: int, rope: Mapping[str, Any]) -> dict[str, Any]:
    same = (
        *_SAME,
        "layer_norm_epsilon",
        "activation_function",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "scale_attn_weights",
    )
    renamed = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
               "max_position_embeddings": "n_positions", "intermediate_size": "n_inner"}  # fmt: skip
    return {
        "model_type": "gpt_bigcode",
        **_taken(source, dict(zip(same, same, strict=True)) | renamed),
        "multi_query": kv_heads == 1,
    }


_NEOX_LAYER = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp",
               "mlp.dense_h_to_4h": "mlp.dense_h_to_4h",
               "mlp.dense_4h_to_h": "mlp.dense_4h_to_h"}  # fmt: skip
_GPT2_LAYER = ("ln_1", "ln_2", "mlp.c_fc", "mlp.c_proj")

HOSTS = {
    "falcon": Host(
        family=FAMILIES["falcon"],
        needs={"use_parallel_residual": True, "attention_bias": True},
        modules={
            "embed_in": "word_embeddings",
            "final_layer_norm": "ln_f",
            **{f"layers.{{layer}}.{ours}": f"h.{{layer}}.{theirs}" for ours, theirs in _NEOX_LAYER.items()},
        },
        config=_falcon,
        any_heads=True,
    ),
    "gpt_bigcode": Host(
        family=Family(
            label="GPTBigCode",
            architecture="GPTBigCodeForCausalLM",
            prefix="transformer.",
            qkv="h.{layer}.attn.c_attn",
            o="h.{layer}.attn.c_proj",
            fused="grouped",
            rotary=None,
        ),
        needs={},
        modules={"wte": "wte", "wpe": "wpe", "ln_f": "ln_f"}
        | {f"h.{{layer}}.{n}": f"h.{{layer}}.{n}" for n in _GPT2_LAYER},
        config=_bigcode,
        any_heads=False,
    ),
}
