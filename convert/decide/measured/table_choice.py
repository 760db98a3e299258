"""The choice of `rope_theta` for engines, measured on tokens that no fit has seen.

Engines compute the frequencies of the stock class's slots from this number alone, so a fold's slots turn at
other frequencies than the source's pairs, unless it is chosen such that they meet. Which table loses least is
predicted worse than it is measured: queries that are fitted to the slots make good much of what a wrong
frequency loses, and how much depends on the model (docs/notes/slots.md).
"""

from dataclasses import replace

from ....core.console import is_first
from ....core.processes import from_first, together
from ..plan import Plan, make_plan
from .layer_losses import slots_loss
from .width_choice import LAYERS

WORSE = 1.5  # times the least predicted loss, from which on a table is not measured


def settle_table(plan: Plan) -> Plan:
    """Return the plan with the `rope_theta` of engines' table chosen.

    A plan that has no choice, or whose effort is too small for it, is returned as it is. Every process of a
    distributed run gets what the first one measured.
    """
    decided = replace(plan, thetas=())
    plans = _candidates(plan) if plan.thetas and plan.effort.widths else {}
    if len(plans) < 2:
        return decided
    with together():
        found = _measure(plans) if is_first() else None
    losses = from_first(found) or {}
    own = plan.thetas[0]
    theta = min(losses, key=losses.__getitem__, default=own)
    if theta == own:
        return decided
    reason = (
        f"rope_theta becomes {theta:g}, from which engines compute other rotary frequencies: the closed form "
        f"loses {losses[own]:.4g} nats with the source's {own:g} and {losses[theta]:.4g} with {theta:g} on "
        "held-back calibration tokens"
    )
    return replace(plans[theta], thetas=(), notices=(*plans[theta].notices, reason))


def _candidates(plan: Plan) -> dict[float, Plan]:
    """Return the plans to measure by their `rope_theta`, the source's own first.

    The others are of the same cache, and not predicted to be far worse.
    """
    own, *thetas = plan.thetas
    plans = {own: plan}
    for theta in thetas:
        other = make_plan(plan.source, plan.request, plan.statistics, theta)
        if other.container.cached == plan.container.cached:
            plans[theta] = other
    most = WORSE * min(each.predicted or 0.0 for each in plans.values())
    return {theta: each for theta, each in plans.items() if theta == own or (each.predicted or 0.0) <= most}


def _measure(plans: dict[float, Plan]) -> dict[float, float]:
    """Return what the closed forms of some plans lose; empty where `forward.attend` does not compute them."""
    found = {}
    for theta, plan in plans.items():
        loss = slots_loss(plan, LAYERS, f"rope_theta {theta:g}")
        if loss is None:
            return {}
        found[theta] = loss
    return found
