"""Defaults of the families of hybrid_rows.py, as in defaults.py."""

from typing import Any

# fmt: off
_SIZES: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
_QWEN: dict[str, Any] = {
    **_SIZES, "vocab_size": 248320, "num_attention_heads": 16, "max_position_embeddings": 32768,
    "head_dim": 256, "partial_rotary_factor": 0.25, "num_key_value_heads": 4, "intermediate_size": 12288,
}
_LFM2: dict[str, Any] = {
    **_SIZES, "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288,
    "num_key_value_heads": 8, "max_position_embeddings": 128000, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6,
}
_MAMBA: dict[str, Any] = {
    **_SIZES, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 262144,
}
HYBRID_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_QWEN, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
                   "num_hidden_layers": 48, "num_key_value_heads": 2},
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": {**_QWEN, "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2},
    "lfm2": _LFM2,
    "lfm2_moe": {**_LFM2, "hidden_size": 2048, "intermediate_size": 7168},
    "granitemoehybrid": {**_SIZES, "attention_multiplier": 1.0},
    "minimax": {**_MAMBA, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "bamba": {**_MAMBA, "vocab_size": 128000, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "jamba": {**_MAMBA, "vocab_size": 65536},
    "olmo_hybrid": {**_SIZES, "vocab_size": 100352, "hidden_size": 3840, "num_attention_heads": 30,
                    "max_position_embeddings": 65536},
}
# fmt: on
