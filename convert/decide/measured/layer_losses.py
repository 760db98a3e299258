"""The loss of a plan's closed form on some of its layers, for choices that need more than a prediction."""

from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from itertools import accumulate

from ....core.console import progress
from ...calibration.capacity import default_jobs
from ...write.fold_threads import fold_threads
from ...write.layer_fold import fold_attention
from ..plan import Plan


def closed_form_loss(plan: Plan, layers: int, description: str) -> float | None:
    """Fold layers of a plan by the closed form, and measure them on tokens that no fit has seen.

    Args:
        plan: the fold, whose refinement is left out.
        layers: at most so many are folded, those of `spread_layers`.
        description: of the work, for its progress.

    Returns:
        Nats per token of all layers, with the cache in the plan's format; None where `forward.attend` does
        not compute the attention.
    """
    closed = replace(plan, refine=0, effort=replace(plan.effort, solve=False))
    attending = plan.source.attending
    predicted = [sum(loss.values()) if loss else 0.0 for loss in plan.losses[: len(attending)]]
    chosen = spread_layers(predicted, layers)
    jobs = plan.request.jobs or default_jobs(
        plan.source, plan.statistics, **plan.fitted_ranks(norm=plan.latent_norm == "fitted")
    )
    with fold_threads(min(jobs, len(chosen))) as pool:
        folding = [pool.submit(fold_attention, closed, attending[one]) for one in chosen]
        for done in progress(as_completed(folding), description, len(folding)):
            done.result()
    losses = [each.result()[1] for each in folding]
    if any(loss is None for loss in losses):
        return None
    stored = (loss.get("stored", loss["folded"]) for loss in losses if loss)
    return sum(factor * loss for factor, loss in zip(chosen.values(), stored, strict=True))


def spread_layers(predicted_L: Sequence[float], count: int) -> dict[int, float]:
    """Return the layers to measure for the sum over all, and the factor for what each loses.

    A few layers can lose half of the sum, so layers stand at even steps of the cumulated predictions, each
    for as much of the sum as a step (systematic sampling with probability in proportion to size). All are
    returned, by 1, if there are no more than `count`; without predictions steps are layers.

    Args:
        predicted_L: loss of every layer, in any unit.
        count: most layers.

    Example:
        >>> spread_layers([4.0, 1.0, 1.0, 2.0], 2)
        {0: 1.0, 3: 2.0}
    """
    layers = len(predicted_L)
    if layers <= count:
        return dict.fromkeys(range(layers), 1.0)
    sizes_L = predicted_L if sum(predicted_L) > 0 else [1.0] * layers
    sums_L = list(accumulate(sizes_L))
    factors: dict[int, float] = {}
    for step in range(count):
        aim = sums_L[-1] * (step + 0.5) / count
        layer = next(at for at, until in enumerate(sums_L) if until > aim)
        factors[layer] = factors.get(layer, 0.0) + sums_L[-1] / count / sizes_L[layer]
    return factors
