"""Folds of layers, each equal to its source where nothing is discarded."""

from dataclasses import replace

import pytest
import torch

from kvfold.convert.algebra.target import LatentTarget
from kvfold.core.errors import InvalidInput
from kvfold.lab.reference import MultiHeadAttention, MultiHeadLatentAttention
from kvfold.lab.reference.folding import fold_to_groups, fold_to_latent

from ..support.reference_modules import TABLE, D, H, attention, inputs


@pytest.mark.parametrize("table", [(), TABLE])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_nothing_discarded_nothing_changed(kv_heads: int, table: tuple[float, ...]) -> None:
    """GQA with as many groups as heads, and MLA of full rank without rotation."""
    source, x, seen = attention(kv_heads), inputs(), inputs(30, seed=8)
    wanted = MultiHeadAttention(source, table)(x)
    folded = fold_to_groups(source, table, kv_heads, seen)
    assert torch.equal(MultiHeadAttention(folded, table)(x), wanted)
    if table:
        return
    target = LatentTarget(kv_lora_rank=2 * kv_heads * H, qk_rope_head_dim=0)
    layer, slots = fold_to_latent(source, table, target, seen)
    for absorbed in (False, True):
        torch.testing.assert_close(MultiHeadLatentAttention(layer, slots, absorbed=absorbed)(x), wanted)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_keep_their_shapes(groups: int) -> None:
    """The naive converter leaves (H, D) weights where a forward of g > 1 heads needs (gH, D)."""
    folded = fold_to_groups(attention(4), TABLE, groups, inputs(30))
    assert folded.k_KHD.shape == folded.v_KHD.shape == (groups, H, D)
    assert MultiHeadAttention(folded, TABLE)(inputs()).shape == inputs().shape


def test_equal_heads_pool_without_loss() -> None:
    few, x = attention(2), inputs()
    names = ("k_KHD", "v_KHD", "k_KH", "v_KH")
    theirs = replace(few, **{name: getattr(few, name).repeat_interleave(2, 0) for name in names})
    pooled = fold_to_groups(theirs, TABLE, 2, inputs(30, seed=8))
    torch.testing.assert_close(MultiHeadAttention(pooled, TABLE)(x), MultiHeadAttention(few, TABLE)(x))


def test_a_sample_of_few_directions_needs_no_more() -> None:
    """Inputs in a plane of three directions need a latent of three, if one knows them."""
    source = attention(4, bias=False)
    plane = torch.randn(3, D, generator=torch.Generator().manual_seed(13), dtype=torch.float64)
    x = inputs(20)[..., :3] @ plane
    target = LatentTarget(kv_lora_rank=3, qk_rope_head_dim=0)
    layer, slots = fold_to_latent(source, (), target, x)
    torch.testing.assert_close(MultiHeadLatentAttention(layer, slots)(x), MultiHeadAttention(source)(x))


@pytest.mark.parametrize("width", [0, 3, 8])
def test_rotary_widths_that_do_not_fit(width: int) -> None:
    target = LatentTarget(kv_lora_rank=8, qk_rope_head_dim=width)
    with pytest.raises(InvalidInput, match="choose an even number from 2 to 6"):
        fold_to_latent(attention(4), TABLE, target, inputs(30))
