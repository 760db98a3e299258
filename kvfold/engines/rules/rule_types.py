"""A checkpoint as the rules of engine_rules.py read it, and the finding when it breaks one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint, open_checkpoint
from ...checkpoints.record import read_record
from ...checkpoints.shards import TensorSpec
from ...convert.families.recognition import is_multimodal
from ...convert.families.rows import FAMILIES
from ...convert.formats.stock import NORM_WEIGHT
from ...models.remote_code import MODEL_TYPE, check_form
from .evidence import Evidence
from .output_kinds import output_of

Effect = Literal["prints nonsense", "refuses to load", "saves no cache", "not known", "note"]
FAILING = ("prints nonsense", "refuses to load")


@dataclass(frozen=True)
class Written:
    """A checkpoint as rules see it.

    Attributes:
        directory: its place.
        config: its config.json.
        specs: shape and dtype of every tensor, by name.
        is_linear: the norms of a stock latent are made linear by its scale.
        tokenizer: the directory of its tokenizer; None where that is not to be judged.
        scheme: of its quantised weights, a key of `SCHEMES`; empty where it has none.
    """

    directory: Path
    config: dict[str, Any]
    specs: Mapping[str, TensorSpec]
    is_linear: bool = False
    tokenizer: Path | None = None
    scheme: str = ""

    @property
    def layout(self) -> str:
        """Return `stock`, `latent`, `decoupled` or `intact` where attention is latent; otherwise `grouped`.

        `latent` is another class of transformers than DeepSeek-V3's.

        In a multimodal class it is `multimodal stock` or `multimodal`.
        """
        kind = self.config.get("model_type")
        if kind == MODEL_TYPE:
            return str(self.config["kvfold"]["form"])
        if is_multimodal(self.config):
            return "multimodal stock" if self._text.get("model_type") == "deepseek_v3" else "multimodal"
        if kind == "deepseek_v3":
            return "stock"
        row = FAMILIES.get(str(kind))
        return "latent" if row is not None and row.latent else "grouped"

    @property
    def output(self) -> str:
        """Return the kind of output, of `output_kinds.OUTPUTS`."""
        return output_of(self.layout, self.cached)

    def get(self, field: str, default: Any = 0) -> Any:
        """Return a field of config.json, of a multimodal one its text model's; a null counts as absent."""
        value = self._text.get(field, self.config.get(field))
        return default if value is None else value

    @property
    def _text(self) -> Mapping[str, Any]:
        """Return the part of config.json that describes the text model."""
        text = self.config.get("text_config") if is_multimodal(self.config) else None
        return text if isinstance(text, Mapping) else self.config

    @property
    def rope(self) -> dict[str, Any]:
        """Return the rope parameters, from the fields of transformers 4 or 5."""
        found = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        return dict(found) if isinstance(found, dict) else {}

    @property
    def cached(self) -> tuple[int, int]:
        """Return the widths of the latent and of the rotary key."""
        return int(self.get("kv_lora_rank")), int(self.get("qk_rope_head_dim"))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One way to go wrong.

    Attributes:
        engines: which go wrong by it, each with its evidence.
        layouts: of what it is asked.
        effect: what happens; notes and lost savings do not fail a checkpoint.
        condition: when it happens, in words for a table; empty where it always does.
        found: what of the checkpoint breaks the rule, in words; empty when nothing does.
        why: what the engine does with it.
    """

    engines: Mapping[str, Evidence]
    layouts: tuple[str, ...]
    effect: Effect
    condition: str
    found: Callable[[Written], str]
    why: str


@dataclass(frozen=True)
class LintFinding:
    """A broken rule: engine, effect, a sentence, and the rule's evidence; None where there is none."""

    engine: str
    effect: Effect
    sentence: str
    evidence: Evidence | None = None

    @property
    def learned(self) -> str:
        """Return the version that the rule was learned on, and whether it was run or read."""
        return "no evidence" if self.evidence is None else str(self.evidence)

    @property
    def fails(self) -> bool:
        """Return whether the checkpoint should not be run in that engine."""
        return self.effect in FAILING

    def __str__(self) -> str:
        happens = "" if self.effect == "note" else f" {self.effect}"
        return f"{self.engine}{happens}: {self.sentence} ({self.learned})"


def open_written(directory: Path) -> Written:
    """Open a checkpoint for the rules.

    Of its weights only the latent's norms are read, where no record says what they do.

    Raises:
        InvalidInput: there is none that can be read.
    """
    checkpoint = open_checkpoint(directory)
    if checkpoint.config.get("model_type") == MODEL_TYPE:
        check_form(directory, checkpoint.config)
    recorded = (read_record(directory) or {}).get("latent_norm")
    norms = (name for name in checkpoint if name.endswith("_a_layernorm.weight"))
    is_linear = recorded == "linear"
    if recorded is None:
        is_linear = any(bool((checkpoint[name] == NORM_WEIGHT).any()) for name in norms)
    specs = {name: checkpoint.spec(name) for name in checkpoint}
    scheme = checkpoint.method if isinstance(checkpoint, QuantisedCheckpoint) else ""
    return Written(directory, checkpoint.config, specs, is_linear, directory, scheme)
