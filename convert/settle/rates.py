"""The rate of refinement, tried on a few layers where a source has many.

A trial of rates takes two fifths of a layer's time. The rate that suits a layer follows from its width and
from what its closed form loses, which `refinement.RATE` takes into account; what is left differs little
between the layers of a source (docs/notes/refinement.md).
"""

from concurrent.futures import as_completed
from dataclasses import replace
from statistics import median_low

from ...core.console import is_first, progress
from ...core.processes import from_first
from ..decide.plan import Plan
from ..efforts import MEASURED, RATED
from ..layer.fold import fold_attention
from ..layer.threads import fold_threads
from ..methods.refinement import trial_steps
from ..methods.table import OWN
from .losses import spread_layers


def settle_rate(plan: Plan) -> Plan:
    """Return the plan with the rate of refinement that suits the middle one of a few layers.

    With few layers each tries rates by itself. Every process of a distributed run gets what the first one
    measured.
    """
    layers = plan.source.attending
    if plan.method != OWN or not plan.refine or plan.statistics is None or len(layers) <= MEASURED:
        return plan
    return replace(plan, quarters=from_first(_quarters(plan) if is_first() else None))


def _quarters(plan: Plan) -> int | None:
    """Return the median of the divisions of the largest rate, or None where no layer can be measured."""
    predicted = [sum(loss.values()) if loss else 0.0 for loss in plan.losses[: len(plan.source.attending)]]
    chosen = [plan.source.attending[at] for at in spread_layers(predicted, RATED)]
    brief = replace(plan, refine=trial_steps(plan.refine))
    jobs = min(plan.jobs, len(chosen))
    with fold_threads(jobs) as pool:
        folding = [pool.submit(fold_attention, brief, number) for number in chosen]
        for done in progress(as_completed(folding), "rate of refinement", len(folding), jobs):
            done.result()
    losses = [each.result()[1] for each in folding]
    found = [int(loss["quarters"]) for loss in losses if loss]
    return median_low(found) if found else None
