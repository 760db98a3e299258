"""The rate of refinement, tried on a few layers where a source has many.

A trial of rates takes two fifths of a layer's time. What is left of the choice after `refinement.RATE` has
taken a layer's width and loss into account changes slowly from layer to layer (docs/notes/refinement.md).
"""

from bisect import bisect_left
from concurrent.futures import as_completed
from dataclasses import replace

from ...core.console import is_first, progress
from ...core.processes import from_first
from ..decide.plan import Plan
from ..efforts import MEASURED, RATED
from ..layer.fold import fold_attention
from ..layer.threads import fold_threads
from ..methods.refinement import trial_steps
from ..methods.table import OWN


def settle_rate(plan: Plan) -> Plan:
    """Return the plan with the rate of refinement of each layer, where a source has many.

    Rates are tried on `efforts.RATED` layers at even steps, the first and the last among them. One in between
    takes the smaller rate of the two around it: too large a rate costs more than too small a one. With few
    layers each tries rates by itself. Every process of a distributed run gets what the first one measured.
    """
    layers = plan.source.attending
    if plan.method != OWN or not plan.refine or plan.statistics is None or len(layers) <= MEASURED:
        return plan
    found = from_first(_tried(plan) if is_first() else None)
    if not found:
        return plan
    tried = sorted(found)

    def around(number: int) -> tuple[int, int]:
        above = bisect_left(tried, number)
        return tried[max(above - 1, 0)], tried[min(above, len(tried) - 1)]

    quarters = {number: found.get(number, max(found[one] for one in around(number))) for number in layers}
    return replace(plan, quarters=quarters)


def _tried(plan: Plan) -> dict[int, int]:
    """Return how often the largest rate is divided by four, by layer; empty where none can be measured."""
    layers = plan.source.attending
    chosen = sorted({layers[round(at * (len(layers) - 1) / (RATED - 1))] for at in range(RATED)})
    brief = replace(plan, refine=trial_steps(plan.refine))
    jobs = min(plan.jobs, len(chosen))
    with fold_threads(jobs) as pool:
        folding = {number: pool.submit(fold_attention, brief, number) for number in chosen}
        for done in progress(as_completed(folding.values()), "rate of refinement", len(folding), jobs):
            done.result()
    losses = {number: each.result()[1] for number, each in folding.items()}
    return {number: int(loss["quarters"]) for number, loss in losses.items() if loss}
