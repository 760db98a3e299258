"""Tiny random checkpoints of every family that kvfold folds, made in a second."""

import json
from pathlib import Path
from typing import Any

import torch

ROPE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
             "original_max_position_embeddings": 32},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
}  # fmt: skip
_KINDS = ("sliding_attention", "full_attention")
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip


# The settings of a family's tiny checkpoint in addition to SIZES; the part that sets it apart from Llama is always in use.
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
_THETAS = {
    kind: {"rope_type": "default", "rope_theta": theta}
    for kind, theta in zip(_KINDS, (1e3, 1e4), strict=True)
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {**ROPE["default"], "partial_rotary_factor": 0.25},
}
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
_LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 512,
    "short_factor": [1.0, 1.5, 2.0, 4.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0],
}
_GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 9,
    "global_head_dim": 16,
    "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e4}},
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "ministral": _MIXED,
    "ministral3": {"rope_parameters": {**ROPE["yarn"], "llama_4_scaling_beta": 0.1}},
    "mixtral": {"num_local_experts": 4, "sliding_window": 9},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4},
    "gpt_oss": {**_MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {**_MIXED, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**_MIXED, "query_pre_attn_scalar": 5, "rope_parameters": _THETAS},
    "phi": {"rope_parameters": {**ROPE["default"], "partial_rotary_factor": 0.5}},
    "olmo3": {**_MIXED, "rope_parameters": _THETAS},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
                "attention_multiplier": 0.3, "mlp_bias": False},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {"rope_parameters": {**ROPE["default"], "partial_rotary_factor": 0.25}, "use_qkv_bias": True,
                 "qk_layernorm": True},
    "glm": {"rope_parameters": {**ROPE["default"], "partial_rotary_factor": 0.5}},
    "glm4": {"rope_parameters": {**ROPE["default"], "partial_rotary_factor": 0.5}},
    "cohere": {"logit_scale": 1.0, "use_qk_norm": True},
    "cohere2": {**_MIXED, "logit_scale": 1.0},
    "gpt_neox": {"rope_parameters": {**ROPE["default"], "partial_rotary_factor": 0.25}},
    "gpt2": {"n_inner": 48},
    "gptj": {"n_inner": 48, "rotary_dim": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "helium": {"head_dim": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "hyperclovax": {"attention_multiplier": 0.3},
    "nemotron": {"rope_parameters": {**ROPE["default"], "partial_rotary_factor": 0.5}},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.3},
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.3,
                         "shared_intermediate_size": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "dots1": {**_EXPERTS, **_ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "glm4_moe": {**_EXPERTS, **_ROUTED, "use_qk_norm": True,
                 "rope_parameters": {**ROPE["default"], "partial_rotary_factor": 0.5}},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "hy_v3": {**_EXPERTS, "num_experts": 4},
    "solar_open": {**_EXPERTS, **_ROUTED},
    "vaultgemma": {**_MIXED, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "mellum": {**_EXPERTS, **_MIXED, "num_experts": 4, "rope_parameters": _THETAS},
    "qwen3_next": {**_EXPERTS, **_LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {**_EXPERTS, **_LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_experts": 4,
                 "num_dense_layers": 1},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4,
                         "num_experts_per_tok": 2, "shared_intermediate_size": 16,
                         "position_embedding_type": "rope", "attention_multiplier": 0.3},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4,
                "num_experts_per_tok": 2},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "num_experts": 4,
              "expert_layer_period": 2, "expert_layer_offset": 1},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "gemma4_text": {**_GEMMA4, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8},
    "gemma4_unified_text": _GEMMA4,
    "exaone4": _MIXED,
    "cwm": _MIXED,
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0}
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
                    "no_rope_layers": [1, 0], "attention_chunk_size": 9, "floor_scale": 8},
    "exaone_moe": {**_EXPERTS, **_MIXED, "num_experts": 4, "first_k_dense_replace": 1},
    "afmoe": {**_EXPERTS, **_MIXED, "num_experts": 4, "num_dense_layers": 1},
    "cohere2_moe": {**_MIXED, "logit_scale": 1.0, "num_experts": 4, "num_shared_experts": 1,
                    "mlp_layer_types": ["sparse", "dense"], "prefix_dense_sliding_window_pattern": 2,
                    "prefix_dense_intermediate_size": 48},
    "flint": {**_EXPERTS, **_MIXED, "num_experts": 4, "shared_expert_intermediate_size": 16,
              "mlp_only_layers": [1]},
    "kolibri1": {**_EXPERTS, **_MIXED, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "deepseek_v2": {**_LATENT, **_EXPERTS, **_ROUTED, "q_lora_rank": 16, "n_shared_experts": 1,
                    "first_k_dense_replace": 1},
    "deepseek_v3": {**_LATENT, **_EXPERTS, **_ROUTED, "q_lora_rank": None, "first_k_dense_replace": 1,
                    "rope_parameters": {**ROPE["yarn"], "mscale": 1.0, "mscale_all_dim": 0.7}},
    "glm4_moe_lite": {**_LATENT, **_EXPERTS, **_ROUTED, "q_lora_rank": 16},
    "kimi_linear": {**_LATENT, **_EXPERTS, **_ROUTED, "q_lora_rank": None, "linear_num_heads": 2,
                    "linear_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "minicpm3": {**_LATENT, "q_lora_rank": 16, "rope_parameters": _LONG, "dim_model_base": 16, "scale_emb": 2, "scale_depth": 1.4},
    "sarvam_mla": {**_LATENT, **_EXPERTS, **_ROUTED, "initializer_range": 0.02},
    "axk1": {**_LATENT, **_EXPERTS, **_ROUTED, "q_lora_rank": 16, "rope_interleave": False},
    "youtu": {**_LATENT, "q_lora_rank": 16},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 8, "ffn_hidden_size": 48, "bias": True},
}  # fmt: skip
# Classes that have no head_dim of their own.
_DERIVED = {
    "qwen2", "qwen2_moe", "phi3", "phi", "olmo", "olmo2", "olmo3", "granite", "smollm3", "stablelm",
    "starcoder2", "cohere",
    "gpt_neox", "gpt2", "gptj", "opt", "falcon", "olmoe", "flex_olmo", "lfm2", "lfm2_moe",
    "granitemoehybrid", "bamba", "jamba", "olmo_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite",
    "kimi_linear", "minicpm3", "sarvam_mla", "axk1", "youtu",
}  # fmt: skip


