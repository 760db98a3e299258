"""The blocks of eval.json that say how good a checkpoint is: perplexity, fidelity, long texts and tasks.

Next to `cost_blocks.py`, these classes are the only description of what a suite of `kvfold eval` writes. The
suites return them, `eval_json.py` writes and reads them, and the report page and the model card show them.
Their field names are the keys of eval.json. A field that is added later needs a default, so that reports of
earlier versions can still be read.

A field named `student`, `teacher` or `parent` holds the numbers of one model: the evaluated checkpoint, its
source, and the folded checkpoint that it was distilled from. It is None where that model was not measured.
"""

from dataclasses import dataclass, field
from typing import ClassVar

Grid = tuple[tuple[float, ...], ...]  # one row per length, one column per depth


class FiniteNumbers:
    """The base of dataclasses that are read from JSON and hold finite numbers alone."""

    __pydantic_config__: ClassVar = {"allow_inf_nan": False}


class SuiteBlock(FiniteNumbers):
    """The base of what a suite writes under its name in eval.json."""


@dataclass(frozen=True)
class Estimate:
    """A number measured on windows, prompts or documents.

    Attributes:
        mean: the number itself, over all of them.
        standard_error: its standard error; None where it is unknown, as for a single window. Of scores from 0
            to 1 it is half of the interval, in units of a normal one, and so above 0 where all are right.
        low, high: its 95 % confidence interval; None where it is unknown.
    """

    mean: float
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + ("" if self.standard_error is None else f" ± {self.standard_error:.2g}")


@dataclass(frozen=True)
class ModelPerplexity:
    """The perplexity of one model.

    Attributes:
        dtype: dtype of its weights as loaded.
        perplexity: exp of the mean NLL per scored token.
        nll: that mean, nats.
        bits_per_byte: the total NLL in bits, divided by the UTF-8 bytes that the scored tokens stand for, or
            by those that the protocol counts.
        byte_perplexity: 2 to the power of `bits_per_byte`.
        word_perplexity: exp of the total NLL per word, where the protocol counts words.
        window_nll: the mean NLL of each window, nats.
    """

    dtype: str
    perplexity: float
    nll: Estimate
    bits_per_byte: float
    byte_perplexity: float
    word_perplexity: float | None
    window_nll: tuple[float, ...]

    def __post_init__(self) -> None:
        check_positive("perplexity", self.perplexity)


@dataclass(frozen=True)
class RecoveredLoss:
    """The part of a conversion's loss that its distillation recovered.

    Attributes:
        value: 1 is all of it, 0 none, negative a further loss; None where it is undefined.
        reason: why it is undefined; None where it is defined.
    """

    value: float | None = None
    reason: str | None = None

    def __str__(self) -> str:
        return f"undefined: {self.reason}" if self.value is None else f"{self.value:.1%}"


@dataclass(frozen=True)
class PerplexityBlock(SuiteBlock):
    """The block of the suite `ppl`.

    Attributes:
        student, teacher, parent: the models.
        difference: NLL of student - teacher, paired by window, nats per token.
        ratio: perplexity of student / teacher, paired by window.
        recovered_share: how much of the conversion's loss the distillation recovered.
        window_tokens: scored tokens of each window.
    """

    student: ModelPerplexity
    teacher: ModelPerplexity | None
    parent: ModelPerplexity | None
    difference: Estimate | None
    ratio: Estimate | None
    recovered_share: RecoveredLoss
    window_tokens: tuple[int, ...]


@dataclass(frozen=True)
class PositionBucket:
    """The KL at the tokens that have `first` to `last` tokens before them in their window."""

    first: int
    last: int
    kl: Estimate


@dataclass(frozen=True)
class FidelityBlock(SuiteBlock):
    """The block of the suite `fidelity`: student against teacher on the same tokens.

    Attributes:
        kl: KL(teacher || student), mean over tokens, nats.
        kl_percentiles: percentiles of the per-token KL, nats, by `p50`, `p99_9` and so on.
        kl_max: the largest KL of a token.
        same_top1: proportion of tokens at which both models find the same next token most probable.
        delta_p: probability that the student gives the token that follows, minus the teacher's; mean over
            tokens.
        delta_p_rms: root mean square of that difference.
        delta_p_percentiles: percentiles of that difference.
        nll_correlation: Pearson's correlation of both models' log probabilities of the tokens that follow;
            None where one of them is constant.
        kl_by_position: the KL by the number of tokens before a token.
    """

    kl: Estimate
    kl_percentiles: dict[str, Estimate]
    kl_max: float
    same_top1: Estimate
    delta_p: Estimate
    delta_p_rms: Estimate
    delta_p_percentiles: dict[str, Estimate]
    nll_correlation: Estimate | None
    kl_by_position: tuple[PositionBucket, ...]


