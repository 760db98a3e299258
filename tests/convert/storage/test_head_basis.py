"""Un-rotated queries and keys in other coordinates: the same scores, and less lost by rounding."""

import dataclasses

import torch
from torch import Tensor

from kvfold.convert.algebra.attention import LatentAttention
from kvfold.convert.algebra.forward import attend
from kvfold.convert.methods.latent_norm import LatentTokens, with_latent_norm
from kvfold.convert.storage.head_basis import with_balanced_heads

from ...support.layers import drawn

SLOTS_S = torch.tensor([0.3], dtype=torch.float64)


def layer(*, bias: bool) -> tuple[LatentAttention, Tensor]:
    """A layer with coordinates that are nearly without keys, as behind fast rotary pairs; and its inputs."""
    width, rank, heads, head = 12, 5, 2, 16
    input_BTD = torch.nn.functional.normalize(drawn(4, 30, width, seed=7), dim=-1) * width**0.5
    faded_P = torch.tensor([1.0] * 3 + [0.003] * 13, dtype=torch.float64)
    made = LatentAttention(
        q_nope_NPA=drawn(heads, head, width, seed=0) / 3,
        q_rope_NRA=drawn(heads, 2, width, seed=1) / 3,
        q_nope_NP=drawn(heads, head, seed=8) / 3 if bias else None,
        q_rope_NR=drawn(heads, 2, seed=9) / 3 if bias else None,
        down_CD=drawn(rank, width, seed=2) / 3,
        k_up_NPC=drawn(heads, head, rank, seed=3) * faded_P[:, None],
        v_up_NHC=drawn(heads, head, rank, seed=4) / 3,
        k_rope_RD=drawn(2, width, seed=5) / 3,
        o_DNH=drawn(width, heads, head, seed=6) / 3,
        scale=0.4,
    )
    tokens = LatentTokens.of(input_BTD[:3].flatten(0, 1), input_BTD[3:].flatten(0, 1))
    return with_latent_norm(made, tokens), input_BTD


def test_the_function_stays_and_so_does_the_size_of_queries() -> None:
    for bias in (False, True):
        given, input_BTD = layer(bias=bias)
        made = with_balanced_heads(given, input_BTD)
        wanted_BTD = attend(given, input_BTD, SLOTS_S)
        torch.testing.assert_close(attend(made, input_BTD, SLOTS_S), wanted_BTD, rtol=1e-8, atol=1e-8)
        for head in range(2):
            size, wanted = made.q_nope_NPA[head].square().mean(), given.q_nope_NPA[head].square().mean()
            torch.testing.assert_close(size, wanted)


def test_one_scale_for_all_coordinates_of_a_head_costs_less() -> None:
    given, input_BTD = layer(bias=False)
    wanted_BTD = attend(given, input_BTD, SLOTS_S)

    def error(one: LatentAttention) -> float:
        step_N1C = one.k_up_NPC.abs().amax(1, keepdim=True) / 7
        rounded = dataclasses.replace(one, k_up_NPC=(one.k_up_NPC / step_N1C).round() * step_N1C)
        return float((attend(rounded, input_BTD, SLOTS_S) - wanted_BTD).square().mean())

    assert error(with_balanced_heads(given, input_BTD)) < error(given) / 2


def test_a_head_without_keys_keeps_the_function() -> None:
    given, input_BTD = layer(bias=False)
    k_up_NPC = given.k_up_NPC.clone()
    k_up_NPC[0] = 0
    given = dataclasses.replace(given, k_up_NPC=k_up_NPC)
    made = with_balanced_heads(given, input_BTD)
    assert all(tensor.isfinite().all() for tensor in (made.q_nope_NPA, made.k_up_NPC))
    wanted_BTD = attend(given, input_BTD, SLOTS_S)
    torch.testing.assert_close(attend(made, input_BTD, SLOTS_S), wanted_BTD, rtol=1e-8, atol=1e-8)
