"""MHA2MLA's rule: rotary pairs of each key head, by every choice of pairs and both decompositions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.convert.algebra.attention import Attention
from kvfold.convert.algebra.rotary import complex_rows, half_rows
from kvfold.convert.algebra.target import LatentTarget
from kvfold.convert.methods.published import PEERS
from kvfold.convert.request import fold_request
from kvfold.convert.settle.settle import make_plan
from kvfold.core.errors import InvalidInput

from ...support import layers
from ...support.layers import FREQUENCIES_F, H, layer, output
from ...support.published_rules import DEMO, PER_HEAD, F, bands_of, folded_output, statistics_of, tokens


def with_pairs(a: Attention, pairs: set[tuple[int, int]]) -> Attention:
    """Only these (head, pair)s have keys."""
    z_KFD = complex_rows(a.k_KHD)
    for head in range(len(z_KFD)):
        for pair in range(F):
            if (head, pair) not in pairs:
                z_KFD[head, pair] = 0
    return replace(a, k_KHD=half_rows(z_KFD))


def test_mha2mla_keeps_the_pairs_that_contribute() -> None:
    a, x_XD = with_pairs(layer(key_heads=2), {(0, 1), (0, 2), (1, 0), (1, 2)}), tokens()
    target = LatentTarget(kv_lora_rank=2 * H, qk_rope_head_dim=8)
    bands = bands_of("mha2mla", 8, (a, statistics_of(a, x_XD)))
    assert [(band.pairs, band.slots) for band in bands] == [((0,), 1), ((1,), 1), ((2,), 2)]
    torch.testing.assert_close(folded_output("mha2mla", a, target, x_XD, x_XD[:20]), output(a, x_XD[:20]))


def test_mha2mla_has_one_table_for_all_layers() -> None:
    """The table has the frequencies of every layer, and each layer fills those that it uses."""
    x_XD = tokens()
    one, other = with_pairs(layer(key_heads=2), {(0, 0)}), with_pairs(layer(seed=1, key_heads=2), {(1, 3)})
    layers = [(a, statistics_of(a, x_XD)) for a in (one, other)]
    bands = bands_of("mha2mla", 4, *layers)
    assert [(band.pairs, band.slots) for band in bands] == [((0,), 1), ((3,), 1)]
    latents = [
        PEERS["mha2mla"].fold(a, LatentTarget(kv_lora_rank=3, qk_rope_head_dim=4), bands, s)
        for a, s in layers
    ]
    assert [bool(latent.k_rope_RD[:2].any()) for latent in latents] == [True, False]
    assert [bool(latent.k_rope_RD[2:].any()) for latent in latents] == [False, True]


def apart(rows_BD: Tensor, values: int, rank: int) -> Tensor:
    """SVD_split: keys and values by half of the rank each."""
    keys_BD, values_BD = rows_BD[:-values], rows_BD[-values:]
    return torch.cat(
        [jointly(keys_BD, len(keys_BD), rank // 2), jointly(values_BD, values, rank - rank // 2)]
    )


def jointly(rows_BD: Tensor, values: int, rank: int) -> Tensor:
    """SVD_joint: rows of keys and values by one truncated SVD."""
    u, s, vt = torch.linalg.svd(rows_BD, full_matrices=False)
    return u[:, :rank] * s[:rank] @ vt[:rank]


@pytest.mark.parametrize(("pairs", "kept"), [("high", [0, 1]), ("low", [2, 3]), ("uniform", [0, 2])])
@pytest.mark.parametrize(("ending", "decompose"), [("", jointly), (":split", apart)])
@pytest.mark.parametrize("biases", [False, True])
def test_mha2mla_by_the_paper(
    pairs: str, kept: list[int], ending: str, decompose: Any, biases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partial RoPE as masked frequencies; un-rotated rows are decomposed with the values."""
    a, x_TD = layer(key_heads=2, biases=biases), tokens()[:20]
    target = LatentTarget(kv_lora_rank=9, qk_rope_head_dim=8)
    bands = bands_of(f"mha2mla:{pairs}", 8, (a, None))
    assert [(band.pairs, band.slots) for band in bands] == [((pair,), 2) for pair in kept]
    folded = folded_output(f"mha2mla:{pairs}{ending}", a, target, tokens(), x_TD)
    still = torch.tensor([row % F not in kept for row in range(H)])
    rows_BD = decompose(torch.cat([a.k_KHD[:, still].flatten(0, 1), a.v_KHD.flatten(0, 1)]), 2 * H, 9)
    k_KHD = a.k_KHD.clone()
    k_KHD[:, still] = rows_BD[: -2 * H].unflatten(0, (2, -1))
    approximated = replace(a, k_KHD=k_KHD, v_KHD=rows_BD[-2 * H :].unflatten(0, (2, -1)))
    monkeypatch.setattr(layers, "FREQUENCIES_F", FREQUENCIES_F.where(~still[:F], 0.0))
    torch.testing.assert_close(folded, output(approximated, x_TD))


@pytest.mark.parametrize("name", PER_HEAD)
def test_mha2mla_rotates_every_pair_of_every_head(name: str) -> None:
    """At the widest rotary part the latent holds values alone."""
    a, x_XD = layer(key_heads=2), tokens()
    target = LatentTarget(kv_lora_rank=2 * H, qk_rope_head_dim=2 * H)
    torch.testing.assert_close(folded_output(name, a, target, x_XD, x_XD[:20]), output(a, x_XD[:20]))


def test_mha2mla_divides_a_cache_in_halves_unless_asked_otherwise() -> None:
    """The bundled checkpoint caches 256 numbers: 8 key heads of 16 dimensions, twice."""

    def division(method: str, **options: Any) -> tuple[int, int]:
        request = fold_request({"model": str(DEMO), "to": "mla", "method": method, **options})
        target = make_plan(DEMO, request).target
        assert isinstance(target, LatentTarget)
        return target.qk_rope_head_dim, target.kv_lora_rank

    for method in PER_HEAD:
        assert division(method, kv_budget="50%") == (64, 64)
        # As many pairs for each head as half of 76 has room for.
        assert division(method, kv_budget="30%") == (32, 44)
        assert division(method, rank="100") == (96, 100)
        assert division(method, rank="200") == (48, 200)  # what makes the cache smaller than the source's
        assert division(method, kv_budget="75%", rope_dim=128) == (128, 64)
    assert division("mha2mla", kv_budget="5%") == (6, 6)
    for method, budget, options, sentence in (
        ("mha2mla:low", "5%", {}, "--rope-dim 6 does not give 8 key heads .* multiple of 16, at most 128"),
        ("mha2mla", "75%", {"rope_dim": 130},
         "--rope-dim 130 does not fit; choose an even number from 2 to 128"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=sentence):
            division(method, kv_budget=budget, **options)


@pytest.mark.parametrize("rope_dim", [6, 20])
def test_widths_that_do_not_give_each_head_as_many_pairs(rope_dim: int) -> None:
    with pytest.raises(
        InvalidInput, match=rf"--rope-dim {rope_dim} does not give 2 key heads .* 4, at most 16"
    ):
        bands_of("mha2mla:high", rope_dim, (layer(key_heads=2), None))
