"""`FoldRequest`: everything that a user can ask of a fold, described once.

The command, the Python API, `kvfold convert --config` and kvfold.json use it; `GQA`, `MQA` and `MLA` are its
targets as Python writes them.
"""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict

from pydantic import BeforeValidator, Field

from ..core.errors import InvalidInput
from ..core.settings import LARGEST_SEED, Settings, refuse_texts, suggest
from ..core.units import read_size
from ..core.untrusted import read_yaml, shorten
from ..texts.calibration_name import names_statistics
from .algebra.target import Rank, Sizes
from .efforts import EFFORTS, Effort

SHARD_SIZE = 5 * 10**9  # bytes
# Names of fields in other programs and in configurations of models.
_OTHER_NAMES = {
    "source": "model", "model_name_or_path": "model", "target": "to", "num_key_value_heads": "kv_heads",
    "kv_lora_rank": "rank", "qk_rope_head_dim": "rope_dim", "budget": "kv_budget", "engine": "engines",
    "output": "out", "output_dir": "out", "max_shard_size": "shard_size", "samples": "sequences",
    "seq_len": "length", "torch_dtype": "dtype", "threads": "jobs",
}  # fmt: skip


def _as_rank(value: object) -> int | str:
    """Return a rank as a number, or `full`."""
    if value == "full":
        return "full"
    number: Any = int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,18}", value) else value
    if isinstance(number, bool | str) or not isinstance(value, str | Real) or number % 1 != 0:
        raise ValueError("it should be a whole number or 'full'")
    return int(number)


def _as_share(value: object) -> str:
    """Return a share as the command line writes it; a text is judged with the source's sizes."""
    if isinstance(value, bool) or not isinstance(value, str | Real):
        raise ValueError("it should be a share, for example '25%' or 0.25")
    return str(value)


def _as_place(value: object) -> object:
    """Return a path with the home directory for `~`; pydantic judges the rest.

    An empty text is refused, which would be the current directory.
    """
    if value == "":
        raise ValueError("it should be a path, not an empty text")
    return Path(os.path.expanduser(value)) if isinstance(value, str | Path) else value


def _as_calibration(value: object) -> object:
    """Return the text of a path, with the home directory for `~`; pydantic judges the rest."""
    if not isinstance(value, str | Path):
        return value
    text = str(value)
    own = "self+" if text.startswith("self+") else ""
    return own + os.path.expanduser(text.removeprefix(own))


