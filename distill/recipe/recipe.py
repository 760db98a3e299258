"""The recipe of a distillation: the models, the text and the stages.

It is checked as a whole before anything is loaded. Recipes are YAML; unknown keys are errors. Numbers of
tokens may be written as 300k, 5M or 1B. Relative paths start at the current directory.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ...core.settings import Settings
from ...core.units import counted, parse_tokens
from .data_section import SELF, Data

SHARED = "shared"  # value of `teacher`: one copy of the weights that student and teacher have in common
# Keys that a resumed run may change: they alter no number, or only the order in which sums are rounded.
_FREE = {
    "save.every", "save.keep", "save.keep_stages", "log_every", "device", "profile", "micro_batch", "compile",
    "gradient_checkpointing", "trackers",
}  # fmt: skip


# Keys of tables elsewhere, such as those in weights.py and optimizer.py, are repeated here so that reading a
# recipe loads no torch.
LossName = Literal[
    "kl", "reverse_kl", "jsd", "ce", "hidden_mse", "hidden_cosine", "attention_output", "attention_relation",
]  # fmt: skip
WeightSet = Literal["all", "attention", "attention+norms", "lora"]
Mode = Literal["end_to_end", "layerwise", "stream"]
StoredFormat = Literal["fp8_e4m3", "fp8_e5m2", "nvfp4", "int8", "int4"]
Profile = Literal["cpu", "single", "ddp", "fsdp2", "zero2", "zero3", "multinode"]
ScheduleName = Literal["cosine", "wsd", "constant"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]
_MOST_TOKENS = 10**13  # near what the largest models were pretrained on; more is a slip
Tokens = Annotated[int, BeforeValidator(parse_tokens), Field(ge=1, le=_MOST_TOKENS)]


class Lora(Settings):
    """Low-rank adapters (arXiv 2106.09685), which are merged into the weights at the end of a stage."""

    rank: int = Field(default=16, ge=1)
    """Rank of each adapter."""
    alpha: int = Field(default=32, ge=1)
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    dropout: Literal[0] = 0
    """Must be 0: training draws no random numbers, so that a stopped run resumes exactly."""
    targets: tuple[str, ...] | None = None
    """Last names of the linear modules with an adapter, such as `[q_proj, o_proj]`. null: all linear modules
    of the attention."""


# With the batch left to kvfold. A stage of 4 steps recovered 3 % of what a fold lost, half its tokens in 50
# steps 8 % (docs/notes/distillation.md).
_STEPS, _LARGEST_BATCH = 100, 65536
FEW_STEPS = 50

# Losses of predictions; all others compare layers.
_OF_PREDICTIONS: tuple[LossName, ...] = ("kl", "reverse_kl", "jsd", "ce")
# Losses that are compared on the teacher's inputs, not on the student's.
_LAYERWISE: tuple[LossName, ...] = ("attention_output",)


class Stage(Settings):
    """One stretch of training, with a fresh optimizer."""

    name: str = Field(pattern=r"^\w[\w.+-]*$")
    """Name of the stage in the metrics: letters, digits and `_.+-`."""
    mode: Literal["auto", "end_to_end", "layerwise", "stream"] = "auto"
    """How the student runs. `end_to_end`: as a whole. `layerwise`: the attention of each layer on the
    teacher's inputs. `stream`: the same, with one layer in memory at a time. `auto`: `layerwise` if the
    only loss is `attention_output`, otherwise `end_to_end`."""
    tokens: Tokens
    """Tokens to train on, rounded up to whole optimizer steps."""
    losses: dict[LossName, Annotated[float, Field(ge=0, le=1e6)]] = Field(default={"kl": 1.0})
    """Weight of each loss: `kl` (forward KL to the teacher), `reverse_kl`, `jsd` (between the two), `ce`
    (cross entropy to the text), `hidden_mse` and `hidden_cosine` (output of each layer), `attention_output`
    (relative error of each layer's attention) and `attention_relation` (similarities among the tokens'
    queries, keys and values)."""
    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """Divisor of both models' logits in `kl`, `reverse_kl` and `jsd`."""
    jsd_beta: float = Field(default=0.5, ge=0, le=1)
    """Position of `jsd` between forward KL (0) and reverse KL (1)."""
    lr: float = Field(gt=0, le=100)
    """Peak learning rate of AdamW. Default: by the size of the student, as for `kvfold distill FOLD`."""
    batch_tokens: Tokens | None = None
    """Tokens per optimizer step over all processes, rounded down to whole windows. null: as many as leave the
    stage at least 100 steps, up to 65536; windows are then a power of two."""
    micro_batch: int = Field(default=4, ge=1)
    """Windows per forward pass of one process. It changes memory and speed, not the result."""
    cache_dtype: StoredFormat | None = None
    """Number format in which the student reads its cache while it trains: `fp8_e4m3`, `fp8_e5m2`, `nvfp4`,
    `int8` or `int4`, rounded as by `kvfold eval --cache-dtype`. Gradients pass the rounding (straight-through
    estimate). `evaluate` measures the student with it too. null: nothing is rounded."""
    train: WeightSet = "all"
    """Weights that are trained: `all`, `attention`, `attention+norms`, or `lora` for adapters (needs `pip
    install kvfold[lora]`)."""
    lora: Lora | None = None
    """Settings of the adapters of `train: lora`."""
    warmup: Annotated[float, BeforeValidator(parse_tokens), Field(ge=0, le=_MOST_TOKENS)] = 0.05
    """Length of the linear warm-up: a fraction of the stage if below 1, otherwise tokens."""
    schedule: ScheduleName = "cosine"
    """Learning rate after the warm-up: `cosine` to zero, `wsd` (constant, then linear to zero over the last
    fifth), or `constant`."""
    weight_decay: float = Field(default=0.0, ge=0, le=100)
    """Decoupled weight decay of matrices. Norms and biases have none."""
    grad_clip: Annotated[float, Field(gt=0, le=1e6)] | None = 1.0
    """Largest gradient norm of a step. null: no limit."""

    @field_validator("losses", mode="before")
    @classmethod
    def _losses_have_weights(cls, losses: object) -> object:
        """Refuse names without weights, and say how they are written with them."""
        names = [losses] if isinstance(losses, str) else losses
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            raise ValueError(
                f"each loss has a weight; write {{{', '.join(f'{name}: 1.0' for name in names)}}}"
            )
        return losses

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
                f"{alone[0]} is a loss of mode: layerwise and cannot be combined with others; give it a "
                "stage of its own"
            )
        if self.how != "end_to_end" and self.learnt != alone:
            other = next(name for name in self.learnt if name not in alone)
            raise ValueError(
                f"mode: {self.how} runs each layer by itself, so it cannot have the loss {other}; "
                f"write losses: {{{_LAYERWISE[0]}: 1.0}}"
            )
        trainable = {"stream": ("attention",), "layerwise": ("attention", "lora")}
        if self.how in trainable and self.train not in trainable[self.how]:
            raise ValueError(
                f"mode: {self.how} trains only attention, and train is {self.train}; write train: attention"
            )
        if self.how == "stream" and self.cache_dtype:
            raise ValueError(
                f"mode: stream does not round caches, and cache_dtype is {self.cache_dtype}; write mode: "
                "layerwise, or leave cache_dtype out"
            )
        if self.lora and self.train != "lora":
            raise ValueError(
                f"lora is given, but train is {self.train}; write train: lora, or leave lora out"
            )
        return self

    @property
    def learnt(self) -> list[LossName]:
        """The losses with a weight above 0."""
        return [name for name, weight in self.losses.items() if weight]

    @property
    def of_layers(self) -> list[LossName]:
        """The losses with a weight above 0 that compare layers."""
        return [name for name in self.learnt if name not in _OF_PREDICTIONS]

    @property
    def how(self) -> Mode:
        """The mode, with `auto` resolved."""
        if self.mode != "auto":
            return self.mode
        return "layerwise" if self.learnt == list(_LAYERWISE) else "end_to_end"


