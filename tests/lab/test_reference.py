"""The modules of every attention variant are what their equations say.

Each against itself, the others, and torch's own.
"""

import pytest
import torch
from torch import nn

from kvfold.convert.algebra.forward import attend
from kvfold.core.errors import InvalidInput
from kvfold.lab.reference import (
    ExpertLatentAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    TokenCache,
)

from ..support.reference_modules import B, D, H, N, T, inputs, latent, multi_head

Module = MultiHeadAttention | MultiHeadLatentAttention


def experts(*, causal: bool = True) -> ExpertLatentAttention:
    return ExpertLatentAttention.from_latent(latent(causal=causal), num_experts=3, top_k=2, seed=3)


MODULES = {
    "mha": lambda causal=True: multi_head(N, causal=causal),
    "gqa": lambda causal=True: multi_head(2, causal=causal),
    "mqa": lambda causal=True: multi_head(1, causal=causal),
    "mla": lambda causal=True: latent(causal=causal),
    "mla, norms and query latent": lambda causal=True: latent(causal=causal, norms=True, q_rank=8),
    "mla, absorbed": lambda causal=True: latent(causal=causal).absorb(),
    "experts": lambda causal=True: perturbed(experts(causal=causal)),
}


def perturbed(module: ExpertLatentAttention) -> ExpertLatentAttention:
    """Experts that differ."""
    with torch.no_grad():
        module.experts.weight_EMC.add_(
            0.1 * torch.randn(module.experts.weight_EMC.shape, dtype=torch.float64)
        )
    return module


@pytest.mark.parametrize("name", MODULES)
def test_cached_is_whole(name: str) -> None:
    """Token by token, or in two pieces, as all at once; and the cache holds what cache_size says."""
    module, x = MODULES[name](), inputs()
    whole, cache = module(x), TokenCache()
    pieces = [module(part, cache=cache) for part in (x[:, :4], x[:, 4:5], x[:, 5:])]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert cache.tokens == T
    assert cache.elements == B * T * module.cache_size()


@pytest.mark.parametrize("name", MODULES)
def test_padding_changes_nothing(name: str) -> None:
    """Padding on the left, with positions that count real tokens; and finite where nothing is read."""
    module, x = MODULES[name](), inputs()
    padded = torch.cat([torch.full_like(x[:, :2], 5.0), x], 1)
    valid = torch.tensor([False] * 2 + [True] * T).expand(B, -1)
    out = module(padded, valid_BX=valid, position_BT=(valid.long().cumsum(1) - 1).clamp(min=0))
    torch.testing.assert_close(out[:, 2:], module(x))
    assert out.isfinite().all()


@pytest.mark.parametrize("name", MODULES)
def test_causal_is_a_mask(name: str) -> None:
    causal, full, x = MODULES[name](causal=True), MODULES[name](causal=False), inputs()
    full.load_state_dict(causal.state_dict())
    torch.testing.assert_close(full(x, mask=torch.ones(T, T, dtype=torch.bool).tril()), causal(x))
    assert not torch.allclose(full(x)[:, 0], causal(x)[:, 0])
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


@pytest.mark.parametrize("bias", [True, False])
def test_torch_in_and_out(bias: bool) -> None:
    torch.manual_seed(4)
    theirs, x = nn.MultiheadAttention(D, N, bias=bias, batch_first=True).double(), inputs()
    ours = MultiHeadAttention.from_torch(theirs)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])
    back = ours.to_torch()
    assert all(
        torch.equal(a, b)
        for a, b in zip(back.state_dict().values(), theirs.state_dict().values(), strict=True)
    )
    few = multi_head(2, causal=False, theta=None, bias=bias)
    torch.testing.assert_close(few.to_torch()(x, x, x, need_weights=False)[0], few(x))


def test_torch_module_that_does_not_fit() -> None:
    with pytest.raises(InvalidInput, match="kdim"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(D, N, kdim=5))
    with pytest.raises(InvalidInput, match="no rotation"):
        multi_head(N).to_torch()
    with pytest.raises(InvalidInput, match="do not divide into 3"):
        MultiHeadAttention(D, N, 3)


@pytest.mark.parametrize("options", [{}, {"norms": True}, {"q_rank": 8}, {"causal": False}])
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


def test_query_latent_of_full_rank_is_exact() -> None:
    module, x = latent(), inputs()
    torch.testing.assert_close(module.compress_queries(D)(x), module(x))
    assert module.compress_queries(3).q_b_proj.weight.shape == (N * 9, 3)
    with pytest.raises(InvalidInput, match="choose 1 to 24"):
        module.compress_queries(25)
