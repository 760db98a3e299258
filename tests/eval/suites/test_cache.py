"""The cache that is counted is the one that the architecture promises, and what fits follows from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from kvfold.checkpoints.cost_blocks import CacheBlock
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.eval.suites.cache import CacheSize, count, predicted
from kvfold.eval.suites.catalogue import SuiteSettings
from kvfold.models.causal_lm import load

from ...support.folds import convert
from ...support.tiny import make as make_tiny
from ...support.tokenizers import save_tokenizer
from ..conftest import SHAPE

CPU = Options(device="cpu")


def caches(
    directory: Path, options: Options = CPU, teacher: Path | None = None, **settings: Any
) -> CacheBlock:
    return evaluate(
        directory, teacher, None, options, suites=("cache",), settings=SuiteSettings.read(settings)
    ).cache


@pytest.mark.parametrize(("changes", "elements"), [
    ({}, 2 * 4 * 8),
    ({"num_key_value_heads": 2}, 2 * 2 * 8),
    ({"num_key_value_heads": 1}, 2 * 8),
    ({"latent": True}, 12 + 4),  # kv_lora_rank + qk_rope_head_dim
], ids=["mha", "gqa", "mqa", "mla"])  # fmt: skip
def test_elements_are_as_promised_and_as_counted(
    make: Callable[..., Path], changes: dict[str, Any], elements: int
) -> None:
    found = caches(make(**changes)).student
    assert found.elements_per_token_per_layer == found.predicted_elements_per_token_per_layer == elements
    assert (found.elements_per_token, found.bytes_per_token, found.dtype) == (
        2 * elements,
        4 * 2 * elements,
        "float32",
    )


def test_half_precision_halves_the_bytes(make: Callable[..., Path]) -> None:
    found = caches(make(dtype=torch.bfloat16), Options(device="cpu", dtype="bfloat16")).student
    assert (found.bytes_per_token, found.dtype) == (2 * found.elements_per_token, "bfloat16")


def test_what_fits_is_counted_next_to_weights_in_their_own_precision(make: Callable[..., Path]) -> None:
    directory = make(dtype=torch.bfloat16)
    weights = (directory / "model.safetensors").stat().st_size
    room = 10 * 4096 * 2 * 64 * 2  # ten sequences of 4k tokens, two layers, 64 elements, two bytes
    found = caches(directory, memory=weights + room + 1).student
    assert [context.bytes for context in found.contexts] == [
        tokens * 2 * 64 * 2 for tokens in (4096, 32768, 131072)
    ]
    assert [context.largest_batch for context in found.contexts] == [10, 1, 0]
    assert [context.largest_batch for context in caches(directory, memory=1000).student.contexts] == [0, 0, 0]
    assert [context.largest_batch for context in caches(directory).student.contexts] == [None] * 3


def test_the_ratio_is_the_students_share_of_the_teachers_cache(make: Callable[..., Path], mha: Path) -> None:
    assert caches(make(num_key_value_heads=1), teacher=mha).ratio == 0.25


def test_layers_with_a_sliding_window_stop_growing(tmp_path: Path) -> None:
    config = MistralConfig(**SHAPE | {"sliding_window": 10})
    MistralForCausalLM(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    size = count(load(tmp_path, CPU))
    assert size.elements_per_token_per_layer == 64
    assert size.layers == ((64, 9), (64, 9))  # transformers keeps one token less than the window
    assert size.elements(5) == 5 * 2 * 64
    assert size.elements(4096) == 9 * 2 * 64
    mixed = CacheSize(64, 128, 512, "float32", (4, 8), ((64, 9), (64, None)))
    assert mixed.elements(100) == 9 * 64 + 100 * 64


def test_a_constant_part_of_the_cache_does_not_count(mha: Path) -> None:
    loaded = load(mha, CPU)
    read = loaded.model.base_model.forward

    def with_state(**inputs: Any) -> Any:
        output = read(**inputs)
        for layer in output.past_key_values.layers:
            layer.state = torch.zeros(1000)
        return output

    loaded.model.base_model.forward = with_state
    assert count(loaded).elements_per_token_per_layer == 2 * 4 * 8


def test_a_class_without_a_row_promises_nothing() -> None:
    assert predicted({"model_type": "unheard-of", "num_attention_heads": 4}) is None
    assert predicted({"model_type": "llama", "num_attention_heads": 0}) is None
    assert predicted({"model_type": "kvfold", "latent_rank": 24}) == 24


def test_a_cache_other_than_promised_is_told(
    mha: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvfold.eval.suites.cache.predicted", lambda config: 16)
    caches(mha)
    assert "holds 64 elements per token and layer in transformers, but 16 by its config.json" in caplog.text


@pytest.mark.parametrize(
    ("kind", "digits", "attending"), [("llama", 3, 3), ("gemma3_text", 6, 3), ("lfm2", 3, 2)]
)
def test_positions_of_intact_latents_are_promised_too(
    kind: str, digits: int, attending: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first layer of each kind caches three digits, so no cache is larger than promised."""
    layers = {
        "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "lfm2": {"layer_types": ["full_attention", "conv", "full_attention"]},
    }
    shape = {"num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 260}
    source = make_tiny(tmp_path / "source", kind, **{**shape, **layers.get(kind, {})})
    save_tokenizer(source)
    intact = ("--to", "mla", "--rank", "16", "--rope", "intact", "--calibration", "none")
    convert(source, *intact, out=tmp_path / "out", code=0)
    found = caches(tmp_path / "out").student
    expected = (16 * attending + digits) / attending
    assert found.elements_per_token_per_layer == found.predicted_elements_per_token_per_layer == expected
    assert found.predicted_bytes_per_token == 4 * (16 * attending + digits)
    assert "by its config.json" not in caplog.text
