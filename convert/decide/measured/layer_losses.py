"""The loss of a plan's closed form on some of its layers, for choices that need more than a prediction."""

from concurrent.futures import as_completed
from dataclasses import replace

import torch

from ....core.console import progress
from ...calibration.capacity import default_jobs
from ...write.fold_threads import fold_threads
from ...write.layer_fold import fold_attention
from ..plan import Plan


def closed_form_loss(plan: Plan, layers: int, description: str) -> float | None:
    """Fold layers of a plan by the closed form, and measure them on tokens that no fit has seen.

    Args:
        plan: the fold, whose refinement is left out.
        layers: at most so many are folded, spread evenly; their losses are scaled up to all layers.
        description: of the work, for its progress.

    Returns:
        Nats per token, with the cache in the plan's format; None where `forward.attend` does not compute the
        attention.
    """
    closed = replace(plan, refine=0, effort=replace(plan.effort, solve=False))
    count = len(plan.source.attending)
    chosen = torch.linspace(0, count - 1, min(count, layers)).round().int().tolist()
    jobs = plan.request.jobs or default_jobs(
        plan.source, plan.statistics, **plan.fitted_ranks(norm=plan.latent_norm == "fitted")
    )
    with fold_threads(min(jobs, len(chosen))) as pool:
        folding = [pool.submit(fold_attention, closed, plan.source.attending[one]) for one in chosen]
        for done in progress(as_completed(folding), description, len(folding)):
            done.result()
    losses = [each.result()[1] for each in folding]
    if any(loss is None for loss in losses):
        return None
    return sum(loss.get("stored", loss["folded"]) for loss in losses if loss) * count / len(chosen)
