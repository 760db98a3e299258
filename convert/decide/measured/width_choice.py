"""The choice of MLA's rotary width, measured on tokens that no fit has seen.

A plan's prediction adds what the slots lose of the rotation to what the latent drops. It does not know that
queries are fitted to what is left, which makes good more of the first than of the second, and how much more
depends on the model. So neighbours of the width that is predicted to lose least are folded and measured.
"""

from dataclasses import replace

from ....core.console import is_first
from ....core.processes import from_first, together
from ...algebra.target import LatentTarget
from ..plan import Plan, make_plan
from ..rope_choice import CHOSEN
from .intact_notice import intact_notice, measure_intact
from .layer_losses import slots_loss

LAYERS = 8  # measured at most, of which the loss of all is estimated


def settle_width(plan: Plan) -> Plan:
    """Return the plan with its rotary width chosen, and a notice where intact rotation loses far less.

    A plan that has no choice, or whose effort is too small for it, is returned as it is. Every process of a
    distributed run gets what the first one measured.
    """
    if len(plan.widths) < 2 or not plan.effort.widths or not isinstance(plan.target, LatentTarget):
        return plan
    with together():
        found = measure_widths(plan) if is_first() else None
        intact = measure_intact(plan, LAYERS) if found else None
    found, intact = from_first((found, intact))
    planned = plan.target.qk_rope_head_dim
    if not found:
        return replace(plan, widths={})
    width = min(found, key=lambda each: found[each])
    told = intact_notice(found[width], intact)
    if width == planned:
        return replace(plan, widths={}, notices=(*plan.notices, *told))
    request = plan.request.model_copy(update={"rope_dim": width})
    settled = make_plan(plan.source, request, plan.statistics)
    # A width leaves these alone.
    form = [sentence for sentence in plan.notices if sentence.startswith(CHOSEN)]
    reason = (
        f"the rotary width is {width}: {planned} is predicted to lose less, but the closed form loses "
        f"{found[planned]:.4g} nats with {planned} and {found[width]:.4g} with {width} on held-back "
        "calibration tokens"
    )
    return replace(settled, request=plan.request, notices=(*form, *settled.notices, reason, *told))


def measure_widths(plan: Plan) -> dict[int, float]:
    """Measure a plan's closed form at its rotary width, and on from there while neighbours lose less.

    Returns:
        Losses on held-back tokens by width, in nats per token; empty where `forward.attend` does not compute
        the attention.
    """
    assert isinstance(plan.target, LatentTarget), "only MLA has a rotary width"
    widths = sorted(plan.widths)
    best = widths.index(plan.target.qk_rope_head_dim)
    first = _loss(plan, widths[best])
    if first is None:
        return {}
    found = {widths[best]: first}
    for step in (-1, 1):
        start = best
        while 0 <= best + step < len(widths):
            width = widths[best + step]
            loss = _loss(plan, width)
            if loss is None:
                break
            found[width] = loss
            if loss >= found[widths[best]]:
                break
            best += step
        if best != start:
            break
    return found


def _loss(plan: Plan, width: int) -> float | None:
    """Return the loss of a plan with another rotary width; None where it cannot be measured."""
    tried = replace(plan, target=plan.widths[width].target, bands=plan.widths[width].bands)
    return slots_loss(tried, LAYERS, f"rotary width {width}")
