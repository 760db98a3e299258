"""The time and memory of a fold, predicted from shapes and the rates of the machine.

Every phase is counted in FLOP, bytes and small operations, divided by the rates of machine_rates.py, and
multiplied by what such a count leaves out, one factor per phase (`python -m benchmarks.fold_cost` checks
them).

Legend: S sequences, T tokens of each, X = S·T, L layers, D hidden size, N and K heads of queries and keys, H
their width, V vocabulary.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from ....core.machine_rates import Rates, measure_rates
from ....core.units import show_bytes
from ....texts.calibration_name import names_statistics, parts
from ...algebra.target import GroupedTarget, LatentTarget
from ...calibration.capacity import Need, fold_bytes
from ...calibration.reach import PAIRS, joined_lengths
from ...calibration.study import batch_size
from ...efforts import EFFORTS, MEASURED
from ...families.source import Source
from ...methods.allocation import rotary_widths
from ...methods.latent_norm import LEAST_PARTS
from ...methods.table import reads_statistics
from ..plan import Plan
from .layer_cost import DOUBLE, FLOAT, SLOW, Shapes, drawn, measured, refinement, searched
from .quantised_cost import prepared

# Measured seconds over counted ones, fitted by hand on folds of three sources (benchmarks/README.md).
FACTORS = {
    "text": 1.7,
    "statistics": 1.1,
    "closed form": 1.15,
    "refinement": 1.0,
    "rounded length": 1.6,
    "quantised cache": 1.25,
}
_STARTED = 1.6e6  # small operations as long as importing torch and transformers takes
BASE = 6.5e8  # bytes of a process that has imported them
_DECODED, _PASSED = 20, 150  # small operations of a layer for a token, and for a batch forward and backward
_TURNED = 70  # of a round of the latent's turn
_NUMBERED = 5500  # bytes that a pass forward and backward moves for each of a layer's hidden numbers
_READ = 2.5  # times that decoding passes over keys and values
_NORMED = 1.5  # of the seconds counted for a latent norm
_FITTED = 24  # evaluations of the fit of a latent norm, which ends early
_OPTIMISED = 3e5  # small operations as long as importing what torch's optimizers need takes
_ROUNDED = 65 + 22  # of the searches for a rounded length, before refinement and after it
_GROUPED = 4  # orders of the heads that are measured
_VALUES = 0.5  # of a decomposition, for eigenvalues alone
# Tables of slots for engines that are measured, of five at most: some are predicted to be far worse.
_TABLES = 4
_NEIGHBOURS = 4  # of them that are measured, or three and intact rotation


@dataclass(frozen=True, kw_only=True)
class FoldCost:
    """Predicted cost of a fold.

    Attributes:
        seconds: of each phase on this machine while nothing else runs.
        peak_bytes: resident memory at its highest.
    """

    seconds: dict[str, float]
    peak_bytes: int

    @property
    def total(self) -> float:
        """Return the seconds of all phases."""
        return sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as plain values."""
        phases = {phase: round(value, 2) for phase, value in self.seconds.items()}
        return {"seconds": round(self.total, 1), "phases": phases, "peak_bytes": self.peak_bytes}

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {value:.0f}" for phase, value in self.seconds.items() if value >= 1)
        return f"about {show_seconds(self.total)} ({phases}) and {show_bytes(self.peak_bytes)} of memory"


def cost_of(plan: Plan) -> FoldCost:
    """Return the predicted cost of a fold on this machine, by a micro-benchmark of about a second."""
    request = plan.request
    calibration = request.calibration or "self"
    if not reads_statistics(plan.method):
        calibration = "none"
    return predict_cost(plan, calibration, measure_rates(plan.source.geometry.hidden_size))


def cost_by_default(plan: Plan, sequences: int) -> FoldCost:
    """Return the predicted cost of a fold with the default effort, whatever the plan has.

    Args:
        plan: the fold.
        sequences: of calibration.
    """
    effort = replace(EFFORTS["default"], sequences=sequences)
    return cost_of(replace(plan, refine=effort.steps, effort=effort))


def in_words(cost: dict[str, Any]) -> str:
    """Return a sentence about a predicted cost, as `FoldCost.to_dict` returns it."""
    takes = f"{show_seconds(cost['seconds'])} and {show_bytes(cost['peak_bytes'])} of memory"
    return f"This fold takes about {takes} on this machine while nothing else runs"


