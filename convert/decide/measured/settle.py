"""Choices of a plan that are measured, because no prediction is good enough for them."""

from ..plan import Plan
from .norm_choice import settle_norm
from .width_choice import settle_width


def settle(plan: Plan) -> Plan:
    """Return the plan with its rotary width, then its latent norm chosen.

    A plan that has no choice is returned as it is.

    Raises:
        InvalidInput: a fitted norm was asked for, and there is nothing to fit it on.
    """
    return settle_norm(settle_width(plan))
