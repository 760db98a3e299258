"""More rows of the table of families: those that were added in 2026."""

from typing import Any

from .family import Family
from .row_parts import ADDED, AFTER, EXPERTS, GATED, LAYERNORM, NORMS, QK_NORM, SANDWICH, affine, layer_names

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
NEWER = {
    "arcee": Family(
        label="Arcee",
        architecture="ArceeForCausalLM",
        layer_tensors=layer_names(*NORMS, *GATED[1:]),
        block="its MLP has no gate",
    ),
    "helium": Family(label="Helium", architecture="HeliumForCausalLM", rotary="interleaved"),
    "cwm": Family(label="CWM", architecture="CwmForCausalLM", full_first=True),
    "seed_oss": Family(label="Seed-OSS", architecture="SeedOssForCausalLM"),
    "ernie4_5": Family(
        label="Ernie 4.5",
        architecture="Ernie4_5ForCausalLM",
        rotary="interleaved",
        needs={"use_bias": (None, False)},
    ),
    "ernie4_5_moe": Family(
        label="Ernie 4.5 MoE",
        architecture="Ernie4_5_MoeForCausalLM",
        rotary="interleaved",
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "hyperclovax": Family(
        label="HyperCLOVA X",
        architecture="HyperCLOVAXForCausalLM",
        scale=("attention_multiplier", 1.0),
        block="it scales and may normalise what a layer adds to the residual stream",
    ),
    "jais2": Family(
        label="Jais 2",
        architecture="Jais2ForCausalLM",
        layer_tensors=layer_names(*affine("input_layernorm", "post_attention_layernorm"), *GATED[1:]),
        model_tensors=affine("norm"),
        block=LAYERNORM,
    ),
    "nemotron": Family(
        label="Nemotron",
        architecture="NemotronForCausalLM",
        rotates_partly=True,
        layer_tensors=layer_names(*affine("input_layernorm", "post_attention_layernorm"), *GATED[1:]),
        model_tensors=affine("norm"),
        block=LAYERNORM,
    ),
    "granitemoe": Family(
        label="Granite MoE",
        architecture="GraniteMoeForCausalLM",
        scale=("attention_multiplier", 1.0),
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "granitemoeshared": Family(
        label="Granite MoE, shared expert",
        architecture="GraniteMoeSharedForCausalLM",
        scale=("attention_multiplier", 1.0),
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "olmoe": Family(
        label="OLMoE",
        architecture="OlmoeForCausalLM",
        needs={"clip_qkv": (None,)},
        **QK_NORM,
        norm_spans="heads",
        layer_tensors=layer_names(*NORMS, "mlp.gate.weight"),
        block=EXPERTS,
    ),
    "flex_olmo": Family(
        label="FlexOlmo",
        architecture="FlexOlmoForCausalLM",
        **QK_NORM,
        norm_spans="heads",
        layer_tensors=layer_names(*AFTER, "mlp.gate.weight"),
        block=EXPERTS,
    ),
    "dots1": Family(
        label="dots.llm1",
        architecture="Dots1ForCausalLM",
        **QK_NORM,
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "glm4_moe": Family(
        label="GLM-4.5 and later",
        architecture="Glm4MoeForCausalLM",
        rotates_partly=True,
        **QK_NORM,
        norm_flag="use_qk_norm",
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "apertus": Family(label="Apertus", architecture="ApertusForCausalLM", **_APERTUS),
    "apertus1p5_text": Family(
        label="Apertus 1.5, text", architecture="Apertus1p5TextForCausalLM", **_APERTUS
    ),
    "minimax_m2": Family(
        label="MiniMax M2",
        architecture="MiniMaxM2ForCausalLM",
        rotates_partly=True,
        **QK_NORM,
        norm_spans="heads",
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "phimoe": Family(
        label="Phi-3.5-MoE",
        architecture="PhimoeForCausalLM",
        layer_tensors=layer_names(*affine("input_layernorm", "post_attention_layernorm")),
        model_tensors=affine("norm"),
        block=EXPERTS,
    ),
    "hy_v3": Family(
        label="Hunyuan 3",
        architecture="HYV3ForCausalLM",
        **QK_NORM,
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "hunyuan_v1_dense": Family(label="Hunyuan", architecture="HunYuanDenseV1ForCausalLM", **_HUNYUAN),
    "hunyuan_v1_moe": Family(
        label="Hunyuan MoE",
        architecture="HunYuanMoEV1ForCausalLM",
        **_HUNYUAN,
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "llama4_text": Family(
        label="Llama 4, text",
        architecture="Llama4ForCausalLM",
        late_norms="bare",
        norm_flag="use_qk_norm",
        rotary="interleaved",
        unrotated="no_rope_layers",
        unlatent="its class can scale queries by position in layers without rotation, and rotates in the "
        "others by complex numbers",
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "gemma4_text": Family(label="Gemma 4, text", architecture="Gemma4ForCausalLM", **_GEMMA4),
    "gemma4_unified_text": Family(
        label="Gemma 4 unified, text", architecture="Gemma4UnifiedForCausalLM", **_GEMMA4
    ),
    "nanochat": Family(
        label="nanochat",
        architecture="NanoChatForCausalLM",
        late_norms="bare",
        rotary="reversed",
        layer_tensors=layer_names("mlp.fc1.weight", "mlp.fc2.weight"),
        model_tensors=(),
        block="its norms have no weights, and its MLP has no gate",
    ),
    "solar_open": Family(
        label="Solar Open",
        architecture="SolarOpenForCausalLM",
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "vaultgemma": Family(
        label="VaultGemma",
        architecture="VaultGemmaForCausalLM",
        norm_shift=1.0,
        scale=("query_pre_attn_scalar", -0.5),
        soft_cap="attn_logit_softcapping",
        layer_tensors=layer_names("input_layernorm.weight", "pre_feedforward_layernorm.weight", *GATED),
        block="it bounds its logits",
    ),
    "aria_text": Family(
        label="Aria, text",
        architecture="AriaTextForCausalLM",
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "mellum": Family(
        label="Mellum",
        architecture="MellumForCausalLM",
        **QK_NORM,
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "exaone4": Family(
        label="EXAONE 4",
        architecture="Exaone4ForCausalLM",
        **QK_NORM,
        unrotated="sliding_window",
        layer_tensors=layer_names(*AFTER, *GATED),
        block=ADDED,
    ),
    "exaone_moe": Family(
        label="EXAONE MoE",
        architecture="ExaoneMoeForCausalLM",
        **QK_NORM,
        unrotated="sliding_window",
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "afmoe": Family(
        label="AFMoE (Trinity)",
        architecture="AfmoeForCausalLM",
        names={"sliding_window_pattern": "global_attn_every_n_layers"},
        **QK_NORM,
        unrotated="sliding_window",
        gate="layers.{layer}.self_attn.gate_proj",
        layer_tensors=layer_names(*NORMS, "pre_mlp_layernorm.weight", "post_mlp_layernorm.weight"),
        block=EXPERTS,
    ),
    "flint": Family(
        label="Flint",
        architecture="FlintForCausalLM",
        **QK_NORM,
        unrotated="layer_types",
        reads_all=lambda layer, layers: layer < 2 or layer % 4 == 1 or layer == layers - 1,
        sinks="layers.{layer}.self_attn.softmax_offset",
        layer_tensors=layer_names(*NORMS, "self_attn.softmax_offset"),
        block=EXPERTS,
    ),
    "kolibri1": Family(
        label="Kolibri 1",
        architecture="Kolibri1ForCausalLM",
        **QK_NORM,
        unrotated="sliding_window",
        layer_tensors=layer_names(*NORMS),
        block=EXPERTS,
    ),
    "internlm3": Family(
        label="InternLM 3", architecture="LlamaForCausalLM", block="its class is chosen by name"
    ),
    "iquestcoder": Family(
        label="IQuest-Coder", architecture="LlamaForCausalLM", block="its class is chosen by name"
    ),
}
