"""A distillation recipe: what is trained, on what, for how long. Checked as a whole before anything is
loaded.

Recipes are YAML; unknown keys are errors. Numbers of tokens may be written 300k, 5M or 1B. Relative paths
start at the current directory.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ...core.units import parse_tokens
from .data_section import SELF, Data, Section
from .watch_section import Evaluate, TrackerName

SHARED = "shared"  # as the teacher: the source, with one copy of what it has in common with the student
# What a resumed run may change: it alters no number, or only the order in which the same sums are rounded.
_FREE = {
    "save.every", "save.keep", "save.keep_stages", "log_every", "device", "profile", "micro_batch", "compile",
    "gradient_checkpointing", "trackers",
}  # fmt: skip


# The tables are in losses, weights.py, job.py, launch.py and schedule.py; here are their keys: reading a
# recipe loads no torch.
LossName = Literal[
    "kl", "reverse_kl", "jsd", "ce", "hidden_mse", "hidden_cosine", "attention_output", "attention_relation",
]  # fmt: skip
WeightSet = Literal["all", "attention", "attention+norms", "lora"]
Mode = Literal["end_to_end", "layerwise", "stream"]
Profile = Literal["cpu", "single", "ddp", "fsdp2", "zero2", "zero3", "multinode"]
ScheduleName = Literal["cosine", "wsd", "constant"]
Tokens = Annotated[int, BeforeValidator(parse_tokens), Field(ge=1)]


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685), merged into the weights when a stage ends."""

    rank: int = Field(default=16, ge=1)
    """Rank of every adapter."""
    alpha: int = Field(default=32, ge=1)
    """An adapter's product is multiplied by alpha / rank."""
    dropout: Literal[0] = 0
    """0 and nothing else: training draws no random numbers, so that a run goes on exactly where it was
    stopped."""
    targets: tuple[str, ...] | None = None
    """Last names of the linear modules that get one, e.g. `[q_proj, o_proj]`; null: all in the attention."""


_LAYERWISE: tuple[LossName, ...] = (
    "attention_output",
)  # compared on the teacher's inputs, not on the student's


class Stage(Section):
    """One stretch of training with a fresh optimizer."""

    name: str = Field(pattern=r"^\w[\w.+-]*$")
    """What the metrics call the stage; letters, digits and `_.+-`."""
    mode: Literal["auto", "end_to_end", "layerwise", "stream"] = "auto"
    """How the student is run: `end_to_end` as a whole; `layerwise`, every layer's attention on the teacher's
    inputs;
    `stream`, the same with one layer in memory at a time. `auto` is `layerwise` where the only loss is
    `attention_output`."""
    tokens: Tokens
    """Tokens to train on, rounded up to whole optimizer steps."""
    losses: dict[LossName, Annotated[float, Field(ge=0)]] = Field(default={"kl": 1.0})
    """Weight of every loss: `kl` (forward KL to the teacher), `reverse_kl`, `jsd` (between the two), `ce`
    (cross entropy to the
    text), `hidden_mse` and `hidden_cosine` (every layer's output), `attention_output` (of every layer,
    relative) and
    `attention_relation` (how the tokens' queries, keys and values lie to each other)."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides both models' logits in `kl`, `reverse_kl` and `jsd`."""
    jsd_beta: float = Field(default=0.5, ge=0, le=1)
    """Where `jsd` lies between forward KL (0) and reverse KL (1)."""
    lr: float = Field(gt=0)
    """Peak learning rate of AdamW."""
    batch_tokens: Tokens = 65536
    """Tokens of an optimizer step over all processes, rounded down to whole windows."""
    micro_batch: int = Field(default=4, ge=1)
    """Windows in one forward pass of one process; changes memory and speed, not the result."""
    train: WeightSet = "all"
    """Which weights are trained: `all`, `attention`, `attention+norms`, or `lora` (adapters; `pip install
    kvfold[lora]`)."""
    lora: Lora | None = None
    """What the adapters of `train: lora` are like."""
    warmup: Annotated[float, BeforeValidator(parse_tokens), Field(ge=0)] = 0.05
    """Linear warm-up: a share of the stage when below 1, otherwise tokens."""
    schedule: ScheduleName = "cosine"
    """After the warm-up: `cosine` to zero, `wsd` (constant, then linear to zero over the last fifth) or
    `constant`."""
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

    @model_validator(mode="after")
    def _parts_fit(self) -> "Stage":
        alone = [name for name in _LAYERWISE if self.losses.get(name)]
        if self.how == "end_to_end" and alone:
            raise ValueError(
                f"{alone[0]} is a loss of mode: layerwise, where it stands alone; give it a stage of its own"
            )
        if self.how != "end_to_end" and self.learnt != alone:
            other = next(name for name in self.learnt if name not in alone)
            raise ValueError(
                f"mode: {self.how} runs no layer on another's output, so it cannot have the loss {other}; "
                f"write losses: {{{_LAYERWISE[0]}: 1.0}}"
            )
        if self.how != "end_to_end" and self.train not in (
            ("attention",) if self.how == "stream" else ("attention", "lora")
        ):
            raise ValueError(
                f"mode: {self.how} reaches attention alone, and train is {self.train}; write train: attention"
            )
        if self.lora and self.train != "lora":
            raise ValueError(
                f"lora is given, but train is {self.train}; write train: lora, or leave lora out"
            )
        return self

    @property
    def learnt(self) -> list[LossName]:
        """The losses that have a weight."""
        return [name for name, weight in self.losses.items() if weight]

    @property
    def how(self) -> Mode:
        """The mode, with `auto` resolved."""
        if self.mode != "auto":
            return self.mode
        return "layerwise" if self.learnt == list(_LAYERWISE) else "end_to_end"


