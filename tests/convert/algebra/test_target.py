"""Targets as the size options ask for them."""

import pytest

from kvfold.convert.algebra.target import (
    Geometry,
    Sizes,
    budget_elements,
    budget_notices,
    from_options,
    share_of,
)

SOURCE = Geometry(hidden_size=96, num_attention_heads=12, num_key_value_heads=6, head_dim=8)


@pytest.mark.parametrize(("budget", "heads", "unused"), [
    ("50%", 3, False), ("0.5", 3, False), ("49%", 2, True), ("20%", 1, True), ("99%", 3, True),
])  # fmt: skip
def test_heads_that_leave_a_part_of_a_budget_unused_are_said(budget: str, heads: int, unused: bool) -> None:
    """GQA keeps the largest divisor of the heads that fits, and names the next one where something is left."""
    target = from_options(SOURCE, "gqa", Sizes(kv_budget=budget))
    assert target.to_dict()["num_key_value_heads"] == heads
    said = " ".join(budget_notices(SOURCE, target, budget))
    assert bool(said) == unused
    if unused:
        larger = next(n for n in (2, 3, 6) if n > heads)
        assert f"--kv-budget {budget} keeps {heads} of 6 key/value heads" in said
        assert f"the next possible number is {larger}, " in said


def test_a_number_of_heads_and_a_latent_leave_nothing_unsaid() -> None:
    assert budget_notices(SOURCE, from_options(SOURCE, "gqa", Sizes(kv_heads=2)), None) == ()
    assert budget_notices(SOURCE, from_options(SOURCE, "mla", Sizes(kv_budget="31%")), "31%") == ()


@pytest.mark.parametrize("heads", [1, 3, 5, 7, 8, 12, 25, 40])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_a_budget_is_the_whole_part_of_its_share(heads: int, head_dim: int) -> None:
    """In floats 29% of 3,200 elements were 927, not 928."""
    source = Geometry(hidden_size=1, num_attention_heads=heads, num_key_value_heads=heads, head_dim=head_dim)
    whole = source.cache_elements
    for percent in range(1, 100):
        assert budget_elements(source, f"{percent}%") == whole * percent // 100
    for elements in range(1, whole):
        share = share_of(elements, source)
        if share != "100%":
            assert budget_elements(source, share) >= elements
