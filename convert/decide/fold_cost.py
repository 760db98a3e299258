"""The time and memory of a fold, predicted from shapes and the rates of the machine.

Every phase is a count of operations: `Work`. Its seconds are those operations over measured rates, times a
factor of the phase for what such a count leaves out (`python -m benchmarks.fold_cost` compares them with
folds).

Legend: S sequences, T tokens of each, X = S·T, L layers, D hidden size, N and K heads of queries and keys, H
their width, R width of a latent, V vocabulary.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from ...core.machine_rates import Rates, measure_rates
from ...core.units import show_bytes
from ...texts.calibration_name import names_statistics, parts
from ..algebra.target import GroupedTarget, LatentTarget
from ..calibration.capacity import Need, fold_bytes
from ..calibration.reach import PAIRS, default_length, joined_lengths
from ..calibration.study import batch_size
from ..efforts import EFFORTS, MEASURED, RATED
from ..methods.allocation import rotary_widths
from ..methods.latent_norm import LEAST_PARTS
from ..methods.refinement import HELD_BACK, RIDGES, SHARES, trial_steps
from ..methods.table import reads_statistics
from ..storage import cache_fit, cache_moments
from ..storage.rounded_length import sequences_read
from .plan import Plan

# Measured seconds over counted ones, fitted on folds of four sources (benchmarks/results/fold-cost.json).
FACTORS = {"text": 1.7, "rounded length": 1.35}
BASE = 6.5e8  # bytes of a process that has imported torch and transformers
_STARTED = 4e6  # small operations that take as long as importing them
_OPTIMISED = 3e5  # as long as importing what torch's optimizers and searches need
_NORMED = 1.8  # times that fitting a latent norm takes longer than what is counted
_FLOAT, _DOUBLE = 4, 8  # bytes
_MIXED = 2.5  # times that an operation of attention takes longer than one of a product
_MOVED = 24  # times that a number of a layer's queries is read or written besides products
_CALLED = 300  # small operations of one layer's attention, forward and backward
_TABLES = 4  # of slots for engines, or rotary widths, that are measured


@dataclass(frozen=True, kw_only=True)
class Work:
    """Counted operations, which add up and are multiplied like numbers.

    Attributes:
        flop: of float32 products; one in float64 counts as two.
        moved: bytes that elementwise functions read and write.
        cubes: n³ of decompositions of symmetric matrices with n rows.
        calls: small operations.
    """

    flop: float = 0.0
    moved: float = 0.0
    cubes: float = 0.0
    calls: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __rmul__(self, times: float) -> "Work":
        return Work(**{name: times * value for name, value in vars(self).items()})

    def seconds(self, rates: Rates, at_once: float) -> float:
        """Return the seconds of this work on so many threads; small operations wait for each other.

        Most of a small operation is Python's own, under its lock.
        """
        computed = self.flop / rates.products + self.moved / rates.stream + self.cubes / rates.decomposition
        return computed / at_once + self.calls * rates.call


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


def in_words(cost: dict[str, Any]) -> str:
    """Return a sentence about a predicted cost, as `FoldCost.to_dict` returns it."""
    takes = f"{show_seconds(cost['seconds'])} and {show_bytes(cost['peak_bytes'])} of memory"
    return f"This fold takes about {takes} on this machine while nothing else runs"


def show_seconds(seconds: float) -> str:
    """Return a duration as a user reads it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def cost_of(plan: Plan) -> FoldCost:
    """Return the predicted cost of a fold on this machine, which is measured in a fraction of a second."""
    calibration = plan.request.calibration or "self"
    if not reads_statistics(plan.method):
        calibration = "none"
    return predict_cost(plan, calibration, measure_rates(plan.source.geometry.hidden_size))


def cost_by_default(plan: Plan, sequences: int) -> FoldCost:
    """Return the predicted cost of a fold with the default effort on some calibration sequences."""
    effort = replace(EFFORTS["default"], sequences=sequences)
    return cost_of(replace(plan, refine=effort.steps, effort=effort))


