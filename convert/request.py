"""`FoldRequest`: everything that a user can ask of a fold, described once.

The command's options, the arguments of the Python API, `kvfold convert --config` and kvfold.json are made of
it; `GQA`, `MQA` and `MLA` are its targets as Python writes them.
"""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from ..core.cache_dtypes import CacheDtypeName
from ..core.command_options import Option, words_of
from ..core.errors import InvalidInput
from ..core.option_types import Bytes, Place, Tokens, as_list
from ..core.settings import LARGEST_SEED, Settings, sentence_of
from ..core.untrusted import read_yaml
from ..engines.rules.engine_names import EngineName
from ..texts.calibration_name import names_statistics
from .algebra.target import Sizes
from .efforts import EFFORTS, EFFORTS_EXPLAINED, Effort, EffortName

SHARD_SIZE = 5 * 10**9  # bytes
# Names of fields in other programs and in configurations of models.
_OTHER_NAMES = {
    "source": "model", "model_name_or_path": "model", "target": "to", "num_key_value_heads": "kv_heads",
    "kv_lora_rank": "rank", "qk_rope_head_dim": "rope_dim", "budget": "kv_budget", "engine": "engines",
    "output": "out", "output_dir": "out", "max_shard_size": "shard_size", "samples": "sequences",
    "seq_len": "length", "torch_dtype": "dtype", "threads": "jobs",
}  # fmt: skip


def _as_rank(value: object) -> int | str:
    if value == "full":
        return "full"
    number: Any = int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,18}", value) else value
    if isinstance(number, bool | str) or not isinstance(value, str | Real) or number % 1 != 0:
        raise ValueError("it should be a whole number or 'full'")
    return int(number)


def _as_share(value: object) -> str:
    """Return a share as the command line writes it; its value is judged with the source's sizes."""
    if isinstance(value, bool) or not isinstance(value, str | Real):
        raise ValueError("it should be a share, for example '25%' or 0.25")
    return str(value)


def _as_calibration(value: object) -> object:
    """Return the text of a path, with the home directory for `~`; pydantic judges the rest."""
    if not isinstance(value, str | Path):
        return value
    text = str(value)
    own = "self+" if text.startswith("self+") else ""
    return own + os.path.expanduser(text.removeprefix(own))


Rank = Annotated[int | Literal["full"], BeforeValidator(_as_rank), Option(metavar="N|full")]
Share = Annotated[str, BeforeValidator(_as_share), Option(metavar="SHARE")]
Shares = Annotated[tuple[Share, ...], BeforeValidator(as_list), Option(metavar="SHARE,...")]
Engines = Annotated[tuple[EngineName, ...], BeforeValidator(as_list), Option("--engine", "NAME,...")]
CalibrationName = Annotated[
    str,
    Field(min_length=1),
    BeforeValidator(_as_calibration),
    Option(metavar="self|none|stdlib|FILE|DATASET|self+FILE"),
]


class _Target(Settings):
    """A target as a user asks for it, with its sizes."""

    def __init__(self, *values: Any, **given: Any) -> None:
        """Refuse what the target does not take; Python's own mistake would be a `TypeError`."""
        kind = type(self)
        if values:
            write = "".join(f"{name}={values[0]!r}" for name in list(kind.model_fields)[:1])
            raise InvalidInput(f"{kind.__name__} takes values by name; write {kind.__name__}({write})")
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise InvalidInput(sentence_of(error, {"": kind}, _OTHER_NAMES)) from None


class GQA(_Target):
    """Grouped-query attention (arXiv 2305.13245): neighbouring key/value heads become one.

    Give either `kv_heads` or `kv_budget`.
    """

    if TYPE_CHECKING:  # callers write 25% as "25%" or 0.25

        def __init__(self, **sizes: Any) -> None: ...

    kv_heads: int | None = None
    """GQA: key/value heads of the output, a divisor of the source's."""
    kv_budget: Share | None = None
    """GQA, MLA: cache after the fold as a share of the source's, such as 25% or 0.25."""


