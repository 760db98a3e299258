"""The table of families, a row each. Foreign weights' names stand here, in family.py and in hosts.py only."""

from dataclasses import replace
from typing import Any

from .family import Block, Family

EXPERTS = "its MLPs are mixtures of experts"
LAYERNORM = "it has LayerNorm with a mean and a bias, and an MLP without a gate"
ADDED = "it normalises what a layer adds to the residual stream"
PARALLEL = "its attention and MLP read one norm in parallel"


def layer_names(*names: str, at: str = "layers.{layer}.") -> tuple[str, ...]:
    """Return names of a layer's tensors."""
    return tuple(at + name for name in names)


def affine(*names: str) -> tuple[str, ...]:
    """Return weight and bias of each module."""
    return tuple(f"{name}.{part}" for name in names for part in ("weight", "bias"))


GATED = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
FUSED_GATE = ("mlp.gate_up_proj.weight", "mlp.down_proj.weight")
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
AFTER = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
SANDWICH = (*NORMS, "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
QK_NORM: dict[str, Any] = {
    "q_norm": "layers.{layer}.self_attn.q_norm.weight",
    "k_norm": "layers.{layer}.self_attn.k_norm.weight",
}


def _own(prefix: str) -> dict[str, Any]:
    return {role: f"{prefix}.{role}_proj" for role in "qkv"} | {"o": f"{prefix}.out_proj"}


_HUNYUAN: dict[str, Any] = {
    "late_norms": "weighted",
    "q_norm": "layers.{layer}.self_attn.query_layernorm.weight",
    "k_norm": "layers.{layer}.self_attn.key_layernorm.weight",
    "stretches": True,
}
_GEMMA4: dict[str, Any] = {
    "needs": {"use_bidirectional_attention": ("vision", None)},
    **QK_NORM,
    "scale": ("head_dim", 0.0),
    "value_norm": True,
    "key_values": "attention_k_eq_v",
    "followers": "num_kv_shared_layers",
    "unlike": True,
    "layer_tensors": layer_names(*SANDWICH, *GATED),
    "block": ADDED,
}
_APERTUS: dict[str, Any] = {
    **QK_NORM,
    "layer_tensors": layer_names("attention_layernorm.weight", "feedforward_layernorm.weight", *GATED[1:]),
    "block": "its MLP has no gate",
}
_NO_BIAS: dict[str, Any] = {"attention_bias": (None, False)}
_GATED_ATTENTION: dict[str, Any] = {**QK_NORM, "norm_shift": 1.0, "gate": "q", "needs": _NO_BIAS}
_LFM2: dict[str, Any] = {
    "names": {"rms_norm_eps": "norm_eps"},
    "q_norm": "layers.{layer}.self_attn.q_layernorm.weight",
    "k_norm": "layers.{layer}.self_attn.k_layernorm.weight",
    "o": "layers.{layer}.self_attn.out_proj",
    "mixers": True,
    "layer_tensors": layer_names("operator_norm.weight", "ffn_norm.weight"),
    "model_tensors": ("embedding_norm.weight",),
}
_OTHERS = "some of its layers do not attend"


def _mixture(label: str, architecture: str, **own: Any) -> Family:
    """Return the row of a family whose MLPs are mixtures of experts behind Llama's two norms."""
    norms = layer_names(*NORMS)
    return Family(label=label, architecture=architecture, layer_tensors=norms, block=EXPERTS, **own)


_ROWS = {
    "llama": Family(label="Llama", architecture="LlamaForCausalLM"),
    "mistral": Family(label="Mistral", architecture="MistralForCausalLM", windowed=True),
    "ministral": Family(label="Ministral", architecture="MinistralForCausalLM", windowed=True),
    "ministral3": Family(label="Ministral 3", architecture="Ministral3ForCausalLM",
        query_growth="llama_4_scaling_beta", block="it scales its queries by their position"),
    "mixtral": Family(label="Mixtral", architecture="MixtralForCausalLM",
        layer_tensors=layer_names(*NORMS, "block_sparse_moe.gate.weight"), block=EXPERTS),
    "qwen2": Family(label="Qwen2", architecture="Qwen2ForCausalLM"),
    "qwen2_moe": _mixture("Qwen2-MoE", "Qwen2MoeForCausalLM"),
    "qwen3": Family(label="Qwen3", architecture="Qwen3ForCausalLM", **QK_NORM),
    "qwen3_moe": _mixture("Qwen3-MoE", "Qwen3MoeForCausalLM", **QK_NORM),
    "gpt_oss": Family(label="gpt-oss", architecture="GptOssForCausalLM",
        sinks="layers.{layer}.self_attn.sinks",
        layer_tensors=layer_names(*NORMS, "self_attn.sinks", "mlp.router.weight"), block=EXPERTS),
    "gemma": Family(label="Gemma", architecture="GemmaForCausalLM",
        block=Block(norm_shift=1.0, embedding_root=True, activation="gelu_pytorch_tanh")),
    "gemma2": Family(label="Gemma 2", architecture="Gemma2ForCausalLM",
        scale=("query_pre_attn_scalar", -0.5), soft_cap="attn_logit_softcapping",
        layer_tensors=layer_names(*SANDWICH, *GATED), block=ADDED),
    "gemma3_text": Family(label="Gemma 3", architecture="Gemma3ForCausalLM",
        needs={"use_bidirectional_attention": (None, False)}, **QK_NORM, norm_shift=1.0,
        scale=("query_pre_attn_scalar", -0.5), soft_cap="attn_logit_softcapping",
        layer_tensors=layer_names(*SANDWICH, *GATED), block=ADDED),
    "phi": Family(label="Phi-1, Phi-2", architecture="PhiForCausalLM", rotates_partly=True,
        needs={"qk_layernorm": (None, False)}, o="layers.{layer}.self_attn.dense",
        layer_tensors=layer_names(*affine("input_layernorm", "mlp.fc1", "mlp.fc2")),
        model_tensors=affine("final_layernorm"), block=PARALLEL),
    "phi3": Family(label="Phi-3, Phi-4-mini", architecture="Phi3ForCausalLM", rotates_partly=True,
        qkv="layers.{layer}.self_attn.qkv_proj", layer_tensors=layer_names(*NORMS, *FUSED_GATE),
        block=Block(gate_up=True)),
    "olmo": Family(label="OLMo", architecture="OlmoForCausalLM", clip="clip_qkv",
        layer_tensors=layer_names(*GATED), model_tensors=(), block=Block(centred=True)),
    "olmo2": Family(label="OLMo 2", architecture="Olmo2ForCausalLM", **QK_NORM, norm_spans="heads",
        layer_tensors=layer_names(*AFTER, *GATED), block=ADDED),
    "olmo3": Family(label="OLMo 3", architecture="Olmo3ForCausalLM", **QK_NORM, norm_spans="heads",
        layer_tensors=layer_names(*AFTER, *GATED), block=ADDED),
    "granite": Family(label="Granite", architecture="GraniteForCausalLM",
        scale=("attention_multiplier", 1.0), block=Block(
            embedding="embedding_multiplier", residual="residual_multiplier", logits="logits_scaling")),
    "smollm3": Family(label="SmolLM3", architecture="SmolLM3ForCausalLM", unrotated="no_rope_layers"),
    "stablelm": Family(label="StableLM", architecture="StableLmForCausalLM", rotates_partly=True,
        needs={"qk_layernorm": (None, False)},
        layer_tensors=layer_names(*affine("input_layernorm"), *GATED), model_tensors=affine("norm"),
        block="it has LayerNorm with a mean and a bias"),
    "starcoder2": Family(label="Starcoder2", architecture="Starcoder2ForCausalLM",
        layer_tensors=layer_names(*affine("input_layernorm", "post_attention_layernorm"),
                                  "mlp.c_fc.weight", "mlp.c_proj.weight"),
        model_tensors=affine("norm"), block=LAYERNORM),
    "glm": Family(label="GLM", architecture="GlmForCausalLM", rotates_partly=True, rotary="interleaved",
        layer_tensors=layer_names(*NORMS, *FUSED_GATE), block=Block(gate_up=True)),
    "glm4": Family(label="GLM-4", architecture="Glm4ForCausalLM", rotates_partly=True, rotary="interleaved",
        layer_tensors=layer_names(*NORMS, "post_self_attn_layernorm.weight", "post_mlp_layernorm.weight",
                                  *FUSED_GATE),
        block=ADDED),
    "cohere": Family(label="Cohere", architecture="CohereForCausalLM", needs={"use_qk_norm": (None, False)},
        rotary="interleaved", layer_tensors=layer_names("input_layernorm.weight", *GATED), block=PARALLEL),
    "cohere2": Family(label="Cohere 2", architecture="Cohere2ForCausalLM", rotary="interleaved",
        unrotated="layer_types", layer_tensors=layer_names("input_layernorm.weight", *GATED),
        block=PARALLEL),
    "cohere2_moe": Family(label="Cohere 2 MoE", architecture="Cohere2MoeForCausalLM", rotary="interleaved",
        unrotated="layer_types", dense_rotate="prefix_dense_sliding_window_pattern",
        layer_tensors=layer_names("input_layernorm.weight"), block=EXPERTS),
    "gpt_neox": Family(label="GPT-NeoX, Pythia", architecture="GPTNeoXForCausalLM", rotates_partly=True,
        prefix="gpt_neox.", qkv="layers.{layer}.attention.query_key_value",
        o="layers.{layer}.attention.dense", fused="grouped", kv_heads=None, host="falcon",
        layer_tensors=layer_names(*affine("input_layernorm", "post_attention_layernorm", "mlp.dense_h_to_4h",
                                          "mlp.dense_4h_to_h")),
        embedding="embed_in.weight", model_tensors=affine("final_layer_norm"), head="embed_out.weight",
        block=PARALLEL),
    "gpt2": Family(label="GPT-2", architecture="GPT2LMHeadModel", names={"intermediate_size": "n_inner"},
        needs={"add_cross_attention": (None, False), "scale_attn_weights": (True,)}, prefix="transformer.",
        qkv="h.{layer}.attn.c_attn", o="h.{layer}.attn.c_proj", transposed=True, rotary=None,
        scale_by_layer="scale_attn_by_inverse_layer_idx", kv_heads=None, host="gpt_bigcode",
        layer_tensors=layer_names(*affine("ln_1", "ln_2", "mlp.c_fc", "mlp.c_proj"), at="h.{layer}."),
        embedding="wte.weight", model_tensors=("wpe.weight", *affine("ln_f")),
        block="it has no rotation, and LayerNorm with a mean and a bias"),
    "gptj": Family(label="GPT-J", architecture="GPTJForCausalLM", names={"intermediate_size": "n_inner"},
        prefix="transformer.", **_own("h.{layer}.attn"), rotary="interleaved", kv_heads=None,
        layer_tensors=layer_names(*affine("ln_1", "mlp.fc_in", "mlp.fc_out"), at="h.{layer}."),
        embedding="wte.weight", model_tensors=affine("ln_f"), block=PARALLEL),
    "opt": Family(label="OPT", architecture="OPTForCausalLM", names={"intermediate_size": "ffn_dim"},
        prefix="model.decoder.", **_own("layers.{layer}.self_attn"), rotary=None, kv_heads=None,
        layer_tensors=layer_names("fc1.weight", "fc2.weight"), model_tensors=("embed_positions.weight",),
        block="it has no rotation, and LayerNorm with a mean and a bias"),
    "falcon": Family(label="Falcon, new decoder", architecture="FalconForCausalLM",
        names={"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
        needs={"alibi": (None, False), "new_decoder_architecture": (True,)}, prefix="transformer.",
        qkv="h.{layer}.self_attention.query_key_value", o="h.{layer}.self_attention.dense", fused="grouped",
        kv_heads="num_kv_heads",
        layer_tensors=layer_names("mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight", at="h.{layer}."),
        embedding="word_embeddings.weight", model_tensors=affine("ln_f"), block=PARALLEL,
        caches_queries=True),
    "arcee": Family(label="Arcee", architecture="ArceeForCausalLM",
        layer_tensors=layer_names(*NORMS, *GATED[1:]), block="its MLP has no gate"),
    "helium": Family(label="Helium", architecture="HeliumForCausalLM", rotary="interleaved"),
    "cwm": Family(label="CWM", architecture="CwmForCausalLM", windowed=True),
    "seed_oss": Family(label="Seed-OSS", architecture="SeedOssForCausalLM"),
    "ernie4_5": Family(label="Ernie 4.5", architecture="Ernie4_5ForCausalLM", rotary="interleaved",
        needs={"use_bias": (None, False)}),
    "ernie4_5_moe": _mixture("Ernie 4.5 MoE", "Ernie4_5_MoeForCausalLM", rotary="interleaved"),
    "hyperclovax": Family(label="HyperCLOVA X", architecture="HyperCLOVAXForCausalLM",
        scale=("attention_multiplier", 1.0),
        block="it scales and may normalise what a layer adds to the residual stream"),
    "jais2": Family(label="Jais 2", architecture="Jais2ForCausalLM",
        layer_tensors=layer_names(*affine("input_layernorm", "post_attention_layernorm"), *GATED[1:]),
        model_tensors=affine("norm"), block=LAYERNORM),
    "nemotron": Family(label="Nemotron", architecture="NemotronForCausalLM", rotates_partly=True,
        layer_tensors=layer_names(*affine("input_layernorm", "post_attention_layernorm"), *GATED[1:]),
        model_tensors=affine("norm"), block=LAYERNORM),
    "granitemoe": _mixture("Granite MoE", "GraniteMoeForCausalLM", scale=("attention_multiplier", 1.0)),
    "granitemoeshared": _mixture("Granite MoE, shared expert", "GraniteMoeSharedForCausalLM",
        scale=("attention_multiplier", 1.0)),
    "olmoe": Family(label="OLMoE", architecture="OlmoeForCausalLM", clip="clip_qkv", **QK_NORM,
        norm_spans="heads", layer_tensors=layer_names(*NORMS, "mlp.gate.weight"), block=EXPERTS),
    "flex_olmo": Family(label="FlexOlmo", architecture="FlexOlmoForCausalLM", **QK_NORM, norm_spans="heads",
        layer_tensors=layer_names(*AFTER, "mlp.gate.weight"), block=EXPERTS),
    "dots1": _mixture("dots.llm1", "Dots1ForCausalLM", **QK_NORM),
    "glm4_moe": _mixture("GLM-4.5 and later", "Glm4MoeForCausalLM", rotates_partly=True, **QK_NORM,
        norm_flag="use_qk_norm"),
    "apertus": Family(label="Apertus", architecture="ApertusForCausalLM", **_APERTUS),
    "apertus1p5_text": Family(label="Apertus 1.5, text", architecture="Apertus1p5TextForCausalLM",
        **_APERTUS),
    "minimax_m2": _mixture("MiniMax M2", "MiniMaxM2ForCausalLM", rotates_partly=True, **QK_NORM,
        norm_spans="heads"),
    "phimoe": Family(label="Phi-3.5-MoE", architecture="PhimoeForCausalLM",
        layer_tensors=layer_names(*affine("input_layernorm", "post_attention_layernorm")),
        model_tensors=affine("norm"), block=EXPERTS),
    "hy_v3": _mixture("Hunyuan 3", "HYV3ForCausalLM", **QK_NORM),
    "hunyuan_v1_dense": Family(label="Hunyuan", architecture="HunYuanDenseV1ForCausalLM", **_HUNYUAN),
    "hunyuan_v1_moe": _mixture("Hunyuan MoE", "HunYuanMoEV1ForCausalLM", **_HUNYUAN),
    "llama4_text": _mixture("Llama 4, text", "Llama4ForCausalLM", late_norms="bare",
        norm_flag="use_qk_norm", rotary="interleaved", unrotated="no_rope_layers",
        unlatent="its class can scale queries by position in layers without rotation, and rotates in the "
        "others by complex numbers"),
    "gemma4_text": Family(label="Gemma 4, text", architecture="Gemma4ForCausalLM", **_GEMMA4),
    "gemma4_unified_text": Family(label="Gemma 4 unified, text", architecture="Gemma4UnifiedForCausalLM",
        **_GEMMA4),
    "nanochat": Family(label="nanochat", architecture="NanoChatForCausalLM", late_norms="bare",
        rotary="reversed", layer_tensors=layer_names("mlp.fc1.weight", "mlp.fc2.weight"), model_tensors=(),
        block="its norms have no weights, and its MLP has no gate"),
    "solar_open": _mixture("Solar Open", "SolarOpenForCausalLM"),
    "vaultgemma": Family(label="VaultGemma", architecture="VaultGemmaForCausalLM", norm_shift=1.0,
        scale=("query_pre_attn_scalar", -0.5), soft_cap="attn_logit_softcapping",
        layer_tensors=layer_names("input_layernorm.weight", "pre_feedforward_layernorm.weight", *GATED),
        block="it bounds its logits"),
    "aria_text": _mixture("Aria, text", "AriaTextForCausalLM"),
    "mellum": _mixture("Mellum", "MellumForCausalLM", **QK_NORM),
    "exaone4": Family(label="EXAONE 4", architecture="Exaone4ForCausalLM", **QK_NORM,
        unrotated="sliding_window", layer_tensors=layer_names(*AFTER, *GATED), block=ADDED),
    "exaone_moe": _mixture("EXAONE MoE", "ExaoneMoeForCausalLM", **QK_NORM, unrotated="sliding_window"),
    "afmoe": Family(label="AFMoE (Trinity)", architecture="AfmoeForCausalLM", **QK_NORM,
        unrotated="sliding_window", gate="layers.{layer}.self_attn.gate_proj",
        layer_tensors=layer_names(*NORMS, "pre_mlp_layernorm.weight", "post_mlp_layernorm.weight"),
        block=EXPERTS),
    "flint": Family(label="Flint", architecture="FlintForCausalLM", **QK_NORM, unrotated="layer_types",
        sinks="layers.{layer}.self_attn.softmax_offset",
        layer_tensors=layer_names(*NORMS, "self_attn.softmax_offset"), block=EXPERTS),
    "kolibri1": _mixture("Kolibri 1", "Kolibri1ForCausalLM", **QK_NORM, unrotated="sliding_window"),
    "internlm3": Family(label="InternLM 3", architecture="LlamaForCausalLM",
        block="its class is chosen by name"),
    "iquestcoder": Family(label="IQuest-Coder", architecture="LlamaForCausalLM",
        block="its class is chosen by name"),
    # Those in which only some layers attend.
    "qwen3_next": _mixture("Qwen3-Next", "Qwen3NextForCausalLM", rotates_partly=True, **_GATED_ATTENTION,
        mixers=True),
    "qwen3_5_text": Family(label="Qwen3.5", architecture="Qwen3_5ForCausalLM", rotates_partly=True,
        **_GATED_ATTENTION, mixers=True, layer_tensors=layer_names(*NORMS, *GATED), block=_OTHERS),
    "qwen3_5_moe_text": _mixture("Qwen3.5-MoE", "Qwen3_5MoeForCausalLM", rotates_partly=True,
        **_GATED_ATTENTION, mixers=True),
    "lfm2": Family(label="LFM2", architecture="Lfm2ForCausalLM", **_LFM2, block=_OTHERS),
    "lfm2_moe": Family(label="LFM2-MoE", architecture="Lfm2MoeForCausalLM", **_LFM2, block=EXPERTS),
    "granitemoehybrid": Family(label="Granite 4", architecture="GraniteMoeHybridForCausalLM",
        rotates="position_embedding_type", scale=("attention_multiplier", 1.0), mixers=True,
        layer_tensors=layer_names(*NORMS), block=_OTHERS),
    "minimax": _mixture("MiniMax", "MiniMaxForCausalLM", needs={"sliding_window": (None,)}, mixers=True),
    "bamba": Family(label="Bamba", architecture="BambaForCausalLM", rotates_partly=True, mixers=True,
        layer_tensors=layer_names("input_layernorm.weight", "pre_ff_layernorm.weight"),
        model_tensors=("final_layernorm.weight",), block=_OTHERS),
    "jamba": Family(label="Jamba", architecture="JambaForCausalLM", rotary=None, mixers=True,
        layer_tensors=layer_names("input_layernorm.weight", "pre_ff_layernorm.weight"),
        model_tensors=("final_layernorm.weight",), block=_OTHERS),
    "olmo_hybrid": Family(label="OLMo Hybrid", architecture="OlmoHybridForCausalLM", **QK_NORM,
        norm_spans="heads", rotates="rope_theta", mixers=True, layer_tensors=layer_names(*GATED),
        block=_OTHERS),
}  # fmt: skip
FAMILIES = {kind: replace(row, kind=kind) for kind, row in _ROWS.items()}
