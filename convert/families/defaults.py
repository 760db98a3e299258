"""Defaults of each family's configuration class in transformers, for fields that config.json leaves out.

Tests compare them with transformers. They stand under the names of Llama's config.json; a row of the table of
families gives a family's other names.
"""

from typing import Any

from .hybrid_defaults import HYBRID_DEFAULTS
from .newer_defaults import NEWER_DEFAULTS

# fmt: off
_SIZES: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}
# Fields of the stock latent class apart from sizes, for the families that it can hold.
_COMMON = {
    **_SIZES, "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6, "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None, "attention_dropout": 0.0, "use_cache": True,
}
_MISTRAL = {
    **_COMMON, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN = {
    **_COMMON, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False, "bos_token_id": None, "eos_token_id": None,
}
_GEMMA = {
    **_COMMON, "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh", "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    "tie_word_embeddings": True,
}
_GEMMA2 = {
    **_SIZES, "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
}
_OLMO = {
    **_SIZES, "vocab_size": 50304, "hidden_act": "silu", "initializer_range": 0.02, "eos_token_id": 50279,
    "pad_token_id": 1,
    "attention_dropout": 0.0, "use_cache": True,
}
_GLM = {
    **_COMMON, "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "bos_token_id": None, "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329,
}
_COHERE = {
    **_SIZES, "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
    "num_attention_heads": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}
_GPT2 = {
    "vocab_size": 50257, "hidden_size": 768, "intermediate_size": None, "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024, "tie_word_embeddings": True, "activation_function": "gelu_new",
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "use_cache": True,
    "bos_token_id": 50256, "eos_token_id": 50256, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "mlp_bias": False},
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "ministral3": {
        **{key: value for key, value in _MISTRAL.items() if key != "sliding_window"}, "vocab_size": 131072,
        "num_hidden_layers": 34, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
        "pad_token_id": 11,
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
                            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                            "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1},
    },
    "mixtral": {**_SIZES, "intermediate_size": 14336, "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "rope_theta": 1e6},
    "qwen2": {**_QWEN, "sliding_window": 4096},
    "qwen2_moe": {**_QWEN, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
                  "num_attention_heads": 16,
                  "num_key_value_heads": 16},
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen3_moe": {**_QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
                  "num_key_value_heads": 4},
    "gpt_oss": {**_SIZES, "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
                "num_hidden_layers": 36,
                "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                "max_position_embeddings": 131072,
                "sliding_window": 128, "sliding_window_pattern": 2, "rope_theta": 150000.0,
                "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                    "truncate": False, "original_max_position_embeddings": 4096}},
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": {**_GEMMA2, "vocab_size": 262208, "max_position_embeddings": 131072,
                    "sliding_window_pattern": 6,
                    "attn_logit_softcapping": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
                    "rms_norm_eps": 1e-6},
    "phi": {**_SIZES, "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "partial_rotary_factor": 0.5},
    "phi3": {**_COMMON, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
             "max_position_embeddings": 4096,
             "rms_norm_eps": 1e-5, "eos_token_id": 32000, "pad_token_id": 32000, "sliding_window": None},
    "olmo": {**_OLMO, "bos_token_id": None},
    "olmo2": {**_OLMO, "rms_norm_eps": 1e-5},
    "olmo3": {**_OLMO, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4,
              "rope_theta": 5e5},
    "granite": {**_COMMON, "mlp_bias": False, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
                "logits_scaling": 1.0,
                "attention_multiplier": 1.0},
    "smollm3": {**_COMMON, "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36,
                "num_attention_heads": 16,
                "num_key_value_heads": 4, "max_position_embeddings": 32768, "mlp_bias": False,
                "use_sliding_window": False,
                "no_rope_layer_interval": 4, "rope_theta": 2e6, "bos_token_id": 128000,
                "eos_token_id": 128001,
                "pad_token_id": 128004, "tie_word_embeddings": True},
    "stablelm": {**_SIZES, "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912,
                 "max_position_embeddings": 4096,
                 "partial_rotary_factor": 0.25},
    "starcoder2": {**_SIZES, "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288,
                   "num_hidden_layers": 30,
                   "num_attention_heads": 24, "num_key_value_heads": 2, "max_position_embeddings": 4096,
                   "tie_word_embeddings": True},
    "glm": _GLM,
    "glm4": _GLM,
    "cohere": {**_COHERE, "rope_theta": 5e5},
    "cohere2": {**_COHERE, "head_dim": 128, "sliding_window": 4096, "sliding_window_pattern": 4},
    "cohere2_moe": {**_COHERE, "head_dim": 128, "sliding_window": 4096, "sliding_window_pattern": 4,
                    "prefix_dense_sliding_window_pattern": 1},
    "gpt_neox": {**_SIZES, "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576,
                 "num_hidden_layers": 44,
                 "num_attention_heads": 64, "hidden_act": "gelu", "attention_dropout": 0.0,
                 "hidden_dropout": 0.0,
                 "initializer_range": 0.02, "layer_norm_eps": 1e-5, "use_cache": True, "bos_token_id": 0,
                 "eos_token_id": 2,
                 "use_parallel_residual": True, "attention_bias": True, "partial_rotary_factor": 0.25},
    "gpt2": _GPT2,
    "gptj": {**_SIZES, "vocab_size": 50400, "intermediate_size": None, "num_hidden_layers": 28,
             "num_attention_heads": 16,
             "rotary_dim": 64},
    "opt": {**_SIZES, "vocab_size": 50272, "hidden_size": 768, "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12, "tie_word_embeddings": True},
    "falcon": {**_SIZES, "vocab_size": 65024, "hidden_size": 4544, "intermediate_size": None,
               "num_attention_heads": 71,
               "tie_word_embeddings": True, "alibi": False, "multi_query": True,
               "new_decoder_architecture": False},
    **NEWER_DEFAULTS,
    **HYBRID_DEFAULTS,
}
# fmt: on
