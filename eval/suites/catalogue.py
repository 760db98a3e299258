"""The table of the suites that `kvfold eval --suite` may name. Importing this module loads nothing heavy.

A suite is a file of this folder and a row here. The file has these functions:

- `measure(subject)` returns the suite's block of eval.json, or None where the suite does not apply. See
  subject.py for the argument. A block is a frozen dataclass of plain values in `quality_blocks.py` or
  `cost_blocks.py` of `kvfold/checkpoints/`, with a row in `BLOCKS` of `eval_json.py` there.
- `rows(block, roles)` returns the block's lines of the table that is printed: a label, and a cell for each
  role or for the first ones.
- `check(settings)`, which is optional, gets the suite's settings and refuses what cannot be measured, before
  a model is loaded.
- `check_room(subject)`, which is optional, refuses prompts too long for the models before any suite measures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ...core.command_options import Option
from ...core.errors import InvalidInput
from ...core.option_types import Bytes, Names, Place, as_list
from ...core.settings import LARGEST_COUNT, LARGEST_SEED, Settings

DEFAULT = ("ppl", "fidelity", "cache")


def _as_counts(value: object) -> object:
    """Return whole numbers from 1 of a list, a number or a text with commas, each once and ascending."""
    parts = as_list(str(value) if isinstance(value, int) and not isinstance(value, bool) else value)
    if not isinstance(parts, tuple | list):
        return value
    texts = [str(part) for part in parts]
    if not all(text.isascii() and text.isdecimal() and text.lstrip("0") for text in texts):
        raise ValueError("it should be whole numbers from 1, separated by commas, such as 1,4")
    # Python reads no number of thousands of digits.
    if any(len(text) > 20 or int(text) > LARGEST_COUNT for text in texts):
        raise ValueError(f"it should be whole numbers of at most {LARGEST_COUNT:,}")
    return tuple(sorted({int(text) for text in texts}))


Counts = Annotated[tuple[int, ...], BeforeValidator(_as_counts), Option(metavar="N,N")]
RulerTask = Literal[
    "niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"
]  # keys of `ruler_tasks.TASKS`


class CacheSettings(Settings):
    """Options of the suite `cache`."""

    memory: Bytes | None = None
    """cache: report how many sequences fit into this memory, e.g. 24GB."""


class SpeedSettings(Settings):
    """Options of the suite `speed`."""

    speed_batch: Counts = (1,)
    """speed: batch sizes."""
    speed_context: Counts | None = None
    """speed: tokens of each prompt. Default: 512,4096 as far as they fit."""
    speed_tokens: int = Field(default=16, ge=1)
    """speed: tokens decoded per round."""
    speed_rounds: int = Field(default=10, ge=3)
    """speed: rounds at most."""
    speed_seconds: float = Field(default=300.0, gt=0)
    """speed: time for the whole sweep; every cell that is begun gets 3 rounds."""


class RetrievalSettings(Settings):
    """Options of the suite `retrieval`."""

    retrieval_lengths: Counts | None = None
    """retrieval: tokens per prompt. Default: 1/4, 1/2 and all of the models' positions, at most 4096."""
    retrieval_depths: int = Field(default=5, ge=1)
    """retrieval: number of depths, from the head of the text to its end."""
    retrieval_samples: int = Field(default=10, ge=1)
    """retrieval: prompts per cell."""
    retrieval_keys: int = Field(default=4, ge=2, le=10)
    """retrieval: keys in a text; the question asks for one of them."""
    retrieval_seed: int = Field(default=0, le=LARGEST_SEED)
    """retrieval: seed of the texts."""


class RulerSettings(Settings):
    """Options of the suite `ruler`."""

    ruler_lengths: Counts | None = None
    """ruler: tokens per prompt and answer. Default: half and all of the models' positions, at most 4096, as
    far as every task fits."""
    ruler_tasks: (
        Annotated[tuple[RulerTask, ...], BeforeValidator(as_list), Option(metavar="NAME,NAME")] | None
    ) = None
    """ruler: generated tasks. Default: all that fit."""
    ruler_samples: int = Field(default=10, ge=1)
    """ruler: prompts per task and length."""
    ruler_seed: int = Field(default=0, le=LARGEST_SEED)
    """ruler: seed of the prompts."""