@dataclass(frozen=True)
class StorageBlock(SuiteBlock):
    """The block of the suite `storage`: what the number format of the student's cache adds to its loss.

    Both sides are the student on the same windows, with its cache in the format and as it computes.

    Attributes:
        cache_dtype: the format.
        kl: KL(without || with), mean over tokens, nats.
        kl_max: the largest KL of a token.
        same_top1: proportion of tokens at which both find the same next token most probable.
        nll: NLL with - without, paired by window, nats per token.
        unquantised_nll: NLL without, nats per token.
        kl_to_teacher: KL(teacher || with) - KL(teacher || without), paired by window, nats; None without a
            teacher.
    """

    cache_dtype: str
    kl: Estimate
    kl_max: float
    same_top1: Estimate
    nll: Estimate
    unquantised_nll: Estimate
    kl_to_teacher: Estimate | None


@dataclass(frozen=True)
class NeedleMeans:
    """Means over all prompts of a kind; the fields are those of `NeedleMap`."""

    accuracy: Estimate
    choice: Estimate
    rank: Estimate


@dataclass(frozen=True)
class NeedleMap:
    """One kind of needle over length and depth.

    Attributes:
        lengths: tokens of prompt and answer.
        depths: where the key stands, 0 to 1.
        samples: prompts per cell.
        accuracy: proportion of prompts whose digits were generated exactly by greedy decoding.
        standard_error: standard error of `accuracy`.
        low, high: 95 % interval of `accuracy` by Wilson, which has a width even where every answer is right.
        choice: proportion of prompts whose right key the text makes likelier than every distractor.
        choice_standard_error: standard error of `choice`.
        rank: mean rank of the right key; a tie counts one half.
        overall: all cells together.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    accuracy: Grid
    standard_error: Grid
    low: Grid
    high: Grid
    choice: Grid
    choice_standard_error: Grid
    rank: Grid
    overall: NeedleMeans

    def __post_init__(self) -> None:
        for name, grid in (("accuracy", self.accuracy), ("choice", self.choice)):
            if [len(row) for row in grid] != [len(self.depths)] * len(self.lengths):
                raise ValueError(f"{name} needs one row per length and one column per depth")
            if not all(0 <= value <= 1 for row in grid for value in row):
                raise ValueError(f"{name} must be between 0 and 1")


@dataclass(frozen=True)
class NeedleDifference:
    """Student - another model on the same prompts."""

    accuracy: Estimate
    choice: Estimate


@dataclass(frozen=True)
class RetrievalBlock(SuiteBlock):
    """The block of the suite `retrieval`.

    Attributes:
        candidates: keys among which the right one is ranked.
        chance: expected `choice` of a model that knows nothing.
        seed: seed of the prompts.
        filler_sha256: hash of the prose between the needles.
        student, teacher, parent: the models, one map per kind of needle.
        difference: by kind of needle; None without a teacher.
        unquantised: the student without the number format of `--cache-dtype`; None where there is none.
        added: the student - the same without that format, by kind of needle.
    """

    candidates: int
    chance: float
    seed: int
    filler_sha256: str
    student: dict[str, NeedleMap]
    teacher: dict[str, NeedleMap] | None
    parent: dict[str, NeedleMap] | None
    difference: dict[str, NeedleDifference] | None
    unquantised: dict[str, NeedleMap] | None = None
    added: dict[str, NeedleDifference] | None = None


@dataclass(frozen=True)
class RulerScores:
    """The scores of one model, 0 to 1: the proportion of the wanted strings that an answer contains.

    Attributes:
        overall: mean over all tasks and lengths.
        by_length: mean over all tasks at each length.
        by_task: mean over all lengths, by task.
        accuracy: by task, the mean at each length.
    """

    overall: Estimate
    by_length: tuple[Estimate, ...]
    by_task: dict[str, Estimate]
    accuracy: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class RulerBlock(SuiteBlock):
    """The block of the suite `ruler`.

    Attributes:
        tasks: names of the tasks.
        lengths: tokens of prompt and answer.
        samples: prompts per task and length.
        seed: seed of the prompts.
        filler_sha256: hash of the prose between the needles.
        student, teacher, parent: the models.
        difference: student - teacher on the same prompts, over all of them; None without a teacher.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    seed: int
    filler_sha256: str
    student: RulerScores
    teacher: RulerScores | None
    parent: RulerScores | None
    difference: Estimate | None

    def __post_init__(self) -> None:
        for one in (self.student, self.teacher, self.parent):
            if one is None:
                continue
            if set(one.by_task) != set(self.tasks) or set(one.accuracy) != set(self.tasks):
                raise ValueError("the scores of a model need one entry per task")
            if any(len(row) != len(self.lengths) for row in (one.by_length, *one.accuracy.values())):
                raise ValueError("the scores of a task need one number per length")


