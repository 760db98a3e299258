"""Modules made from other modules.

Experts, latents that read, and folds, each equal to its source where nothing is discarded.
"""

import pytest
import torch
from torch import Tensor, nn

from kvfold.convert.algebra.target import GroupedTarget, LatentTarget
from kvfold.convert.calibration.statistics import LayerStatistics
from kvfold.core.errors import InvalidInput
from kvfold.lab.reference import (
    ExpertLatentAttention,
    LatentCache,
    LatentQueryAttention,
    MultiHeadAttention,
    fold,
    halvings,
)

from ..support.reference_modules import B, D, H, N, T, inputs, latent, multi_head


def reader(*, self_attention: bool = False, d_input: int | None = None) -> LatentQueryAttention:
    torch.manual_seed(5)
    return LatentQueryAttention(D, N, 3, d_input, self_attention=self_attention).double()


def distance(module: nn.Module, source: nn.Module, x: Tensor) -> float:
    wanted = source(x).detach()
    return float((module(x).detach() - wanted).norm() / wanted.norm())


# Experts


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_experts_at_first_are_plain_mla(top_k: int) -> None:
    source, x = latent(norms=True, q_rank=8), inputs()
    made = ExpertLatentAttention.from_latent(source, num_experts=3, top_k=top_k)
    torch.testing.assert_close(made(x), source(x))
    assert made.cache_size() == source.cache_size()
    shares = made.experts.shares(made.experts.probabilities(made.latent(x)))
    assert torch.all((shares > 0).sum(-1) == top_k)
    assert len({tuple(row) for row in (shares > 0).flatten(0, 1).tolist()}) > 1 or top_k == 3


def test_experts_have_no_absorbed_form() -> None:
    with pytest.raises(InvalidInput, match="token to token"):
        ExpertLatentAttention.from_latent(latent(), num_experts=2).absorb()
    with pytest.raises(InvalidInput, match="choose 1 to 2"):
        ExpertLatentAttention.from_latent(latent(), num_experts=2, top_k=3)


def test_balance_loss() -> None:
    """1 for a router that tells nothing apart but sends as many tokens everywhere.

    E where all go to one expert.
    """
    made, x = ExpertLatentAttention.from_latent(latent(), num_experts=2), inputs(40)
    with torch.no_grad():
        made.experts.router.bias.copy_(torch.tensor([50.0, -50.0]))
    assert made.balance_loss(x).item() == pytest.approx(2.0)
    with torch.no_grad():
        made.experts.router.bias.zero_()
        made.experts.router.weight.mul_(1e-9)
    assert made.balance_loss(x).item() == pytest.approx(1.0)
    valid = torch.zeros(B, 40, dtype=torch.bool)
    valid[:, :7] = True
    torch.testing.assert_close(made.balance_loss(x, valid), made.balance_loss(x[:, :7]))
    made.balance_loss(x).backward()
    assert made.experts.router.weight.grad is not None
    assert made.experts.weight_EMC.grad is None


def test_clusters_rebuild_better() -> None:
    """At the source's rank equal to it.

    Below, two clusters that are too wide together and not alone are rebuilt.
    """
    source, x = latent(), inputs(60)
    with pytest.raises(InvalidInput, match="a norm or a bias"):
        ExpertLatentAttention.from_clusters(source, 10, 1, x)
    with torch.no_grad():
        source.kv_a_proj.bias[:10] = 0
    torch.testing.assert_close(
        ExpertLatentAttention.from_clusters(source, 10, 1, x)(x), source(x), rtol=1e-4, atol=1e-6
    )
    planes = [
        torch.randn(3, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed in (20, 21)
    ]
    weights = torch.cat([torch.full_like(x[..., :1], 5.0), x[..., :2]], -1)
    unlike = torch.stack([weights[row] @ planes[row] for row in range(2)])
    one, two = (ExpertLatentAttention.from_clusters(source, 5, count, unlike) for count in (1, 2))
    assert distance(two, source, unlike) < 1e-3 * distance(one, source, unlike)
    with pytest.raises(InvalidInput, match="2 tokens do not make 3 clusters"):
        ExpertLatentAttention.from_clusters(source, 5, 3, x[:1, :2])
    with pytest.raises(InvalidInput, match="a latent of 10"):
        ExpertLatentAttention.from_clusters(source, 11, 1, x)


def test_router_chooses_the_nearest_centre() -> None:
    """Clusters along one ray, which only a router with the centres' sizes tells apart."""
    source = latent()
    with torch.no_grad():
        source.kv_a_proj.bias[:10] = 0
    x = inputs(60) * 0.02 + torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).repeat(20)[None, :, None]
    made = ExpertLatentAttention.from_clusters(source, 5, 3, x)
    owner = made.experts.probabilities(made.latent(x)).argmax(-1)
    assert torch.equal(owner, owner[:1, :3].repeat(B, 20))
    assert len(set(owner[0, :3].tolist())) == 3


