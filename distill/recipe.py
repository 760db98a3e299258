"""A distillation recipe: what is trained, on what, for how long. Checked as a whole before anything is loaded.

Recipes are YAML; unknown keys are errors. Numbers of tokens may be written 300k, 5M or 1B. Relative paths start at the
current directory.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}
# What a resumed run may change: it alters no number, or only the order in which the same sums are rounded.
_FREE = {"save.every", "save.keep", "log_every", "device", "micro_batch"}


def parse_tokens(value: object) -> object:
    """`"5M"` to 5000000; what is no string with or without a unit is left for pydantic to judge."""
    if not isinstance(value, str):
        return value
    number, unit = value.strip().replace("_", ""), 1
    if number[-1:].lower() in _UNITS:
        number, unit = number[:-1], _UNITS[number[-1].lower()]
    try:
        parsed = float(number)
        return round(parsed * unit) if unit > 1 or parsed.is_integer() else parsed
    except (ValueError, OverflowError):
        raise ValueError("it should be a number of tokens, such as 5000, 300k, 5M or 1B") from None


# The tables are in losses.py, student.py and schedule.py; here are their keys, so that reading a recipe loads no torch.
LossName = Literal["kl", "ce"]
WeightSet = Literal["all", "attention"]
ScheduleName = Literal["cosine", "wsd", "constant"]
Tokens = Annotated[int, BeforeValidator(parse_tokens), Field(ge=1)]


class Section(BaseModel):
    """Part of a recipe: immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Data(Section):
    """Where the text comes from and how it is cut."""

    source: str
    """A .jsonl, .json, .txt or .parquet file (may be .gz, .xz, .bz2, .zst), a directory or glob of them, a dataset's Hub id, or
    `stdlib`, the source text of Python's standard library."""
    name: str | None = None
    """Configuration of a Hub dataset, e.g. `sample-10BT`."""
    split: str = "train"
    """Split of a Hub dataset."""
    text_field: str = "text"
    """The field that holds a document's text."""
    seq_len: int = Field(ge=2)
    """Tokens in a window."""
    seed: int = Field(default=0, ge=0)
    """Decides which documents are taken first and the order of windows."""


class Stage(Section):
    """One stretch of training with a fresh optimizer."""

    name: str
    """What the metrics call the stage."""
    tokens: Tokens
    """Tokens to train on, rounded up to whole optimizer steps."""
    losses: dict[LossName, Annotated[float, Field(ge=0)]] = {"kl": 1.0}
    """Weight of every loss: `kl` (forward KL to the teacher), `ce` (cross entropy to the text)."""
    lr: float = Field(gt=0)
    """Peak learning rate of AdamW."""
    batch_tokens: Tokens = 65536
    """Tokens of an optimizer step over all processes, rounded down to whole windows."""
    micro_batch: int = Field(default=4, ge=1)
    """Windows in one forward pass of one process; changes memory and speed, not the result."""
    train: WeightSet = "all"
    """Which weights are trained: `all` or `attention`."""
    warmup: Annotated[float, BeforeValidator(parse_tokens), Field(ge=0)] = 0.05
    """Linear warm-up: a share of the stage when below 1, otherwise tokens."""
    schedule: ScheduleName = "cosine"
    """After the warm-up: `cosine` to zero, `wsd` (constant, then linear to zero over the last fifth) or `constant`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; norms and biases have none."""
    grad_clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest gradient norm of a step; null for no limit."""

    @field_validator("losses")
    @classmethod
    def _something_is_learnt(cls, losses: dict[LossName, float]) -> dict[LossName, float]:
        if not any(losses.values()):
            raise ValueError("at least one loss needs a weight above 0")
        return losses


class Save(Section):
    """Training state, from which a killed run goes on."""

    every: int = Field(default=500, ge=1)
    """Optimizer steps between two saves; a stage's end and SIGTERM or SIGINT save as well."""
    keep: int = Field(default=2, ge=1)
    """How many of the newest are kept."""


class Recipe(Section):
    """A whole run."""

    version: Literal[1] = Field(alias="schema")
    """Version of this format: 1."""
    student: str
    """The converted checkpoint: a directory or a Hub id."""
    teacher: str | None = None
    """The model to learn from; by default the source named in the student's kvfold.json."""
    output: str
    """Directory of the distilled checkpoint; must not exist. Until it is whole, everything lies in `<output>.partial`."""
    data: Data
    """The text."""
    stages: tuple[Stage, ...] = Field(min_length=1)
    """What is done, in order."""
    save: Save = Save()
    """When the training state is saved."""
    log_every: int = Field(default=10, ge=1)
    """Optimizer steps between two lines of metrics.jsonl; each stage's first and last step always have one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the forward pass; trained weights are float32 always. `auto` is bf16 on a GPU that has it, otherwise fp32."""
    device: Literal["auto", "cpu"] = "auto"
    """`auto` is what accelerate finds."""

    @model_validator(mode="after")
    def _stages_can_be_run(self) -> "Recipe":
        if len({stage.name for stage in self.stages}) < len(self.stages):
            raise ValueError("two of the stages have the same name")
        for index, stage in enumerate(self.stages):
            if stage.batch_tokens < self.data.seq_len:
                raise ValueError(
                    f"stages[{index}].batch_tokens is {stage.batch_tokens}, less than one window of "
                    f"data.seq_len {self.data.seq_len} tokens"
                )
        return self

    def step_windows(self, stage: Stage) -> int:
        """Windows of an optimizer step, over all processes."""
        return stage.batch_tokens // self.data.seq_len

    def steps(self, stage: Stage) -> int:
        """Optimizer steps of a stage."""
        return math.ceil(stage.tokens / (self.step_windows(stage) * self.data.seq_len))

    @property
    def windows(self) -> int:
        """Windows that the whole run reads."""
        return sum(self.steps(stage) * self.step_windows(stage) for stage in self.stages)

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, as plain JSON values."""
        return self.model_dump(mode="json", by_alias=True)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What makes it another run, e.g. `stages[0].lr (was 0.0001)`; the arguments are resolved recipes."""
    old, new = _flat(before), _flat(after)
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [f"{key} (was {old.get(key)})" for key in changed if key not in _FREE and key.rpartition(".")[2] not in _FREE]


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        items = [(f"{key}.{name}" if key else str(name), item) for name, item in value.items()]
    elif isinstance(value, list) and value:
        items = [(f"{key}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {key: value}
    return {name: leaf for inner, item in items for name, leaf in _flat(item, inner).items()}