class MQA(_Target):
    """Multi-query attention (arXiv 1911.02150): one key/value head for all query heads."""


class MLA(_Target):
    """Multi-head latent attention (arXiv 2405.04434): one latent for the keys and values of all heads.

    Give either `rank` or `kv_budget`. With `engines` leave both out for a size that their kernels have.
    """

    if TYPE_CHECKING:

        def __init__(self, **sizes: Any) -> None: ...

    rank: Rank | None = None
    """MLA: kv_lora_rank; `full` keeps everything and saves nothing (a proof)."""
    kv_budget: Share | None = None
    """GQA, MLA: cache after the fold as a share of the source's, such as 25% or 0.25."""
    rope_dim: int | None = None
    """MLA: qk_rope_head_dim, the width of the rotary key cached next to the latent. Default: chosen."""
    q_lora_rank: Rank | None = None
    """MLA: make the queries of all heads from so many numbers. Saves weights and their reads; the KV cache
    does not change. Default: queries stay as they are."""
    rope: Literal["decoupled", "intact"] | None = None
    """MLA: a rotary key next to the latent, or keys that are rebuilt from the latent, then rotated. Default:
    decoupled; of a source with key norms, chosen by the predicted loss and the engines."""
    slots: Literal["allocated", "uniform"] | None = None
    """MLA: rotary slots where they save most (with statistics), or on the table that stock engines compute.
    Default: chosen."""


class FoldRequest(MLA, GQA):
    """A fold as a user asks for it: `kvfold convert` takes its fields as options.

    It has the sizes of all targets; what does not belong to its own target is refused when it is planned.
    """

    if not TYPE_CHECKING:
        __init__ = Settings.__init__  # a request is no target

    model: str = Field(min_length=1)
    """The source: a directory, or a Hub id with an optional `@revision`."""
    to: Literal["gqa", "mqa", "mla"]
    """Attention of the output."""
    container: Literal["auto", "stock", "remote"] | None = None
    """MLA: the DeepSeek-V3 class, or the source's class with code shipped next to the weights. Default: stock
    where it fits."""
    latent_norm: Literal["auto", "fitted", "linear"] = "auto"
    """MLA in the stock class: fit the latent to the class's norm, so that any tool can train and quantise the
    output, or make the norm linear by a small scale, which other tools destroy. Auto: fitted, but linear for
    --rank full."""
    cache_dtype: CacheDtypeName = "bfloat16"
    """Prepare the fold for a cache of this format: the coordinates of what is cached are chosen for it, and
    refinement sees its rounding."""
    engines: Engines = ()
    """Engines that must run the output, which takes the least lossy container that all accept."""
    calibration: CalibrationName | None = None
    """Text on which the loss of a fold is predicted and measured: `self`, text that the model writes; `none`,
    weights alone; `stdlib`, the source text of Python's standard library without what
    `kvfold eval --text stdlib` reads; a text (UTF-8 of any suffix, or .txt, .jsonl, .json, .parquet, also
    compressed, or a directory of these); a data set, org/name[:config[:split[:field]]]; half of each, as in
    self+FILE; or saved statistics (.safetensors). Default: self where it is needed."""
    layerwise: bool | None = None
    """Take statistics with one layer in memory at a time. Default: where the model does not fit whole."""
    effort: EffortName = Field(default="default", description=f"Time against quality. {EFFORTS_EXPLAINED}.")
    sequences: Annotated[int, Field(ge=1)] | None = None
    """Calibration sequences. Default: as `effort` says."""
    length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of a calibration sequence. Default: 256 where the source writes text and 512 of another text, or
    fewer where the source was trained on fewer, if that shows."""
    context: Annotated[Tokens, Field(ge=2)] | None = None
    """Tokens of the texts that the output is for: distances beyond the calibration text are extrapolated to
    it, at most to 4096. Default: texts of all lengths up to the source's positions, or to where its own text
    breaks down."""
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED)
    """Seed of the calibration."""
    save_statistics: Annotated[Place, Option(metavar="FILE")] | None = None
    """File that keeps the statistics (.safetensors)."""
    refine: Annotated[int, Field(ge=0), Option(metavar="STEPS")] | None = None
    """Steps of refinement: training of each layer on its own, towards the source's layer, on the calibration
    text. 0: only the closed form. Default: as `effort` says."""
    method: str | None = None
    """GQA, MQA: subspace, aligned, aligned:grouped or mean. MLA: subspace, or a published rule to compare
    with: svd, transmla, care, no-sqrt-care, transmla-care, mha2mla, xecomla. mha2mla takes :high, :low or
    :uniform for its rotary pairs (without one, by 2-norm) and :split to decompose keys and values apart, e.g.
    mha2mla:high:split; transmla and the rules of care take :foldN (FreqFold) and :balanceR. Default:
    subspace."""
    out: Place | None = None
    """Output directory; must not exist. Default: ./<model>-<target>."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the output; auto: the source's; what is dequantised takes that of most other numbers, or
    bfloat16. float16 is refused where a weight is larger than 65,504, and takes a fitted latent norm."""
    dequantize: bool = False
    """Write all weights of a quantised source unquantised; otherwise only attention is."""
    text_only: bool = False
    """Write the folded text tower of a multimodal model alone, as a causal language model."""
    ignore_code: bool = False
    """Fold a checkpoint that names a class in code of its own as transformers' class of its model_type."""
    shard_size: Annotated[Bytes, Field(ge=1)] = SHARD_SIZE
    """Largest size of a weight file."""
    verify: Literal["full", "lint", "none"] = "lint"
    """At the end: `lint` checks the rules of `kvfold verify`, `full` also runs the output against its source.
    Exit code 3 if the output fails; it is kept."""
    jobs: Annotated[int, Field(ge=1)] | None = None
    """Layers folded at once. Default: one per core, if they fit in memory."""

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
        text = self.calibration or "none"
        draws_text = text != "none" and not names_statistics(text)
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
        values = {name: value for name, value in self.essentials().items() if name != "model"}
        return shlex.join(["kvfold", "convert", self.model, *words_of(type(self), values)])


