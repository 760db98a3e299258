"""The blocks of eval.json that say what a checkpoint costs: its KV cache and its speed.

See `quality_blocks.py` for what holds of every block.
"""

from dataclasses import dataclass

from .quality_blocks import SuiteBlock, check_positive


@dataclass(frozen=True)
class CacheAtLength:
    """The cache of one sequence of `tokens` tokens.

    Attributes:
        tokens: length of the sequence.
        bytes: size of its cache.
        largest_batch: how many such sequences fit into `CacheBlock.memory` next to the weights; None where no
            memory was given.
    """

    tokens: int
    bytes: int
    largest_batch: int | None


@dataclass(frozen=True)
class ModelCache:
    """The KV cache of one model.

    Attributes:
        elements_per_token_per_layer: growth of the live cache per token, mean over the layers that attend.
        predicted_elements_per_token_per_layer: the same by config.json; None for a class that kvfold does not
            know.
        elements_per_token: growth of the live cache per token, all layers.
        bytes_per_token: the same in bytes of `dtype`.
        dtype: dtype of the live cache, as the model was loaded.
        predicted_bytes_per_token: by config.json, in `stored_dtype`, all layers.
        stored_dtype: dtype of the weights in the checkpoint, which is what a server keeps its cache in.
        weight_bytes: size of the checkpoint's weights.
        contexts: the caches of long sequences, in `cache_dtype` or else `stored_dtype`, from the measured
            growth.
        cache_dtype: the number format that the cache is stored in by `--cache-dtype`; None where it is stored
            as it is computed.
        quantised_bytes_per_token: bytes of a token in `cache_dtype`, its scales included, all layers.
        state_bytes: of layers that do not attend, whose state has one size; it is part of `contexts`. None in
            reports of earlier versions.
        growing_layers: number of layers whose cache grows; None in reports of earlier versions.
    """

    elements_per_token_per_layer: float
    predicted_elements_per_token_per_layer: float | None
    elements_per_token: float
    bytes_per_token: float
    dtype: str
    predicted_bytes_per_token: int | None
    stored_dtype: str
    weight_bytes: int
    contexts: tuple[CacheAtLength, ...]
    cache_dtype: str | None = None
    quantised_bytes_per_token: float | None = None
    state_bytes: int | None = None
    growing_layers: int | None = None

    def __post_init__(self) -> None:
        check_positive("elements_per_token_per_layer", self.elements_per_token_per_layer)


@dataclass(frozen=True)
class CacheBlock(SuiteBlock):
    """The block of the suite `cache`.

    Attributes:
        student, teacher, parent: the models.
        ratio: elements per token, student / teacher.
        memory: bytes that weights and sequences were to fit into; None where no memory was given.
    """

    student: ModelCache
    teacher: ModelCache | None
    parent: ModelCache | None
    ratio: float | None
    memory: int | None

    def __post_init__(self) -> None:
        if self.ratio is not None:
            check_positive("ratio", self.ratio)


@dataclass(frozen=True)
class Quartiles:
    """The median of repeated measurements and the quartiles around it."""

    median: float
    q1: float
    q3: float

    def __str__(self) -> str:
        return f"{self.median:,.4g} [{self.q1:,.4g}, {self.q3:,.4g}]"


@dataclass(frozen=True)
class PhaseSpeed:
    """The speed of prefill or of decoding.

    Attributes:
        milliseconds: time to read all prompts, or time of one decoding step of the whole batch.
        tokens_per_second: tokens of all sequences together.
    """

    milliseconds: Quartiles
    tokens_per_second: Quartiles


@dataclass(frozen=True)
class ModelSpeed:
    """The speed of one model.

    Attributes:
        prefill, decode: the phases.
        peak_bytes: peak memory above the weights, cache included.
    """

    prefill: PhaseSpeed
    decode: PhaseSpeed
    peak_bytes: int


@dataclass(frozen=True)
class SpeedCell:
    """One batch size and context length.

    Attributes:
        batch: sequences read at once.
        context: tokens of each prompt.
        tokens: decoding steps per round.
        rounds: number of timed rounds.
        student, teacher: the models.
        prefill_speedup, decode_speedup: the teacher's time over the student's, round by round; None where the
            models did not take turns.
        skipped: why there are no numbers; None where there are.
    """

    batch: int
    context: int
    tokens: int
    rounds: int
    student: ModelSpeed | None = None
    teacher: ModelSpeed | None = None
    prefill_speedup: Quartiles | None = None
    decode_speedup: Quartiles | None = None
    skipped: str | None = None

    def __post_init__(self) -> None:
        check_positive("batch", self.batch)
        check_positive("context", self.context)


@dataclass(frozen=True)
class SpeedBlock(SuiteBlock):
    """The block of the suite `speed`.

    Attributes:
        machine: the processor or device.
        interleaved: both models took turns.
        cells: the sweep over batch sizes and contexts.
    """

    machine: str
    interleaved: bool
    cells: tuple[SpeedCell, ...]
