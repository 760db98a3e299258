"""Groups of heads that become one: of equal size, by predicted loss and not by position.

Query heads may be put in any order when W_O's columns go with them, so neighbouring heads need not share a
key. The loss of a group is taken as the sum over its pairs of heads of what the two would lose as one.

Legend: attention.py; M heads in a group.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from ..algebra.attention import Attention
from ..algebra.metric import LayerMetric, rows_of, with_bias
from ..algebra.rotary import complex_rows
from ..algebra.subspaces import factor

Partition = tuple[tuple[int, ...], ...]  # the heads of every group

CANDIDATES = 4  # orders that are measured where there is text to measure on
# Share of the predicted loss below which another order is not worth its uncertainty (docs/notes/heads.md).
GAIN = 0.06


def arrangements(attention: Attention, metric: LayerMetric, groups: int) -> list[tuple[list[int], float]]:
    """Return orders of the heads whose consecutive groups of equal size lose least, the best first.

    They do not depend on the order that the heads come in. Norms of single heads are ignored: the lengths
    that they hide change no cost, because the metric contains them too.

    Returns:
        At most `CANDIDATES` orders, each with the share of the predicted loss that it saves.
    """
    heads = len(attention.k_KHD)
    if groups in (1, heads):
        return [(list(range(heads)), 0.0)]
    costs_KK = merge_costs(attention, metric)
    before = _cost(costs_KK, list(range(heads)), groups)
    orders = arrange(costs_KK, groups)[:CANDIDATES]
    return [(order, 1 - _cost(costs_KK, order, groups) / before if before > 0 else 0.0) for order in orders]


def reordered(attention: Attention, metric: LayerMetric, order: list[int]) -> tuple[Attention, LayerMetric]:
    """Return the same layer, and its metric, with the key heads and their queries in another order."""
    return heads_in(order, attention), metric.reordered(order, _readers(order, attention))


def _readers(order: list[int], attention: Attention) -> list[int]:
    queries = len(attention.q_NHD) // len(attention.k_KHD)
    return [key * queries + query for key in order for query in range(queries)]


def heads_in(order: list[int], attention: Attention) -> Attention:
    """Return the same layer with the key heads and their queries in another order."""
    readers = _readers(order, attention)
    moved: dict[str, Any] = {"o_DNH": attention.o_DNH[:, readers]}
    for heads, names in (
        (order, ("k_KHD", "k_KH", "v_KHD", "v_KH")),
        (readers, ("q_NHD", "q_NH", "gate_NHD", "gate_NH")),
    ):
        tensors = ((name, getattr(attention, name)) for name in names)
        moved |= {name: tensor[heads] for name, tensor in tensors if tensor is not None}
    return replace(attention, **moved)


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
    product = _of_two(metric.pairs(heads), first, second) @ _of_two(gram_FKK, first, second)
    if not product.isfinite().all():  # MKL ends the process at such a matrix
        raise LinAlgError("the product of two metrics is not finite")
    energy = torch.linalg.eigvals(product).real
    lost_P = energy.amin(-1).clamp(min=0).sum(0) / 2  # a complex error counts half in each of its real parts
    values = _seen(v_KHE, metric).flatten(0, 1) @ v_KHE.flatten(0, 1).mT
    for at, (one, other) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        rows = rows_of([one, other], width)
        lower = factor(metric.value_pair(heads, one, other))
        energy = torch.linalg.eigvalsh(lower.mT @ values[rows[:, None], rows] @ lower)
        lost_P[at] += energy[:width].clamp(min=0).sum()
    costs_KK: Tensor = lost_P.new_zeros(heads, heads)
    costs_KK[first, second] = costs_KK[second, first] = lost_P
    return costs_KK


def likest(attention: Attention, groups: int) -> list[int]:
    """Return the order of the heads whose consecutive groups of equal size are most alike once turned.

    Heads are grouped as in arXiv 2412.20677, by weights alone: the distance of two heads is what remains
    after the best angle for each rotary pair of their keys and the best rotation of their values. `arrange`
    searches where the paper anneals.
    """
    heads = len(attention.k_KHD)
    if groups in (1, heads):
        return list(range(heads))
    k_KHE = with_bias(attention.k_KHD, attention.k_KH)
    v_KHE = with_bias(attention.v_KHD, attention.v_KH)
    z_KFE = complex_rows(k_KHE)
    keys_KK = torch.einsum("kfe,mfe->kmf", z_KFE, z_KFE.conj()).abs().sum(-1)
    values_KK = torch.linalg.svdvals(torch.einsum("khe,mge->kmhg", v_KHE, v_KHE)).sum(-1)
    energy_K = k_KHE.square().sum((1, 2)) + v_KHE.square().sum((1, 2))
    return arrange(energy_K + energy_K[:, None] - 2 * (keys_KK + values_KK), groups)[0]


def arrange(costs_KK: Tensor, groups: int) -> list[list[int]]:
    """Return orders of the heads whose consecutive groups of equal size cost little, the cheapest first.

    A search starts from every head and makes the swap that saves most, while one saves. The orders are where
    the searches end, and one swap away from the best of these. No step depends on the numbers of heads.
    """
    costs_KK = costs_KK - costs_KK.diagonal().diag()  # a head alone costs nothing
    ends = {
        _partition(_swapped(costs_KK, _gathered(costs_KK, groups, head))) for head in range(len(costs_KK))
    }
    best = min(ends, key=lambda partition: (_cost(costs_KK, _flat(partition), groups), partition))
    orders = [_flat(partition) for partition in ends | set(_neighbours(best))]
    return sorted(orders, key=lambda order: (_cost(costs_KK, order, groups), order))


def _neighbours(partition: Partition) -> Iterator[Partition]:
    """Return every partition that is one swap of two heads away."""
    group_K = torch.empty(sum(map(len, partition)), dtype=torch.int64)
    for number, members in enumerate(partition):
        group_K[list(members)] = number
    for one, other in combinations(range(len(group_K)), 2):
        if group_K[one] != group_K[other]:
            moved_K = group_K.clone()
            moved_K[[one, other]] = group_K[[other, one]]
            yield _partition(moved_K)


def _partition(group_K: Tensor) -> Partition:
    members = ((group_K == group).nonzero().flatten().tolist() for group in group_K.unique())
    return tuple(sorted(tuple(group) for group in members))


def _flat(partition: Partition) -> list[int]:
    return [head for group in partition for head in group]


def _gathered(costs_KK: Tensor, groups: int, first: int) -> Tensor:
    """Return the group of every head (K,), groups filled one after the other with the heads that fit best.

    Args:
        costs_KK: of every two heads as one.
        groups: the number of groups.
        first: the head that the first group begins with; others begin with the head that fits worst.
    """
    heads = len(costs_KK)
    group_K = torch.full((heads,), -1)
    for group in range(groups):
        left = group_K < 0
        begin = int((costs_KK[:, left].sum(1)).masked_fill(~left, -torch.inf).argmax()) if group else first
        group_K[begin] = group
        for _ in range(heads // groups - 1):
            added_K = costs_KK[:, group_K == group].sum(1).masked_fill(group_K >= 0, torch.inf)
            group_K[added_K.argmin()] = group
    return group_K


def _swapped(costs_KK: Tensor, group_K: Tensor) -> Tensor:
    """Return the groups (K,) after every swap of two heads that saves, the largest saving first."""
    least = 1e-9 * float(costs_KK.sum())
    while True:
        to_KG = costs_KK @ torch.nn.functional.one_hot(group_K).to(costs_KK.dtype)
        there_KK = to_KG[:, group_K]  # of a row's head to the group of a column's head
        moved_KK = there_KK - there_KK.diagonal()[:, None] - costs_KK
        change_KK = (moved_KK + moved_KK.mT).masked_fill(group_K[:, None] == group_K, 0.0)
        if float(change_KK.min()) >= -least:
            return group_K
        one, other = divmod(int(change_KK.argmin()), len(group_K))
        group_K[[one, other]] = group_K[[other, one]]


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
