"""The modules of every attention variant are what their equations say, each against the others."""

import pytest
import torch

from kvfold.convert.algebra.forward import attend
from kvfold.lab.reference import MultiHeadAttention, TokenCache

from ..support.reference_modules import TABLE, N, T, attention, inputs, latent, latent_layer, multi_head

MODULES = {
    "mha": lambda: multi_head(N), "gqa": lambda: multi_head(2), "mqa": lambda: multi_head(1), "mla": latent,
    "mla, query latent": lambda: latent(q_rank=8), "mla, absorbed": lambda: latent(absorbed=True),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_cached_is_whole(name: str) -> None:
    """Token by token, or in two pieces, as all at once."""
    module, x = MODULES[name](), inputs()
    whole, cache = module(x), TokenCache()
    pieces = [module(part, cache=cache) for part in (x[:, :4], x[:, 4:5], x[:, 5:])]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert cache.tokens == T


@pytest.mark.parametrize("name", MODULES)
def test_a_token_reads_none_after_it(name: str) -> None:
    module, x = MODULES[name](), inputs()
    changed = x.clone()
    changed[:, -1] += 1
    assert torch.equal(module(changed)[:, :-1], module(x)[:, :-1])
    assert not torch.allclose(module(changed)[:, -1], module(x)[:, -1])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_module_is_the_layer(kv_heads: int) -> None:
    x, layer = inputs(), attention(kv_heads)
    expected = attend(layer, x, torch.tensor(TABLE, dtype=torch.float64))
    torch.testing.assert_close(MultiHeadAttention(layer, TABLE)(x), expected)


@pytest.mark.parametrize("q_rank", [None, 8])
@pytest.mark.parametrize("absorbed", [False, True])
def test_the_latent_module_is_the_layer(absorbed: bool, q_rank: int | None) -> None:
    x, slots = inputs(), torch.tensor([1.0, 0.1], dtype=torch.float64)
    torch.testing.assert_close(
        latent(absorbed=absorbed, q_rank=q_rank)(x), attend(latent_layer(q_rank), x, slots)
    )


def test_absorbed_takes_over_a_cache() -> None:
    expanded, absorbed, x, shared = latent(), latent(absorbed=True), inputs(), TokenCache()
    parts = [expanded(x[:, :5], cache=shared), absorbed(x[:, 5:], cache=shared)]
    torch.testing.assert_close(torch.cat(parts, 1), expanded(x))


def test_absorbed_never_expands() -> None:
    calls = []
    for name, module in (("expanded", latent()), ("absorbed", latent(absorbed=True))):
        module.kv_b_proj.register_forward_hook(lambda *_, name=name: calls.append(name))
        module(inputs())
    assert calls == ["expanded"]
