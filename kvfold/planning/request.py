"""`PlanRequest`: everything that a user can ask of a comparison of targets."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from ..convert.request import Bytes, CalibrationName, Names, Place, Shares, Tokens
from ..core.settings import LARGEST_SEED, Settings, refuse_texts


def _with_unit(memory: int) -> int:
    if memory < 1000:  # 24 for 24 GB
        raise ValueError("it counts bytes: write for example 24GB")
    return memory


class PlanRequest(Settings):
    """A comparison of targets as a user asks for it."""

    model: str = Field(min_length=1)
    """The source: a directory, or a Hub id with an optional `@revision`."""
    context: Annotated[Tokens, Field(ge=1)] | None = None
    """Tokens of each sequence; None: 32k, or the source's positions where these are fewer."""
    batch: int = Field(default=1, ge=1)
    """Sequences at once."""
    memory: Annotated[Bytes, AfterValidator(_with_unit)] | None = None
    """Bytes for weights, cache and activations, of each rank; None: unbounded."""
    tp: int = Field(default=1, ge=1)
    """Ranks of tensor parallelism that serve the model."""
    dcp: int = Field(default=1, ge=1)
    """Of these, ranks of decode context parallelism, which divides the tokens of repeated heads."""
    goal: Literal["quality", "speed"] = "quality"
    """`quality` puts the least predicted loss first; `speed` the fewest bytes moved for a decoded token."""
    tolerance: float = Field(default=0.1, ge=0)
    """With the goal `speed`: most predicted loss, nats per token."""
    engines: Names = ()
    """Engines that must run the output; none: any."""
    budgets: Shares | None = None
    """Shares of the source's cache to try for MLA."""
    calibration: CalibrationName = "none"
    """Text that losses are predicted on, as in a `FoldRequest`; `none` predicts from the weights alone. Left
    out, it is `self` where `save_statistics` is given."""
    layerwise: bool | None = None
    """Take statistics with one layer in memory at a time; None: when the model does not fit whole."""
    sequences: int = Field(default=48, ge=1)
    """Calibration sequences."""
    length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of a calibration sequence; left out, as in a `FoldRequest`."""
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED)
    """Seed of the calibration."""
    save_statistics: Place | None = None
    """File (.safetensors) that keeps the statistics."""
    cache_dtypes: Names = ()
    """Number formats of the cache to compare, each with every target; none: the output's dtype."""
    curve: bool = False
    """Also predict the loss of targets that do not fit, as a curve over the cache."""
    png: Place | None = None
    """Picture of the curve."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    text_only: bool = False
    """Of a multimodal checkpoint, plan the text tower alone, as a causal language model."""

    @model_validator(mode="before")
    @classmethod
    def _statistics_need_text(cls, values: dict[str, Any]) -> dict[str, Any]:
        return values if values.get("save_statistics") is None else {"calibration": "self", **values}


def plan_request(values: Mapping[str, Any]) -> PlanRequest:
    """Return the request that values of Python describe.

    Args:
        values: by the names of the fields of `PlanRequest`.

    Raises:
        InvalidInput: names the field, its value and what would be right.
    """
    refuse_texts(values, PlanRequest)
    return PlanRequest.read(values)
