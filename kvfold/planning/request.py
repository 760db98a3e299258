"""`PlanRequest`: everything that a user can ask of a comparison of targets."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..convert.request import CalibrationName, Engines, Shares
from ..core.cache_dtypes import CacheDtypeName
from ..core.command_options import Option
from ..core.option_types import Bytes, Place, Tokens, as_list
from ..core.settings import LARGEST_SEED, Settings


def _with_unit(memory: int) -> int:
    if memory < 1000:  # 24 for 24 GB
        raise ValueError("it counts bytes: write for example 24GB")
    return memory


class PlanRequest(Settings):
    """A comparison of targets as a user asks for it: `kvfold plan` takes its fields as options."""

    model: str = Field(min_length=1)
    """The source: a directory, or a Hub id with an optional `@revision`."""
    context: Tokens | None = None
    """Tokens of each sequence, such as 8192 or 8k. Default: 32k, or the source's positions where these are
    fewer."""
    batch: int = Field(default=1, ge=1)
    """Sequences at once."""
    memory: Annotated[Bytes, AfterValidator(_with_unit)] | None = None
    """Memory for weights, cache and activations, such as 24GB or 24GiB. Default: no limit."""
    tp: Annotated[int, Field(ge=1), Option(metavar="N")] = 1
    """Tensor-parallel ranks; memory and cache are then those of one rank."""
    dcp: Annotated[int, Field(ge=1), Option(metavar="M")] = 1
    """Ranks of decode context parallelism among them, which divide the tokens of repeated heads."""
    goal: Literal["quality", "speed"] = "quality"
    """`quality` puts the least predicted loss first; `speed` the fewest bytes moved for a decoded token."""
    tolerance: float = Field(default=0.1, ge=0)
    """With the `goal` speed: most predicted loss, nats per token; by weights alone, a share of attention's
    output."""
    engines: Engines = ()
    """Engines that must run the output. Default: any."""
    budgets: Annotated[Shares, AfterValidator(lambda shares: tuple(dict.fromkeys(shares)))] | None = None
    """Shares of the source's cache to try for MLA, such as 50%,25%."""
    cache_dtypes: Annotated[
        tuple[CacheDtypeName, ...], BeforeValidator(as_list), Option("--cache-dtype", "NAME,...")
    ] = ()
    """Number formats of the cache. Every target is compared in each, by its bytes and by the loss in
    closed-form coordinates for it; * marks those that no other beats in both. Default: the output's dtype."""
    calibration: CalibrationName = "none"
    """Text that losses are predicted on, as of `kvfold convert`, or saved statistics (.safetensors); `none`,
    the weights alone, which ranks roughly; `self` where `save_statistics` is given."""
    layerwise: bool | None = None
    """Take statistics with one layer in memory at a time. Default: where the model does not fit whole."""
    sequences: int = Field(default=48, ge=1)
    """Calibration sequences."""
    length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of a calibration sequence. Default: as `kvfold convert` has it."""
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED)
    """Seed of the calibration."""
    save_statistics: Annotated[Place, Option(metavar="FILE")] | None = None
    """File that keeps the statistics (.safetensors)."""
    curve: bool = False
    """Also show predicted loss against cache, for every target whether it fits or not."""
    png: Annotated[Place, Option(metavar="FILE")] | None = None
    """Picture of the curve (matplotlib)."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    text_only: bool = False
    """Plan the text tower of a multimodal model alone, as a causal language model; otherwise it is folded in
    its place."""

    @model_validator(mode="before")
    @classmethod
    def _statistics_need_text(cls, values: dict[str, Any]) -> dict[str, Any]:
        return values if values.get("save_statistics") is None else {"calibration": "self", **values}
