"""The inputs that layers have behind layers that were changed, which some published rules calibrate on.

TransMLA's code decomposes every layer on activations of the model whose rotation was removed, CARE's behind
the layers that it has decomposed already. The calibration tokens are read again, one layer at a time; layers,
masks and rotary tables are transformers' own, with the output of the attention replaced.

Legend: statistics.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.console import progress
from ...models.layered_model import LayeredModel
from ..algebra.attention import LatentAttention
from ..algebra.forward import attend
from ..algebra.target import LatentTarget
from ..calibration.layerwise import Calls, enter
from ..calibration.study import fitting_batch, layout_of
from ..decide.plan import Plan
from ..methods.layer_sample import sample_of
from ..methods.published import InOrder, peer, with_few_queries
from ..methods.slots import bands_of, slots_of


def in_order(plan: Plan) -> Plan:
    """Return the plan with `inputs`, where its method reads other activations than the source's.

    A layer whose attention `forward.attend` does not compute is read through as the source has it.
    """
    rule = peer(plan.method)
    if rule is None or rule.in_order is None or plan.statistics is None:
        return plan
    assert isinstance(plan.target, LatentTarget)
    ids_BT = plan.statistics.ids_BT
    layered = LayeredModel(plan.source.checkpoint)
    batches = [(part_BT, part_BT) for part_BT in ids_BT.split(fitting_batch(plan.source, ids_BT))]
    held: list[Tensor] = []  # hidden states between two layers, by batch, on the CPU
    calls = enter(layered, batches, lambda at, hidden_BTD: held.append(hidden_BTD.cpu()))
    numbers = range(len(layered.blocks))
    for number in progress(numbers, "activations in order", len(numbers)):
        with torch.no_grad(), layered.block(number) as block:
            through = None
            if number in plan.source.attending:
                moment_EE = _moment(plan, number, layered, held, calls)
                plan = replace(plan, inputs={**plan.inputs, number: moment_EE})
                through = _through(plan, number, rule.in_order)
            with _replaced(plan, number, layered, through):
                held = [calls.run(block, number, each_BTD.to(layered.device)).cpu() for each_BTD in held]
    return plan


def _moment(plan: Plan, number: int, layered: LayeredModel, held: list[Tensor], calls: Calls) -> Tensor:
    """Return the second moment (E, E) of a layer's input, with the constant 1 behind it, float64."""
    sums: list[Tensor] = []

    def see(_: Any, inputs: tuple[Tensor, ...]) -> None:
        rows_XE = pad(inputs[0].flatten(0, 1), (0, 1), value=1).to("cpu", torch.float64)
        sums.append(rows_XE.mT @ rows_XE)

    hook = layered.model.get_submodule(_first(plan, number)).register_forward_pre_hook(see)
    try:
        for hidden_BTD in held:
            calls.run(layered.blocks[number], number, hidden_BTD.to(layered.device))
    finally:
        hook.remove()
    return torch.stack(sums).sum(0) / sum(hidden_BTD[..., 0].numel() for hidden_BTD in held)


def _through(plan: Plan, number: int, rule: InOrder) -> LatentAttention | None:
    """Return the layer that the next ones read through, float64; None: the source's."""
    assert plan.statistics is not None
    assert isinstance(plan.target, LatentTarget)
    table_F, factor = plan.source.frequencies(number)
    attention = plan.source.attention(number, factor)
    taken = plan.statistics.layers[plan.source.attending.index(number)]
    if sample_of(plan.source, taken, number, attention, table_F) is None:
        return None
    bands, input_EE = bands_of(plan.source, plan.bands, number), plan.inputs[number]
    if rule.between is not None:
        return rule.between(attention, plan.target, bands, taken, input_EE)
    found = peer(plan.method)
    assert found is not None
    return with_few_queries(found, attention, plan.target, bands, taken, input_EE)


@contextmanager
def _replaced(
    plan: Plan, number: int, layered: LayeredModel, through: LatentAttention | None
) -> Iterator[None]:
    """Replace the output of a layer's attention for the duration; None: leave it."""
    if through is None:
        yield
        return
    layer = through.to(torch.float32, layered.device)
    slots_S = slots_of(plan.source, plan.bands, number).to(layered.device)
    scoring = plan.source.scoring(number, 1.0).to(torch.float32, layered.device)
    seen: list[Tensor] = []

    def see(_: Any, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])

    def answer(_: Any, inputs: Any, output_BTD: Tensor) -> Tensor:
        return attend(layer, seen.pop(), slots_S, scoring).view_as(output_BTD)

    last = layout_of(plan.source).projections(number)["o"]
    hooks = [
        layered.model.get_submodule(_first(plan, number)).register_forward_pre_hook(see),
        layered.model.get_submodule(last).register_forward_hook(answer),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _first(plan: Plan, number: int) -> str:
    """Return the name of the projection that reads a layer's input first."""
    names = layout_of(plan.source).projections(number)
    return next(name for role, name in names.items() if role != "o")
