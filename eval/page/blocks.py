"""What a page reads of eval.json, kvfold.json and curve.json, as shapes.

What it does not show is passed over.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Part(BaseModel):
    """A piece of a file."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Estimate(Part):
    """A mean with its standard error and 95 % interval, where these are known."""

    mean: float
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None


class Checkpoint(Part):
    """Which weights."""

    path: str
    name: str
    identity: str


class Protocol(Part):
    """On what was measured; equal ones make perplexities comparable. `window` in tokens."""

    name: str
    text_sha256: str
    window: int
    windows: int
    bos: str


class Measured(Part):
    """One model's perplexity; `nll` in nats a token."""

    perplexity: Positive
    nll: Estimate
    bits_per_byte: float


class Recovered(Part):
    """The share of the conversion's loss that was won back, or why it is undefined."""

    value: float | None
    reason: str | None = None


class Perplexities(Part):
    """The suite `ppl`."""

    student: Measured
    teacher: Measured | None = None
    parent: Measured | None = None
    ratio: Estimate | None = None
    recovered_share: Recovered


class Bucket(Part):
    """KL at tokens with `first` to `last` tokens before them."""

    first: int
    last: int
    kl: Estimate


class Fidelity(Part):
    """The suite `fidelity`; KL in nats."""

    kl: Estimate
    kl_percentiles: dict[str, Estimate]
    kl_max: float
    same_top1: Estimate
    kl_by_position: tuple[Bucket, ...] = ()


class Context(Part):
    """A sequence's cache in bytes, and how many sequences fit, where a memory was given."""

    tokens: int
    bytes: int
    largest_batch: int | None = None


class ModelCache(Part):
    """One model's cache."""

    elements_per_token_per_layer: Positive
    predicted_elements_per_token_per_layer: int | None = None
    stored_dtype: str
    contexts: tuple[Context, ...] = ()


class Caches(Part):
    """The suite `cache`."""

    student: ModelCache
    teacher: ModelCache | None = None
    ratio: Positive | None = None
    memory: int | None = None


class Report(Part):
    """A file that `kvfold eval --out` wrote."""

    version: Literal[2] = Field(alias="schema")
    checkpoint: Checkpoint
    teacher: Checkpoint | None = None
    protocol: Protocol | None = None
    suites: dict[str, Any]
    device: str = "unknown"
    versions: dict[str, str] = {}


class Spread(Part):
    """The median of repeated measurements, and their quartiles."""

    median: float
    q1: float
    q3: float


class Phase(Part):
    """Prefill or decode; tokens of all sequences together."""

    milliseconds: Spread
    tokens_per_second: Spread


class Timing(Part):
    """One model."""

    prefill: Phase
    decode: Phase
    peak_bytes: int


class SpeedCell(Part):
    """One batch size and context; the speedups are the teacher's time over the student's."""

    batch: Count
    context: Count
    student: Timing | None = None
    teacher: Timing | None = None
    prefill_speedup: Spread | None = None
    decode_speedup: Spread | None = None
    skipped: str | None = None


class Speeds(Part):
    """The suite `speed`."""

    machine: str
    cells: tuple[SpeedCell, ...]


Grid = tuple[tuple[Share, ...], ...]


class NeedleMap(Part):
    """Shares over lengths and depths.

    Of needles found, and of keys that were the likeliest of the candidates.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    accuracy: Grid
    choice: Grid

    @model_validator(mode="after")
    def _is_a_grid(self) -> Self:
        for grid in (self.accuracy, self.choice):
            if len(grid) != len(self.lengths) or {len(row) for row in grid} - {len(self.depths)}:
                raise ValueError("a cell is missing")
        return self


class Kinds(Part):
    """One model's needles."""

    passkey: NeedleMap
    multikey: NeedleMap


class Retrieval(Part):
    """The suite `retrieval`; `chance` is what guessing gives where the likeliest of the candidates counts."""

    candidates: int
    chance: float
    student: Kinds
    teacher: Kinds | None = None


class Flips(Part):
    """Answers that turned against the teacher's, and McNemar's probability of as much by chance."""

    right_to_wrong: int
    wrong_to_right: int
    p_value: float


class Metric(Part):
    """One metric of a task."""

    student: Estimate
    teacher: Estimate | None = None
    difference: Estimate | None = None
    flips: Flips | None = None


class Task(Part):
    """A task and its metrics, of which `primary` is told."""

    samples: int
    primary: str
    metrics: dict[str, Metric]

    @model_validator(mode="after")
    def _has_its_primary(self) -> Self:
        if self.primary not in self.metrics:
            raise ValueError(f"there is no metric {self.primary}")
        return self


class Tasks(Part):
    """The suite `tasks`."""

    tasks: dict[str, Task]


SUITES: dict[str, type[Part]] = {
    "ppl": Perplexities,
    "fidelity": Fidelity,
    "cache": Caches,
    "speed": Speeds,
    "retrieval": Retrieval,
    "tasks": Tasks,
}


class Spectrum(Part):
    """What directions of a layer's keys and values cost when they are left out, by their number from 1."""

    size: Count
    index: tuple[Count, ...]
    cost: tuple[float, ...]


class Layer(Part):
    """A layer of a conversion: its loss as planned and as measured alone, nats a token."""

    planned: dict[str, float] | None = None
    measured: dict[str, float] | None = None
    spectrum: Spectrum | None = None


class Point(Part):
    """An evaluation during training."""

    tokens: int
    perplexity: Positive


class Curve(Part):
    """curve.json."""

    text: str
    teacher_perplexity: Positive
    points: tuple[Point, ...] = Field(min_length=1)