# The fields that decide the output, in the order in which a command names them.
_RECORDED = (
    "model", "to", "kv_heads", "rank", "rope_dim", "kv_budget", "q_lora_rank", "rope", "container",
    "latent_norm", "cache_dtype", "engines", "slots", "calibration", "effort", "sequences", "length", "seed",
    "context", "refine", "shard_size", "method", "revision", "dtype", "dequantize",
    "text_only", "ignore_code",
)  # fmt: skip


def fold_request(values: Mapping[str, Any], where: str = "") -> FoldRequest:
    """Return the checked request of values by the names of its fields, from the file `where` if any."""
    return FoldRequest.read(values, _OTHER_NAMES, where)


def read_config(file: Path, overrides: Mapping[str, Any]) -> FoldRequest:
    """Return the request in a YAML or JSON file, with some values replaced.

    `engine` is also read there, which is the name of the option.
    """
    values = read_yaml(file)
    if "engine" in values and "engines" not in values:
        values["engines"] = values.pop("engine")
    return fold_request({**values, **overrides}, file.name)


def request_of(model: str | Path, target: GQA | MQA | MLA, **options: Any) -> FoldRequest:
    """Return the request for a target, with other fields of `FoldRequest` by name; None leaves one out.

    Raises:
        InvalidInput: names the field, its value and what would be right.
    """
    if not isinstance(target, _Target) or isinstance(target, FoldRequest):
        raise InvalidInput(f"the target is {target!r}; it should be kvfold.GQA(...), MQA() or MLA(...)")
    sizes = {name: value for name, value in dict(target).items() if value is not None}
    given = {name: value for name, value in options.items() if value is not None}
    for name in sorted(sizes.keys() & given.keys()):
        raise InvalidInput(f"{name} is given twice, in the target and as an option; leave one of them out")
    to = type(target).__name__.lower()
    return FoldRequest.read({"model": str(model), "to": to, **sizes, **given}, _OTHER_NAMES)
