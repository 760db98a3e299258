"""Tiny DeepSeek models, and the ways of generating with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    StaticCache,
)

from kvfold.convert.formats import absorption as absorbed

YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24, "max_position_embeddings": 256, "first_k_dense_replace": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "v3": (3, {}),
    "v3, halves": (3, {"rope_interleave": False, "attention_bias": True}),
    "v3, compressed queries, experts, yarn": (3,
        {"q_lora_rank": 24, "first_k_dense_replace": 1, "rope_parameters": YARN}),
    "v2": (2, {}),
    "v2, compressed queries, experts": (2,
        {"q_lora_rank": 24, "first_k_dense_replace": 1, "attention_bias": True}),
}  # fmt: skip
IDS = torch.arange(2 * 40).reshape(2, 40) ** 2 * 7 % 97
MASK = torch.ones_like(IDS)
MASK[0, :5] = 0


def latent_model(name: str = "v3", **settings: Any) -> Any:
    """A random model, with norms that are not ones."""
    torch.manual_seed(0)
    version, own = MODELS[name]
    config, model = {
        2: (DeepseekV2Config, DeepseekV2ForCausalLM),
        3: (DeepseekV3Config, DeepseekV3ForCausalLM),
    }[version]
    made = model(config(**{**SIZES, **own, **settings})).eval()
    for parameter in made.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 1.0, 0.3)
    return made


def generate(model: Any, batch: int = 2, **options: Any) -> list[list[int]]:
    """Twelve greedy tokens after a prompt."""
    plain = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    tokens: list[list[int]] = model.generate(IDS[:batch, :20], **plain, **options).tolist()
    return tokens


def chunks(model: Any, mask: Tensor = MASK) -> Tensor:
    """Logits of IDS, read in pieces through a cache; the first row is padded on the left."""
    found, cache = [], None
    for first, last in ((0, 30), (30, 33), (33, 34), (34, 40)):
        step = {
            "attention_mask": mask[:, :last],
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, first:last],
        }
        with torch.no_grad():
            output = model(input_ids=IDS[:, first:last], past_key_values=cache, use_cache=True, **step)
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, 1)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, module: Any = absorbed) -> Iterator[list[tuple[int, int]]]:
    """(new tokens, cached tokens) of every call of `attend`."""
    taken: list[tuple[int, int]] = []
    attend = module.attend

    def spy(query: Tensor, latent: Tensor, *rest: Any) -> Any:
        taken.append((query.shape[2], latent.shape[2]))
        return attend(query, latent, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(module, "attend", spy)
        yield taken


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes; views are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor) and not func.is_view:
                self.elements = max(self.elements, tensor.numel())
        return made


WAYS: dict[str, dict[str, Any]] = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "padded on the left": {"attention_mask": MASK[:, :20]},
    "padded, static": {"attention_mask": MASK[:, :20], "cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 4, "batch": 1},
}


def steps(model: Any, step: Any) -> Tensor:
    """Logits of three decoding steps with a static cache."""
    cache, found = StaticCache(config=model.config, max_cache_len=48), []
    with torch.no_grad():
        model(input_ids=IDS[:, :20], past_key_values=cache)
        for token in range(20, 23):
            position = torch.full((2, 1), token)
            found.append(
                step(input_ids=IDS[:, token : token + 1], past_key_values=cache, position_ids=position).logits
            )
    return torch.cat(found, 1)
