"""The cache that is counted is the one that the architecture promises."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.eval.cache import measure
from kvfold.eval.models import load
from kvfold.eval.options import Options

IDS = torch.arange(21)  # an odd length: the two halves differ


@pytest.mark.parametrize(
    ("changes", "elements"),
    [
        ({}, 2 * 4 * 8),
        ({"num_key_value_heads": 2}, 2 * 2 * 8),
        ({"num_key_value_heads": 1}, 2 * 8),
        ({"latent": True}, 12 + 4),  # kv_lora_rank + qk_rope_head_dim
    ],
    ids=["mha", "gqa", "mqa", "mla"],
)
def test_elements_per_token_and_layer(make: Callable[..., Path], changes: dict[str, Any], elements: int) -> None:
    size = measure(load(make(**changes), Options(device="cpu")), IDS)
    assert (size.elements_per_token_per_layer, size.elements_per_token) == (elements, 2 * elements)
    assert (size.bytes_per_token, size.dtype, size.lengths) == (4 * 2 * elements, "float32", (10, 21))


def test_half_precision_halves_the_bytes(mha: Path) -> None:
    size = measure(load(mha, Options(device="cpu", dtype="bfloat16")), IDS)
    assert (size.bytes_per_token, size.dtype) == (2 * size.elements_per_token, "bfloat16")


def test_a_constant_part_of_the_cache_does_not_count(mha: Path) -> None:
    loaded = load(mha, Options(device="cpu"))
    read = loaded.model.base_model.forward

    def with_state(**inputs: Any) -> Any:
        output = read(**inputs)
        for layer in output.past_key_values.layers:
            layer.state = torch.zeros(1000)
        return output

    loaded.model.base_model.forward = with_state
    assert measure(loaded, IDS).elements_per_token_per_layer == 2 * 4 * 8