class Save(Settings):
    """Training states, from which a stopped run resumes."""

    every: int = Field(default=500, ge=1)
    """Optimizer steps between two saves. The end of a stage, SIGTERM and SIGINT save as well."""
    keep: int = Field(default=2, ge=1)
    """Number of states that are kept, the newest ones."""
    keep_stages: bool = False
    """If true, each stage but the last writes its model as a checkpoint in `<output>/stages/NAME`."""


class Evaluate(Settings):
    """Evaluation on text that the run does not train on.

    It takes place before the first step, while the run trains, and at the end of each stage. Stages with
    mode: stream have none, since the whole student is never in memory.
    """

    source: str = Field(min_length=1)
    """The held-out text: a .txt, .jsonl, .json or .parquet file, `stdlib` (modules that training on `stdlib`
    leaves out), or `wikitext2-gptq-N`. Text that the run trains on is refused."""
    text_field: str = "text"
    """Field that holds the text of a document, if the file has fields."""
    every: int = Field(default=100, ge=1)
    """Optimizer steps between two evaluations. They use the float32 weights in training; the output of a
    bf16 student is rounded when it is written, and gives other last digits."""
    windows: int = Field(default=32, ge=2)
    """Number of windows, read from the start of the text."""
    seq_len: int | None = Field(default=None, ge=2)
    """Tokens per window, as in `kvfold eval --window`. null: N of `wikitext2-gptq-N`, otherwise the same as
    `data.seq_len`."""
    keep: Literal["last", "best"] = "last"
    """Weights that become the output: `last`, or `best` for those with the lowest perplexity, including the
    start's. With `best` they are stored in `<output>.partial/best` during the run, and the text has been used
    to choose, so report final numbers on another one."""


