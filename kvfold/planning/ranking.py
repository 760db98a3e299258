"""Candidates at a context, batch and memory, ranked by predicted loss or by what decoding moves."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from ..convert.calibration.statistics import Statistics
from ..convert.decide.engine_choice import format_refusal
from ..convert.decide.per_rank import source_elements
from ..convert.decide.plan import Plan
from ..core.cache_dtypes import CacheDtype
from ..core.console import progress
from ..core.errors import InvalidInput
from .candidates import Candidate
from .demand import Bounds, Decoding, Demand, decoding, demand, held, parameters, token_bytes
from .prediction import PredictedLosses

# By slots that statistics choose, and by uniform ones (CHANGELOG.md).
_SLOTS = "0.128 instead of 0.175 nats, story-1m-gqa at 25%"
_MOST = 2**40  # tokens or sequences that a search goes up to
Goal = Literal["quality", "speed"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A candidate at given bounds.

    Attributes:
        candidate: the target.
        demand, decoding: what it takes there.
        fits: whether that is within the bounds.
        loss: predicted: nats per token, or by weights alone a share; None where it was not or cannot be.
        held: elements per token and layer on one rank.
        saves: its cache takes fewer bytes there than the source's in the source's dtype.
        kind: the number format of the cache; None: the output's dtype.
        share: of the bytes of the source's cache in its own dtype, on one rank alone.
    """

    candidate: Candidate
    demand: Demand
    decoding: Decoding
    fits: bool
    loss: float | None = None
    held: int = 0
    saves: bool = True
    kind: CacheDtype | None = None
    share: float = 1.0

    @property
    def name(self) -> str:
        """Return the target, and the format of its cache where it has one."""
        return self.candidate.label + ("" if self.kind is None else f", {self.kind.name}")

    @property
    def asked(self) -> Plan:
        """Return the plan of a fold that is prepared for the format."""
        plan = self.candidate.plan
        name = "bfloat16" if self.kind is None else self.kind.name
        return replace(plan, request=plan.request.model_copy(update={"cache_dtype": name}))

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values."""
        one, stored = self.candidate, {}
        cache = one.plan.cache()
        if self.kind is not None:
            size = token_bytes(one.plan, kind=self.kind) * len(one.plan.layers)
            stored = {"dtype": self.kind.name, "bytes_per_token": size, "bytes_share": self.share}
        return {
            "label": self.name,
            "kind": one.kind,
            "target": one.plan.target.to_dict(),
            "container": one.container,
            "class": one.architecture,
            "engines": dict(one.engines),
            "cache": {**cache["after"], **stored, "share": cache["ratio"]},
            "rank": {"elements_per_token_per_layer": self.held, "saves": self.saves},
            "parameters": parameters([*one.plan.specs.values(), *one.others]),
            "memory": {**asdict(self.demand), "total": self.demand.total},
            "fits": self.fits,
            "predicted_loss": self.loss,
            "decode": asdict(self.decoding),
        }


def alternative(rows: Sequence[Row]) -> Row | None:
    """Return a row that weights alone cannot tell from the first, which is chosen, and that runs more widely.

    It caches and moves as little, and lacks only the slots that statistics will choose for the other.
    """
    chosen = rows[0]
    if not chosen.candidate.allocates:
        return None
    for row in rows:
        is_equal = row.fits and (row.loss, row.held, row.kind) == (chosen.loss, chosen.held, chosen.kind)
        runs_more_widely = {*chosen.candidate.served_by} < {*row.candidate.served_by}
        if is_equal and row.decoding.bytes <= chosen.decoding.bytes and runs_more_widely:
            return row
    return None


def place(candidate: Candidate, bounds: Bounds, kind: CacheDtype | None = None) -> Row:
    """Evaluate a candidate at given bounds, in the best engine that runs it, without a prediction.

    `kind` is the number format of its cache; None: the output's dtype.
    """
    plan, ranks, geometry = candidate.plan, bounds.ranks, candidate.plan.source.geometry
    needed, itemsize = _needed(candidate, bounds, kind), plan.dtype.itemsize
    return Row(
        candidate=candidate,
        demand=needed,
        decoding=decoding(plan, bounds, candidate.served_by, kind),
        fits=bounds.hold(needed),
        held=held(plan, ranks),
        saves=token_bytes(plan, ranks, kind) < source_elements(geometry, ranks) * itemsize,
        kind=kind,
        share=token_bytes(plan, kind=kind) / (geometry.cache_elements * itemsize),
    )


def _needed(candidate: Candidate, bounds: Bounds, kind: CacheDtype | None) -> Demand:
    """Return the memory that a candidate takes of each rank, with the tensors around its text tower."""
    needed = demand(candidate.plan, bounds, candidate.served_by, kind)
    others = sum(spec.nbytes for spec in candidate.others)
    return replace(needed, weights=needed.weights + others // bounds.ranks.tensor)


def place_all(
    candidates: Sequence[Candidate], kinds: Sequence[CacheDtype], bounds: Bounds, engines: Sequence[str]
) -> list[Row]:
    """Evaluate candidates with their caches in each format that the engines store; none: the outputs' dtype.

    Raises:
        InvalidInput: they store no candidate's cache in any of the formats.
    """
    if not kinds:
        return [place(candidate, bounds) for candidate in candidates]
    rows, refusal = [], ""
    for candidate in candidates:
        for kind in kinds:
            own = None if kind.bits >= 16 else format_refusal(candidate.plan, engines, kind.name)
            refusal = refusal or own or ""
            if own is None:
                rows.append(place(candidate, bounds, kind))
    if not rows:
        raise InvalidInput(f"no target is left: {refusal}; name another format or engine")
    return rows


def predict_rows(
    rows: Sequence[Row], bounds: Bounds, statistics: Statistics | None, *, every: bool = False
) -> list[Row]:
    """Predict the losses of rows that fit, or of every row.

    Plans are made anew by the statistics; None: losses are predicted by weights alone.
    """
    kinds = {row.kind.name: row.kind for row in rows if row.kind is not None}
    known = PredictedLosses(tuple(kinds.values()))
    asked = [row for row in rows if row.fits or every]
    predicted = [row for row in rows if not (row.fits or every)]
    for row in progress(asked, "predict", len(asked)):
        if statistics is not None:
            candidate = row.candidate.with_statistics(statistics)
            if not candidate.served_by:  # not with slots that are allocated
                continue
            row = place(candidate, bounds, row.kind)
        predicted.append(replace(row, loss=known.of(row.candidate.plan, row.kind)))
    return predicted


def rank(
    rows: Sequence[Row], goal: Goal, tolerance: float, *, calibrated: bool
) -> tuple[list[Row], str | None]:
    """Order rows, which are predicted where they fit, by a goal; those that do not fit come last.

    It is `quality`, the least predicted loss, or `speed`, the least bytes per decoded token of those within
    the tolerance. That is in nats if `calibrated`, as the losses are.

    Returns:
        The rows, and why the first was chosen; None where none fits.
    """
    fitting = sorted((row for row in rows if row.fits), key=_by_loss)
    others = [row for row in rows if not row.fits]
    within = [row for row in fitting if row.loss is not None and row.loss <= tolerance]
    if goal == "speed":
        beyond = [row for row in fitting if row not in within]
        within.sort(key=lambda row: (not row.saves, row.decoding.bytes, *_by_loss(row)))
        fitting = [*within, *beyond]
    reason = _reason(fitting, len(within), goal, tolerance, calibrated) if fitting else None
    return [*fitting, *others], reason


def _by_loss(row: Row) -> tuple[bool, bool, float, float, bool, bool, int]:
    """Sort by least loss; then by what decides between equal ones.

    These are the larger cache where no loss is known, slots that statistics will choose, which lost less
    (`_SLOTS`), no code of its own, and fewer bytes moved. A target of which a rank holds no less than of the
    source comes after all others.
    """
    return (
        not row.saves,
        row.loss is None,
        row.loss or 0.0,
        -row.share if row.loss is None else 0.0,
        not row.candidate.allocates,
        row.candidate.container == "remote",
        row.decoding.bytes,
    )


def _reason(fitting: Sequence[Row], within: int, goal: Goal, tolerance: float, calibrated: bool) -> str:
    best, count = fitting[0], len(fitting)
    if not best.saves:
        return (
            f"none of the {count} that fit takes less of a rank than the source does; keep the source, or "
            f"raise --dcp"
        )
    if best.loss is None:
        return f"the largest cache of the {count} that fit; for this attention no loss can be predicted"
    lost = (
        f"{best.loss:.4f} nats per token"
        if calibrated
        else f"{best.loss:.1%} of the attention's output, by weights alone"
    )
    if goal == "quality":
        return f"least predicted loss ({lost}) of the {count} that fit"
    if not within:
        return (
            f"least predicted loss ({lost}): none of the {count} that fit is within the tolerance of "
            f"{tolerance:g}"
        )
    return (
        f"fewest bytes moved per decoded token ({lost}) of the {within} that fit within the "
        f"tolerance of {tolerance:g}"
    )


def compare(chosen: Row, other: Row) -> str:
    """Return what a row's alternative has in its favour, and why the row is nevertheless chosen."""
    own_code = chosen.candidate.container == "remote" != other.candidate.container
    return (
        f"the same cache and predicted loss in {', '.join(other.candidate.served_by)}"
        f"{', without trust_remote_code' if own_code else ''}; the slots of {chosen.name} are chosen by "
        f"statistics only when it is folded, which lost less where it was measured ({_SLOTS})"
    )


def what_would_fit(rows: Sequence[Row], bounds: Bounds) -> dict[str, Any]:
    """Return what would have to change where none of some rows fits.

    That is the least memory that suffices, and the longest context and largest batch that the given memory
    holds.

    Returns:
        `label` of the row that needs least, and `memory`; `context` and `batch`, None where not even one
        would fit, with the label of the row that has it.
    """
    least = min(rows, key=lambda row: row.demand.total)

    def largest(name: str) -> tuple[int | None, str | None]:
        def fails(row: Row, size: int) -> bool:
            sizes: dict[str, Any] = {name: size}
            changed = replace(bounds, **sizes)
            return not changed.hold(_needed(row.candidate, changed, row.kind))

        # As many sizes from 1 on fit.
        sizes = [(bisect_left(range(1, _MOST), True, key=partial(fails, row)), row.name) for row in rows]
        most, label = max(sizes, key=lambda size: size[0])
        return (most, label) if most else (None, None)

    (context, with_context), (batch, with_batch) = largest("context"), largest("batch")
    return {
        "label": least.name,
        "memory": least.demand.total,
        "context": context,
        "context_label": with_context,
        "batch": batch,
        "batch_label": with_batch,
    }
