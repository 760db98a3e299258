"""The models, directory and processes of a whole run."""

from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from ..recipe.recipe import Recipe
from ..stages import state


@dataclass(frozen=True)
class RunContext:
    """A run as a whole.

    Attributes:
        recipe: the run.
        accelerator: device, processes, precision.
        student: directory of the checkpoint to be trained.
        teacher: directory of the model to learn from.
        partial: working directory.
        signals: numbers of the signals received so far.
    """

    recipe: Recipe
    accelerator: Accelerator
    student: Path
    teacher: Path
    partial: Path
    signals: list[int]

    @property
    def start(self) -> Path:
        """The checkpoint that stages in memory start from.

        It is the student, or the output of the last streamed stage.
        """
        streamed = [stage for stage in self.recipe.stages if stage.how == "stream"]
        for stage in reversed(streamed):
            directory = self.partial / "stages" / stage.name
            if directory.exists():
                return directory
        return self.student

    def has_weights(self, found: Path) -> bool:
        """Return whether a saved state is of a stage in memory: a streamed stage leaves a checkpoint."""
        return self.recipe.stages[state.read_progress(found).stage].how != "stream"