def _as_list(value: object) -> object:
    """Return values from a text with commas or from a single number; pydantic judges the rest."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    return (value,) if isinstance(value, Real) and not isinstance(value, Integral) else value


def _as_bytes(value: object) -> object:
    """Return bytes from a text such as `500MB` or `5GB`; pydantic judges the rest."""
    if not isinstance(value, str):
        return value
    try:
        return read_size(value, "size", "bytes")
    except InvalidInput:
        raise ValueError("it should be a size, for example 500MB or 5GB") from None


def _as_tokens(value: object) -> object:
    """Return tokens from a text such as `8192` or `8k`; pydantic judges the rest."""
    if not isinstance(value, str):
        return value
    try:
        return read_size(value, "context", "tokens")
    except InvalidInput:
        raise ValueError("it should be a number of tokens, for example 8192 or 8k") from None


WantedRank = Annotated[Rank, BeforeValidator(_as_rank)]
Share = Annotated[str, BeforeValidator(_as_share)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
Shares = Annotated[tuple[Share, ...], BeforeValidator(_as_list)]
Bytes = Annotated[int, BeforeValidator(_as_bytes), Field(le=LARGEST_SEED)]
Tokens = Annotated[int, BeforeValidator(_as_tokens)]
CalibrationName = Annotated[str, Field(min_length=1), BeforeValidator(_as_calibration)]
Place = Annotated[Path, BeforeValidator(_as_place)]


class FoldRequest(Settings):
    """A fold as a user asks for it. The options of `kvfold convert` have the same names and defaults."""

    model: str = Field(min_length=1)
    """The source: a directory, or a Hub id with an optional `@revision`."""
    to: Literal["gqa", "mqa", "mla"]
    """Attention of the output."""
    kv_heads: int | None = None
    """GQA: key/value heads of the output."""
    rank: WantedRank | None = None
    """MLA: kv_lora_rank, or `full`, which keeps everything and saves nothing (a proof)."""
    rope_dim: int | None = None
    """MLA: qk_rope_head_dim, cached next to the latent; chosen when left out."""
    kv_budget: Share | None = None
    """GQA, MLA: cache after the fold as a share of the source's, e.g. `25%` or 0.25."""
    q_lora_rank: WantedRank | None = None
    """MLA: rank of the queries, or `full`; left out, queries stay as they are."""
    rope: Literal["decoupled", "intact"] | None = None
    """MLA: a rotary key next to the latent, or keys that are rebuilt from the latent, then rotated."""
    container: Literal["auto", "stock", "remote"] | None = None
    """MLA: the DeepSeek-V3 class, or the source's class with code shipped next to the weights."""
    latent_norm: Literal["auto", "fitted", "linear"] = "auto"
    """MLA in the stock class: a norm that the latent is fitted to, or one made linear by a small scale."""
    cache_dtype: Literal["bfloat16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "int8", "int4"] = "bfloat16"
    """Format in which the output's cache will be stored, and for which each layer is prepared."""
    engines: Names = ()
    """Engines that must run the output: transformers, vllm, sglang, llama.cpp, mlx and others."""
    slots: Literal["allocated", "uniform"] | None = None
    """MLA: rotary slots where they save most, or on the table that stock engines compute."""
    calibration: CalibrationName | None = None
    """`self`, `none`, a text, a data set, `self+TEXT` or saved statistics; left out, `self` where needed."""
    layerwise: bool | None = None
    """Take statistics with one layer in memory at a time; left out, when the model does not fit whole."""
    effort: Literal["quick", "default", "best"] = "default"
    """How much text is read and how far layers are refined: a row of `efforts.EFFORTS`."""
    sequences: Annotated[int, Field(ge=1)] | None = None
    """Calibration sequences; left out, as `effort` says."""
    length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of a calibration sequence; left out, 256 where the source writes text and 512 of another text,
    or fewer where it was trained on fewer."""
    context: Annotated[Tokens, Field(ge=2)] | None = None
    """Tokens of the texts that the output is for; left out, texts of all lengths up to the source's
    positions, or to where its own text breaks down."""
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED)
    """Seed of the calibration."""
    save_statistics: Place | None = None
    """File (.safetensors) that keeps the statistics."""
    refine: Annotated[int, Field(ge=0)] | None = None
    """Steps by which each layer is fitted to the source's; left out, as `effort` says; 0: closed form."""
    method: str | None = None
    """Name of a method of the target; left out, `subspace`."""
    out: Place | None = None
    """Output directory, which must not exist; left out, `./<model>-<target>`."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the output; `auto` is the source's. What is dequantised takes that of most other numbers, or
    bfloat16."""
    text_only: bool = False
    """Of a multimodal checkpoint, write the folded text tower alone, as a causal language model."""
    dequantize: bool = False
    """Write the weights of a quantised source unquantised; otherwise only its attention is."""
    shard_size: Annotated[Bytes, Field(ge=1)] = SHARD_SIZE
    """Largest size of a weight file: bytes, or a text such as `5GB`."""
    verify: Literal["full", "lint", "none"] = "lint"
    """At the end ask the rules of `kvfold verify` (`lint`), or also run the output next to its source."""
    jobs: Annotated[int, Field(ge=1)] | None = None
    """Layers folded at once; left out, one per core if they fit in memory."""

    @property
    def source_name(self) -> str | None:
        """The source's Hub id without its revision; None for a directory, which has its own name."""
        return None if Path(self.model).expanduser().is_dir() else self.model.partition("@")[0]

    @property
    def taken(self) -> Effort:
        """The sequences and steps of the fold: those that are given, else those of its effort."""
        effort = EFFORTS[self.effort]
        given: dict[str, Any] = {"sequences": self.sequences, "steps": self.refine}
        taken = replace(effort, **{key: n for key, n in given.items() if n is not None})
        # `--refine 0` is the closed form alone, unless the effort has no steps anyway.
        return taken if taken.steps or not effort.steps else replace(taken, solve=False)

    @property
    def sizes(self) -> Sizes:
        """The sizes and the form of the target, as far as they are given."""
        return Sizes(**{field.name: getattr(self, field.name) for field in fields(Sizes)})

    def essentials(self) -> dict[str, Any]:
        """Return what the output depends on, as plain values: the record's `request`.

        Places, verification and parallel work are left out, and so is everything that has its default.
        """
        found: dict[str, Any] = {}
        draws_text = self.calibration not in {None, "none"} and not self._has_saved_statistics
        for name in _RECORDED:
            value = getattr(self, name)
            is_drawn = name in {"sequences", "length", "seed"}
            kept = draws_text if is_drawn else value != type(self).model_fields[name].default
            if kept and value is not None:
                found[name] = list(value) if isinstance(value, tuple) else value
        # Ranks are texts there, as records of all versions have them.
        return found | {name: str(found[name]) for name in ("rank", "q_lora_rank") if name in found}

    @property
    def command(self) -> str:
        """The command that writes the same output again."""
        words = ["kvfold", "convert", self.model]
        for name, value in self.essentials().items():
            if name == "model":
                continue
            option = "--engine" if name == "engines" else f"--{name.replace('_', '-')}"
            words.append(option)
            if value is not True:
                words.append(",".join(value) if isinstance(value, list) else str(value))
        return shlex.join(words)

    @property
    def _has_saved_statistics(self) -> bool:
        return self.calibration is not None and names_statistics(self.calibration)


# The fields that decide the output, in the order in which a command names them.
_RECORDED = (
    "model", "to", "kv_heads", "rank", "rope_dim", "kv_budget", "q_lora_rank", "rope", "container",
    "latent_norm", "cache_dtype", "engines", "slots", "calibration", "effort", "sequences", "length", "seed",
    "context", "refine", "shard_size", "method", "revision", "dtype", "dequantize",
    "text_only",
)  # fmt: skip


def fold_request(values: Mapping[str, Any], where: str = "") -> FoldRequest:
    """Return a checked request.

    Args:
        values: by the names of the fields of `FoldRequest`.
        where: the name of the file that they come from.

    Raises:
        InvalidInput: names the field, its value and what would be right.
    """
    return FoldRequest.read(values, _OTHER_NAMES, where)


def read_config(file: Path, overrides: Mapping[str, Any]) -> FoldRequest:
    """Return the request in a YAML or JSON file, with some values replaced.

    `engine` is also read there, which is the name of the option.

    Raises:
        InvalidInput: names the field, its value and what would be right.
    """
    values = read_yaml(file)
    if "engine" in values and "engines" not in values:
        values["engines"] = values.pop("engine")
    return fold_request({**values, **overrides}, file.name)


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A target as a user asks for it."""

    to: ClassVar[str]

    def __new__(cls, *values: Any, **given: Any) -> Self:
        """Refuse what the target does not take; Python's own mistake would be a `TypeError`."""
        names = [field.name for field in fields(cls)]
        if values:
            write = f"{names[0]}={values[0]!r}" if names else ""
            raise InvalidInput(f"{cls.__name__} takes values by name; write {cls.__name__}({write})")
        for name in given:
            if name not in names:
                hint = suggest(name, names, _OTHER_NAMES) if names else "it takes none"
                raise InvalidInput(f"unknown name {name!r} of {cls.__name__}; {hint}")
        return super().__new__(cls)

    def options(self) -> dict[str, Any]:
        """Return the target's fields of a `FoldRequest`."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"to": self.to, **{name: value for name, value in given.items() if value is not None}}


@dataclass(frozen=True, kw_only=True)
class GQA(_Wanted):
    """Grouped-query attention (arXiv 2305.13245): neighbouring key/value heads become one.

    Give either `kv_heads` or `kv_budget`.

    Attributes:
        kv_heads: key/value heads of the output; a divisor of the source's.
        kv_budget: cache after the fold as a share of the source's: `"25%"` or 0.25.
    """

    to: ClassVar[str] = "gqa"
    kv_heads: int | None = None
    kv_budget: str | float | None = None


@dataclass(frozen=True, kw_only=True)
class MQA(_Wanted):
    """Multi-query attention (arXiv 1911.02150): one key/value head for all query heads."""

    to: ClassVar[str] = "mqa"


@dataclass(frozen=True, kw_only=True)
class MLA(_Wanted):
    """Multi-head latent attention (arXiv 2405.04434): one latent for the keys and values of all heads.

    Give either `rank` or `kv_budget`. With `engines` leave both out for a size that their kernels have.

    Attributes:
        rank: kv_lora_rank, or `"full"`, which keeps everything and saves nothing (a proof).
        kv_budget: cache after the fold as a share of the source's, both parts together: `"25%"` or 0.25.
        rope_dim: qk_rope_head_dim, the width of the rotary key next to the latent; chosen when None.
        q_lora_rank: rank of the queries, or `"full"`; None leaves them as they are. It saves weights and no
            cache.
        rope: `decoupled`, a rotary key of its own next to the latent; `intact`, keys that are rebuilt from
            the latent, then rotated. None is `decoupled`; of a source with key norms it is chosen by the
            predicted loss and the engines.
        slots: rotary slots where they save most (`allocated`, with statistics) or on the table that stock
            engines compute (`uniform`); chosen when None.
    """

    to: ClassVar[str] = "mla"
    rank: int | str | None = None
    kv_budget: str | float | None = None
    rope_dim: int | None = None
    q_lora_rank: int | str | None = None
    rope: Literal["decoupled", "intact"] | None = None
    slots: Literal["allocated", "uniform"] | None = None


class FoldOptions(TypedDict, total=False):
    """The keyword arguments of `kvfold.fold` apart from its target and output: fields of `FoldRequest`."""

    container: Literal["auto", "stock", "remote"]
    latent_norm: Literal["auto", "fitted", "linear"]
    cache_dtype: Literal["bfloat16", "fp8_e4m3", "fp8_e5m2", "nvfp4", "int8", "int4"]
    calibration: str | Path
    layerwise: bool
    effort: Literal["quick", "default", "best"]
    sequences: int
    length: int
    context: int | str
    seed: int
    save_statistics: str | Path
    refine: int
    method: str
    revision: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    dequantize: bool
    text_only: bool
    shard_size: int | str
    verify: Literal["full", "lint", "none"]
    jobs: int


def request_of(model: str | Path, target: GQA | MQA | MLA, **options: Any) -> FoldRequest:
    """Return the request for a target, with other fields of `FoldRequest` by name; None leaves one out.

    Raises:
        InvalidInput: names the field, its value and what would be right.
    """
    if not isinstance(target, _Wanted):
        raise InvalidInput(f"the target is {target!r}; it should be kvfold.GQA(...), MQA() or MLA(...)")
    given = {name: value for name, value in options.items() if value is not None}
    for name in sorted(target.options().keys() & given.keys()):
        raise InvalidInput(f"{name} is given twice, in the target and as an option; leave one of them out")
    refuse_texts({**target.options(), **given}, FoldRequest)
    for name in ("rank", "q_lora_rank"):
        if isinstance(wanted := target.options().get(name), str) and wanted != "full":
            raise InvalidInput(f"{name} is {shorten(wanted)}; it should be a whole number or the text 'full'")
    return fold_request({"model": str(model), **target.options(), **given})
