"""The metric of keys and values where the first token of a text is an attention sink."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.convert.algebra.attention import Attention
from kvfold.convert.calibration.layer_metric import from_statistics, metric_of, of_keys
from kvfold.convert.calibration.statistics import LayerStatistics

from ...support.layers import drawn

D, N, K, H, TEXTS, T = 12, 4, 2, 4, 64, 16
SINK = 30.0  # how much larger the first token's gradient is


def attention() -> Attention:
    return Attention(
        q_NHD=drawn(N, H, D, seed=0),
        k_KHD=drawn(K, H, D, seed=1),
        v_KHD=drawn(K, H, D, seed=2),
        o_DNH=drawn(D, N, H, seed=3),
        scale=H**-0.5,
    )


def moment(rows: Tensor) -> Tensor:
    rows = rows.flatten(0, 1)
    return rows.mT @ rows / (TEXTS * T)


def sample() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and gradients at keys and values, in which every text begins with one and the same token."""
    input_BTD = drawn(TEXTS, T, D, seed=4).to(torch.bfloat16).double()
    input_BTD[:, 0] = drawn(D, seed=5).to(torch.bfloat16).double()
    gradients = [drawn(TEXTS, T, K * H, seed=seed) for seed in (6, 7)]
    for rows in gradients:
        rows[:, 0] *= SINK
        rows[:, 0, 1:] *= 0.1  # not in the directions of other tokens
    return input_BTD, *gradients


def layer() -> LayerStatistics:
    input_BTD, key_BTC, value_BTC = sample()
    heads = torch.eye(H, dtype=torch.float64).expand(N, -1, -1)
    return LayerStatistics(
        input_EE=moment(torch.cat([input_BTD, torch.ones(TEXTS, T, 1)], -1)),
        query_NHH=heads,
        key_fisher=moment(key_BTC),
        value_fisher=moment(value_BTC),
        query_fisher=heads,
        distance_NT=torch.full((N, T), 1 / T, dtype=torch.float64),
        output_fisher=torch.eye(D, dtype=torch.float64),
        input_BTD=input_BTD.to(torch.bfloat16),
        output_BTD=input_BTD[:1].to(torch.bfloat16),
        first_key_fisher=moment(key_BTC[:, :1]),
        first_value_fisher=moment(value_BTC[:, :1]),
        first_NT=torch.full((N, T), 0.2 / T, dtype=torch.float64),
    )


def test_errors_cost_what_they_do_to_first_and_other_tokens() -> None:
    """½ tr(G E C Eᵀ) of errors like the weights themselves, against the mean over tokens of (gᵀ E x)²."""
    source, taken = attention(), layer()
    input_BTD, *gradients = sample()
    metric = of_keys(taken, source)
    input_EE, least_EE = metric.input_EE, from_statistics(taken).input_EE
    assert least_EE is not None
    cost, found = 0.0, 0.0
    for seed in range(40):
        # Errors of a fold are combinations of the rows that it has.
        mixed = drawn(2, K * H, K * H, seed=9 + seed)
        errors = [
            mix @ rows.flatten(0, 1) for mix, rows in zip(mixed, (source.k_KHD, source.v_KHD), strict=True)
        ]
        blocks = metric.key_BSS[0], metric.value_BSS[0]
        for error_CD, gradient_BTC, block_CC in zip(errors, gradients, blocks, strict=True):
            cost += float(((input_BTD @ error_CD.mT) * gradient_BTC).sum(-1).square().mean())
            found += float((block_CC @ error_CD @ input_EE[:-1, :-1] * error_CD).sum())
    assert found == pytest.approx(cost, rel=0.35)
    first_D = input_BTD[0, 0]
    at_first, before = (float(first_D @ moment_EE[:-1, :-1] @ first_D) for moment_EE in (input_EE, least_EE))
    assert at_first > 20 * before
    assert float(metric.key_BSS[0].trace()) < 0.25 * float(taken.key_fisher.trace())


@pytest.mark.parametrize("case", ["no sink", "first tokens alone"])
def test_where_there_is_no_sink_all_tokens_are_alike(case: str) -> None:
    taken = layer()
    key, value = taken.first_key_fisher, taken.first_value_fisher
    changed: dict[str, dict[str, Any]] = {
        "no sink": {"first_key_fisher": key / 100, "first_value_fisher": value / 100},
        "first tokens alone": {"key_fisher": key, "value_fisher": value},
    }
    taken = replace(taken, **changed[case])
    aware, plain = metric_of(taken, attention(), T), from_statistics(taken)
    for name in ("input_EE", "key_BSS", "value_BSS"):
        assert torch.equal(getattr(aware, name), getattr(plain, name))
