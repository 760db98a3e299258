"""The modules of every attention variant are what their equations say.

Each against itself and the others.
"""

import pytest
import torch

from kvfold.convert.algebra.forward import attend
from kvfold.lab.reference import (
    MultiHeadAttention,
    MultiHeadLatentAttention,
    TokenCache,
)

from ..support.reference_modules import H, N, T, inputs, latent, multi_head

Module = MultiHeadAttention | MultiHeadLatentAttention


MODULES = {
    "mha": lambda causal=True: multi_head(N, causal=causal),
    "gqa": lambda causal=True: multi_head(2, causal=causal),
    "mqa": lambda causal=True: multi_head(1, causal=causal),
    "mla": lambda causal=True: latent(causal=causal),
    "mla, query latent": lambda causal=True: latent(causal=causal, q_rank=8),
    "mla, absorbed": lambda causal=True: latent(causal=causal).absorb(),
}


@pytest.mark.parametrize("name", MODULES)
def test_cached_is_whole(name: str) -> None:
    """Token by token, or in two pieces, as all at once."""
    module, x = MODULES[name](), inputs()
    whole, cache = module(x), TokenCache()
    pieces = [module(part, cache=cache) for part in (x[:, :4], x[:, 4:5], x[:, 5:])]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert cache.tokens == T


@pytest.mark.parametrize("name", MODULES)
def test_a_causal_token_reads_none_after_it(name: str) -> None:
    causal, full, x = MODULES[name](causal=True), MODULES[name](causal=False), inputs()
    full.load_state_dict(causal.state_dict())
    assert not torch.allclose(full(x)[:, 0], causal(x)[:, 0])
    torch.testing.assert_close(full(x)[:, -1], causal(x)[:, -1])
    changed = x.clone()
    changed[:, -1] += 1
    assert torch.equal(causal(changed)[:, :-1], causal(x)[:, :-1])


@pytest.mark.parametrize("name", MODULES)
def test_gradients(name: str) -> None:
    module, x = MODULES[name](), inputs(3).requires_grad_()
    assert torch.autograd.gradcheck(module, (x,), fast_mode=True)
    weight = module.o_proj.weight
    module(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    assert weight.grad is not None


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_module_is_the_layer(kv_heads: int) -> None:
    module, x = multi_head(kv_heads), inputs()
    expected = attend(module.weights(), x, torch.tensor(module.frequencies, dtype=torch.float64))
    torch.testing.assert_close(module(x), expected)
    again = MultiHeadAttention.from_weights(module.weights(), module.frequencies)
    assert torch.equal(again(x), module(x))


def test_equal_heads_are_fewer_heads() -> None:
    """GQA is MHA whose heads repeat; with as many groups as heads it is MHA."""
    few, many, x = multi_head(2), multi_head(N), inputs()
    with torch.no_grad():
        for name in ("q_proj", "o_proj", "k_proj", "v_proj"):
            for part in ("weight", "bias"):
                value = getattr(getattr(few, name), part)
                if name in ("k_proj", "v_proj"):
                    value = value.unflatten(0, (2, H)).repeat_interleave(2, 0).flatten(0, 1)
                getattr(getattr(many, name), part).copy_(value)
    torch.testing.assert_close(many(x), few(x))


@pytest.mark.parametrize("options", [{}, {"q_rank": 8}, {"causal": False}])
def test_absorbed_is_expanded(options: dict[str, object]) -> None:
    expanded, x = latent(**options), inputs()  # type: ignore[arg-type]
    absorbed = expanded.absorb()
    torch.testing.assert_close(absorbed(x), expanded(x))
    shared = TokenCache()
    prefilled = expanded(x[:, :5], cache=shared)
    torch.testing.assert_close(
        torch.cat([prefilled, absorbed(x[:, 5:], cache=shared)], 1)[:, :5], expanded(x[:, :5])
    )


def test_absorbed_never_expands() -> None:
    calls = []
    for name, module in (("expanded", latent()), ("absorbed", latent().absorb())):
        module.kv_b_proj.register_forward_hook(lambda *_, name=name: calls.append(name))
        module(inputs())
    assert calls == ["expanded"]
