"""What an evaluation found: one frozen value, which is the JSON report and the rows of the table."""

from dataclasses import asdict, dataclass
from typing import Any

from .cache import CacheSize
from .fidelity import Fidelity
from .perplexity import Estimate, Share


@dataclass(frozen=True)
class Protocol:
    """On what was measured.

    Attributes:
        name: the full name of the protocol; with the text's hash it says what a perplexity is comparable with.
        text_sha256: of the whole text in UTF-8.
        window: tokens of a window, BOS included.
        windows: how many.
        scored_tokens: in all windows.
    """

    name: str
    text_sha256: str
    window: int
    windows: int
    scored_tokens: int


@dataclass(frozen=True)
class Measured:
    """One model.

    Attributes:
        path: the checkpoint.
        dtype: of its weights as loaded.
        perplexity: exp of the mean NLL.
        nll: negative log likelihood of a scored token, nats.
        window_nll: its mean in each window, nats.
        cache: what a token costs in the live cache.
    """

    path: str
    dtype: str
    perplexity: float
    nll: Estimate
    window_nll: tuple[float, ...]
    cache: CacheSize


@dataclass(frozen=True)
class Result:
    """An evaluation.

    Attributes:
        schema: version of the JSON report.
        protocol: on what was measured.
        student: the model in question.
        teacher: its source, if there is one.
        parent: the converted checkpoint that it was distilled from, if there is one.
        nll_difference: student - teacher, paired by window, nats a token.
        fidelity: student against teacher.
        cache_ratio: elements a token, student / teacher.
        recovered_share: how much of the conversion's loss the distillation won back.
        device: where it ran.
        versions: of kvfold, torch and transformers.
    """

    schema: int
    protocol: Protocol
    student: Measured
    teacher: Measured | None
    parent: Measured | None
    nll_difference: Estimate | None
    fidelity: Fidelity | None
    cache_ratio: float | None
    recovered_share: Share
    device: str
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, `schema` first."""
        return asdict(self)

    @property
    def title(self) -> str:
        """What stands above the table."""
        return self.protocol.name

    @property
    def columns(self) -> list[str]:
        """The table's header: a column for each model."""
        return ["", *(role for role, _ in self._models())]

    @property
    def rows(self) -> list[list[str]]:
        """The table's lines: what each model has of its own, then the student against the others."""
        models = [model for _, model in self._models()]
        blank = [""] * (len(models) - 1)
        rows = [
            ["windows, tokens scored", f"{self.protocol.windows}, {self.protocol.scored_tokens}", *blank],
            ["text sha256", self.protocol.text_sha256[:16], *blank],
            ["perplexity", *(f"{model.perplexity:.4g}" for model in models)],
            ["NLL, nats/token", *(_plus_minus(model.nll) for model in models)],
            ["cache, elements/token/layer", *(f"{model.cache.elements_per_token_per_layer:,.10g}" for model in models)],
            ["cache, elements/token", *(f"{model.cache.elements_per_token:,.10g}" for model in models)],
            [f"cache, bytes/token ({self.student.cache.dtype})", *(f"{model.cache.bytes_per_token:,.10g}" for model in models)],
        ]
        return [*rows, *([label, value, *blank] for label, value in self._comparisons())]

    def _models(self) -> list[tuple[str, Measured]]:
        named = [("student", self.student), ("teacher", self.teacher), ("parent", self.parent)]
        return [(role, model) for role, model in named if model is not None]

    def _comparisons(self) -> list[tuple[str, str]]:
        if self.nll_difference is None or self.fidelity is None or self.cache_ratio is None:
            return []
        share = self.recovered_share
        return [
            ("cache, share of the teacher's", f"{self.cache_ratio:.2%}"),
            ("NLL - teacher's, nats/token", _plus_minus(self.nll_difference)),
            ("KL(teacher || student), nats", _plus_minus(self.fidelity.kl)),
            ("KL median", f"{self.fidelity.kl_median:.4g}"),
            ("KL 99th percentile", f"{self.fidelity.kl_p99:.4g}"),
            ("same top-1", _plus_minus(self.fidelity.same_top1)),
            ("recovered share", f"undefined: {share.reason}" if share.value is None else f"{share.value:.1%}"),
        ]


def _plus_minus(value: Estimate) -> str:
    error = "" if value.standard_error is None else f" ± {value.standard_error:.2g}"
    return f"{value.mean:.4f}{error}"
