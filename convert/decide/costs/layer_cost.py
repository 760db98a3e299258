"""The parts that a predicted cost of a fold is counted from: passes of one layer over tokens.

Legend: fold_cost.py.
"""

from dataclasses import dataclass

from ....core.machine_rates import Rates
from ...algebra.target import GroupedTarget, LatentTarget
from ...calibration.capacity import Need
from ...calibration.reach import default_length
from ...methods.refinement import HELD_BACK, RIDGES, SHARES, trial_steps
from ..plan import Plan

SLOW = 5  # of a small operation inside a module, in those of `Rates.call`
FLOAT, DOUBLE = 4, 8  # bytes
_MOVED = 24  # times that a number of a layer's queries is read or written besides products: rotation, loss
_ATTENDED = 60  # small operations of one layer's attention
_DESCENDED = 50  # small operations of a step of refinement for each of a layer's tensors
_RATES = 3  # rates of refinement that are tried, in most layers
_SEARCHED = 100  # of an evaluation in a search by L-BFGS


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Counts of a source and the calibration of a fold."""

    sequences: int
    length: int
    positions: int
    layers: int
    hidden: int
    heads: int
    key_heads: int
    width: int
    vocabulary: int
    weights: int  # that multiply every token: all but the embeddings

    @property
    def tokens(self) -> int:
        """Return the tokens of the calibration."""
        return self.sequences * self.length

    @classmethod
    def of(cls, plan: Plan) -> "Shapes":
        """Return the counts of a fold."""
        source, request = plan.source, plan.request
        geometry, sequences = source.geometry, plan.effort.sequences
        length = request.length or default_length(source, request.calibration)
        if plan.statistics is not None:
            sequences, length = plan.statistics.layers[0].input_BTD.shape[:2]
        need, vocabulary = Need.of(source, sequences=1, length=2), int(source.config["vocab_size"])
        return cls(
            sequences=sequences,
            length=min(length, source.positions),
            positions=source.positions,
            layers=source.layers,
            hidden=geometry.hidden_size,
            heads=geometry.num_attention_heads,
            key_heads=geometry.num_key_value_heads,
            width=geometry.head_dim,
            vocabulary=vocabulary,
            weights=(need.weights - need.rest) // FLOAT + vocabulary * geometry.hidden_size,
        )


def searched(tokens: int, rank: int, rates: Rates) -> float:
    """Return the seconds of one evaluation of a function of tokens' lengths with its gradient, in float64."""
    moved = 8 * tokens * rank * DOUBLE
    return 4 * tokens * rank**2 / rates.double + moved / rates.stream + _SEARCHED * rates.call


def drawn(plan: Plan, shapes: Shapes, rates: Rates, draws: int) -> float:
    """Return the seconds of one token's attention and of gradients of some draws at its output."""
    drawn = 2 * shapes.hidden**2 / rates.single + 8 * shapes.hidden * FLOAT / rates.stream
    return (1 + 2 * draws) * of_folded(plan, shapes, rates) + draws * drawn


def measured(plan: Plan, shapes: Shapes, rates: Rates) -> float:
    """Return the seconds of measuring one layer on what is held back."""
    each = of_source(shapes, rates) + of_folded(plan, shapes, rates)
    return shapes.tokens / HELD_BACK * each + _ATTENDED * SLOW * rates.call


def refinement(plan: Plan, shapes: Shapes, rates: Rates) -> float:
    """Return the seconds of one layer's refinement on one thread."""
    inside, steps = shapes.heads * shapes.width, _steps(plan)
    by_gram = 34 * shapes.width + 4 * shapes.hidden  # or the iteration itself, for each number of a square
    orthogonal = steps * 6 * inside * shapes.width * min(20 * shapes.hidden, by_gram)
    solved = 0.0
    if plan.solves:
        solved = 4 * shapes.tokens * inside * (inside + shapes.hidden) + 3 * inside**3
    seconds = refined_tokens(plan, shapes) * of_folded(plan, shapes, rates)
    seconds += shapes.tokens * of_source(shapes, rates)
    tensors = 8 if isinstance(plan.target, LatentTarget) else 4
    calls = steps * tensors * _DESCENDED * SLOW * rates.call
    return seconds + (orthogonal + solved) / rates.single + calls


def _steps(plan: Plan) -> int:
    """Return the steps of a layer's refinement with those on which its rates are tried."""
    return plan.refine + _RATES * trial_steps(plan.refine)


def refined_tokens(plan: Plan, shapes: Shapes) -> float:
    """Return how many tokens pass through one folded layer in its refinement; backwards counts as twice."""
    descended = _steps(plan) * min(plan.effort.batch, shapes.sequences) * shapes.length
    shares = ((_RATES + 1) * len(SHARES) if plan.refine else 0) + (len(RIDGES) if plan.solves else 0)
    tokens = 3 * descended + (1 + shares) / HELD_BACK * shapes.tokens
    return tokens + (shapes.tokens if plan.solves else 0)


def _forward(shapes: Shapes, rates: Rates, projections: float, width: float) -> float:
    """Return the seconds of one token's attention on one thread.

    Args:
        shapes: of the source.
        rates: of this machine.
        projections: numbers of the weights that multiply the token.
        width: of keys and values.
    """
    # Scores and mixing are over half of the keys.
    inside = shapes.heads * width
    moved = _MOVED * inside * FLOAT / rates.stream
    return 2 * projections / rates.single + 2 * shapes.length * inside / rates.mixing + moved


def of_source(shapes: Shapes, rates: Rates) -> float:
    """Return the seconds of one token's attention in the source."""
    rows = 2 * shapes.width * (shapes.heads + shapes.key_heads)
    return _forward(shapes, rates, shapes.hidden * rows, shapes.width)


def of_folded(plan: Plan, shapes: Shapes, rates: Rates) -> float:
    """Return the seconds of one token's attention after the fold, and of the loss at its output."""
    inside, target = shapes.heads * shapes.width, plan.target
    loss = shapes.hidden**2
    if isinstance(target, GroupedTarget):
        kept = 2 * target.num_key_value_heads * shapes.width
        return _forward(shapes, rates, shapes.hidden * (2 * inside + kept) + loss, shapes.width)
    rank, rotary = target.kv_lora_rank, target.qk_rope_head_dim
    queries = shapes.heads * (shapes.width + rotary)
    rows = shapes.hidden * (queries + inside + rank + rotary) + 2 * rank * inside + rank**2
    return _forward(shapes, rates, rows + loss, shapes.width + rotary)
