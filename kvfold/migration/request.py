"""The request of a migration, and its working directory.

    <out>.partial/  lock  journal.jsonl  statistics.safetensors  folded/STEP/  distilled/STEP/

Each checkpoint appears under its name only when it is whole, so the same command resumes after the last one.
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..convert.decide.plan import Plan
from ..convert.families.source import open_source
from ..core.command_options import words_of
from ..core.units import show_percent, show_trained
from ..core.work import working_directory
from ..distill.recipe.recipe import Recipe
from ..eval.assertions import Assertion
from ..eval.options import Options
from ..texts.corpus import Text
from .migration_options import MigrationOptions

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
        wanted: the request as the user made it.
        source: the directory of its model.
        steps: from the largest cache to the smallest.
        bound: the condition on an evaluation.
        text: held-out text.
        options: how the text is read.
        calibration: the arguments of `study`.
        refine: steps of the fold's refinement.
        recipe: of every step's distillation; student and output are filled in.
        overrides: of the recipe, as `--set` has them.
    """

    wanted: MigrationOptions
    source: Path
    steps: tuple[Step, ...]
    bound: Assertion
    text: Text
    options: Options
    calibration: dict[str, Any]
    refine: int
    recipe: Recipe
    overrides: tuple[str, ...]

    @property
    def out(self) -> Path:
        """The output as the user named it."""
        return self.wanted.out

    @property
    def partial(self) -> Path:
        """The working directory."""
        return working_directory(self.out)

    @property
    def unmet(self) -> Path:
        """The output if no step stays within the bound."""
        return Path(f"{self.out}.unmet")

    @property
    def command(self) -> str:
        """The command that makes the same output again, without `--out`."""
        wanted = self.wanted
        others = {"model", "to", "until", "out", "settings", "keep_steps"}
        values = wanted.model_dump(exclude=others, exclude_defaults=True, exclude_none=True)
        if "steps" in values:
            values["steps"] = tuple(map(show_percent, values["steps"]))
        if "tokens_per_step" in values:
            values["tokens_per_step"] = show_trained(wanted.tokens_per_step)
        words = words_of(MigrationOptions, {"to": wanted.to, "until": wanted.until, **values})
        settings = [f"{key}={json.dumps(value)}" for key, value in wanted.settings.items()]
        words += [word for setting in [*self.overrides, *settings] for word in ("--set", setting)]
        return shlex.join(["kvfold", "migrate", wanted.model, *words])

    def asked(self) -> dict[str, Any]:
        """Return everything that the numbers depend on.

        It must stay the same between two runs; the bound and the list of steps may change.
        """
        return {
            "kvfold_migrate": SCHEMA,
            "source": open_source(self.source).checkpoint.identity(),
            "to": self.wanted.to,
            "text": self.text.sha256,
            "window": self.options.window,
            "max_windows": self.options.max_windows,
            "calibration": self.calibration,
            "effort": self.wanted.effort,
            "refine": self.refine,
            "recipe": {
                key: value
                for key, value in self.recipe.resolved().items()
                if key not in {"student", "output", "save"}
            },
        }
