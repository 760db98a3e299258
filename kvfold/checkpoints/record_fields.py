"""The fields of kvfold.json that kvfold reads back; other fields are kept as they are.

A field that is added later needs a default, so that records of earlier versions can still be read.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from .quality_blocks import FiniteNumbers

Count = Annotated[int, Field(gt=0, lt=2**63)]  # products of three still have a float
Plain = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class RecordedSource(FiniteNumbers):
    """The checkpoint that an output was made from, see `record.describe`."""

    name: str
    path: str
    revision: str | None = None
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RecordedParent(FiniteNumbers):
    """A checkpoint on the way from the source to the output."""

    stage: str
    path: str


@dataclass(frozen=True, kw_only=True)
class RecordedSize(FiniteNumbers):
    """The size of a cache."""

    elements_per_token_per_layer: Annotated[float, Field(gt=0, lt=2**63)]
    bytes_per_token: Count


@dataclass(frozen=True, kw_only=True)
class RecordedCache(FiniteNumbers):
    """The size of the cache of the source and of the output.

    Where some layers do not attend, the sizes are those of the others; `layers` counts all by kind. Where
    layers are unlike, elements per layer are a mean, and `kinds` has those of each kind: the number of layers
    with a cache, and what one caches in the source and in the output.
    """

    before: RecordedSize
    after: RecordedSize
    ratio: Annotated[float, Field(gt=0)]
    layers: dict[str, Count] = field(default_factory=dict)
    kinds: dict[str, dict[str, Count]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RecordedCalibration(FiniteNumbers):
    """The origin of statistics."""

    text: str
    tokens: int
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class RecordedKL(FiniteNumbers):
    """The KL of a fold from its source, nats per token, on calibration text held back from the fit."""

    kl: float
    sequences: int
    length: int


@dataclass(frozen=True, kw_only=True)
class RecordedFormat(FiniteNumbers):
    """The number format that a cache is prepared for, and predicted losses with it."""

    name: str
    predicted_loss: float | None = None
    unprepared: float | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedTraining(FiniteNumbers):
    """A distillation: its recipe and its result."""

    recipe: dict[str, Any] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    student: str = ""
    teacher: str = ""
    steps: int = 0
    tokens: int = 0
    stages: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedRounding(FiniteNumbers):
    """A quantisation of weights."""

    scheme: str
    command: str = ""
    group_size: Count | None = None
    rounded_share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RecordedSearch(FiniteNumbers):
    """A search of `kvfold migrate`, which chose the size."""

    command: str


@dataclass(frozen=True, kw_only=True)
class Recorded(FiniteNumbers):
    """The content of kvfold.json."""

    schema: int
    stage: str
    source: RecordedSource
    parents: list[RecordedParent]
    kvfold: str = ""
    command: str = ""
    target: dict[str, Plain | list[Plain]] = field(default_factory=dict)
    method: str = ""
    calibration: RecordedCalibration | None = None
    predicted_loss: float | None = None
    measured_kl: RecordedKL | None = None
    cache_dtype: RecordedFormat | None = None
    layers: list[dict[str, Any]] = field(default_factory=list)
    container: str = ""
    engines: list[str] = field(default_factory=list)
    dtype: str = ""
    cache: RecordedCache | None = None
    notices: list[str] = field(default_factory=list)
    distill: RecordedTraining = field(default_factory=RecordedTraining)
    latent_norm: str | None = None
    quantize: RecordedRounding | None = None
    migrate: RecordedSearch | None = None
    weights: dict[str, str] = field(default_factory=dict)
