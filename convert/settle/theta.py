"""The choice of `rope_theta` for engines, measured on tokens that no fit has seen.

Engines compute the frequencies of the stock class's slots from this number alone, so a fold's slots turn at
other frequencies than the source's pairs, unless it is chosen such that they meet. Which table loses least is
predicted worse than it is measured: queries that are fitted to the slots make good much of what a wrong
frequency loses, and how much depends on the model (docs/notes/slots.md).
"""

from dataclasses import replace

from ...core.console import is_first
from ...core.processes import from_first, together
from ..decide.draft import make_draft
from ..decide.plan import Draft, Plan
from .losses import slots_loss

WORSE = 1.5  # times the least predicted loss, from which on a table is not measured


def settle_table(draft: Draft) -> Plan:
    """Return the plan with the `rope_theta` of engines' table chosen.

    Every process of a distributed run gets what the first one measured.

    Args:
        draft: one with several values of `rope_theta`.
    """
    plans = _candidates(draft)
    if len(plans) < 2:
        return draft.plan
    with together():
        found = _measure(plans) if is_first() else None
    losses = from_first(found) or {}
    own = draft.thetas[0]
    theta = min(losses, key=losses.__getitem__, default=own)
    if theta == own:
        return draft.plan
    reason = (
        f"rope_theta becomes {theta:g}, from which engines compute other rotary frequencies: the closed form "
        f"loses {losses[own]:.4g} nats with the source's {own:g} and {losses[theta]:.4g} with {theta:g} on "
        "held-back calibration tokens"
    )
    return replace(plans[theta], notices=(*plans[theta].notices, reason))


def _candidates(draft: Draft) -> dict[float, Plan]:
    """Return the plans to measure by their `rope_theta`, the source's own first.

    The others are of the same cache, and not predicted to be far worse.
    """
    plan, (own, *thetas) = draft.plan, draft.thetas
    plans = {own: plan}
    for theta in thetas:
        other = make_draft(plan.source, plan.request, plan.statistics, theta).plan
        if other.container.cached == plan.container.cached:
            plans[theta] = other
    most = WORSE * min(each.predicted or 0.0 for each in plans.values())
    return {theta: each for theta, each in plans.items() if theta == own or (each.predicted or 0.0) <= most}


def _measure(plans: dict[float, Plan]) -> dict[float, float]:
    """Return what the closed forms of some plans lose; empty where `forward.attend` does not compute them."""
    found = {}
    for theta, plan in plans.items():
        loss = slots_loss(plan, f"rope_theta {theta:g}")
        if loss is None:
            return {}
        found[theta] = loss
    return found
