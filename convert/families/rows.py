"""The table of families, a row each. Foreign weights' names stand here, in family.py and in hosts.py only."""

from dataclasses import replace
from typing import Any

from .family import Block, Family

EXPERTS = "its MLPs are mixtures of experts"
LAYERNORM = "it has LayerNorm with a mean and a bias, and an MLP without a gate"
ADDED = "it normalises what a layer adds to the residual stream"
PARALLEL = "its attention and MLP read one norm in parallel"
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
    "block": ADDED,
}
_APERTUS: dict[str, Any] = {**QK_NORM, "block": "its MLP has no gate"}
_NO_BIAS: dict[str, Any] = {"attention_bias": (None, False)}
_GATED_ATTENTION: dict[str, Any] = {**QK_NORM, "norm_shift": 1.0, "gate": "q", "needs": _NO_BIAS}
_LFM2: dict[str, Any] = {
    "names": {"rms_norm_eps": "norm_eps"},
    "q_norm": "layers.{layer}.self_attn.q_layernorm.weight",
    "k_norm": "layers.{layer}.self_attn.k_layernorm.weight",
    "o": "layers.{layer}.self_attn.out_proj",
    "mixers": True,
}
_LAYERNORM_EPS = {"rms_norm_eps": "layer_norm_eps"}
_OTHERS = "some of its layers do not attend"


def _mixture(label: str, architecture: str, **own: Any) -> Family:
    return Family(label=label, architecture=architecture, block=EXPERTS, **own)


def _latent(label: str, architecture: str, **own: Any) -> Family:
    """Return the row of a family that has latent attention; what follows it passes unchanged."""
    return Family(label=label, architecture=architecture, latent=True, k=None, v=None, kv_heads=None,
        needs=_NO_BIAS, block=EXPERTS, **{"rotary": "interleaved", **own})  # fmt: skip


