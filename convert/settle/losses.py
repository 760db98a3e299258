"""The loss of a plan's closed form on some of its layers, for choices that need more than a prediction."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from itertools import accumulate

from ...core.console import progress
from ...core.memory import enough_memory
from ..decide.plan import Plan
from ..efforts import MEASURED
from ..layer.fold import fold_attention
from ..layer.threads import FEWER, fold_threads


@enough_memory(FEWER)
def closed_form_loss(plan: Plan, description: str) -> float | None:
    """Fold layers of a plan by the closed form, and measure them on tokens that no fit has seen.

    They are `efforts.MEASURED` at most, those of `spread_layers`. Progress is shown with the description.

    Returns:
        Nats per token of all layers, with the cache in the plan's format; None where `forward.attend` does
        not compute the attention.
    """
    closed = replace(plan, refine=0, effort=replace(plan.effort, solve=False))
    attending = plan.source.attending
    predicted = [sum(loss.values()) if loss else 0.0 for loss in plan.losses[: len(attending)]]
    chosen = spread_layers(predicted, MEASURED)
    jobs = min(plan.jobs, len(chosen))
    with fold_threads(jobs) as pool:
        folding = [pool.submit(fold_attention, closed, attending[one]) for one in chosen]
        for done in progress(as_completed(folding), description, len(folding), jobs):
            done.result()
    losses = [each.result()[1] for each in folding]
    if any(loss is None for loss in losses):
        return None
    stored = (loss.get("stored", loss["folded"]) for loss in losses if loss)
    return sum(factor * loss for factor, loss in zip(chosen.values(), stored, strict=True))


def slots_loss(plan: Plan, description: str) -> float | None:
    """Return `closed_form_loss` with a linear norm and a cache that is not quantised.

    Which slots lose least does not depend on these, and they cost time.
    """
    request = plan.request.model_copy(update={"cache_dtype": "bfloat16"})
    plain = replace(plan, latent_norm=plan.latent_norm and "linear", request=request)
    return closed_form_loss(plain, description)


def spread_layers(predicted_L: Sequence[float], count: int) -> dict[int, float]:
    """Return the layers to measure for the sum over all, and the factor for what each loses.

    A few layers can lose half of the sum. So layers stand at even steps of the cumulated predictions, each
    for as much of the sum as a step (systematic sampling with probability in proportion to size); one that is
    predicted to lose a step or more stands for itself. All do if there are no more than `count`. Without
    finite predictions steps are layers.

    Args:
        predicted_L: loss of every layer, in any unit.
        count: most layers.

    Example:
        >>> spread_layers([4.0, 1.0, 1.0, 1.0, 1.0], 3)
        {0: 1.0, 2: 2.0, 4: 2.0}
    """
    if len(predicted_L) <= count:
        return dict.fromkeys(range(len(predicted_L)), 1.0)
    is_usable = 0 < sum(predicted_L) < math.inf
    sizes = dict(enumerate(predicted_L if is_usable else [1.0] * len(predicted_L)))
    factors: dict[int, float] = {}
    while left := count - len(factors):
        step = sum(sizes.values()) / left
        certain = [layer for layer, size in sizes.items() if size >= step > 0]
        if not certain:
            break
        # Without these, steps are smaller, and others may exceed them.
        factors |= dict.fromkeys(certain, 1.0)
        sizes = {layer: size for layer, size in sizes.items() if layer not in factors}
    if left and step > 0:
        layers, sums = list(sizes), list(accumulate(sizes.values()))
        drawn = [layers[bisect_right(sums, (number + 0.5) * step)] for number in range(left)]
        factors |= {layer: step / sizes[layer] for layer in drawn}
    return dict(sorted(factors.items()))
