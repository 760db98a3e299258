"""From a draft to a plan: what predictions cannot decide well enough is measured, once."""

from pathlib import Path

from ...core.processes import together
from ..calibration.statistics import Statistics
from ..decide.draft import make_draft
from ..decide.plan import Draft, Plan
from ..families.source import Source
from ..request import FoldRequest
from .in_order import in_order
from .theta import settle_table
from .widths import settle_width


def settle(draft: Draft) -> Plan:
    """Return the plan with its rotary width, or the table of its slots, chosen.

    It also gets the inputs of layers behind changed ones, where its method reads these. What is open is left
    as it is predicted where the effort is too small to measure it.

    Raises:
        InvalidInput: the statistics are without the tokens that the method reads again.
    """
    plan = draft.plan
    if plan.effort.widths and len(draft.widths) > 1:
        plan = settle_width(draft)
    elif plan.effort.widths and draft.thetas:
        plan = settle_table(draft)
    with together():
        return in_order(plan)


def make_plan(place: Path | Source, request: FoldRequest, statistics: Statistics | None = None) -> Plan:
    """Return the settled plan of a request; arguments and errors are those of `make_draft` and `settle`."""
    return settle(make_draft(place, request, statistics))
