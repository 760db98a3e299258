"""Groups of heads that become one: of equal size, by predicted loss and not by position.

Query heads may be put in any order when W_O's columns go with them, so neighbouring heads need not share a
key. The loss of a group is taken as the sum over its pairs of heads of what the two would lose as one.

Legend: attention.py; M heads in a group.
"""

from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from ..algebra.attention import Attention
from ..algebra.metric import LayerMetric, with_bias
from ..algebra.rotary import complex_rows
from ..algebra.subspaces import factor

GAIN = 0.06  # share of the predicted loss below which another order is not worth its uncertainty (LOG.md)


def grouped(attention: Attention, metric: LayerMetric, groups: int) -> tuple[Attention, LayerMetric, float]:
    """Return the same layer with its heads in an order in which neighbours lose least as one.

    Norms of single heads are ignored: the lengths that they hide change no cost, because the metric contains
    them too.

    Returns:
        The layer, the metric in that order, and the share of the predicted loss that the order saves.
    """
    heads = len(attention.k_KHD)
    if groups in (1, heads):
        return attention, metric, 0.0
    costs_KK = merge_costs(attention, metric)
    order = arrange(costs_KK, groups)
    queries = len(attention.q_NHD) // heads
    readers = [key * queries + query for key in order for query in range(queries)]

    def key(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[order]

    moved = replace(
        attention,
        q_NHD=attention.q_NHD[readers],
        k_KHD=attention.k_KHD[order],
        v_KHD=attention.v_KHD[order],
        o_DNH=attention.o_DNH[:, readers],
        q_NH=None if attention.q_NH is None else attention.q_NH[readers],
        k_KH=key(attention.k_KH),
        v_KH=key(attention.v_KH),
    )
    before, after = (_cost(costs_KK, one, groups) for one in (list(range(heads)), order))
    return moved, metric.reordered(order, readers), 1 - after / before if before > 0 else 0.0


def merge_costs(attention: Attention, metric: LayerMetric) -> Tensor:
    """Return the loss of every two heads as one, (K, K), in the metric's unit.

    For keys that is, per rotary pair, the smaller energy of the two; for values, all but the H largest
    energies.
    """
    k_KHE = with_bias(attention.k_KHD, attention.k_KH)
    v_KHE = with_bias(attention.v_KHD, attention.v_KH)
    heads = len(k_KHE)
    width = k_KHE.shape[1]
    first, second = torch.tensor(list(combinations(range(heads), 2))).T
    keys_FKE = complex_rows(_seen(k_KHE, metric)).transpose(0, 1)
    gram_FKK = keys_FKE @ complex_rows(k_KHE).transpose(0, 1).mH
    energy = torch.linalg.eigvals(
        _of_two(metric.pairs(heads), first, second) @ _of_two(gram_FKK, first, second)
    ).real
    lost_P = energy.amin(-1).clamp(min=0).sum(0) / 2  # a complex error counts half in each of its real parts
    values = _seen(v_KHE, metric).flatten(0, 1) @ v_KHE.flatten(0, 1).mT
    for at, (one, other) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        rows = torch.cat([torch.arange(head * width, (head + 1) * width) for head in (one, other)])
        lower = factor(metric.value_pair(heads, one, other))
        lost_P[at] += (
            torch.linalg.eigvalsh(lower.mT @ values[rows[:, None], rows] @ lower)[:width].clamp(min=0).sum()
        )
    costs_KK: Tensor = lost_P.new_zeros(heads, heads)
    costs_KK[first, second] = costs_KK[second, first] = lost_P
    return costs_KK


def arrange(costs_KK: Tensor, groups: int) -> list[int]:
    """Return an order of the heads whose consecutive groups of equal size cost least.

    The search swaps heads while a swap helps. It starts from the heads' own order, and keeps it where nothing
    is gained.
    """
    costs: list[list[float]] = costs_KK.tolist()
    heads = len(costs)
    size = heads // groups
    order = list(range(heads))

    def with_group(head: int, group: int, without: int) -> float:
        return sum(
            costs[head][other] for other in order[group * size : (group + 1) * size] if other != without
        )

    helped = True
    while helped:
        helped = False
        for x, y in combinations(range(heads), 2):
            here = x // size
            there = y // size
            if here == there:
                continue
            one, other = order[x], order[y]
            before = with_group(one, here, one) + with_group(other, there, other)
            after = with_group(one, there, other) + with_group(other, here, one)
            if after < before * (1 - 1e-9):
                order[x], order[y], helped = other, one, True
    members = sorted(sorted(order[start : start + size]) for start in range(0, heads, size))
    return [head for group in members for head in group]


def _cost(costs_KK: Tensor, order: list[int], groups: int) -> float:
    parts = torch.tensor(order).view(groups, -1)
    return sum(float(costs_KK[part][:, part].sum()) for part in parts) / 2


def _seen(rows_KHE: Tensor, metric: LayerMetric) -> Tensor:
    moment_EE = metric.moment(rows_KHE)
    return rows_KHE if moment_EE is None else rows_KHE @ moment_EE


def _of_two(matrix_FKK: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the 2 x 2 blocks (F, pairs, 2, 2) of two heads each."""
    both = torch.stack([first, second], -1)
    return matrix_FKK[:, both[:, :, None], both[:, None, :]]
