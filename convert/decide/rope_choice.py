"""The form of MLA for sources that normalise their keys, where the user leaves it open.

Both forms hold such a source. Intact rotation loses less and decodes more slowly: every step rebuilds all
keys, and engines such as vLLM then cache keys and values whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ...core.errors import InvalidInput
from ..families.source import Source
from ..families.support import LIMIT
from .engines import are_served, read_engines

Output = TypeVar("Output", bound=Any)  # a plan; plan.py imports this file
CHOSEN = "rotation is "  # how the notice of a choice begins


def _is_limited(source: Source) -> bool:
    """Return whether a source has windows or bounded scores, which vLLM's latent attention has not."""
    cap = source.family.soft_cap
    windows = any(source.window(layer) is not None for layer in source.attending)
    return windows or (cap is not None and source.config[cap] is not None)


def choose_rope(source: Source, options: Mapping[str, Any], make: Callable[[str | None], Output]) -> Output:
    """Return the plan of one of the two forms, with a notice that says which and why.

    Args:
        source: one with key norms.
        options: of `plan.make_plan`.
        make: returns the plan of a form, or raises InvalidInput.
    """
    if options.get("rope_dim") is not None or options.get("slots") is not None:
        return make("decoupled")
    if options["container"] == "stock":
        return make(None)
    if are_served(read_engines(options.get("engine"))):
        return make("intact" if _is_limited(source) else "decoupled")
    intact = make("intact")
    if intact.predicted is None:
        return intact
    try:
        decoupled = make("decoupled")
    except InvalidInput:  # its layers have unlike tables, or its slots have no place in the budget
        return intact
    cost = decoupled.predicted - intact.predicted
    chosen = decoupled if cost <= LIMIT else intact
    other = "intact" if chosen is decoupled else "decoupled"
    sentence = (
        f"{CHOSEN}{chosen.target.rope}: decoupled is predicted to lose {cost:.4f} nats per token more "
        f"than intact, and the limit is {LIMIT}; --rope {other} takes the other"
    )
    return replace(chosen, notices=(*chosen.notices, sentence))