class Recipe(Settings):
    """A whole run."""

    version: Literal[1] = Field(alias="schema")
    """Version of this format: 1."""
    student: str = Field(min_length=1)
    """The converted checkpoint to be trained: a directory or a Hub id."""
    teacher: str | None = None
    """The model to learn from. null: the source named in the student's kvfold.json. `shared`: that source,
    with one copy of the weights that it has in common with the student and that are not trained. This takes
    less memory and gives the same numbers."""
    teacher_cache: str | None = None
    """Directory for the teacher's last hidden states. They are computed once, and later runs on the same
    data read them."""
    teacher_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the teacher cache. `auto`: the one that the teacher computes in, so that nothing is
    lost."""
    output: str
    """Directory of the distilled checkpoint; it must not exist. Until it is complete, everything is stored in
    `<output>.partial`."""
    data: Data
    """The text to train on."""
    stages: tuple[Stage, ...] = Field(min_length=1)
    """The stages of training, in order."""
    save: Save = Save()
    """When training states are saved."""
    log_every: int = Field(default=10, ge=1)
    """Optimizer steps between two lines of metrics.jsonl. The first and last step of each stage always have
    a line."""
    evaluate: Evaluate | None = None
    """Held-out text on which the student is evaluated while it trains. null: none. The float32 weights in
    training are evaluated; the output of a bf16 student is rounded when it is written, so the last digits
    that `kvfold eval` finds differ."""
    trackers: tuple[TrackerName, ...] = ()
    """Trackers that also receive the metrics: `tensorboard`, `wandb`, `trackio` (needs `pip install
    kvfold[trackers]`). The files that they write on this machine end up in `<output>/trackers`."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the forward pass; trained weights are always float32. `auto`: bf16 on a GPU that supports
    it, otherwise fp32."""
    device: Literal["auto", "cpu"] = "auto"
    """Device to train on. `auto`: the one that accelerate finds."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of storing its activations: less memory, a third more
    time. It applies to stages of mode `end_to_end`; others store one layer's activations at a time."""
    compile: bool = False
    """Compile each layer with torch.compile, in stages whose losses read only the predictions."""
    profile: Profile | None = None
    """Division of the run among processes, as `kvfold distill --profile`."""

    @field_validator("output")
    @classmethod
    def _can_be_made(cls, output: str) -> str:
        if Path(output).name in ("", ".."):
            raise ValueError("it should name a directory that does not exist yet, such as ./out/NAME")
        return output

    @model_validator(mode="after")
    def _stages_can_be_run(self) -> "Recipe":
        if len({stage.name for stage in self.stages}) < len(self.stages):
            raise ValueError("two of the stages have the same name; give each a name of its own")
        modes = [stage.how for stage in self.stages]
        if sorted(modes, key=lambda mode: mode != "stream") != modes:
            raise ValueError(
                "a stage with mode: stream starts from a checkpoint, so it must come before all others"
            )
        if modes[0] == "stream" and any(source.source == SELF for source in self.data.sources):
            raise ValueError(
                f"stage {self.stages[0].name} has mode: stream, which never holds the whole teacher in "
                "memory, but data.source self is text that the teacher writes; write mode: layerwise "
                "there, or name another text"
            )
        if self.evaluate and modes == ["stream"] * len(modes):
            raise ValueError(
                "evaluate needs a stage with the whole student in memory, and all stages have mode: stream"
            )
        for index, stage in enumerate(self.stages):
            if self.compile and stage.cache_dtype:
                raise ValueError(
                    f"stages[{index}].cache_dtype is {stage.cache_dtype}, and compile is true; caches are "
                    "rounded only in layers that are not compiled, so leave one of both out"
                )
            if self.teacher == SHARED and stage.train == "all":
                raise ValueError(
                    f"stages[{index}].train is all, but teacher: shared keeps one copy of the weights that "
                    "no stage trains; write train: attention there, or teacher: null"
                )
            if stage.batch_tokens is not None and stage.batch_tokens < self.data.seq_len:
                raise ValueError(
                    f"stages[{index}].batch_tokens is {stage.batch_tokens}, which is less than one window of "
                    f"data.seq_len {self.data.seq_len} tokens; use at least {self.data.seq_len}"
                )
        return self

    def step_windows(self, stage: Stage) -> int:
        """Return the windows per optimizer step, over all processes."""
        if stage.batch_tokens is not None:
            return stage.batch_tokens // self.data.seq_len
        return default_windows(stage.tokens, self.data.seq_len)

    def pass_windows(self, stage: Stage, processes: int = 1) -> int:
        """Return the windows per forward pass of a process: `micro_batch`, or its part of a smaller step."""
        return min(stage.micro_batch, math.ceil(self.step_windows(stage) / processes))

    def step_tokens(self, stage: Stage) -> int:
        """Return the tokens per optimizer step, over all processes."""
        return self.step_windows(stage) * self.data.seq_len

    def steps(self, stage: Stage) -> int:
        """Return the number of optimizer steps of a stage."""
        return math.ceil(stage.tokens / self.step_tokens(stage))

    def few_steps(self) -> list[str]:
        """Return a sentence for every stage with so few optimizer steps that it will recover little."""
        found = []
        for stage in self.stages:
            steps, most = self.steps(stage), stage.tokens // FEW_STEPS // self.data.seq_len
            if steps >= FEW_STEPS:
                continue
            remedy = (
                f"batch_tokens {most * self.data.seq_len} or less would give it {FEW_STEPS}"
                if most
                else f"{FEW_STEPS} steps of one window take {FEW_STEPS * self.data.seq_len} tokens"
            )
            found.append(
                f"stage {stage.name} has {counted(steps, 'optimizer step')} of {self.step_tokens(stage)} "
                f"tokens, which recover{'s' * (steps == 1)} little; {remedy}"
            )
        return found

    def rounded_batches(self) -> list[str]:
        """Return a sentence for every stage whose `batch_tokens` is no whole number of windows."""
        return [
            f"stage {stage.name}: batch_tokens {stage.batch_tokens} is rounded down to "
            f"{self.step_tokens(stage)}, {counted(self.step_windows(stage), 'window')} of "
            f"data.seq_len {self.data.seq_len}"
            for stage in self.stages
            if stage.batch_tokens not in (None, self.step_tokens(stage))
        ]

    @property
    def output_directory(self) -> Path:
        """Directory of the distilled checkpoint."""
        return Path(self.output).expanduser()

    @property
    def working_directory(self) -> Path:
        """Directory of everything that a run stores until its output is whole."""
        output = self.output_directory
        return output.with_name(output.name + ".partial")

    @property
    def windows(self) -> int:
        """The number of windows that the whole run reads."""
        return sum(self.steps(stage) * self.step_windows(stage) for stage in self.stages)

    def resolved(self) -> dict[str, Any]:
        """Return every key with its value, as plain JSON values; a batch left to kvfold is a number here."""
        values = self.model_dump(mode="json", by_alias=True)
        for stage, entry in zip(self.stages, values["stages"], strict=True):
            entry["batch_tokens"] = stage.batch_tokens or self.step_tokens(stage)
        return values


def default_windows(tokens: int, seq_len: int) -> int:
    """Return the windows per optimizer step of a stage where `batch_tokens` is left out.

    They are the largest power of two that leaves the stage 100 steps of at most 65536 tokens; at least 1.

    Example:
        >>> default_windows(200_000, 256)
        4
    """
    most = min(_LARGEST_BATCH, tokens // _STEPS) // seq_len
    return 2 ** (most.bit_length() - 1) if most else 1


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the keys that make two resolved recipes different runs, such as `stages[0].lr (was 0.0001)`."""
    old, new = flatten(before), flatten(after)
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [
        f"{key} (was {old.get(key)})"
        for key in changed
        if _FREE.isdisjoint((key.partition("[")[0], key.rpartition(".")[2], key))
    ]


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Return every leaf of nested mappings and lists by its place, such as `stages[0].lr`."""
    if isinstance(value, dict) and value:
        items = [(f"{key}.{name}" if key else str(name), item) for name, item in value.items()]
    elif isinstance(value, list) and value:
        items = [(f"{key}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {key: value}
    return {name: leaf for inner, item in items for name, leaf in flatten(item, inner).items()}
