"""`MigrationOptions`: what a user can ask of a migration in addition to its source, bound and output."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ..convert.request import CalibrationName, Shares
from ..core.settings import LARGEST_SEED, Settings, refuse_texts
from ..distill.recipe.recipe_file import plain_values


def _as_text(value: object) -> object:
    """Return the text of a number of tokens."""
    return str(value) if type(value) is int else value


class MigrationOptions(Settings):
    """The options of `kvfold.migrate`. Those of `kvfold migrate` have the same names and defaults."""

    steps: Shares | None = None
    """Falling proportions of the source's cache; None: those of 50, 25 and 12.5 % that it allows."""
    text: Annotated[str, Field(min_length=1), BeforeValidator(plain_values)] = "stdlib"
    """Held-out text, as for `kvfold.evaluate`."""
    train: Annotated[str, Field(min_length=1), BeforeValidator(plain_values)] | None = None
    """Training text, as `data.source` of a recipe; None: `stdlib` if `text` is `stdlib`, else `self`."""
    tokens_per_step: Annotated[str, BeforeValidator(_as_text)] = "200k"
    """Length of each distillation: a number, or a text such as `200k` or `50M`."""
    window: Annotated[int, Field(ge=2)] | None = None
    """Tokens per window; None: the model's positions, at most 1,024."""
    max_windows: Annotated[int, Field(ge=2)] | None = None
    """Evaluate on at most this many windows."""
    calibration: CalibrationName = "self"
    """As in a `FoldRequest`."""
    effort: Literal["quick", "default", "best"] = "default"
    """Of every fold, as in a `FoldRequest`."""
    sequences: Annotated[int, Field(ge=1)] | None = None
    """Calibration sequences; None: those of the effort."""
    refine: Annotated[int, Field(ge=0)] | None = None
    """Steps of refinement of each layer; None: those of the effort."""
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED)
    """Seed of calibration and training."""
    settings: Annotated[Mapping[str, Any], BeforeValidator(plain_values), AfterValidator(dict)] = {}
    """Values that replace those of every distillation's recipe, by key: `{"stages.0.lr": 1e-4}`."""
    keep_steps: bool = False
    """Keep every step's checkpoints, in `<out>/steps`."""


def migration_options(values: Mapping[str, Any]) -> MigrationOptions:
    """Return the options that values of Python describe.

    Args:
        values: by the names of the fields of `MigrationOptions`.

    Raises:
        InvalidInput: names the field, its value and what would be right.
    """
    refuse_texts(values, MigrationOptions)
    return MigrationOptions.read(values)
