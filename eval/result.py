"""What an evaluation found: one frozen value, which is the JSON report and the rows of the table."""

from dataclasses import asdict, dataclass
from typing import Any
from typing import Protocol as Interface

from ..checkpoints.identity import Checkpoint
from .suites.cache import Caches
from .suites.fidelity import Fidelity
from .suites.perplexity import Perplexity

SCHEMA = 2


class Finding(Interface):
    """What a suite found: a frozen dataclass of plain values."""

    def rows(self, roles: tuple[str, ...]) -> list[list[str]]:
        """Lines of the table: a label, and a cell for each role."""


@dataclass(frozen=True)
class Protocol:
    """On what was measured.

    Attributes:
        name: the full name of the protocol; with the text's hash it says what a perplexity is comparable
            with.
        text_sha256: of the whole text in UTF-8.
        window: tokens that a model reads at once.
        windows: how many.
        bos: where BOS stands: at the head of `each` window, the `first` one or each `document`, or `none`.
        scored_tokens: in all windows.
        scored_bytes: of UTF-8, by which bits per byte are taken.
    """

    name: str
    text_sha256: str
    window: int
    windows: int
    bos: str
    scored_tokens: int
    scored_bytes: int


@dataclass(frozen=True)
class Result:
    """An evaluation.

    Attributes:
        schema: version of the JSON report.
        checkpoint: the model in question, the student.
        teacher: its source, if there is one.
        parent: the converted checkpoint that it was distilled from, if there is one.
        protocol: on what was measured; None when no suite reads a text.
        suites: what each suite found; None for one that does not apply.
        device: where it ran.
        versions: of kvfold, torch and transformers.
    """

    schema: int
    checkpoint: Checkpoint
    teacher: Checkpoint | None
    parent: Checkpoint | None
    protocol: Protocol | None
    suites: dict[str, Any]
    device: str
    versions: dict[str, str]

    @property
    def ppl(self) -> Perplexity:
        """What the suite `ppl` found."""
        found = self.suites["ppl"]
        assert isinstance(found, Perplexity)
        return found

    @property
    def fidelity(self) -> Fidelity | None:
        """What the suite `fidelity` found; None without a teacher."""
        found = self.suites["fidelity"]
        assert found is None or isinstance(found, Fidelity)
        return found

    @property
    def cache(self) -> Caches:
        """What the suite `cache` found."""
        found = self.suites["cache"]
        assert isinstance(found, Caches)
        return found

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, `schema` first."""
        return asdict(self)

    @property
    def title(self) -> str:
        """What stands above the table."""
        return self.checkpoint.name if self.protocol is None else self.protocol.name

    @property
    def columns(self) -> list[str]:
        """The table's header: a column for each model."""
        return ["", *self._roles()]

    @property
    def rows(self) -> list[list[str]]:
        """The table's lines: what was read, then each suite's."""
        roles = self._roles()
        rows: list[list[str]] = []
        if self.protocol is not None:
            blank = [""] * (len(roles) - 1)
            counts = f"{self.protocol.windows}, {self.protocol.scored_tokens}, {self.protocol.scored_bytes}"
            rows.append(["windows, tokens, bytes scored", counts, *blank])
            rows.append(["text sha256", self.protocol.text_sha256[:16], *blank])
        for finding in self.suites.values():
            rows += [] if finding is None else finding.rows(roles)
        return rows

    def _roles(self) -> tuple[str, ...]:
        named = (("student", self.checkpoint), ("teacher", self.teacher), ("parent", self.parent))
        return tuple(role for role, found in named if found is not None)