def make(
    directory: Path,
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    rope: str = "default",
    seed: int = 0,
    old_config: bool = False,
    equal_heads: bool = False,
    **overrides: Any,
) -> Path:
    """Save a random checkpoint, norms and biases included; `equal_heads`: all key/value heads alike."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = {**SIZES, "rope_parameters": dict(ROPE[rope]), **SETTINGS.get(family, {}), **overrides}
    for ours, theirs in {"hidden_size": "word_embed_proj_dim", "num_key_value_heads": "num_kv_heads"}.items():
        if theirs in SETTINGS.get(family, {}):
            settings[theirs] = settings[ours]
    if "kv_lora_rank" in settings:  # which all heads share
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    head_dim = settings["head_dim"]
    if family in _DERIVED:
        head_dim = settings["hidden_size"] // settings["num_attention_heads"]
        del settings["head_dim"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "_norm." in name:
                parameter.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.3)
            elif "attn" in name or "attention" in name:
                parameter.normal_(0, 0.2)
            if equal_heads and ".k_layernorm.norms." in name:
                parameter.copy_(model.get_parameter(name.partition("norms.")[0] + "norms.0.weight"))
            elif equal_heads:
                _equalise(name, parameter, settings["num_attention_heads"], head_dim)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard_size)
    if old_config:
        _rewrite_as_4x(directory / "config.json")
    (directory / "tokenizer.json").write_text('{"made": "by the test"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def _equalise(name: str, parameter: torch.Tensor, heads: int, head_dim: int) -> None:
    """Make all key heads the first one, and all value heads, wherever a family keeps them."""
    module, part = name.split(".")[-2:]
    if module in {"k_proj", "v_proj"} or (module == "k_norm" and parameter.numel() > head_dim):
        stacks = [parameter.view(-1) if module == "k_norm" else parameter]
    elif module == "qkv_proj":  # all queries, all keys, all values
        stacks = list(parameter[heads * head_dim :].chunk(2))
    elif module == "c_attn":  # the same, as columns
        stacks = list((parameter.mT if part == "weight" else parameter)[heads * head_dim :].chunk(2))
    elif module == "query_key_value":  # a key head's queries, its key, its value
        grid = parameter.view(heads, 3, head_dim, *parameter.shape[1:])
        stacks = [grid[:, 1], grid[:, 2]]
    else:
        return
    for stack in stacks:
        rows = stack if module == "query_key_value" else stack.unflatten(0, (-1, head_dim))
        rows.copy_(rows[:1].clone().expand_as(rows))


def _rewrite_as_4x(path: Path) -> None:
    """As transformers 4 wrote it: rope_theta, torch_dtype, nulls, and nothing that equals a default."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    for key in (
        "attention_dropout",
        "mlp_bias",
        "hidden_act",
        "pretraining_tp",
        "initializer_range",
        "rms_norm_eps",
    ):
        config.pop(key, None)
    path.write_text(json.dumps(config))


def same_bytes(one: Path, other: Path) -> list[str]:
    """The files that differ between two directories, but for the record's own path."""
    names = {path.name for path in [*one.iterdir(), *other.iterdir()]}
    return sorted(name for name in names if (one / name).read_bytes() != (other / name).read_bytes())