class Save(Section):
    """Training state, from which a killed run goes on."""

    every: int = Field(default=500, ge=1)
    """Optimizer steps between two saves; a stage's end and SIGTERM or SIGINT save as well."""
    keep: int = Field(default=2, ge=1)
    """How many of the newest are kept."""
    keep_stages: bool = False
    """Whether every stage but the last leaves its model as a checkpoint of its own, in
    `<output>/stages/NAME`."""


class Recipe(Section):
    """A whole run."""

    version: Literal[1] = Field(alias="schema")
    """Version of this format: 1."""
    student: str = Field(min_length=1)
    """The converted checkpoint: a directory or a Hub id."""
    teacher: str | None = None
    """The model to learn from; by default the source named in the student's kvfold.json. `shared` is that
    source again, with
    one copy of all that it has in common with the student and that is not trained: less memory, the same
    numbers."""
    teacher_cache: str | None = None
    """Directory for the teacher's last hidden states, computed once and read by later runs on the same
    data."""
    teacher_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What they are kept in; `auto` is what the teacher computes in, so that nothing is lost."""
    output: str
    """Directory of the distilled checkpoint; must not exist. Until it is whole, everything lies in
    `<output>.partial`."""
    data: Data
    """The text."""
    stages: tuple[Stage, ...] = Field(min_length=1)
    """What is done, in order."""
    save: Save = Save()
    """When the training state is saved."""
    log_every: int = Field(default=10, ge=1)
    """Optimizer steps between two lines of metrics.jsonl; each stage's first and last step always have
    one."""
    evaluate: Evaluate | None = None
    """Held-out text that the student is evaluated on while it trains; null: none. What is evaluated is the
    float32 weights in
    training: `kvfold eval` of a bf16 student's output, which is rounded when it is written, finds slightly
    other numbers."""
    trackers: tuple[TrackerName, ...] = ()
    """Who else is told the metrics: `tensorboard`, `wandb`, `trackio` (`pip install kvfold[trackers]`). What
    they write on this
    machine ends in `<output>/trackers`."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the forward pass; trained weights are float32 always. `auto` is bf16 on a GPU that has it,
    otherwise fp32."""
    device: Literal["auto", "cpu"] = "auto"
    """`auto` is what accelerate finds."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it computed: less memory, a
    third more time. In
    stages of mode `end_to_end`; others keep one layer's at a time."""
    compile: bool = False
    """Compile each layer with torch.compile, in stages whose losses read nothing but the predictions."""
    profile: Profile | None = None
    """How many processes share the work and what of it; the same as `kvfold distill --profile`."""

    @field_validator("output")
    @classmethod
    def _can_be_made(cls, output: str) -> str:
        if Path(output).name in ("", ".."):
            raise ValueError("it should name a directory that does not exist yet, such as ./out/NAME")
        return output

    @model_validator(mode="after")
    def _stages_can_be_run(self) -> "Recipe":
        if len({stage.name for stage in self.stages}) < len(self.stages):
            raise ValueError("two of the stages have the same name")
        modes = [stage.how for stage in self.stages]
        if sorted(modes, key=lambda mode: mode != "stream") != modes:
            raise ValueError(
                "a stage with mode: stream starts from a checkpoint, so it comes before all others"
            )
        if modes[0] == "stream" and any(source.source == SELF for source in self.data.sources):
            raise ValueError(
                f"stage {self.stages[0].name} has mode: stream, which never has the teacher whole in "
                f"memory, and the text of "
                "data.source self is what the teacher writes; write mode: layerwise there, or name "
                "another text"
            )
        if self.evaluate and modes == ["stream"] * len(modes):
            raise ValueError(
                "evaluate needs a stage with the student whole in memory, and all of these have mode: stream"
            )
        for index, stage in enumerate(self.stages):
            if self.teacher == SHARED and stage.train == "all":
                raise ValueError(
                    f"stages[{index}].train is all, and teacher: shared keeps one copy of what a stage "
                    f"leaves alone; "
                    "write train: attention there, or leave teacher out"
                )
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
    old, new = flatten(before), flatten(after)
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [
        f"{key} (was {old.get(key)})"
        for key in changed
        if _FREE.isdisjoint((key.partition("[")[0], _last(key), key))
    ]


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Every leaf of nested mappings and lists by its place, such as `stages[0].lr`."""
    if isinstance(value, dict) and value:
        items = [(f"{key}.{name}" if key else str(name), item) for name, item in value.items()]
    elif isinstance(value, list) and value:
        items = [(f"{key}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {key: value}
    return {name: leaf for inner, item in items for name, leaf in flatten(item, inner).items()}
