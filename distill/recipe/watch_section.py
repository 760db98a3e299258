"""The sections of a recipe that watch a run and train nothing: evaluation on held-out text, and trackers."""

from typing import Literal

from pydantic import Field

from ...core.settings import Settings

TrackerName = Literal["tensorboard", "wandb", "trackio"]  # keys of the table in trackers.py


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
