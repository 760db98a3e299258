"""The choice of `rope_theta` for engines, measured on tokens that no fit has seen.

Engines compute the frequencies of the stock class's slots from this number alone, so a fold's slots turn at
other frequencies than the source's pairs, unless it is chosen such that they meet. Which table loses least is
predicted worse than it is measured: queries that are fitted to the slots make good much of what a wrong
frequency loses, and how much depends on the model (LOG.md).
"""

from dataclasses import replace

from ....core.console import is_first
from ....core.processes import from_first, together
from ..plan import Plan, make_plan
from .layer_losses import closed_form_loss
from .width_choice import LAYERS

WORSE = 1.5  # times the least predicted loss, from which on a table is not measured


def settle_table(plan: Plan) -> Plan:
    """Return the plan with the `rope_theta` of engines' table chosen.

    A plan that has no choice, or whose effort is too small for it, is returned as it is. Every process of a
    distributed run gets what the first one measured.
    """
    if len(plan.thetas) < 2 or not plan.effort.widths:
        return replace(plan, thetas=())
    plans = {theta: make_plan(plan.source, plan.request, plan.statistics, theta) for theta in plan.thetas[1:]}
    plans = {
        theta: other for theta, other in plans.items() if other.container.cached == plan.container.cached
    }
    least = min(each.predicted or 0.0 for each in (plan, *plans.values()))
    plans = {plan.thetas[0]: plan} | {
        theta: other for theta, other in plans.items() if (other.predicted or 0.0) <= WORSE * least
    }
    if len(plans) < 2:
        return replace(plan, thetas=())
    with together():
        found = _measure(plans) if is_first() else None
    found = from_first(found)
    if not found:
        return replace(plan, thetas=())
    own, theta = plan.thetas[0], min(found, key=lambda each: found[each])
    if theta == own:
        return replace(plan, thetas=())
    reason = (
        f"rope_theta becomes {theta:g}, from which engines compute other rotary frequencies: the closed form "
        f"loses {found[own]:.4g} nats with the source's {own:g} and {found[theta]:.4g} with {theta:g} on "
        "held-back calibration tokens"
    )
    return replace(plans[theta], thetas=(), notices=(*plans[theta].notices, reason))


def _measure(plans: dict[float, Plan]) -> dict[float, float]:
    """Return what the closed forms of some plans lose; empty where `forward.attend` does not compute them."""
    found = {}
    for theta, plan in plans.items():
        tried = replace(
            plan,
            latent_norm=plan.latent_norm and "linear",  # which costs nothing
            request=plan.request.model_copy(update={"cache_dtype": "bfloat16"}),
        )
        loss = closed_form_loss(tried, LAYERS, f"rope_theta {theta:g}")
        if loss is None:
            return {}
        found[theta] = loss
    return found
