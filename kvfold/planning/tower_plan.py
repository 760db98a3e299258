"""Plans of folds of multimodal checkpoints: the text tower is read in its place, and nothing is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..convert.decide.fold_cost import FoldCost, cost_of
from ..convert.settle.preparation import prepare
from ..convert.towers.outlook import tower_report
from ..convert.towers.tower_targets import check_request, tower_request
from ..convert.towers.view import tower_source
from ..convert.towers.whole_checkpoint import names_in_place, whole_config
from ..core.console import is_first

if TYPE_CHECKING:
    from ..convert.decide.plan import Plan
    from ..convert.request import FoldRequest
    from ..convert.towers.tower import Tower


def plan_tower(request: FoldRequest, tower: Tower) -> tuple[dict[str, Any], FoldCost] | None:
    """Return the plan of a fold of a text tower, as plain values, and its predicted cost.

    Args:
        request: what the user asked for.
        tower: the tower of the source that it names.

    Returns:
        Both in the first of several processes; None in the others.

    Raises:
        InvalidInput: the tower cannot be folded like this, or a value is unusable.
    """
    check_request(request, tower)
    asked = request.model_copy(update={"text_only": False}) if request.text_only else tower_request(request)
    with tower_source(tower) as source:
        plan = prepare(asked, dry_run=True, source=source)
        if not is_first():
            return None
        cost = cost_of(plan)
        found = {**plan.to_dict(), "source": str(tower.directory)}
        found["tower"] = tower_report(tower, in_place=not request.text_only, dequantize=request.dequantize)
        copied = found["tower"]["bytes"]
        if request.text_only:
            found["tower"]["work_bytes"] = copied
            return found, cost
        found["tower"]["work_bytes"] = copied + found["output_bytes"]
        return found | _in_place(tower, plan, found), cost


def _in_place(tower: Tower, plan: Plan, found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a plan that are those of the whole output."""
    config = whole_config(tower, plan.config)
    stored = {ours: name for name, ours in names_in_place(tower, plan.specs).items()}
    shapes = found["attention_of_layer_0"]
    return {
        "container": (config.get("architectures") or [config["model_type"]])[0],
        "output_bytes": found["output_bytes"] + found["tower"]["other_bytes"],
        "attention_of_layer_0": {stored[name]: shape for name, shape in shapes.items()},
    }
