"""Run with TRITON_INTERPRET=1: prints the kernel's differences from plain products, and a model's tokens."""

import json
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import kvfold
from kvfold.models.shipped import decoding_kvfold, kernels_kvfold

# (B, N, T, S, C, R), mask, dtype, processors
CASES: dict[str, tuple[tuple[int, ...], str, torch.dtype, int]] = {
    "one token": ((2, 4, 1, 70, 32, 8), "", torch.float32, 3),
    "one split": ((2, 4, 1, 70, 32, 8), "", torch.float32, 1),
    "no rotary key": ((1, 3, 1, 50, 48, 0), "", torch.float32, 5),
    "several tokens, boolean": ((2, 4, 3, 50, 48, 8), "boolean", torch.float32, 5),
    "static cache": ((2, 4, 1, 90, 32, 16), "static", torch.float32, 40),
    "added": ((2, 20, 2, 33, 40, 16), "added", torch.float32, 9),
    "more rows than a block": ((1, 40, 1, 40, 32, 16), "", torch.float32, 4),
    "many splits": ((1, 4, 1, 400, 40, 8), "", torch.float32, 40),
    "a rank in parts": ((2, 2, 1, 300, 200, 8), "static", torch.float32, 60),
    "half precision": ((2, 4, 1, 100, 64, 8), "boolean", torch.float16, 7),
}


def case(sizes: tuple[int, ...], kind: str, dtype: torch.dtype, processors: int) -> float:
    """Relative difference from plain products in float64, of rows apart from each other."""
    B, N, T, S, C, R = sizes
    query, turned = torch.randn(B, N, T, C), torch.randn(B, N, T, R)
    latent, rope = torch.randn(B, S, C + 4)[..., :C], torch.randn(B, S, R)
    mask = None
    if kind:
        # Longer than the cache, as some caches have it.
        mask = torch.rand(1 if kind == "added" else B, 1, T, S + 7) > 0.3
        if kind == "static":
            mask[..., 21:] = False
        mask[..., 0] = True
    given = mask
    if mask is not None and kind == "added":
        given = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    tensors = [one.to(dtype) for one in (query, turned, latent, rope)]
    found = kernels_kvfold.fused(*tensors, given, 0.2, tile=16, stages=1, processors=processors)
    expected = kernels_kvfold.plain(*(one.double() for one in tensors), mask, 0.2)
    return float((found - expected).norm() / expected.norm())


def tokens(**options: Any) -> list[list[int]]:
    """Greedy tokens of a random model that decodes from its latent; the first row is padded on the left."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=97, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=24,
        first_k_dense_replace=2,
        eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    model = kvfold.absorb(DeepseekV3ForCausalLM(config).eval())
    ids = torch.arange(40).reshape(2, 20) ** 2 * 7 % 97
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    made: Tensor = model.generate(
        ids, attention_mask=padding, max_new_tokens=8, do_sample=False, pad_token_id=0, **options
    )
    return made.tolist()  # type: ignore[no-any-return]


def main() -> None:
    torch.manual_seed(0)
    differences = {name: case(*given) for name, given in CASES.items()}
    ways: tuple[dict[str, Any], ...] = ({}, {"cache_implementation": "static"}, {"num_beams": 2})
    expected = [tokens(**options) for options in ways]
    calls = []

    def choice(*tensors: Any, scale: float) -> tuple[int, int]:
        calls.append(scale)
        return 16, 1

    kernels_kvfold._choice = choice
    kernels_kvfold._processors = lambda _: 3
    decoding_kvfold.takes = lambda *_: True
    found = [tokens(**options) for options in ways]
    print(json.dumps({"differences": differences, "expected": expected, "found": found, "calls": len(calls)}))


if __name__ == "__main__":
    main()
