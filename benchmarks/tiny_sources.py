"""Tiny random source checkpoints, a tokenizer, a text and a recipe, made when they are first asked for.

They belong to the benchmarks alone: benchmarks that compare revisions need sources that no revision changes.
"""

import json
import random
import shlex
from pathlib import Path
from typing import Any

BOS, EOS = "<s>", "</s>"
_VOCABULARY = 258  # bytes, BOS, EOS
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}
_WIDE = {
    "hidden_size": 640,
    "head_dim": 64,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "num_hidden_layers": 1,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# The settings of every model; biases and key norms are those that a family has by default.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "head_dim": 16, "num_key_value_heads": 4},
    "heads": {"family": "llama", "head_dim": 8},
    "wide": {"family": "llama", **_WIDE},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 8},
    "mixtral": {"family": "mixtral", "dtype": "bfloat16", "head_dim": 8, **_EXPERTS},
}
RECIPE = """\
schema: 1
student: folded
output: distilled
data: {{source: {text}, seq_len: 64, seed: 0}}
stages:
  - {{name: align, losses: {{attention_output: 1.0}}, train: attention, tokens: 1k, lr: 1e-3,
     batch_tokens: 512}}
  - {{name: kl, losses: {{kl: 1.0, ce: 0.1}}, tokens: 2k, lr: 5e-4, batch_tokens: 512}}
evaluate: {{source: {held_out}, every: 2, windows: 4}}
log_every: 1
"""


class Sources(dict[str, str]):
    """The paths of sources by name, quoted for a shell: MODELS, `text`, `held_out` and `recipe`.

    Args:
        folder: where they are made.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> str:
        path = self.folder / name
        if name in MODELS:
            _make_model(path, **MODELS[name])
        elif name in {"text", "held_out"}:
            path = path.with_suffix(".txt")
            path.write_text(_make_text(seed=len(name)), encoding="utf-8")
        elif name == "recipe":
            path = path.with_suffix(".yaml")
            texts = {part: json.dumps(shlex.split(self[part])[0]) for part in ("text", "held_out")}
            path.write_text(RECIPE.format_map(texts), encoding="utf-8")
        else:
            raise KeyError(name)
        self[name] = shlex.quote(str(path))
        return self[name]


def _make_model(path: Path, family: str, dtype: str = "float32", **settings: Any) -> None:
    """Save a checkpoint with random weights, norms and biases, and a tokenizer of bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **_SIZES | settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
            elif "attn" in name:
                parameter.normal_(0, 1.6 * parameter.shape[1] ** -0.5)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    _make_tokenizer().save_pretrained(path)


def _make_tokenizer() -> Any:
    """Return a tokenizer with one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, BOS, EOS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)


def _make_text(seed: int) -> str:
    """Return about 20 kB of sentences of invented words."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("aeioulnrstdkm", k=draw.randint(2, 8))) for _ in range(200)]
    sentences = [
        " ".join(draw.choices(words, k=draw.randint(5, 12))).capitalize() + ".\n" for _ in range(400)
    ]
    return "".join(sentences)
