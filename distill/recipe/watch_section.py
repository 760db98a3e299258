"""The parts of a recipe that say how a run is watched: evaluation on held-out text, and trackers.

They train nothing.
"""

from typing import Literal

from pydantic import Field

from .data_section import Section

TrackerName = Literal["tensorboard", "wandb", "trackio"]  # the table is in trackers.py


class Evaluate(Section):
    """Perplexity on text that the run does not train on, before the first step, while it trains and at each
    stage's end; not in
    stages with mode: stream, which never have the whole student in memory."""

    source: str
    """The text: a .txt, .jsonl, .json or .parquet file, `stdlib` (modules that training on `stdlib` leaves
    out), or
    `wikitext2-gptq-N`. Text that the run trains on is refused."""
    text_field: str = "text"
    """The field that holds a document's text, where the file has fields."""
    every: int = Field(default=100, ge=1)
    """Optimizer steps between two evaluations, of the float32 weights in training: what a bf16 student's are
    rounded to when
    the output is written gives slightly other numbers."""
    windows: int = Field(default=32, ge=2)
    """How many windows are read, from the start of the text."""
    seq_len: int | None = Field(default=None, ge=2)
    """Tokens in a window; null: as many as in `data.seq_len`. The numbers are those of `kvfold eval
    --window`."""
    keep: Literal["last", "best"] = "last"
    """Which weights become the output: the last, or those with the lowest perplexity, the start's among
    them, which are then
    kept meanwhile in `<output>.partial/best`. A text that decides this is no test text any more."""
