"""Checkpoints with random weights of a given size, and what a command on them costs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from kvfold.checkpoints.shards import ShardWriter, TensorSpec

HIDDEN, HEAD, VOCABULARY = 2048, 128, 32000
FEED_FORWARD = 2.75  # its width as a multiple of the hidden size


def generate(directory: Path, gigabytes: float, *, hidden: int = HIDDEN, layers: int | None = None) -> int:
    """Write a random bfloat16 Llama of about that size, or of so many layers; return their number."""
    wide = int(FEED_FORWARD * hidden)
    layer = 4 * hidden * hidden + 3 * hidden * wide + 2 * hidden
    layers = layers or max(1, round((gigabytes * 1e9 / 2 - 2 * VOCABULARY * hidden) / layer))
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (VOCABULARY, hidden) for name in ("model.embed_tokens", "lm_head")
    }
    shapes["model.norm.weight"] = (hidden,)
    for number in range(layers):
        prefix = f"model.layers.{number}."
        shapes |= {f"{prefix}self_attn.{role}_proj.weight": (hidden, hidden) for role in "qkvo"}
        shapes |= {f"{prefix}mlp.{role}_proj.weight": (wide, hidden) for role in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (hidden, wide)}
        shapes |= {f"{prefix}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
    specs = {name: TensorSpec(torch.bfloat16, shape) for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(directory, specs, 10**9) as writer:
        for name, shape in shapes.items():
            writer.write(name, torch.randn(shape, generator=generator) * 0.02)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": hidden // HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return layers


def timed(command: list[str]) -> dict[str, float]:
    """Return wall seconds, CPU seconds and peak resident megabytes of a command."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command} failed")
    cpu = usage.ru_utime + usage.ru_stime
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in kilobytes on Linux
    return {
        "seconds": round(time.monotonic() - start, 3),
        "cpu_seconds": round(cpu, 3),
        "peak_mb": round(usage.ru_maxrss * unit / 1e6),
    }


def write_words(directory: Path, file: Path, tokens: int) -> None:
    """Write a tokenizer of numbers into a model's directory, and a text of random ones into a file."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    ids = torch.randint(VOCABULARY, (2 * tokens,), generator=torch.Generator().manual_seed(0))
    file.write_text(" ".join(map(str, ids.tolist())), encoding="utf-8")
