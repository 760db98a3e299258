"""The request of a migration, and its working directory.

    <out>.partial/  lock  journal.jsonl  statistics.safetensors  folded/STEP/  distilled/STEP/

Each checkpoint appears under its name only when it is whole, so the same command resumes after the last one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..convert.decide.plan import Plan
from ..convert.families.source import open_source
from ..core.work import working_directory
from ..distill.recipe.recipe import Recipe
from ..eval.assertions import Assertion
from ..eval.options import Options
from ..texts.corpus import Text

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Step:
    """A size on the way.

    Attributes:
        name: its proportion of the source's cache, such as `25%`, or `mqa`.
        sizes: the options of `target.from_options`.
        plan: the fold by weights alone, which knows the output's shapes.
    """

    name: str
    sizes: dict[str, Any]
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Migration:
    """A checked request.

    Attributes:
        model: the source as the user named it.
        source: its directory.
        to: `gqa`, `mqa` or `mla`.
        steps: from the largest cache to the smallest.
        bound: the condition on an evaluation.
        text: held-out text.
        options: how the text is read.
        calibration: the arguments of `study`.
        effort: of the folds.
        refine: steps of the fold's refinement.
        recipe: of every step's distillation; student and output are filled in.
        out: the output as the user named it.
        keep_steps: whether every step's checkpoints stay, in `<out>/steps`.
        command: the command that makes the same output again, without `--out`.
    """

    model: str
    source: Path
    to: str
    steps: tuple[Step, ...]
    bound: Assertion
    text: Text
    options: Options
    calibration: dict[str, Any]
    effort: str
    refine: int
    recipe: Recipe
    out: Path
    keep_steps: bool
    command: str

    @property
    def partial(self) -> Path:
        """The working directory."""
        return working_directory(self.out)

    @property
    def unmet(self) -> Path:
        """The output if no step stays within the bound."""
        return Path(f"{self.out}.unmet")

    def asked(self) -> dict[str, Any]:
        """Return everything that the numbers depend on.

        It must stay the same between two runs; the bound and the list of steps may change.
        """
        recipe = self.recipe.resolved()
        return {
            "kvfold_migrate": SCHEMA,
            "source": open_source(self.source).checkpoint.identity(),
            "to": self.to,
            "text": self.text.sha256,
            "window": self.options.window,
            "max_windows": self.options.max_windows,
            "calibration": self.calibration,
            "effort": self.effort,
            "refine": self.refine,
            "recipe": {
                key: value for key, value in recipe.items() if key not in {"student", "output", "save"}
            },
        }
