"""The predicted time of preparing layers for a quantised cache (`--cache-dtype`).

Legend: fold_cost.py.
"""

from ....core.cache_dtypes import CacheDtype, cache_dtype
from ....core.machine_rates import Rates
from ...algebra.target import GroupedTarget
from ...methods.refinement import HELD_BACK
from ...storage.cache_fit import STEPS
from ...storage.cache_moments import DRAWS, TOKENS
from ..plan import Plan
from .layer_cost import FLOAT, SLOW, Shapes, drawn, measured, refined_tokens, refinement

# Passes over numbers that one evaluation of their coordinates takes with its gradient, and that a forward
# pass through their rounding takes: with one fixed scale, with a scale of a token, and with scales of groups.
_EVALUATED = {0: 20, None: 30}
_ROUNDED = {0: 12, None: 6}
_OF_GROUPS = 85, 50
_CALLED = 40  # small operations of such an evaluation
_BALANCED = 5  # decompositions of a tensor's closed form
# Products of a matrix exponential: its gradient is one of twice the side.
_EXPONENTIAL = 8 * (1 + 2**3)


def prepared(plan: Plan, shapes: Shapes, rates: Rates, again: float = 0.0, written: float = 0.0) -> float:
    """Return the seconds of preparing one layer on one thread.

    Args:
        plan: with the format in its request.
        shapes: of the source.
        rates: of this machine.
        again: seconds of what follows every refinement of the layer.
        written: seconds of writing the layer once more.
    """
    dtype = cache_dtype(plan.request.cache_dtype)
    tensors = _tensors(plan, shapes)
    used = shapes.tokens * (1 - 1 / HELD_BACK)
    sums = 2 * sum(heads * width**2 for heads, width, _ in tensors)
    moments = used * (drawn(plan, shapes, rates, DRAWS) + (1 + DRAWS) * sums / rates.double)
    moments += shapes.hidden**3 / rates.decomposition
    fit = sum(
        heads * _fit(dtype, min(TOKENS, used), width, turned, rates) for heads, width, turned in tensors
    )
    rounded = _rounded(dtype, tensors, rates)
    # The layer as it is and in other coordinates, and the first without rounding.
    ways = 2
    seconds = moments + fit
    if plan.refine:
        ways += 1
        seconds += refinement(plan, shapes, rates) + refined_tokens(plan, shapes) * rounded + again
    losses = (ways + 1) * measured(plan, shapes, rates) + ways * shapes.tokens / HELD_BACK * rounded
    return seconds + losses + (ways - 1) * written


def _tensors(plan: Plan, shapes: Shapes) -> list[tuple[int, int, int]]:
    """Return heads, width and numbers that may be turned of each tensor that a layer caches."""
    target = plan.target
    if isinstance(target, GroupedTarget):
        heads = target.num_key_value_heads
        return [(heads, shapes.width, 0), (heads, shapes.width, shapes.width)]
    return [(1, target.kv_lora_rank + target.qk_rope_head_dim, target.kv_lora_rank)]


def _fit(dtype: CacheDtype, rows: float, width: int, turned: int, rates: Rates) -> float:
    """Return the seconds of finding coordinates of one head's numbers."""
    passes = _EVALUATED.get(dtype.group, _OF_GROUPS[0])
    products = (4 * rows + 2 * _EXPONENTIAL * turned) * turned**2 / rates.single
    moved = 2 * passes * rows * width * FLOAT / rates.stream
    return (STEPS + 1) * (products + moved + _CALLED * SLOW * rates.call) + (
        _BALANCED * width**3 / rates.decomposition
    )


def _rounded(dtype: CacheDtype, tensors: list[tuple[int, int, int]], rates: Rates) -> float:
    """Return the seconds in which the numbers of one token pass through their rounding in coordinates."""
    passes = _ROUNDED.get(dtype.group, _OF_GROUPS[1])
    products = sum(4 * heads * width**2 for heads, width, _ in tensors)
    moved = sum(2 * passes * heads * width * FLOAT for heads, width, _ in tensors)
    return products / rates.single + moved / rates.stream