def show_seconds(seconds: float) -> str:
    """Return a duration as a user reads it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def predict_cost(plan: Plan, calibration: str, rates: Rates) -> FoldCost:
    """Return the predicted cost of a fold.

    Args:
        plan: the fold, by weights alone or by statistics.
        calibration: `none`, `self`, a text or both; saved statistics cost as little as `none`.
        rates: of this machine.
    """
    shapes, jobs = Shapes.of(plan), _jobs(plan, rates)
    is_read = calibration != "none" and not names_statistics(calibration)
    seconds = {"start": _STARTED * rates.call, "text": 0.0, "statistics": 0.0}
    own, text = parts(calibration)
    if own:
        count = shapes.sequences if text is None else shapes.sequences - shapes.sequences // 2
        seconds["text"] = _text(replace(shapes, sequences=count), rates)
    if is_read:
        seconds["statistics"] = _statistics(shapes, rates)
    seconds |= _of_layers(plan, calibration, shapes, rates, jobs)
    # Small operations are counted as of one thread at a time, however many layers are at work: most of each
    # is Python's own, under its lock.
    alone, at_once = (_of_layers(plan, calibration, shapes, rates.of_calls(), count) for count in (1, jobs))
    for phase, held in alone.items():
        seconds[phase] += held - at_once[phase]
    found = {phase: value * FACTORS.get(phase, 1.0) for phase, value in seconds.items() if value}
    return FoldCost(seconds=found, peak_bytes=_peak(plan, shapes, calibration, jobs))


def _of_layers(plan: Plan, calibration: str, shapes: Shapes, rates: Rates, jobs: int) -> dict[str, float]:
    """Return the seconds of the phases in which `jobs` layers are folded at once."""
    layers, fitted = shapes.layers / jobs, plan.latent_norm == "fitted" and calibration != "none"
    seconds = {"closed form": layers * _closed(plan, shapes, rates)}
    if fitted:
        norm = _NORMED * _norm(plan, shapes, rates) + shapes.hidden**3 / rates.decomposition
        seconds["closed form"] += layers * norm + _OPTIMISED * rates.call
    if calibration != "none":
        seconds["closed form"] += _division(plan, shapes, rates, jobs)
        # A closed form is measured too, and the output projection of `--effort quick` is solved for.
        without_steps = "output projection" if plan.solves else "measurement"
        seconds["refinement" if plan.refine else without_steps] = layers * refinement(plan, shapes, rates)
        if fitted and plan.refine:
            seconds["rounded length"] = layers * _rounded(plan, shapes, rates)
        if plan.request.cache_dtype != "bfloat16":
            seconds["quantised cache"] = _quantised(plan, shapes, rates, jobs, fitted=fitted)
    return seconds


def _text(shapes: Shapes, rates: Rates) -> float:
    """Return the seconds in which a source writes its text, all sequences at once, and reads some of it."""
    products = 2 * shapes.tokens * shapes.weights / rates.decoding
    repeated = 1 if shapes.heads == shapes.key_heads else 3
    cached = _READ * shapes.sequences * shapes.length**2 * shapes.heads * shapes.width * FLOAT * repeated
    predicted = 8 * shapes.tokens * shapes.vocabulary * FLOAT  # softmax, entropy and draw
    calls = shapes.length * (shapes.layers * _DECODED + 40) * SLOW * rates.call
    joined = joined_lengths(shapes.sequences, shapes.length, shapes.positions)
    read = 3 * min(PAIRS, shapes.sequences // 2) * sum(joined)  # joined and alone
    read_products = 2 * read * shapes.weights / rates.products
    return products + read_products + (shapes.layers * cached + predicted) / rates.stream + calls


def _statistics(shapes: Shapes, rates: Rates) -> float:
    """Return the seconds of a pass forward and backward with its moments."""
    x, keys, maps = shapes.tokens, shapes.key_heads * shapes.width, shapes.heads * shapes.length
    products = 2 * 2 * x * shapes.weights + shapes.layers * 12 * x * maps * shapes.width
    moved = (shapes.layers * 60 * x * maps + 8 * x * shapes.vocabulary) * FLOAT
    moved += shapes.layers * x * shapes.hidden * _NUMBERED
    sides = (shapes.hidden + 1) ** 2 + shapes.hidden**2 + 2 * keys**2
    moments = shapes.layers * 2 * x * (sides * 9 / 16 + 2 * shapes.heads * shapes.width**2)
    batches = math.ceil(shapes.sequences / batch_size(shapes.length))
    calls = batches * shapes.layers * _PASSED * SLOW * rates.call
    return products / rates.products + moved / rates.stream + moments / rates.double / rates.threads + calls


def _closed(plan: Plan, shapes: Shapes, rates: Rates) -> float:
    """Return the seconds of one layer's closed form on one thread, and of measuring orders of heads."""
    keys = shapes.key_heads * shapes.width
    # Products as torch makes them, counted on layers of hidden size 1,024 and 2,048 with 2 to 32 key heads.
    if isinstance(plan.target, GroupedTarget):
        algebra = shapes.hidden * keys * (32 * shapes.hidden + 10 * keys)
        return algebra / rates.double + _GROUPED * measured(plan, shapes, rates)
    algebra = shapes.hidden * keys * (15 * shapes.hidden + 12 * keys)
    return algebra / rates.double + min(shapes.hidden, 2 * keys) ** 3 / rates.decomposition


