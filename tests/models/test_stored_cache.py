"""A cache in a number format is the one that decoding token by token with a rounding cache reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicLayer

from kvfold.core.cache_dtypes import CACHE_DTYPES, cache_dtype
from kvfold.core.errors import InvalidInput
from kvfold.models.causal_lm import load
from kvfold.models.load_options import LoadOptions
from kvfold.models.stored_cache import StoredCache

from ..support import folds, tiny
from ..support.tokenizers import save_tokenizer

TOKENS = 9
GROUPED = ("--to", "gqa", "--kv-heads", "2")
LATENT = ("--to", "mla", "--rank", "24", "--rope-dim", "4")
# Output kinds by name: the family, the fold, and the rows that a token writes to a layer's cache.
KINDS: dict[str, tuple[str, tuple[str, ...], tuple[int, ...]]] = {
    "mha": ("llama", (), (8,) * 16),
    "gqa": ("llama", GROUPED, (8,) * 4),
    "mqa": ("llama", ("--to", "mqa"), (8,) * 2),
    "layer_past": ("gpt_neox", (), (4,) * 16),
    "gpt_bigcode": ("gpt2", ("--to", "mqa"), (4,) * 2),
    "stock": ("llama", (*LATENT, "--container", "stock"), (24 + 4,)),
    "remote": ("llama", (*LATENT, "--container", "remote"), (24 + 4,)),
    "remote, key norms": ("qwen3", LATENT, (24 + 4,)),
    "intact": ("llama", ("--to", "mla", "--rank", "24", "--rope", "intact"), (24,)),
}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a function that loads the model of a kind, in float64 so that no rounding depends on the order
    of sums."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Any:
        family, options, _ = KINDS[kind]
        if kind not in made:
            source = tiny.make(tmp_path_factory.mktemp("source") / "model", family)
            save_tokenizer(source)
            made[kind] = source
            if options:
                made[kind] = source.with_name("fold")
                folds.convert(source, *options, *folds.WEIGHTS, out=made[kind], code=0)
        return load(made[kind], LoadOptions(device="cpu")).model.double()

    return get


class RoundingLayer(DynamicLayer):
    """A layer of transformers' own cache that rounds what it is given."""

    def __init__(self, store: Callable[[Tensor], Tensor], kind: str) -> None:
        super().__init__()
        self.store, self.kind = store, kind

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.kind in {"stock", "remote", "remote, key norms"}:
            keys, values = self.store(torch.cat([keys, values], -1)).tensor_split([keys.shape[-1]], -1)
        elif self.kind == "intact":
            keys = self.store(keys)
        else:
            keys, values = self.store(keys), self.store(values)
        return super().update(keys, values)


def ids_of(model: Any) -> Tensor:
    return torch.randint(model.config.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def decoded(model: Any, kind: str, store: Callable[[Tensor], Tensor]) -> Tensor:
    """Return logits of each token, read one by one with a cache that rounds."""
    cache = Cache(layers=[RoundingLayer(store, kind) for _ in range(2)])
    ids_BT = ids_of(model)
    steps = [model(input_ids=ids_B1, past_key_values=cache).logits for ids_B1 in ids_BT.split(1, dim=1)]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("name", CACHE_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_window_reads_what_decoding_reads(model_of: Callable[[str], Any], kind: str, name: str) -> None:
    model, own = model_of(kind), cache_dtype(name).stored
    if name == "bfloat16":
        wanted = decoded(model, kind, lambda rows: rows.bfloat16().double())
    else:
        wanted = decoded(model, kind, own)
    ids_BT = ids_of(model)
    exact = model(input_ids=ids_BT, use_cache=False).logits
    stored = StoredCache(model, cache_dtype(name))
    for use_cache in (False, True):
        found = model(input_ids=ids_BT, use_cache=use_cache).logits
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert float((found - exact).abs().max()) > 1e-4, "nothing was rounded"
    assert stored.bytes_per_token == [sum(map(cache_dtype(name).bytes, KINDS[kind][2]))] * 2
    with stored.off():
        assert torch.equal(model(input_ids=ids_BT, use_cache=False).logits, exact)
    stored.remove()
    assert torch.equal(model(input_ids=ids_BT, use_cache=False).logits, exact)


@torch.no_grad()
def test_generation_keeps_rounded_numbers_only(model_of: Callable[[str], Any]) -> None:
    model, kind = model_of("gqa"), cache_dtype("int4")
    StoredCache(model, kind)
    given = ids_of(model)
    done = model.generate(
        given, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, eos_token_id=-1
    )
    for layer in done.past_key_values.layers:
        assert layer.keys.shape[-2] == TOKENS + 3
        torch.testing.assert_close(kind.stored(layer.keys), layer.keys, rtol=1e-6, atol=0)
        torch.testing.assert_close(kind.stored(layer.values), layer.values, rtol=1e-6, atol=0)


@torch.no_grad()
def test_scales_are_of_one_layer_s_keys_and_values(model_of: Callable[[str], Any]) -> None:
    model, kind = model_of("gqa"), cache_dtype("fp8_e4m3")
    StoredCache(model, kind, {1: (0.5, 3.0)})
    layers = model(input_ids=ids_of(model), use_cache=True).past_key_values.layers
    for layer, keys, values in ((layers[0], 1.0, 1.0), (layers[1], 0.5, 3.0)):
        assert torch.equal(kind.stored(layer.keys, keys), layer.keys)
        assert torch.equal(kind.stored(layer.values, values), layer.values)
    assert not torch.equal(kind.stored(layers[1].values), layers[1].values)


def test_attention_that_writes_no_cache_is_refused(model_of: Callable[[str], Any]) -> None:
    model = model_of("mha")
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, past_key_values=None, **kwargs: forward(*args, **kwargs)
    StoredCache(model, cache_dtype("int8"))
    with pytest.raises(InvalidInput, match=r"layer 1 of .* model \(LlamaAttention\) does not write its keys"):
        model(input_ids=ids_of(model))
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(InvalidInput, match="leave out --cache-dtype"):
        StoredCache(model, cache_dtype("int8"))