# Latents that read


def test_latent_queries_are_cross_attention() -> None:
    module, x = reader(), inputs()
    theirs = nn.MultiheadAttention(D, N, bias=False, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(
            torch.cat([module.q_proj.weight, module.k_proj.weight, module.v_proj.weight])
        )
        theirs.out_proj.weight.copy_(module.o_proj.weight)
    query = module.latent_LD.expand(B, -1, -1)
    torch.testing.assert_close(module(x), query + theirs(query, x, x, need_weights=False)[0])


@pytest.mark.parametrize("self_attention", [False, True])
def test_latents_read_in_pieces(self_attention: bool) -> None:
    module, x = reader(self_attention=self_attention), inputs(50)
    valid = torch.rand(B, 50, generator=torch.Generator().manual_seed(6)) > 0.3
    valid[:, :10] = False  # a first piece that is all padding
    cache: LatentCache | None = None
    for start in range(0, 50, 10):
        piece = slice(start, start + 10)
        cache = module.read(x[:, piece], cache, valid_BX=valid[:, piece])
        assert cache.elements == B * module.cache_size()
    assert cache is not None
    torch.testing.assert_close(module.result(cache), module(x, valid_BX=valid))
    kept = [x[row][valid[row]] for row in range(B)]
    torch.testing.assert_close(module(x, valid_BX=valid), torch.cat([module(rows[None]) for rows in kept]))


def test_latents_of_another_width() -> None:
    module = reader(self_attention=True, d_input=7)
    x = torch.randn(B, T, 7, dtype=torch.float64, requires_grad=True)
    assert module(x).shape == (B, 3, D)
    assert torch.autograd.gradcheck(module, (x,), fast_mode=True)
    mask = torch.ones(3, T, dtype=torch.bool)
    mask[:, 4:] = False
    torch.testing.assert_close(module(x, mask=mask), module(x[:, :4]))


# Folds


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("theta", [None, 100.0])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_nothing_discarded_nothing_changed(kv_heads: int, theta: float | None, causal: bool) -> None:
    """GQA with as many groups as heads, and MLA of full rank.

    Without rotation, or with a rotary width of all heads.
    """
    source, x = multi_head(kv_heads, causal=causal, theta=theta), inputs()
    assert torch.equal(fold(source, GroupedTarget(num_key_value_heads=kv_heads))(x), source(x))
    if theta is None:
        target = LatentTarget(kv_lora_rank=2 * kv_heads * H, qk_rope_head_dim=0)
    else:
        target = LatentTarget(kv_lora_rank=kv_heads * H, qk_rope_head_dim=kv_heads * H, slots="source")
    for seen in (None, inputs(30, seed=8)):
        folded = fold(source, target, seen)
        torch.testing.assert_close(folded(x), source(x))
        torch.testing.assert_close(folded.absorb()(x), source(x))


@pytest.mark.parametrize("method", ["subspace", "aligned", "mean"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_keep_their_shapes(groups: int, method: str) -> None:
    """The naive converter averages all heads to one and leaves (H, D) weights where a forward of g > 1
    heads needs (gH, D).
    """
    source, x = multi_head(4), inputs()
    folded = fold(source, GroupedTarget(num_key_value_heads=groups), method=method)
    assert folded.k_proj.weight.shape == folded.v_proj.weight.shape == (groups * H, D)
    assert folded(x).shape == x.shape
    assert folded.cache_size() == source.cache_size() * groups // 4
    if method == "mean":
        expected = source.k_proj.weight.view(groups, 4 // groups, H, D).mean(1).flatten(0, 1)
        torch.testing.assert_close(folded.k_proj.weight, expected)


def test_equal_heads_pool_without_loss() -> None:
    few, x = multi_head(2), inputs()
    theirs = multi_head(4)
    with torch.no_grad():
        theirs.q_proj.load_state_dict(few.q_proj.state_dict())
        theirs.o_proj.load_state_dict(few.o_proj.state_dict())
        for name in ("k_proj", "v_proj"):
            for part in ("weight", "bias"):
                rows = (
                    getattr(getattr(few, name), part)
                    .unflatten(0, (2, H))
                    .repeat_interleave(2, 0)
                    .flatten(0, 1)
                )
                getattr(getattr(theirs, name), part).copy_(rows)
    for method in ("subspace", "aligned", "mean"):
        torch.testing.assert_close(
            fold(theirs, GroupedTarget(num_key_value_heads=2), method=method)(x), few(x)
        )


def test_a_sample_helps() -> None:
    """Statistics of an uneven input make the fold of what reads it better, for either target."""
    source = multi_head(4)
    uneven = torch.linspace(0.02, 2, D, dtype=torch.float64)
    sample, x = inputs(60, seed=11) * uneven, inputs(60, seed=12) * uneven
    for target in (GroupedTarget(num_key_value_heads=1), LatentTarget(kv_lora_rank=8, qk_rope_head_dim=4)):
        assert distance(fold(source, target, sample), source, x) < distance(fold(source, target), source, x)
    allocated = LatentTarget(kv_lora_rank=8, qk_rope_head_dim=8, slots="allocated")
    assert fold(source, allocated, sample).cache_size() == 16


def test_a_sample_of_few_directions_needs_no_more() -> None:
    """Inputs in a plane of three directions need a latent of three, if one knows them."""
    source = multi_head(4, theta=None, bias=False)
    x = inputs(20)[..., :3] @ torch.randn(
        3, D, generator=torch.Generator().manual_seed(13), dtype=torch.float64
    )
    target = LatentTarget(kv_lora_rank=3, qk_rope_head_dim=0)
    torch.testing.assert_close(fold(source, target, x)(x), source(x))
    assert distance(fold(source, target), source, x) > 0.01


def statistics() -> LayerStatistics:
    """An isotropic layer's, as a pass over a model would give them."""
    eye, none = torch.eye(N * H, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    return LayerStatistics(
        input_EE=torch.eye(D + 1, dtype=torch.float64),
        query_NHH=none,
        key_fisher=eye,
        value_fisher=eye,
        query_fisher=eye.new_zeros(N, H, H),
        distance_NT=torch.full((N, 9), 1 / 9, dtype=torch.float64),
        output_fisher=none,
        input_BTD=none,
        output_BTD=none,
    )


def test_statistics_of_a_pass_serve() -> None:
    """They belong to the source: on the progressive path only the first step can read them."""
    source, x = multi_head(4), inputs()
    path = halvings(source, statistics())
    assert [module.num_kv_heads for module in path] == [4, 2, 1]
    assert torch.equal(path[1](x), fold(source, GroupedTarget(num_key_value_heads=2), statistics())(x))
    assert not torch.equal(path[1](x), fold(source, GroupedTarget(num_key_value_heads=2))(x))
    full = LatentTarget(kv_lora_rank=4 * H, qk_rope_head_dim=4 * H, slots="source")
    torch.testing.assert_close(fold(source, full, statistics())(x), source(x))
    assert (
        0
        < distance(fold(source, LatentTarget(kv_lora_rank=20, qk_rope_head_dim=4), statistics()), source, x)
        < 1
    )


def test_progressive_path() -> None:
    source, seen = multi_head(4), []

    def note(module: MultiHeadAttention) -> MultiHeadAttention:
        seen.append(module.num_kv_heads)
        return module

    path = halvings(source, inputs(20), between=note)
    assert [module.num_kv_heads for module in path] == [4, 2, 1]
    assert seen == [2, 1]
    assert path[0] is source
    assert distance(path[1], source, inputs()) < distance(path[2], source, inputs())


def test_torch_module_folds() -> None:
    torch.manual_seed(7)
    theirs, x = nn.MultiheadAttention(D, N, batch_first=True).double(), inputs()
    torch.testing.assert_close(
        fold(theirs, LatentTarget(kv_lora_rank=D, qk_rope_head_dim=0))(x), theirs(x, x, x)[0]
    )
    assert fold(theirs.float(), GroupedTarget(num_key_value_heads=1)).k_proj.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (GroupedTarget(num_key_value_heads=3), "do not fold into 3; choose from 1, 2, 4"),
        (LatentTarget(kv_lora_rank=8, qk_rope_head_dim=3), "choose an even number from 2 to 6"),
        (LatentTarget(kv_lora_rank=0, qk_rope_head_dim=2), "1 or more"),
        (LatentTarget(kv_lora_rank=8, qk_rope_head_dim=0, rope="intact", slots="none"), "decoupled"),
    ],
)
def test_targets_that_do_not_fit(target: GroupedTarget | LatentTarget, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        fold(multi_head(4), target)
    with pytest.raises(InvalidInput, match="Linear cannot be folded"):
        fold(nn.Linear(3, 3), target)
