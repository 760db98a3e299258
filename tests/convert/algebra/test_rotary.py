"""Our frequency tables are transformers' own, for every rope_type that has a fixed one."""

import pytest
import torch

from kvfold.convert.algebra.rotary import (
    complex_rows,
    frequencies,
    half_rows,
    interleaved_rows,
    rope_parameters,
)
from kvfold.core.errors import InvalidInput

from ...support.tiny import ROPE, SIZES


@pytest.mark.parametrize("kind", ROPE)
def test_tables_equal_transformers(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**(SIZES | {"head_dim": 32}), rope_parameters=dict(ROPE[kind]))
    theirs = LlamaRotaryEmbedding(config)
    ours, factor = frequencies(rope_parameters(config.to_dict()), 32, 128)
    torch.testing.assert_close(ours.float(), theirs.inv_freq.float(), rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling)


def test_both_generations_of_config_are_read() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}
    assert rope_parameters(old) == rope_parameters(new)
    assert rope_parameters(old) == {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    assert rope_parameters({}) == {"rope_type": "default", "rope_theta": 10000.0}


def test_what_depends_on_length_is_refused() -> None:
    with pytest.raises(InvalidInput, match="rope_type dynamic has no fixed frequency table"):
        frequencies({"rope_type": "dynamic", "rope_theta": 1e4}, 8, 128)
    with pytest.raises(InvalidInput, match="rope_type linear needs 'factor'"):
        frequencies({"rope_type": "linear", "rope_theta": 1e4}, 8, 128)


def test_layouts() -> None:
    rows = torch.arange(6.0).reshape(6, 1)
    assert torch.equal(half_rows(complex_rows(rows)), rows)
    assert interleaved_rows(complex_rows(rows)).flatten().tolist() == [0, 3, 1, 4, 2, 5]
