"""The table of families: a row each. A foreign weight's name stands here and in family.py only."""

from dataclasses import replace
from typing import Any

from .defaults import DEFAULTS
from .family import Block, Family
from .hybrid_rows import HYBRID
from .newer_rows import NEWER
from .row_parts import (
    ADDED,
    AFTER,
    EXPERTS,
    FUSED_GATE,
    GATED,
    LAYERNORM,
    NORMS,
    PARALLEL,
    QK_NORM,
    SANDWICH,
    affine,
    layer_names,
)

_GPT_NAMES = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions", "intermediate_size": "n_inner",
}  # fmt: skip


def _own(prefix: str) -> dict[str, Any]:
    """Return q, k, v and o of a family with other names for its layers."""
    return {role: f"{prefix}.{role}_proj" for role in "qkv"} | {"o": f"{prefix}.out_proj"}


_ROWS = {
    "llama": Family(label="Llama", architecture="LlamaForCausalLM"),
    "mistral": Family(label="Mistral", architecture="MistralForCausalLM"),
    "ministral": Family(label="Ministral", architecture="MinistralForCausalLM"),
    "ministral3": Family(
        label="Ministral 3",
        architecture="Ministral3ForCausalLM",
        query_growth="llama_4_scaling_beta",
        block="it scales its queries by their position",
    ),
    "mixtral": Family(
        label="Mixtral",
        architecture="MixtralForCausalLM",
        layer_tensors=layer_names(*NORMS, "block_sparse_moe.gate.weight"),
        block=EXPERTS,
    ),
    "qwen2": Family(label="Qwen2", architecture="Qwen2ForCausalLM"),
    "qwen2_moe": Family(
        label="Qwen2-MoE",
        architecture="Qwen2MoeForCausalLM",
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "qwen3": Family(label="Qwen3", architecture="Qwen3ForCausalLM", **QK_NORM),
    "qwen3_moe": Family(
        label="Qwen3-MoE",
        architecture="Qwen3MoeForCausalLM",
        **QK_NORM,
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "gpt_oss": Family(
        label="gpt-oss",
        architecture="GptOssForCausalLM",
        sinks="layers.{layer}.self_attn.sinks",
        layer_tensors=layer_names(*NORMS, "self_attn.sinks", "mlp.router.weight"),
        block=EXPERTS,
    ),
    "gemma": Family(
        label="Gemma",
        architecture="GemmaForCausalLM",
        block=Block(norm_shift=1.0, embedding_root=True),
    ),
    "gemma2": Family(
        label="Gemma 2",
        architecture="Gemma2ForCausalLM",
        scale=("query_pre_attn_scalar", -0.5),
        soft_cap="attn_logit_softcapping",
        layer_tensors=layer_names(*SANDWICH, *GATED),
        block=ADDED,
    ),
    "gemma3_text": Family(
        label="Gemma 3",
        architecture="Gemma3ForCausalLM",
        needs={"use_bidirectional_attention": (None, False)},
        names={"sliding_window_pattern": "_sliding_window_pattern"},
        **QK_NORM,
        norm_shift=1.0,
        windowed_theta=("rope_local_base_freq", 1e4),
        scale=("query_pre_attn_scalar", -0.5),
        soft_cap="attn_logit_softcapping",
        layer_tensors=layer_names(*SANDWICH, *GATED),
        block=ADDED,
    ),
    "phi": Family(
        label="Phi-1, Phi-2",
        architecture="PhiForCausalLM",
        rotates_partly=True,
        needs={"qk_layernorm": (None, False)},
        o="layers.{layer}.self_attn.dense",
        layer_tensors=layer_names(*affine("input_layernorm", "mlp.fc1", "mlp.fc2")),
        model_tensors=affine("final_layernorm"),
        block=PARALLEL,
    ),
    "phi3": Family(
        label="Phi-3, Phi-4-mini",
        architecture="Phi3ForCausalLM",
        rotates_partly=True,
        qkv="layers.{layer}.self_attn.qkv_proj",
        layer_tensors=layer_names(*NORMS, *FUSED_GATE),
        block=Block(gate_up=True),
    ),
    "olmo": Family(
        label="OLMo",
        architecture="OlmoForCausalLM",
        needs={"clip_qkv": (None,)},
        layer_tensors=layer_names(*GATED),
        model_tensors=(),
        block=Block(centred=True),
    ),
    "olmo2": Family(
        label="OLMo 2",
        architecture="Olmo2ForCausalLM",
        **QK_NORM,
        norm_spans="heads",
        layer_tensors=layer_names(*AFTER, *GATED),
        block=ADDED,
    ),
    "olmo3": Family(
        label="OLMo 3",
        architecture="Olmo3ForCausalLM",
        **QK_NORM,
        norm_spans="heads",
        windowed_theta=(None, 5e5),  # its configuration takes rope_theta for the other layers alone
        layer_tensors=layer_names(*AFTER, *GATED),
        block=ADDED,
    ),
    "granite": Family(
        label="Granite",
        architecture="GraniteForCausalLM",
        scale=("attention_multiplier", 1.0),
        block=Block(
            embedding="embedding_multiplier", residual="residual_multiplier", logits="logits_scaling"
        ),
    ),
    "smollm3": Family(
        label="SmolLM3",
        architecture="SmolLM3ForCausalLM",
        unrotated="no_rope_layers",
    ),
    "stablelm": Family(
        label="StableLM",
        architecture="StableLmForCausalLM",
        rotates_partly=True,
        needs={"qk_layernorm": (None, False)},
        layer_tensors=layer_names(*affine("input_layernorm"), *GATED),
        model_tensors=affine("norm"),
        block="it has LayerNorm with a mean and a bias",
    ),
    "starcoder2": Family(
        label="Starcoder2",
        architecture="Starcoder2ForCausalLM",
        layer_tensors=layer_names(
            *affine("input_layernorm", "post_attention_layernorm"), "mlp.c_fc.weight", "mlp.c_proj.weight"
        ),
        model_tensors=affine("norm"),
        block=LAYERNORM,
    ),
    "glm": Family(
        label="GLM",
        architecture="GlmForCausalLM",
        rotates_partly=True,
        rotary="interleaved",
        layer_tensors=layer_names(*NORMS, *FUSED_GATE),
        block=Block(gate_up=True),
    ),
    "glm4": Family(
        label="GLM-4",
        architecture="Glm4ForCausalLM",
        rotates_partly=True,
        rotary="interleaved",
        layer_tensors=layer_names(
            *NORMS, "post_self_attn_layernorm.weight", "post_mlp_layernorm.weight", *FUSED_GATE
        ),
        block=ADDED,
    ),
    "cohere": Family(
        label="Cohere",
        architecture="CohereForCausalLM",
        needs={"use_qk_norm": (None, False)},
        rotary="interleaved",
        layer_tensors=layer_names("input_layernorm.weight", *GATED),
        block=PARALLEL,
    ),
    "cohere2": Family(
        label="Cohere 2",
        architecture="Cohere2ForCausalLM",
        rotary="interleaved",
        unrotated="layer_types",
        layer_tensors=layer_names("input_layernorm.weight", *GATED),
        block=PARALLEL,
    ),
    "cohere2_moe": Family(
        label="Cohere 2 MoE",
        architecture="Cohere2MoeForCausalLM",
        rotary="interleaved",
        unrotated="layer_types",
        dense_rotate="prefix_dense_sliding_window_pattern",
        layer_tensors=layer_names("input_layernorm.weight"),
        block=EXPERTS,
    ),
    "gpt_neox": Family(
        label="GPT-NeoX, Pythia",
        architecture="GPTNeoXForCausalLM",
        rotates_partly=True,
        names={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        prefix="gpt_neox.",
        qkv="layers.{layer}.attention.query_key_value",
        o="layers.{layer}.attention.dense",
        fused="grouped",
        kv_heads=None,
        host="falcon",
        layer_tensors=layer_names(
            *affine("input_layernorm", "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
        ),
        embedding="embed_in.weight",
        model_tensors=affine("final_layer_norm"),
        head="embed_out.weight",
        block=PARALLEL,
    ),
    "gpt2": Family(
        label="GPT-2",
        architecture="GPT2LMHeadModel",
        names=_GPT_NAMES,
        needs={"add_cross_attention": (None, False), "scale_attn_weights": (True,)},
        prefix="transformer.",
        qkv="h.{layer}.attn.c_attn",
        o="h.{layer}.attn.c_proj",
        transposed=True,
        rotary=None,
        scale_by_layer="scale_attn_by_inverse_layer_idx",
        kv_heads=None,
        host="gpt_bigcode",
        layer_tensors=layer_names(*affine("ln_1", "ln_2", "mlp.c_fc", "mlp.c_proj"), at="h.{layer}."),
        embedding="wte.weight",
        model_tensors=("wpe.weight", *affine("ln_f")),
        block="it has no rotation, and LayerNorm with a mean and a bias",
    ),
    "gptj": Family(
        label="GPT-J",
        architecture="GPTJForCausalLM",
        names=_GPT_NAMES,
        prefix="transformer.",
        **_own("h.{layer}.attn"),
        rotary="interleaved",
        kv_heads=None,
        layer_tensors=layer_names(*affine("ln_1", "mlp.fc_in", "mlp.fc_out"), at="h.{layer}."),
        embedding="wte.weight",
        model_tensors=affine("ln_f"),
        block=PARALLEL,
    ),
    "opt": Family(
        label="OPT",
        architecture="OPTForCausalLM",
        names={"intermediate_size": "ffn_dim"},
        prefix="model.decoder.",
        **_own("layers.{layer}.self_attn"),
        rotary=None,
        kv_heads=None,
        layer_tensors=layer_names("fc1.weight", "fc2.weight"),
        model_tensors=("embed_positions.weight",),
        block="it has no rotation, and LayerNorm with a mean and a bias",
    ),
    "falcon": Family(
        label="Falcon, new decoder",
        architecture="FalconForCausalLM",
        names={"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
        needs={"alibi": (None, False), "new_decoder_architecture": (True,)},
        prefix="transformer.",
        qkv="h.{layer}.self_attention.query_key_value",
        o="h.{layer}.self_attention.dense",
        fused="grouped",
        kv_heads="num_kv_heads",
        layer_tensors=layer_names("mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight", at="h.{layer}."),
        embedding="word_embeddings.weight",
        model_tensors=affine("ln_f"),
        block=PARALLEL,
        caches_queries=True,
    ),
}
FAMILIES = {kind: replace(row, defaults=DEFAULTS[kind]) for kind, row in (_ROWS | NEWER | HYBRID).items()}
