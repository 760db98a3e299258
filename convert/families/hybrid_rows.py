"""Rows of the table of families in which only some layers attend."""

from typing import Any

from .family import Family
from .row_parts import EXPERTS, GATED, NORMS, QK_NORM, layer_names

_NO_BIAS: dict[str, Any] = {"attention_bias": (None, False)}
_GATED_ATTENTION: dict[str, Any] = {**QK_NORM, "norm_shift": 1.0, "gate": "q", "needs": _NO_BIAS}
_LFM2: dict[str, Any] = {
    "names": {"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"},
    "q_norm": "layers.{layer}.self_attn.q_layernorm.weight",
    "k_norm": "layers.{layer}.self_attn.k_layernorm.weight",
    "o": "layers.{layer}.self_attn.out_proj",
    "mixers": "convolutions",
    "layer_tensors": layer_names("operator_norm.weight", "ffn_norm.weight"),
    "model_tensors": ("embedding_norm.weight",),
}
_OTHERS = "some of its layers do not attend"

HYBRID = {
    "qwen3_next": Family(
        label="Qwen3-Next",
        architecture="Qwen3NextForCausalLM",
        rotates_partly=True,
        **_GATED_ATTENTION,
        mixers="every fourth",
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "qwen3_5_text": Family(
        label="Qwen3.5",
        architecture="Qwen3_5ForCausalLM",
        rotates_partly=True,
        **_GATED_ATTENTION,
        mixers="every fourth",
        layer_tensors=layer_names(*NORMS, *GATED),
        block=_OTHERS,
    ),
    "qwen3_5_moe_text": Family(
        label="Qwen3.5-MoE",
        architecture="Qwen3_5MoeForCausalLM",
        rotates_partly=True,
        **_GATED_ATTENTION,
        mixers="every fourth",
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "lfm2": Family(label="LFM2", architecture="Lfm2ForCausalLM", **_LFM2, block=_OTHERS),
    "lfm2_moe": Family(label="LFM2-MoE", architecture="Lfm2MoeForCausalLM", **_LFM2, block=EXPERTS),
    "granitemoehybrid": Family(
        label="Granite 4",
        architecture="GraniteMoeHybridForCausalLM",
        rotates="position_embedding_type",
        scale=("attention_multiplier", 1.0),
        mixers="none",
        layer_tensors=layer_names(*NORMS),
        block=_OTHERS,
    ),
    "minimax": Family(
        label="MiniMax",
        architecture="MiniMaxForCausalLM",
        needs={"sliding_window": (None,)},
        mixers="every other",
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "bamba": Family(
        label="Bamba",
        architecture="BambaForCausalLM",
        rotates_partly=True,
        mixers="indices",
        layer_tensors=layer_names("input_layernorm.weight", "pre_ff_layernorm.weight"),
        model_tensors=("final_layernorm.weight",),
        block=_OTHERS,
    ),
    "jamba": Family(
        label="Jamba",
        architecture="JambaForCausalLM",
        rotary=None,
        mixers="period",
        layer_tensors=layer_names("input_layernorm.weight", "pre_ff_layernorm.weight"),
        model_tensors=("final_layernorm.weight",),
        block=_OTHERS,
    ),
    "olmo_hybrid": Family(
        label="OLMo Hybrid",
        architecture="OlmoHybridForCausalLM",
        **QK_NORM,
        norm_spans="heads",
        rotates="rope_theta",
        mixers="every fourth or last",
        layer_tensors=layer_names(*GATED),
        block=_OTHERS,
    ),
}
