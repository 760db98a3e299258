"""From a draft to a plan: what predictions cannot decide well enough is measured, once."""

from dataclasses import replace
from pathlib import Path

from ...core.console import is_first
from ...core.processes import from_first, together
from ..calibration.statistics import Statistics
from ..decide.draft import make_draft
from ..decide.plan import Draft, Plan
from ..families.source import Source
from ..request import FoldRequest
from .in_order import in_order
from .losses import slots_loss
from .rates import settle_rate
from .widths import settle_width

WORSE = 1.5  # tables that are predicted to lose more than this times the least are not measured


def settle(draft: Draft) -> Plan:
    """Return the plan with its rotary width, or the table of its slots, chosen.

    It also gets the inputs of layers behind changed ones, where its method reads these. What is open is left
    as it is predicted where the effort is too small to measure it.
    """
    plan = draft.plan
    if plan.effort.widths and len(draft.widths) > 1:
        plan = settle_width(draft)
    elif plan.effort.widths and draft.thetas:
        plan = settle_table(draft)
    with together():
        return in_order(settle_rate(plan))


def make_plan(place: Path | Source, request: FoldRequest, statistics: Statistics | None = None) -> Plan:
    """Return the settled plan of a request; arguments and errors are those of `make_draft` and `settle`."""
    return settle(make_draft(place, request, statistics))


def settle_table(draft: Draft) -> Plan:
    """Return the plan with the `rope_theta` of engines' table chosen, by the first of several processes.

    Engines compute the frequencies of the stock class's slots from this number alone, so a fold's slots turn
    at other frequencies than the source's pairs, unless it is chosen such that they meet. Which table loses
    least is predicted worse than it is measured: queries that are fitted to the slots make good much of what
    a wrong frequency loses, and how much depends on the model (docs/notes/slots.md). So it is measured on
    tokens that no fit has seen, for tables of the same cache that are not predicted to be far worse.
    """
    plan, (own, *thetas) = draft.plan, draft.thetas
    plans = {own: plan}
    for theta in thetas:
        other = make_draft(plan.source, plan.request, plan.statistics, theta).plan
        if other.container.cached == plan.container.cached:
            plans[theta] = other
    most = WORSE * min(each.predicted or 0.0 for each in plans.values())
    plans = {theta: each for theta, each in plans.items() if theta == own or (each.predicted or 0.0) <= most}
    if len(plans) < 2:
        return plan
    losses: dict[float, float] = {}
    with together():
        for theta, each in plans.items() if is_first() else ():
            loss = slots_loss(each, f"rope_theta {theta:g}")
            if loss is None:  # `forward.attend` does not compute the attention
                losses = {}
                break
            losses[theta] = loss
    losses = from_first(losses)
    theta = min(losses, key=losses.__getitem__, default=own)
    if theta == own:
        return plan
    reason = (
        f"rope_theta becomes {theta:g}, which changes the rotary frequencies that engines compute: on "
        f"held-back calibration tokens the closed form loses {losses[own]:.4g} nats with the source's "
        f"{own:g}, and {losses[theta]:.4g} with {theta:g}"
    )
    return replace(plans[theta], notices=(*plans[theta].notices, reason))