_ROWS = {
    "llama": Family(label="Llama", architecture="LlamaForCausalLM"),
    "mistral": Family(label="Mistral", architecture="MistralForCausalLM", windowed=True),
    "ministral": Family(label="Ministral", architecture="MinistralForCausalLM", windowed=True),
    "ministral3": Family(label="Ministral 3", architecture="Ministral3ForCausalLM",
        query_growth="llama_4_scaling_beta", block="it scales its queries by their position"),
    "mixtral": Family(label="Mixtral", architecture="MixtralForCausalLM", block=EXPERTS),
    "qwen2": Family(label="Qwen2", architecture="Qwen2ForCausalLM"),
    "qwen2_moe": _mixture("Qwen2-MoE", "Qwen2MoeForCausalLM"),
    "qwen3": Family(label="Qwen3", architecture="Qwen3ForCausalLM", **QK_NORM),
    "qwen3_moe": _mixture("Qwen3-MoE", "Qwen3MoeForCausalLM", **QK_NORM),
    "gpt_oss": Family(label="gpt-oss", architecture="GptOssForCausalLM",
        sinks="layers.{layer}.self_attn.sinks", block=EXPERTS),
    "gemma": Family(label="Gemma", architecture="GemmaForCausalLM",
        block=Block(norm_shift=1.0, embedding_root=True, activation="gelu_pytorch_tanh")),
    "gemma2": Family(label="Gemma 2", architecture="Gemma2ForCausalLM", scale=("query_pre_attn_scalar", -0.5),
        soft_cap="attn_logit_softcapping", block=ADDED),
    "gemma3_text": Family(label="Gemma 3", architecture="Gemma3ForCausalLM",
        needs={"use_bidirectional_attention": (None, False)}, **QK_NORM, norm_shift=1.0,
        scale=("query_pre_attn_scalar", -0.5), soft_cap="attn_logit_softcapping", block=ADDED),
    "phi": Family(label="Phi-1, Phi-2", architecture="PhiForCausalLM", rotates_partly=True,
        needs={"qk_layernorm": (None, False)},
        because=", because kvfold has no key norms with a bias",
        o="layers.{layer}.self_attn.dense", block=PARALLEL),
    "phi3": Family(label="Phi-3, Phi-4-mini", architecture="Phi3ForCausalLM", rotates_partly=True,
        qkv="layers.{layer}.self_attn.qkv_proj", block=Block(gate_up=True)),
    "olmo": Family(label="OLMo", architecture="OlmoForCausalLM", clip="clip_qkv", block=Block(centred=True)),
    "olmo2": Family(label="OLMo 2", architecture="Olmo2ForCausalLM", **QK_NORM, norm_spans="heads",
        block=ADDED),
    "olmo3": Family(label="OLMo 3", architecture="Olmo3ForCausalLM", **QK_NORM, norm_spans="heads",
        block=ADDED),
    "granite": Family(label="Granite", architecture="GraniteForCausalLM", scale=("attention_multiplier", 1.0),
        block=Block(embedding="embedding_multiplier", residual="residual_multiplier",
            logits="logits_scaling")),
    "smollm3": Family(label="SmolLM3", architecture="SmolLM3ForCausalLM", unrotated="no_rope_layers"),
    "stablelm": Family(label="StableLM", architecture="StableLmForCausalLM", names=_LAYERNORM_EPS,
        rotates_partly=True, q_norm="layers.{layer}.self_attn.q_layernorm.norms.{head}.weight",
        k_norm="layers.{layer}.self_attn.k_layernorm.norms.{head}.weight", norm_spans="each",
        norm_flag="qk_layernorm", block="it has LayerNorm with a mean and a bias"),
    "starcoder2": Family(label="Starcoder2", architecture="Starcoder2ForCausalLM", block=LAYERNORM),
    "glm": Family(label="GLM", architecture="GlmForCausalLM", rotates_partly=True, rotary="interleaved",
        block=Block(gate_up=True)),
    "glm4": Family(label="GLM-4", architecture="Glm4ForCausalLM", rotates_partly=True, rotary="interleaved",
        block=ADDED),
    "cohere": Family(label="Cohere", architecture="CohereForCausalLM", names=_LAYERNORM_EPS, **QK_NORM,
        norm_spans="each", norm_flag="use_qk_norm", rotary="interleaved", block=PARALLEL),
    "cohere2": Family(label="Cohere 2", architecture="Cohere2ForCausalLM", rotary="interleaved",
        unrotated="layer_types", block=PARALLEL),
    "cohere2_moe": Family(label="Cohere 2 MoE", architecture="Cohere2MoeForCausalLM", rotary="interleaved",
        unrotated="layer_types", dense_rotate="prefix_dense_sliding_window_pattern", block=EXPERTS),
    "gpt_neox": Family(label="GPT-NeoX, Pythia", architecture="GPTNeoXForCausalLM", rotates_partly=True,
        prefix="gpt_neox.", qkv="layers.{layer}.attention.query_key_value",
        o="layers.{layer}.attention.dense", fused="grouped", kv_heads=None, host="falcon",
        embedding="embed_in.weight", head="embed_out.weight", block=PARALLEL),
    "gpt2": Family(label="GPT-2", architecture="GPT2LMHeadModel", names={"intermediate_size": "n_inner"},
        needs={"add_cross_attention": (None, False), "scale_attn_weights": (True,)}, prefix="transformer.",
        qkv="h.{layer}.attn.c_attn", o="h.{layer}.attn.c_proj", transposed=True, rotary=None,
        scale_by_layer="scale_attn_by_inverse_layer_idx", kv_heads=None, host="gpt_bigcode",
        embedding="wte.weight", block="it has no rotation, and LayerNorm with a mean and a bias"),
    "gptj": Family(label="GPT-J", architecture="GPTJForCausalLM", names={"intermediate_size": "n_inner"},
        prefix="transformer.", **_own("h.{layer}.attn"), rotary="interleaved", kv_heads=None,
        embedding="wte.weight", block=PARALLEL),
    "opt": Family(label="OPT", architecture="OPTForCausalLM", names={"intermediate_size": "ffn_dim"},
        prefix="model.decoder.", **_own("layers.{layer}.self_attn"), rotary=None, kv_heads=None,
        block="it has no rotation, and LayerNorm with a mean and a bias"),
    "falcon": Family(label="Falcon, new decoder", architecture="FalconForCausalLM",
        names={"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
        needs={"alibi": (None, False), "new_decoder_architecture": (True,)}, prefix="transformer.",
        qkv="h.{layer}.self_attention.query_key_value", o="h.{layer}.self_attention.dense", fused="grouped",
        kv_heads="num_kv_heads", embedding="word_embeddings.weight", block=PARALLEL, caches_queries=True),
    "arcee": Family(label="Arcee", architecture="ArceeForCausalLM", block="its MLP has no gate"),
    "helium": Family(label="Helium", architecture="HeliumForCausalLM", rotary="interleaved"),
    "cwm": Family(label="CWM", architecture="CwmForCausalLM", windowed=True),
    "seed_oss": Family(label="Seed-OSS", architecture="SeedOssForCausalLM"),
    "ernie4_5": Family(label="Ernie 4.5", architecture="Ernie4_5ForCausalLM", rotary="interleaved",
        needs={"use_bias": (None, False)}),
    "ernie4_5_moe": _mixture("Ernie 4.5 MoE", "Ernie4_5_MoeForCausalLM", rotary="interleaved"),
    "hyperclovax": Family(label="HyperCLOVA X", architecture="HyperCLOVAXForCausalLM",
        scale=("attention_multiplier", 1.0),
        block="it scales and may normalise what a layer adds to the residual stream"),
    "jais2": Family(label="Jais 2", architecture="Jais2ForCausalLM", block=LAYERNORM),
    "nemotron": Family(label="Nemotron", architecture="NemotronForCausalLM", rotates_partly=True,
        block=LAYERNORM),
    "granitemoe": _mixture("Granite MoE", "GraniteMoeForCausalLM", scale=("attention_multiplier", 1.0)),
    "granitemoeshared": _mixture("Granite MoE, shared expert", "GraniteMoeSharedForCausalLM",
        scale=("attention_multiplier", 1.0)),
    "olmoe": Family(label="OLMoE", architecture="OlmoeForCausalLM", clip="clip_qkv", **QK_NORM,
        norm_spans="heads", block=EXPERTS),
    "flex_olmo": Family(label="FlexOlmo", architecture="FlexOlmoForCausalLM", **QK_NORM, norm_spans="heads",
        block=EXPERTS),
    "dots1": _mixture("dots.llm1", "Dots1ForCausalLM", **QK_NORM),
    "glm4_moe": _mixture("GLM-4.5 and later", "Glm4MoeForCausalLM", rotates_partly=True, **QK_NORM,
        norm_flag="use_qk_norm"),
    "apertus": Family(label="Apertus", architecture="ApertusForCausalLM", **_APERTUS),
    "apertus1p5_text": Family(label="Apertus 1.5, text", architecture="Apertus1p5TextForCausalLM",
        **_APERTUS),
    "minimax_m2": _mixture("MiniMax M2", "MiniMaxM2ForCausalLM", rotates_partly=True, **QK_NORM,
        norm_spans="heads"),
    "phimoe": Family(label="Phi-3.5-MoE", architecture="PhimoeForCausalLM", block=EXPERTS),
    "hy_v3": _mixture("Hunyuan 3", "HYV3ForCausalLM", **QK_NORM),
    "hunyuan_v1_dense": Family(label="Hunyuan", architecture="HunYuanDenseV1ForCausalLM", **_HUNYUAN),
    "hunyuan_v1_moe": _mixture("Hunyuan MoE", "HunYuanMoEV1ForCausalLM", **_HUNYUAN),
    "llama4_text": _mixture("Llama 4, text", "Llama4ForCausalLM", late_norms="bare", norm_flag="use_qk_norm",
        rotary="interleaved", unrotated="no_rope_layers",
        unlatent="its class can scale queries by position in layers without rotation, and rotates in the "
        "others by complex numbers"),
    "gemma4_text": Family(label="Gemma 4, text", architecture="Gemma4ForCausalLM", **_GEMMA4),
    "gemma4_unified_text": Family(label="Gemma 4 unified, text", architecture="Gemma4UnifiedForCausalLM",
        **_GEMMA4),
    "nanochat": Family(label="nanochat", architecture="NanoChatForCausalLM", late_norms="bare",
        rotary="reversed", block="its norms have no weights, and its MLP has no gate"),
    "solar_open": _mixture("Solar Open", "SolarOpenForCausalLM"),
    "vaultgemma": Family(label="VaultGemma", architecture="VaultGemmaForCausalLM", norm_shift=1.0,
        scale=("query_pre_attn_scalar", -0.5), soft_cap="attn_logit_softcapping",
        block="it bounds its logits"),
    "aria_text": _mixture("Aria, text", "AriaTextForCausalLM"),
    "mellum": _mixture("Mellum", "MellumForCausalLM", **QK_NORM),
    "exaone4": Family(label="EXAONE 4", architecture="Exaone4ForCausalLM", **QK_NORM,
        unrotated="sliding_window", block=ADDED),
    "exaone_moe": _mixture("EXAONE MoE", "ExaoneMoeForCausalLM", **QK_NORM, unrotated="sliding_window"),
    "afmoe": Family(label="AFMoE (Trinity)", architecture="AfmoeForCausalLM", **QK_NORM,
        unrotated="sliding_window", gate="layers.{layer}.self_attn.gate_proj", block=EXPERTS),
    "flint": Family(label="Flint", architecture="FlintForCausalLM", **QK_NORM, unrotated="layer_types",
        sinks="layers.{layer}.self_attn.softmax_offset", block=EXPERTS),
    "kolibri1": _mixture("Kolibri 1", "Kolibri1ForCausalLM", **QK_NORM, unrotated="sliding_window"),
    "internlm3": Family(label="InternLM 3", architecture="LlamaForCausalLM",
        block="its class is chosen by name"),
    "iquestcoder": Family(label="IQuest-Coder", architecture="LlamaForCausalLM",
        block="its class is chosen by name"),
    # Those in which only some layers attend.
    "qwen3_next": _mixture("Qwen3-Next", "Qwen3NextForCausalLM", rotates_partly=True, **_GATED_ATTENTION,
        mixers=True),
    "qwen3_5_text": Family(label="Qwen3.5", architecture="Qwen3_5ForCausalLM", rotates_partly=True,
        **_GATED_ATTENTION, mixers=True, block=_OTHERS),
    "qwen3_5_moe_text": _mixture("Qwen3.5-MoE", "Qwen3_5MoeForCausalLM", rotates_partly=True,
        **_GATED_ATTENTION, mixers=True),
    "lfm2": Family(label="LFM2", architecture="Lfm2ForCausalLM", **_LFM2, block=_OTHERS),
    "lfm2_moe": Family(label="LFM2-MoE", architecture="Lfm2MoeForCausalLM", **_LFM2, block=EXPERTS),
    "granitemoehybrid": Family(label="Granite 4", architecture="GraniteMoeHybridForCausalLM",
        rotates="position_embedding_type", scale=("attention_multiplier", 1.0), mixers=True, block=_OTHERS),
    "minimax": _mixture("MiniMax", "MiniMaxForCausalLM", needs={"sliding_window": (None,)}, mixers=True),
    "bamba": Family(label="Bamba", architecture="BambaForCausalLM", rotates_partly=True, mixers=True,
        block=_OTHERS),
    "jamba": Family(label="Jamba", architecture="JambaForCausalLM", rotary=None, mixers=True, block=_OTHERS),
    "olmo_hybrid": Family(label="OLMo Hybrid", architecture="OlmoHybridForCausalLM", **QK_NORM,
        norm_spans="heads", rotates="rope_theta", mixers=True, block=_OTHERS),
    # Those whose attention is latent already.
    "deepseek_v2": _latent("DeepSeek-V2", "DeepseekV2ForCausalLM"),
    "deepseek_v3": _latent("DeepSeek-V3, R1, Moonlight", "DeepseekV3ForCausalLM"),
    "glm4_moe_lite": _latent("GLM-4.7-Flash", "Glm4MoeLiteForCausalLM"),
    "kimi_linear": _latent("Kimi Linear", "KimiLinearForCausalLM", rotary=None, mixers=True),
    "minicpm3": _latent("MiniCPM3", "MiniCPM3ForCausalLM", rotary="half"),
    "sarvam_mla": _latent("Sarvam", "DeepseekV3ForCausalLM"),
    "axk1": _latent("A.X-K1", "AXK1ForCausalLM"),
    "youtu": _latent("Youtu-LLM", "YoutuForCausalLM"),
}  # fmt: skip
FAMILIES = {kind: replace(row, kind=kind) for kind, row in _ROWS.items()}
