"""Tiny random checkpoints of every family that kvfold folds, made in a second and small enough to reason about."""

import json
from pathlib import Path
from typing import Any

import torch

ROPE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def make(
    directory: Path,
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    rope: str = "default",
    seed: int = 0,
    old_config: bool = False,
    **overrides: Any,
) -> Path:
    """Save a random checkpoint of a family; norms and biases are random too, so that no mistake hides behind ones and zeros."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = {**SIZES, "rope_parameters": dict(ROPE[rope]), **overrides}
    if family == "mistral":
        settings = {"sliding_window": None, **settings}
    if family == "qwen2":  # its config class derives head_dim
        settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
            elif "self_attn" in name:
                parameter.normal_(0, 0.2)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard_size)
    if old_config:
        _rewrite_as_4x(directory / "config.json")
    (directory / "tokenizer.json").write_text('{"made": "by the test"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def _rewrite_as_4x(path: Path) -> None:
    """As transformers 4 wrote it: rope_theta and rope_scaling, torch_dtype, nulls, and nothing that equals a default."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    for key in ("attention_dropout", "mlp_bias", "hidden_act", "pretraining_tp", "initializer_range", "rms_norm_eps"):
        config.pop(key, None)
    path.write_text(json.dumps(config))


def same_bytes(one: Path, other: Path) -> list[str]:
    """The files that differ between two directories, but for the record's own path."""
    names = {path.name for path in [*one.iterdir(), *other.iterdir()]}
    return sorted(name for name in names if (one / name).read_bytes() != (other / name).read_bytes())
