"""Folds of modules, each equal to its source where nothing is discarded."""

import pytest
import torch
from torch import Tensor, nn

from kvfold.convert.algebra.target import LatentTarget
from kvfold.core.errors import InvalidInput
from kvfold.lab.reference.folding import fold_to_groups, fold_to_latent

from ..support.reference_modules import D, H, inputs, multi_head


def distance(module: nn.Module, source: nn.Module, x: Tensor) -> float:
    wanted = source(x).detach()
    return float((module(x).detach() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("theta", [None, 100.0])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_nothing_discarded_nothing_changed(kv_heads: int, theta: float | None, causal: bool) -> None:
    """GQA with as many groups as heads, and MLA of full rank.

    Without rotation, or with a rotary width of all heads.
    """
    source, x = multi_head(kv_heads, causal=causal, theta=theta), inputs()
    assert torch.equal(fold_to_groups(source, kv_heads)(x), source(x))
    if theta is None:
        target = LatentTarget(kv_lora_rank=2 * kv_heads * H, qk_rope_head_dim=0)
    else:
        target = LatentTarget(kv_lora_rank=kv_heads * H, qk_rope_head_dim=kv_heads * H, slots="source")
    for seen in (None, inputs(30, seed=8)):
        folded = fold_to_latent(source, target, seen)
        torch.testing.assert_close(folded(x), source(x))
        torch.testing.assert_close(folded.absorb()(x), source(x))


@pytest.mark.parametrize("method", ["subspace", "aligned", "mean"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_keep_their_shapes(groups: int, method: str) -> None:
    """The naive converter averages all heads to one and leaves (H, D) weights where a forward of g > 1
    heads needs (gH, D).
    """
    source, x = multi_head(4), inputs()
    folded = fold_to_groups(source, groups, method=method)
    assert folded.k_proj.weight.shape == folded.v_proj.weight.shape == (groups * H, D)
    assert folded(x).shape == x.shape
    assert folded.num_kv_heads == groups
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
        torch.testing.assert_close(fold_to_groups(theirs, 2, method=method)(x), few(x))


def test_a_sample_helps() -> None:
    """Statistics of an uneven input make the fold of what reads it better, for either target."""
    source = multi_head(4)
    uneven = torch.linspace(0.02, 2, D, dtype=torch.float64)
    sample, x = inputs(60, seed=11) * uneven, inputs(60, seed=12) * uneven
    narrow = LatentTarget(kv_lora_rank=8, qk_rope_head_dim=4)
    for fold, target in ((fold_to_groups, 1), (fold_to_latent, narrow)):
        assert distance(fold(source, target, sample), source, x) < distance(fold(source, target), source, x)
    allocated = LatentTarget(kv_lora_rank=8, qk_rope_head_dim=8, slots="allocated")
    folded = fold_to_latent(source, allocated, sample)
    assert folded.kv_lora_rank + folded.qk_rope_head_dim == 16


def test_a_sample_of_few_directions_needs_no_more() -> None:
    """Inputs in a plane of three directions need a latent of three, if one knows them."""
    source = multi_head(4, theta=None, bias=False)
    x = inputs(20)[..., :3] @ torch.randn(
        3, D, generator=torch.Generator().manual_seed(13), dtype=torch.float64
    )
    target = LatentTarget(kv_lora_rank=3, qk_rope_head_dim=0)
    torch.testing.assert_close(fold_to_latent(source, target, x)(x), source(x))
    assert distance(fold_to_latent(source, target), source, x) > 0.01


@pytest.mark.parametrize("width", [0, 3, 8])
def test_rotary_widths_that_do_not_fit(width: int) -> None:
    with pytest.raises(InvalidInput, match="choose an even number from 2 to 6"):
        fold_to_latent(multi_head(4), LatentTarget(kv_lora_rank=8, qk_rope_head_dim=width))
