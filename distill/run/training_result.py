"""The result of a finished run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..watch.metrics import read_lines


@dataclass(frozen=True)
class TrainingResult:
    """A finished distillation.

    Attributes:
        output: directory of the distilled checkpoint.
        student: directory of the checkpoint that was trained.
        teacher: directory of the model that it learned from.
        steps: optimizer steps of all stages.
        tokens: tokens trained on.
        stages: for every stage its `name`, `steps`, and its losses at its `first` step and over its `last`
            tenth, in nats per token for the losses that compare distributions; None where a power failure
            took them.
        evaluation: perplexities of teacher, start and output on held-out text, and the share recovered; None
            if the recipe evaluates nothing.
        notices: sentences on what may surprise the reader, given while this process ran.
        record: everything above as it is stored in the output's kvfold.json.
        is_new: whether this process trained; False where the output was complete already.
    """

    output: Path
    student: Path
    teacher: Path
    steps: int
    tokens: int
    stages: list[dict[str, Any]]
    evaluation: dict[str, Any] | None
    notices: tuple[str, ...]
    record: dict[str, Any]
    is_new: bool = True

    @classmethod
    def from_record(
        cls, output: Path, record: dict[str, Any], notices: tuple[str, ...], *, is_new: bool
    ) -> "TrainingResult":
        """Return the result of a run from its record: `student`, `teacher`, `models`, `steps`, and so on."""
        return cls(
            output=output,
            student=Path(record["student"]),
            teacher=Path(record["teacher"]),
            steps=record["steps"],
            tokens=record["tokens"],
            stages=record["stages"],
            evaluation=record.get("evaluation"),
            notices=notices,
            record=record,
            is_new=is_new,
        )

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the output's metrics.jsonl: one for every logged step."""
        return read_lines(self.output / "metrics.jsonl")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `kvfold distill --json` prints them."""
        return {"output": str(self.output), **self.record}