class GenerationSettings(Settings):
    """Options of the suite `generation`."""

    prompts: Annotated[Place, Option(metavar="FILE")] | None = None
    """generation: texts to continue: rows with `prompt`, a text, or `messages`, a conversation to answer.
    Default: beginnings of windows of --text."""
    generation_prompts: int = Field(default=32, ge=1)
    """generation: texts at most that are continued."""
    generation_tokens: Annotated[int, Field(ge=1), Option(metavar="N")] | None = None
    """generation: tokens of a continuation. Default: 128, or what the models' positions leave."""
    generation_questions: int = Field(default=16, ge=0)
    """generation: questions per task: sums, sorting, copying, looking up."""
    generation_seed: int = Field(default=0, le=LARGEST_SEED)
    """generation: seed of the questions and of what is drawn."""


def _none_empty(names: tuple[str, ...]) -> tuple[str, ...]:
    named = tuple(name for name in names if name)
    if not named:
        raise ValueError("it names no task; write for example mla-core")
    return named


class TasksSettings(Settings):
    """Options of the suite `tasks`."""

    tasks: Annotated[Names, AfterValidator(_none_empty), Option(metavar="NAME,NAME")] = ("mla-core",)
    """tasks: tasks of lm-evaluation-harness; mla-core: ARC, HellaSwag, PIQA, WinoGrande, OpenBookQA, BoolQ,
    MMLU."""
    task_path: Annotated[Place, Option(metavar="DIR")] | None = None
    """tasks: directory of your own tasks, as YAML files; their code runs."""
    limit: Annotated[int, Field(ge=1), Option(metavar="N")] | None = None
    """tasks: only the first N documents of each task, as a trial."""
    fewshot: Annotated[int, Field(ge=0), Option(metavar="N")] | None = None
    """tasks: examples before each question. Default: as each task says."""
    task_cache: Annotated[Place, Option(metavar="DIR")] | None = None
    """tasks: cache of each model's scores, by the hash of its weights."""


class SuiteSettings(
    TasksSettings, GenerationSettings, RulerSettings, RetrievalSettings, SpeedSettings, CacheSettings
):
    """The options of all suites."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A row of the table.

    Attributes:
        module: the file, without `.py`.
        summary: a few words for --help.
        reads_text: it needs --text.
        instead: one of its own settings that takes the place of --text.
        on_all_ranks: every process of a launcher takes part; otherwise rank 0 measures alone.
        settings: its own options, a base of `SuiteSettings`; `subject.asked` gives their values.
        shorter: what makes its own prompts shorter, as an advice where memory is full; empty: nothing does.
    """

    module: str
    summary: str
    reads_text: bool = False
    instead: str = ""
    on_all_ranks: bool = False
    settings: type[Settings] = Settings
    shorter: str = ""


SUITES = {
    "ppl": Suite(
        module="perplexity", summary="perplexity and bits per byte", reads_text=True, on_all_ranks=True
    ),
    "fidelity": Suite(
        module="fidelity", summary="KL to the teacher, same top-1, Δp", reads_text=True, on_all_ranks=True
    ),
    "storage": Suite(
        module="storage",
        summary="loss added by --cache-dtype, which chooses this suite",
        reads_text=True,
        on_all_ranks=True,
    ),
    "cache": Suite(module="cache", summary="elements and bytes of the KV cache", settings=CacheSettings),
    "speed": Suite(module="speed", summary="time and memory of prefill and decode", settings=SpeedSettings),
    "retrieval": Suite(
        module="retrieval",
        summary="keys found again in generated texts",
        shorter="smaller --retrieval-lengths",
        settings=RetrievalSettings,
    ),
    "ruler": Suite(
        module="ruler",
        summary="generated tasks of RULER over long texts",
        shorter="smaller --ruler-lengths",
        settings=RulerSettings,
    ),
    "generation": Suite(
        module="generation",
        summary="what the models write: answers right, agreement, KL on their own text",
        reads_text=True,
        instead="prompts",
        shorter="a smaller --generation-tokens",
        settings=GenerationSettings,
    ),
    "tasks": Suite(module="tasks", summary="benchmarks of lm-evaluation-harness", settings=TasksSettings),
}


def with_storage(names: Sequence[str], cache_dtype: str | None) -> tuple[str, ...]:
    """Return the suites that are run where the student's cache is in a number format, or in none.

    Returns:
        Them, and `storage` where there is a format and a suite that reads the text.

    Raises:
        InvalidInput: a suite has no meaning with a format, or none without.
    """
    if cache_dtype is None:
        if "storage" in names:
            raise InvalidInput(
                "--suite storage measures a number format of the cache; add --cache-dtype NAME"
            )
        return tuple(names)
    if "speed" in names:
        raise InvalidInput(
            "--suite speed times the cache as the model computes it, and --cache-dtype only rounds; leave "
            "one of them out"
        )
    reading = any(SUITES[name].reads_text for name in names)
    return tuple(name for name in SUITES if name in names or (name == "storage" and reading))
