"""A cache reaches attention under the name of any release of transformers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import kvfold
from kvfold.core.cache_dtypes import cache_dtype
from kvfold.models.caches import CACHE_NAMES, cache_argument, cache_of
from kvfold.models.causal_lm import LoadOptions, load
from kvfold.models.decoder import Decoder
from kvfold.models.stored_cache import StoredCache

from ..support.folds import fold_latent
from ..support.tiny import make
from ..support.tokenizers import save_tokenizer

IDS = torch.arange(40)[None] ** 2 % 97
FORMS = {
    "decoupled": ("--container", "remote"),
    "intact": ("--rope", "intact"),
    "absorbed": ("--container", "stock"),
}


class _Named(nn.Module):
    def forward(self, hidden_states: Any, cache: Any = None, **kwargs: Any) -> None: ...


class _Earlier(nn.Module):
    def forward(self, hidden_states: Any, past_key_values: Any = None, **kwargs: Any) -> None: ...


class _Hidden(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> None: ...


def test_the_name_is_that_of_the_module() -> None:
    names = [cache_argument(module) for module in (_Named(), _Earlier(), _Hidden())]
    assert names == ["cache", "past_key_values", "past_key_values"]
    assert cache_of(SimpleNamespace(cache=1)) == cache_of(SimpleNamespace(past_key_values=1)) == 1


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("model")
    source = make(place / "source")
    save_tokenizer(source)
    out = fold_latent(source, "--kv-budget", "50%", *FORMS[request.param])
    loaded = load(out, LoadOptions(device="cpu")).model
    return kvfold.absorb(loaded) if request.param == "absorbed" else loaded


@torch.no_grad()
def _decoded(model: Any) -> torch.Tensor:
    cache, found = None, []
    for ids_1T in (IDS[:, :30], *IDS[:, 30:].split(1, dim=1)):
        output = model(input_ids=ids_1T, use_cache=True, **{cache_argument(model): cache})
        cache = cache_of(output)
        found.append(output.logits)
    assert cache.get_seq_length() == IDS.shape[1]
    return torch.cat(found, 1)


@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("name", CACHE_NAMES)
def test_attention_decodes_by_either_name(model: Any, name: str, stores: bool) -> None:
    def rename(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        given = [kwargs.pop(other) for other in CACHE_NAMES if other in kwargs]
        assert len(given) == 1
        return args, {**kwargs, name: given[0]}

    expected = model(input_ids=IDS, use_cache=False).logits
    attentions = [Decoder(model).attention(number) for number in range(len(Decoder(model)))]
    handles = [attention.register_forward_pre_hook(rename, with_kwargs=True) for attention in attentions]
    stored = StoredCache(model, cache_dtype("bfloat16")) if stores else None
    try:
        found = _decoded(model)
    finally:
        for handle in handles:
            handle.remove()
        if stored is not None:
            stored.remove()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2 if stores else 2e-5)
    if stores:
        assert (found - expected).abs().max() > 1e-5, "the cache was not rounded"