def _norm(plan: Plan, shapes: Shapes, rates: Rates) -> float:
    """Return the seconds of fitting one layer's latent norm, and of writing the layer behind it."""
    assert isinstance(plan.target, LatentTarget)
    rank = plan.target.kv_lora_rank
    fit = _FITTED * searched(shapes.tokens, rank, rates)
    # The latent is turned by numbers of tokens.
    turned = 3 * rank * (_TURNED * rates.call + 10 * rank**2 * DOUBLE / rates.stream)
    turned += 2 * shapes.tokens * rank * (shapes.hidden + rank) / rates.double
    written = _balanced(plan, shapes, rates) + turned
    lengths = shapes.tokens * drawn(plan, shapes, rates, plan.effort.draws)
    return lengths + fit + _all_parts(plan, shapes, rates) + written


def _quantised(plan: Plan, shapes: Shapes, rates: Rates, jobs: int, *, fitted: bool) -> float:
    """Return the seconds of preparing all layers for a quantised cache.

    Args:
        plan: the fold.
        shapes: of the source.
        rates: of this machine.
        jobs: layers that are folded at once.
        fitted: whether a latent norm is fitted.
    """
    layers = shapes.layers / jobs
    if not fitted:  # the norm's fit would have imported the same
        return layers * prepared(plan, shapes, rates) + _OPTIMISED * rates.call
    again = _all_parts(plan, shapes, rates)
    written = _balanced(plan, shapes, rates)
    return layers * prepared(plan, shapes, rates, again, written)


def _all_parts(plan: Plan, shapes: Shapes, rates: Rates) -> float:
    """Return the seconds of choosing a length of one layer's latent that leaves no direction out."""
    assert isinstance(plan.target, LatentTarget)
    rank = plan.target.kv_lora_rank
    tried = 2 * shapes.tokens * rank * (shapes.hidden + rank) / rates.double + rank**3 / rates.decomposition
    return len(LEAST_PARTS) * (measured(plan, shapes, rates) + tried)


def _balanced(plan: Plan, shapes: Shapes, rates: Rates) -> float:
    """Return the seconds of balancing the heads of one layer by numbers of tokens."""
    assert isinstance(plan.target, LatentTarget)
    rank, inside = plan.target.kv_lora_rank, shapes.heads * shapes.width
    rows = shapes.hidden * (inside + rank) + rank * (2 * inside + rank) + 2 * inside * shapes.width
    return 2 * shapes.tokens * rows / rates.double


def _rounded(plan: Plan, shapes: Shapes, rates: Rates) -> float:
    """Return the seconds of choosing one layer's lengths for rounding, before refinement and after it."""
    assert isinstance(plan.target, LatentTarget)
    rank, draws = plan.target.kv_lora_rank, plan.effort.draws
    costs = shapes.tokens * drawn(plan, shapes, rates, draws)
    moments = 2 * shapes.tokens * rank * (shapes.hidden + draws * rank) / rates.double
    search = _ROUNDED * (searched(shapes.tokens, rank, rates) + 12 * rank**3 / rates.double)
    root = shapes.hidden**3 / rates.decomposition
    return 2 * (costs + moments + root + 2 * measured(plan, shapes, rates)) + search


def _division(plan: Plan, shapes: Shapes, rates: Rates, jobs: int) -> float:
    """Return the seconds in which slots are chosen, and a budget is divided, with `jobs` layers at once."""
    request = plan.request
    if not isinstance(plan.target, LatentTarget) or plan.target.slots == "source":
        return 0.0
    rows = 2 * shapes.key_heads * shapes.width
    products = shapes.hidden * rows * (4 * shapes.hidden + 2 * rows) / rates.double
    predicted = shapes.layers * (_VALUES * min(shapes.hidden, rows) ** 3 / rates.decomposition + products)
    each = _closed(plan, shapes, rates) + measured(plan, shapes, rates)
    each *= _turns(MEASURED, shapes, jobs) * plan.effort.widths
    if plan.container.profile is not None:
        return _TABLES * (predicted + each)
    if request.kv_budget is None or request.rope_dim is not None:
        return 0.0
    elements = plan.target.kv_lora_rank + plan.target.qk_rope_head_dim
    return len(rotary_widths(plan.source.geometry, elements)) * predicted + _NEIGHBOURS * each


def _turns(layers: int, shapes: Shapes, jobs: int) -> int:
    """Return the layers that are measured one after the other, of at most so many."""
    return math.ceil(min(layers, shapes.layers) / jobs)


def _jobs(plan: Plan, rates: Rates) -> int:
    return min(plan.request.jobs or rates.threads, plan.source.layers)


def _peak(plan: Plan, shapes: Shapes, calibration: str, jobs: int) -> int:
    """Return the bytes of the phase that takes most."""
    source: Source = plan.source
    if calibration == "none":
        return int(BASE + jobs * fold_bytes(source))
    need = Need.of(source, sequences=min(batch_size(shapes.length), shapes.sequences), length=shapes.length)
    cached = shapes.sequences * need.cached
    studied = need.weights + max(cached, need.activations) + need.statistics
    sample = (shapes.sequences, shapes.length)
    folded = fold_bytes(source, sample, **plan.fitted_ranks)
    return int(BASE + max(studied, need.statistics + jobs * folded))
