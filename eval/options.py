"""`EvalRequest`: everything that a user can ask of an evaluation. It imports nothing heavy, for `--help`."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ..core.cache_dtypes import CacheDtypeName
from ..core.command_options import Option, option_name
from ..core.console import processes_in_all
from ..core.errors import InvalidInput
from ..core.hub import local_directory
from ..core.option_types import Names, Place
from ..models.load_options import LoadOptions
from .suites.catalogue import DEFAULT, SUITES, SuiteSettings, with_storage


class Options(LoadOptions):
    """Options that load the models and cut the text."""

    window: Annotated[int, Field(ge=2), Option(metavar="N")] | None = None
    """Tokens per window, BOS included. Default: the models' positions, at most 2048."""
    bos: bool | None = None
    """Start each window with BOS. Default: if the tokenizer has one."""
    max_windows: Annotated[int, Field(ge=1), Option(metavar="N")] | None = None
    """Read only the first N windows."""
    batch_size: Annotated[int, Field(ge=1), Option(metavar="N")] = 8
    """Windows read at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where it is available."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: the checkpoint's own on cuda, float32 on cpu, where half precision is slow."""
    one_at_a_time: Annotated[bool | None, Option("--one-at-a-time/--together")] = None
    """Load student, teacher and parent one after the other. Default: only where they do not fit together."""
    teacher_cache: Annotated[Place, Option(metavar="DIR")] | None = None
    """Keep the teacher's hidden states in DIR, for this student and others."""
    cache_dtype: CacheDtypeName | None = None
    """Store the student's cache in this number format: each token is rounded when it is written and read
    rounded at every later step. Also measures the student without it. It leaves the teacher as it is."""


def _chosen(names: Sequence[str]) -> tuple[str, ...]:
    known = f"known are {', '.join(SUITES)}"
    asked = [name for name in names if name]
    if not asked:
        raise ValueError(f"it names nothing; {known}")
    for name in asked:
        if name not in SUITES:
            raise ValueError(f"{name} is not a suite; {known}")
    return tuple(name for name in SUITES if name in asked)


class EvalRequest(SuiteSettings, Options):
    """An evaluation as a user asks for it: `kvfold eval` takes its fields as options."""

    model: str = Field(min_length=1)
    """The checkpoint, a directory or a Hub id."""
    suites: Annotated[Names, AfterValidator(_chosen), Option("--suite", "NAME,...")] = Field(
        default=DEFAULT,
        description=f"Suites to run. {'; '.join(f'{name}: {row.summary}' for name, row in SUITES.items())}.",
    )
    text: Annotated[str, Option(metavar="PROTOCOL|FILE|stdlib")] | None = None
    """wikitext2-gptq-2048 (or another window), lm-eval:wikitext, the held-out part of Python's library, or a
    text: UTF-8 of any suffix, or .txt, .jsonl, .json, .parquet with documents in a field 'text', also
    compressed."""
    rows: Annotated[Place, Option(metavar="FILE")] | None = None
    """Rows of WikiText-2 as JSON, instead of those from the Hub."""
    teacher: Annotated[str, Option(metavar="MODEL")] | None = None
    """Model to compare with. Default: the source named in kvfold.json."""

    @property
    def options(self) -> Options:
        """The options that load the models and cut the text."""
        return self.part(Options)

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        for name, suite in SUITES.items():
            for field in suite.settings.model_fields.keys() & self.model_fields_set:
                if name not in self.suites:
                    option = option_name(type(self), field)
                    raise ValueError(f"{option} belongs to the suite {name}, which --suite does not name")
        self.all_suites()
        asked = {name: SUITES[name] for name in self.suites}
        reading = [
            name
            for name, suite in asked.items()
            if suite.reads_text and not (suite.instead and getattr(self, suite.instead))
        ]
        if self.text is None and reading:
            told = f"the suites {', '.join(reading)} read a text; choose one with --text, for example stdlib"
            if local_directory(self.model) is None:
                told = f"{self.model} is not a directory here; if it is a Hub id, {told}"
            raise InvalidInput(told)
        for name in ("offload_dir", "cpu_memory"):
            if getattr(self, name) is not None and self.device_map != "auto":
                option = option_name(type(self), name)
                raise ValueError(f"{option} has no effect without --device-map auto; add that option")
        if self.device_map == "auto" and processes_in_all() > 1:
            raise ValueError(
                "--device-map auto uses all devices in one process; start kvfold without a launcher"
            )
        return self

    def all_suites(self) -> tuple[str, ...]:
        """Return the suites that are run: `storage` too where the cache is in a number format.

        Raises:
            InvalidInput: a suite has no meaning with a format, or none without.
        """
        return with_storage(self.suites, self.cache_dtype)
