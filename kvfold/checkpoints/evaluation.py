"""`eval.json` as data.

What `kvfold eval --out` found, read for the model card without importing the evaluation.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ..core.errors import InvalidInput

FILE = "eval.json"


class Part(BaseModel):
    """A piece of a report; what the card does not tell is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Protocol(Part):
    """On what was measured; `window` in tokens."""

    name: str
    text_sha256: str
    window: int
    windows: int
    scored_tokens: int


class Estimate(Part):
    """A mean and its standard error, where there are several windows."""

    mean: float
    standard_error: float | None = None


class Cache(Part):
    """What the live cache grew by."""

    elements_per_token_per_layer: float


class Measured(Part):
    """One model."""

    path: str
    dtype: str
    perplexity: float
    cache: Cache | None = None


class Fidelity(Part):
    """The checkpoint against its source.

    KL(source || checkpoint) in nats, and the share of equal top-1 tokens.
    """

    kl: Estimate
    same_top1: Estimate


class Share(Part):
    """How much of the conversion's loss distillation won back; None where that cannot be told."""

    value: float | None = None


class Evaluation(Part):
    """What the card tells of a report; schema 1 of the report has this shape."""

    protocol: Protocol
    student: Measured
    teacher: Measured | None = None
    parent: Measured | None = None
    fidelity: Fidelity | None = None
    recovered_share: Share = Share()


class _Place(Part):
    path: str


class _Scores(Part):
    dtype: str
    perplexity: float


class _Perplexities(Part):
    student: _Scores
    teacher: _Scores | None = None
    parent: _Scores | None = None
    recovered_share: Share = Share()


class _Caches(Part):
    student: Cache | None = None
    teacher: Cache | None = None
    parent: Cache | None = None


class _Suites(Part):
    ppl: _Perplexities | None = None
    fidelity: Fidelity | None = None
    cache: _Caches | None = None


class _Suited(Part):
    """A report of schema 2: a block a suite."""

    checkpoint: _Place
    teacher: _Place | None = None
    parent: _Place | None = None
    protocol: Protocol | None = None
    suites: _Suites

    def evaluation(self) -> Evaluation | None:
        """What the card tells; None without perplexities."""
        scores, caches = self.suites.ppl, self.suites.cache or _Caches()
        if scores is None or self.protocol is None:
            return None

        def measured(place: _Place | None, found: _Scores | None, cache: Cache | None) -> Measured | None:
            if place is None or found is None:
                return None
            return Measured(path=place.path, dtype=found.dtype, perplexity=found.perplexity, cache=cache)

        student = measured(self.checkpoint, scores.student, caches.student)
        assert student is not None  # neither is optional
        return Evaluation(
            protocol=self.protocol,
            student=student,
            teacher=measured(self.teacher, scores.teacher, caches.teacher),
            parent=measured(self.parent, scores.parent, caches.parent),
            fidelity=self.suites.fidelity,
            recovered_share=scores.recovered_share,
        )


def read_evaluation(directory: Path) -> Evaluation | None:
    """What was measured of a checkpoint, from the eval.json that lies in it; None where there is none, or no
    perplexity in it.

    Raises:
        InvalidInput: it is no report of `kvfold eval`, of another schema, not finite, or of another
        checkpoint.
    """
    path = directory / FILE
    if not path.is_file():
        return None
    again = f"remove it and measure again: kvfold eval {directory} --text FILE --out {path}"
    try:
        report: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise InvalidInput(f"{path} is not valid JSON; {again}") from None
    schema = report.get("schema") if isinstance(report, dict) else None
    if schema not in (1, 2):
        raise InvalidInput(f"{path} is no report of schema 1 or 2 (its schema is {schema}); {again}")
    try:
        found = (
            Evaluation.model_validate(report) if schema == 1 else _Suited.model_validate(report).evaluation()
        )
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InvalidInput(f"{path} is no report of kvfold eval ({place}: {first['msg']}); {again}") from None
    measured = Path(found.student.path) if found else directory
    if measured.is_dir() and measured.resolve() != directory.resolve():
        raise InvalidInput(f"{path} was measured on {measured}, not on {directory}; {again}")
    return found
