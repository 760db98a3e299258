"""`MigrationOptions`: everything that a user can ask of a migration."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ..convert.efforts import EffortName
from ..convert.request import CalibrationName
from ..core.command_options import Option
from ..core.errors import InvalidInput
from ..core.option_types import Place, TrainedTokens, as_list
from ..core.settings import LARGEST_SEED, Settings
from ..core.units import read_share

STEPS = (0.5, 0.25, 0.125)  # shares of the source's cache
WINDOW = 1024  # the most tokens of a window


def _as_share(value: object) -> object:
    try:
        return float(read_share(value, "")) if isinstance(value, str) else value
    except InvalidInput:
        raise ValueError("it should be a share of the source's cache, such as 25% or 0.25") from None


def _plain(value: object) -> object:
    """Return plain values as a recipe reads them; imported late, since `--help` needs no recipe."""
    from ..distill.recipe.recipe_file import plain_values

    return plain_values(value)


_Share = Annotated[float, BeforeValidator(_as_share), Field(gt=0, lt=1)]
_Text = Annotated[str, Field(min_length=1), BeforeValidator(_plain)]


class MigrationOptions(Settings):
    """A migration as a user asks for it: `kvfold migrate` takes its fields as options."""

    model: str = Field(min_length=1)
    """The source: a directory, or a Hub id with an optional `@revision`."""
    to: Literal["gqa", "mqa", "mla"]
    """Attention of the output."""
    until: Annotated[str, Option(metavar="BOUND")]
    """Condition that must hold on `text`: 'ppl<1.02x' (times the source's perplexity), or one of
    `kvfold eval --assert`, such as 'kl<0.05'."""
    out: Annotated[Place, Option(metavar="DIR")]
    """Output; must not exist."""
    steps: Annotated[tuple[_Share, ...], BeforeValidator(as_list), Option(metavar="SHARE,...")] | None = None
    """Falling proportions of the source's cache. Default: those of 50%,25%,12.5% that it allows."""
    text: Annotated[_Text, Option(metavar="FILE|stdlib")] = "stdlib"
    """Held-out text, as for `kvfold eval`."""
    train: Annotated[_Text, Option(metavar="TEXT")] | None = None
    """Training text, as `data.source` of a recipe. Default: stdlib if `text` is stdlib, else self."""
    tokens_per_step: TrainedTokens = 200_000
    """Length of each distillation, such as 200k or 50M."""
    window: Annotated[int, Field(ge=2)] | None = None
    """Tokens per window. Default: the model's positions, at most 1024."""
    max_windows: Annotated[int, Field(ge=2)] | None = None
    """Evaluate on at most this many windows."""
    calibration: CalibrationName = "self"
    """As for `kvfold convert`."""
    effort: EffortName = "default"
    """Effort of every fold, as for `kvfold convert`."""
    sequences: Annotated[int, Field(ge=1)] | None = None
    """Calibration sequences. Default: as `effort` says."""
    refine: Annotated[int, Field(ge=0), Option(metavar="STEPS")] | None = None
    """Steps of refinement of each layer. Default: as `effort` says."""
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED)
    """Seed of calibration and training."""
    settings: Annotated[Mapping[str, Any], BeforeValidator(_plain), AfterValidator(dict)] = {}
    """Values that replace those of every distillation's recipe, by key: `{"stages.0.lr": 1e-4}`."""
    keep_steps: bool = False
    """Keep every step's checkpoints, in `<out>/steps`."""
