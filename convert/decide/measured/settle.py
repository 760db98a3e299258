"""Choices of a plan that are measured, because no prediction is good enough for them."""

from ..plan import Plan
from .table_choice import settle_table
from .width_choice import settle_width


def settle(plan: Plan) -> Plan:
    """Return the plan with its rotary width, or the table of its slots, chosen.

    A plan that has no choice is returned as it is.
    """
    return settle_table(settle_width(plan))