def predict_cost(plan: Plan, calibration: str, rates: Rates) -> FoldCost:
    """Return the predicted cost of a fold on a machine with some rates.

    `calibration` is `none`, `self`, a text or both; saved statistics cost as little as `none`.
    """
    jobs = min(plan.request.jobs or rates.threads, plan.source.layers)
    counted = _Counts(plan, calibration, jobs)
    seconds = {"start": _STARTED * rates.call}
    for phase, work in counted.of_model().items():
        seconds[phase] = FACTORS.get(phase, 1.0) * work.seconds(rates, rates.threads)
    for phase, work in counted.of_layers().items():
        seconds[phase] = FACTORS.get(phase, 1.0) * work.seconds(rates, jobs)
    return FoldCost(seconds=seconds, peak_bytes=counted.peak_bytes())


class _Counts:
    """The operations and bytes of a fold that folds `jobs` layers at once."""

    def __init__(self, plan: Plan, calibration: str, jobs: int = 1) -> None:
        source, request, geometry = plan.source, plan.request, plan.source.geometry
        self.plan, self.calibration, self.jobs = plan, calibration, jobs
        self.sequences = plan.effort.sequences
        length = request.length or default_length(source, request.calibration)
        if plan.statistics is not None:
            self.sequences, length = plan.statistics.layers[0].input_BTD.shape[:2]
        self.length = min(length, source.positions)
        self.tokens = self.sequences * self.length
        self.layers, self.hidden = source.layers, geometry.hidden_size
        self.heads, self.key_heads = geometry.num_attention_heads, geometry.num_key_value_heads
        self.width, self.vocabulary = geometry.head_dim, int(source.config["vocab_size"])
        need = Need.of(source, sequences=1, length=2)
        # All that multiply every token: the layers and the head.
        self.weights = (need.weights - need.rest) // _FLOAT + self.vocabulary * self.hidden
        self.fits_norm = plan.latent_norm == "fitted" and calibration != "none"

    def of_model(self) -> dict[str, Work]:
        """Return the work of the phases in which the whole source is at work."""
        found = {}
        own, text = parts(self.calibration)
        if own:
            found["text"] = self._text(self.sequences - (0 if text is None else self.sequences // 2))
        if self.calibration != "none" and not names_statistics(self.calibration):
            found["statistics"] = self._statistics()
        return found

    def of_layers(self) -> dict[str, Work]:
        """Return the work of the phases in which layers are folded."""
        plan = self.plan
        closed = self._closed()
        folded = self.layers + (RATED if plan.refine and self.layers > MEASURED else 0)
        work = {"closed form": folded * closed}
        if self.fits_norm:
            work["closed form"] += folded * self._norm()
        if self.calibration == "none":
            return work
        work["closed form"] += self._division(closed) + Work(calls=_OPTIMISED)
        # A closed form is measured too, and the output projection of `--effort quick` is solved for.
        without_steps = "output projection" if plan.solves else "measurement"
        work["refinement" if plan.refine else without_steps] = self.layers * self._refinement()
        if self.fits_norm and plan.refine:
            work["rounded length"] = self.layers * (self._rounded(65) + self._rounded(22))
        if plan.request.cache_dtype != "bfloat16":
            work["quantised cache"] = self._quantised()
        return work

    def peak_bytes(self) -> int:
        """Return the bytes of the phase that takes most."""
        source, jobs = self.plan.source, self.jobs
        if self.calibration == "none":
            return int(BASE + jobs * fold_bytes(source))
        batch = min(batch_size(self.length), self.sequences)
        need = Need.of(source, sequences=batch, length=self.length)
        studied = need.weights + max(self.sequences * need.cached, need.activations) + need.statistics
        folded = fold_bytes(source, (self.sequences, self.length), **self.plan.fitted_ranks)
        return int(BASE + max(studied, need.statistics + jobs * folded))

    def _text(self, sequences: int) -> Work:
        """Count a text that the source writes, all sequences at once, and what it reads of it."""
        tokens, repeated = sequences * self.length, 1 if self.heads == self.key_heads else 3
        read = 3 * min(PAIRS, sequences // 2)  # joined and alone
        read *= sum(joined_lengths(sequences, self.length, self.plan.source.positions))
        cached = 2.5 * self.layers * tokens * self.length * self.heads * self.width * repeated
        return Work(
            flop=2 * (tokens + read) * self.weights,
            moved=_FLOAT * (cached + 8 * tokens * self.vocabulary),  # softmax, entropy and draw
            calls=self.length * (100 * self.layers + 200),
        )

    def _statistics(self) -> Work:
        """Count a pass forward and backward with its moments, whose products are in float64."""
        keys, maps = self.key_heads * self.width, self.heads * self.length
        sides = 2 * self.hidden**2 + 2 * keys**2 + 4 * self.heads * self.width**2
        batches = math.ceil(self.sequences / batch_size(self.length))
        each = 12 * maps * self.width + 2 * sides
        moved = 60 * maps + 1400 * self.hidden
        return Work(
            flop=self.tokens * (4 * self.weights + self.layers * each),
            moved=_FLOAT * self.tokens * (self.layers * moved + 8 * self.vocabulary),
            calls=750 * batches * self.layers,
        )

    def _pass(self, projections: int, width: int) -> Work:
        """Count one token's attention, over half of the keys, and the weights that multiply the token."""
        inside = self.heads * width
        return Work(flop=2 * projections + _MIXED * 2 * self.length * inside, moved=_MOVED * inside * _FLOAT)

    def _of_source(self) -> Work:
        return self._pass(2 * self.hidden * self.width * (self.heads + self.key_heads), self.width)

    def _of_folded(self) -> Work:
        """Count one token's attention after the fold, and the loss at its output."""
        inside, target = self.heads * self.width, self.plan.target
        loss = self.hidden**2
        if isinstance(target, GroupedTarget):
            rows = 2 * inside + 2 * target.num_key_value_heads * self.width
            return self._pass(self.hidden * rows + loss, self.width)
        rank, rotary = target.kv_lora_rank, target.qk_rope_head_dim
        rows = inside + self.heads * rotary + inside + rank + rotary
        return self._pass(self.hidden * rows + 2 * rank * inside + rank**2 + loss, self.width + rotary)

    def _measured(self) -> Work:
        """Count measuring one layer on what is held back."""
        return self.tokens / HELD_BACK * (self._of_source() + self._of_folded()) + Work(calls=_CALLED)

    def _closed(self) -> Work:
        """Count one layer's closed form, whose products are in float64, and measuring orders of heads."""
        keys, hidden = self.key_heads * self.width, self.hidden
        if isinstance(self.plan.target, GroupedTarget):
            return Work(flop=2 * hidden * keys * (32 * hidden + 10 * keys)) + 4 * self._measured()
        products = 2 * hidden * keys * (15 * hidden + 12 * keys)
        return Work(flop=products, cubes=min(hidden, 2 * keys) ** 3)

    def _norm(self) -> Work:
        """Count fitting one layer's latent norm, and writing the layer behind it."""
        assert isinstance(self.plan.target, LatentTarget)
        rank, inside = self.plan.target.kv_lora_rank, self.heads * self.width
        # Lengths that leave no direction out, then heads that are balanced by numbers of tokens.
        tried = Work(flop=4 * self.tokens * rank * (self.hidden + rank), cubes=rank**3) + self._measured()
        balanced = Work(flop=4 * self.tokens * (self.hidden + 2 * rank) * (inside + rank))
        fitted = self._lengths(24, self.tokens, self.plan.effort.draws)
        return _NORMED * (fitted + len(LEAST_PARTS) * tried + balanced)

    def _rounded(self, evaluations: int) -> Work:
        """Count a search for a length with which rounding costs less, and measuring it."""
        assert isinstance(self.plan.target, LatentTarget)
        read = min(self.sequences, sequences_read(self.plan.target.kv_lora_rank, self.length))
        return self._lengths(evaluations, read * self.length, 1) + self._measured()

    def _lengths(self, evaluations: int, tokens: float, draws: int) -> Work:
        """Count a search for a length of each token's latent in one layer, by gradients of some draws."""
        assert isinstance(self.plan.target, LatentTarget)
        rank = self.plan.target.kv_lora_rank
        moments = Work(flop=4 * tokens * rank * (self.hidden + 2 * rank), cubes=self.hidden**3)
        moved = 8 * tokens * rank * _DOUBLE
        search = evaluations * Work(flop=8 * tokens * rank**2, moved=moved, calls=100)
        return (1 + 2 * draws) * tokens * self._of_folded() + moments + self._measured() + search

    def _division(self, closed: Work) -> Work:
        """Count choosing slots and dividing a budget between them and the latent."""
        plan, request, target = self.plan, self.plan.request, self.plan.target
        if not isinstance(target, LatentTarget) or target.slots == "source":
            return Work()
        rows = 2 * self.key_heads * self.width
        flop = 2 * self.hidden * rows * (4 * self.hidden + 2 * rows)
        predicted = self.layers * Work(flop=flop, cubes=min(self.hidden, rows) ** 3 / 2)  # eigenvalues alone
        # Some threads may be idle while the last layers are measured, which counts as well.
        layers = math.ceil(min(MEASURED, self.layers) / self.jobs) * self.jobs if plan.effort.widths else 0
        measured = _TABLES * layers * (closed + self._measured())
        if plan.container.profile is not None:
            return _TABLES * predicted + measured
        if request.kv_budget is None or request.rope_dim is not None:
            return Work()
        elements = target.kv_lora_rank + target.qk_rope_head_dim
        return len(rotary_widths(plan.source.geometry, elements)) * predicted + measured

    def _refinement(self) -> Work:
        """Count one layer's refinement; a pass backwards counts as two."""
        plan, inside = self.plan, self.heads * self.width
        steps: float = plan.refine + 3 * trial_steps(plan.refine)  # three rates are tried in most layers
        if self.layers > MEASURED:  # on a few, which then descend as long as a trial
            steps = plan.refine + 4 * trial_steps(plan.refine) * RATED / self.layers
        shares = (4 * len(SHARES) if plan.refine else 0) + (len(RIDGES) + HELD_BACK if plan.solves else 0)
        passes: float = 3 * steps * min(plan.effort.batch, self.sequences) * self.length
        passes += (1 + shares) / HELD_BACK * self.tokens
        work = passes * self._of_folded() + self.tokens * self._of_source()
        tensors = 8 if isinstance(plan.target, LatentTarget) else 4
        work += steps * Work(calls=250 * tensors)
        if plan.solves:
            work += Work(flop=4 * self.tokens * inside * (inside + self.hidden) + 3 * inside**3)
        return work

    def _quantised(self) -> Work:
        """Count preparing all layers for a number format of the cache, with what is refined again."""
        plan, target, hidden = self.plan, self.plan.target, self.hidden
        widths = [self.width] * 2 * target.num_key_value_heads if isinstance(target, GroupedTarget) else []
        if isinstance(target, LatentTarget):
            widths = [target.kv_lora_rank + target.qk_rope_head_dim]
        rows = min(cache_moments.TOKENS, self.tokens)
        fit = Work(calls=200 * len(widths))
        for width in widths:  # products, and passes over the numbers for their rounding and its gradient
            fit += Work(flop=(4 * rows + 144 * width) * width**2, moved=100 * rows * width * _FLOAT)
        drawn = (1 + 2 * cache_moments.DRAWS) * self._of_folded()
        prepared = self.tokens * drawn + Work(cubes=hidden**3) + cache_fit.STEPS * fit + 3 * self._measured()
        again = prepared + self._refinement() if plan.refine else prepared
        if not self.fits_norm:
            return self.layers * again
        return self.layers * (again + self._norm())
