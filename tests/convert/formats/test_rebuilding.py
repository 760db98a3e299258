"""Decoding with rotation left intact: keys rebuilt block by block compute what all at once do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.core.errors import InvalidInput
from kvfold.models.shipped import attention_kvfold, decoding_kvfold
from kvfold.models.shipped.attention_kvfold import KvfoldDecoupledAttention, KvfoldIntactAttention
from kvfold.models.shipped.modeling_kvfold import KvfoldForCausalLM

from ...support.folds import fold_latent
from ...support.latent_decoding import WAYS, Largest, chunks, generate, steps
from ...support.tiny import make

# Heads of their own; grouped heads and biases; normed keys and two kinds of layers; a bounded score; sinks,
# with which weights do not sum to one.
SOURCES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {"num_key_value_heads": 4}, "gemma3_text": {"num_key_value_heads": 4},
    "gemma2": {"num_key_value_heads": 4}, "gpt_oss": {"num_key_value_heads": 4, "attention_bias": True},
}  # fmt: skip


def fold(root: Path, family: str, form: str, **settings: Any) -> Any:
    source = make(root / "source", family, **settings)
    out = fold_latent(source, "--kv-budget", "25%", "--container", "remote", "--rope", form)
    return KvfoldForCausalLM.from_pretrained(out, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=SOURCES)
def intact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fold(tmp_path_factory.mktemp("intact"), request.param, "intact", **SOURCES[request.param])


@pytest.mark.parametrize("block", [1, 2**20])
def test_blocks_compute_what_the_whole_does(intact: Any, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one and several new tokens on a padded batch, in blocks of 16 tokens and in one."""
    monkeypatch.setattr(decoding_kvfold, "BLOCK", block)
    taken = []
    attend = attention_kvfold.attend_rotated

    def spy(query: Tensor, *rest: Any) -> Any:
        taken.append(query.shape[2])
        return attend(query, *rest)

    monkeypatch.setattr(attention_kvfold, "attend_rotated", spy)
    ours = chunks(intact)[:, 5:]
    # With few key heads, several tokens at once are less work expanded.
    assert ({1, 3} if intact.config.kvfold["key_heads"] == 8 else {1}) <= set(taken)
    monkeypatch.setattr(KvfoldIntactAttention, "_rebuilds", lambda *_: False)
    torch.testing.assert_close(ours, chunks(intact)[:, 5:], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_are_the_same(intact: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = generate(intact, **WAYS[way])
    monkeypatch.setattr(KvfoldIntactAttention, "_rebuilds", lambda *_: False)
    assert generate(intact, **WAYS[way]) == tokens


@pytest.mark.parametrize("form", ["intact", "decoupled"])
def test_the_expansion_is_never_whole(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step makes no tensor larger than the cache that it grows, or than a block of rebuilt keys."""
    model = fold(tmp_path, "llama", form, hidden_size=128, head_dim=16)
    monkeypatch.setattr(decoding_kvfold, "BLOCK", 1)
    ids = torch.randint(97, (2, 200))
    cache = model(input_ids=ids, use_cache=True).past_key_values
    with Largest() as largest, torch.no_grad():
        model(input_ids=ids[:, :1], past_key_values=cache)
    weights = max(parameter.numel() for parameter in model.parameters())
    cached = max(tensor.numel() for tensor in (cache.layers[0].keys, cache.layers[0].values))
    assert largest.elements <= max(cached, weights) < 2 * 201 * 8 * 16
    for cls, name in ((KvfoldIntactAttention, "_rebuilds"), (KvfoldDecoupledAttention, "_absorbs")):
        monkeypatch.setattr(cls, name, lambda *_: False)
    with Largest() as whole, torch.no_grad():
        model(input_ids=ids[:, :1], past_key_values=cache)
    assert whole.elements >= 2 * 202 * 8 * 16, "the spy sees it where it is made"


def test_several_tokens_at_once(intact: Any) -> None:
    looked_up = {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 1}
    assert generate(intact, batch=1, **looked_up) == generate(intact, batch=1)


@pytest.mark.parametrize("form", ["intact", "decoupled"])
def test_one_graph_of_a_decoding_step(tmp_path: Path, form: str) -> None:
    model = fold(tmp_path, "llama", form)
    torch._dynamo.reset()
    torch.testing.assert_close(
        steps(model, torch.compile(model, fullgraph=True, backend="eager")), steps(model, model)
    )


def test_our_own_class_needs_no_absorbing(intact: Any) -> None:
    with pytest.raises(InvalidInput, match=r"KvfoldForCausalLM .* by itself; absorb is for DeepseekV2"):
        kvfold.absorb(intact)