@dataclass(frozen=True)
class ModelGeneration:
    """Numbers of the texts and answers that one model writes.

    Attributes:
        right: share of questions answered right; None where no question fits into the models' positions.
        by_task: the same by task.
        length: tokens of an answer, its end included.
        endless: share of answers that do not end.
        repeated: share of a greedy text's runs of four tokens that stood in it before.
        nll: nats per token of its own drawn text, by itself.
    """

    right: Estimate | None
    by_task: dict[str, Estimate]
    length: Estimate | None
    endless: Estimate | None
    repeated: Estimate
    nll: Estimate


@dataclass(frozen=True)
class PartingRate:
    """A rate at which greedy texts part where the teacher's entropy is at most `entropy` nats.

    Tokens count in the first of the table's rows that holds them, `tokens` in all.
    """

    entropy: float
    rate: float
    tokens: int


@dataclass(frozen=True)
class GenerationDifference:
    """A model against its teacher, on the same prompts with the same chances.

    Attributes:
        right: share of questions answered right, student - teacher; None where there are none.
        kept: share of the answers that the teacher gets right which are right here too.
        length: tokens of an answer, student / teacher, over questions that both answer to an end.
        agreement: share of greedy texts whose first N tokens are the teacher's, by `N`.
        parting: the median place, from 0, of the first token that differs; None where most texts agree.
        parting_by_entropy: how often they part at the next token, by quartile of the teacher's entropy.
        kl_own_text: KL(student || teacher) per token on text that the student draws, nats.
        kl_teacher_text: KL(teacher || student) per token on text that the teacher draws, nats.
        accepted_greedy, accepted_drawn: how many of N tokens that the student drafts its teacher accepts in
            speculative decoding, by `N`, greedily and at temperature 1. Absent before 2026-11-30.
    """

    right: Estimate | None
    kept: Estimate | None
    length: Estimate | None
    agreement: dict[str, Estimate]
    parting: float | None
    parting_by_entropy: tuple[PartingRate, ...]
    kl_own_text: Estimate
    kl_teacher_text: Estimate
    accepted_greedy: dict[str, Estimate] = field(default_factory=dict)
    accepted_drawn: dict[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerationBlock(SuiteBlock):
    """The block of the suite `generation`.

    Attributes:
        prompts: number of texts that are continued.
        prompts_sha256: hash of their tokens.
        questions: number of questions.
        tokens: tokens of a continuation.
        seed: seed of questions and chances.
        student, teacher, parent: the models.
        difference: student against teacher; None without one.
        parent_difference: the folded parent against the teacher.
    """

    prompts: int
    prompts_sha256: str
    questions: int
    tokens: int
    seed: int
    student: ModelGeneration
    teacher: ModelGeneration | None
    parent: ModelGeneration | None
    difference: GenerationDifference | None
    parent_difference: GenerationDifference | None


@dataclass(frozen=True)
class AnswerFlips:
    """Documents whose answers differ between the models.

    Attributes:
        right_to_wrong: documents that only the teacher has right.
        wrong_to_right: documents that only the student has right.
        p_value: exact p of McNemar's test of the two counts.
    """

    right_to_wrong: int
    wrong_to_right: int
    p_value: float


@dataclass(frozen=True)
class TaskMetric:
    """One metric of a task.

    Attributes:
        student, teacher, parent: the models; with a standard error where the metric is a mean over documents.
        difference: student - teacher on the same documents, with error and interval by Agresti and Min.
        flips: None where a document is not simply right or wrong.
    """

    student: Estimate
    teacher: Estimate | None
    parent: Estimate | None
    difference: Estimate | None
    flips: AnswerFlips | None


@dataclass(frozen=True)
class TaskScores:
    """A task or group of tasks.

    Attributes:
        samples: number of documents.
        shots: examples before each question.
        primary: the metric to compare by.
        metrics: all metrics by name.
    """

    samples: int
    shots: int
    primary: str
    metrics: dict[str, TaskMetric]

    def __post_init__(self) -> None:
        if self.primary not in self.metrics:
            raise ValueError(f"there is no metric {self.primary}")


@dataclass(frozen=True)
class TaskAverage:
    """Means of the tasks' primary metrics."""

    student: float
    teacher: float | None
    parent: float | None
    difference: Estimate | None


@dataclass(frozen=True)
class TasksBlock(SuiteBlock):
    """The block of the suite `tasks`.

    Attributes:
        harness: version of lm-evaluation-harness.
        limit: documents per task, if not all; scores under a limit are not benchmark results.
        fewshot: examples asked for; None: as many as each task says.
        tasks: by name.
        average: over the tasks.
    """

    harness: str
    limit: int | None
    fewshot: int | None
    tasks: dict[str, TaskScores]
    average: TaskAverage


def check_positive(name: str, value: float) -> None:
    """Raise a ValueError unless a value is greater than 0."""
    if not value > 0:
        raise ValueError(f"{name} must be greater than 0")
