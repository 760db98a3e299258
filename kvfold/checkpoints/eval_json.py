"""eval.json, the report of `kvfold eval`: its head, its only reader and its only writer.

The suites' blocks are described in `quality_blocks.py` and `cost_blocks.py`. Importing this module loads
neither torch nor pydantic.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from ..core import untrusted
from ..core.errors import InvalidInput
from ..core.untrusted import type_adapter
from .cost_blocks import CacheBlock, SpeedBlock
from .quality_blocks import (
    FidelityBlock,
    FiniteNumbers,
    GenerationBlock,
    PerplexityBlock,
    RetrievalBlock,
    RulerBlock,
    StorageBlock,
    SuiteBlock,
    TasksBlock,
)

FILE = "eval.json"
SCHEMA = 2
ROLES = ("student", "teacher", "parent")
BLOCKS: dict[str, type[SuiteBlock]] = {
    "ppl": PerplexityBlock,
    "fidelity": FidelityBlock,
    "storage": StorageBlock,
    "cache": CacheBlock,
    "speed": SpeedBlock,
    "retrieval": RetrievalBlock,
    "ruler": RulerBlock,
    "generation": GenerationBlock,
    "tasks": TasksBlock,
}
T = TypeVar("T")
B = TypeVar("B", bound=SuiteBlock)


@dataclass(frozen=True)
class MeasuredCheckpoint:
    """A checkpoint as a report names it.

    Attributes:
        path: its directory.
        name: the directory's name, or that of the repository in the Hub's cache.
        identity: hash of the files that decide what it computes, see `identity.py`.
        record: excerpt of its kvfold.json; None where kvfold did not make it.
    """

    path: str
    name: str
    identity: str
    record: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class TextProtocol:
    """The text that was read, and how; perplexities are comparable where all of this is equal.

    Attributes:
        name: full name of the protocol.
        text_sha256: hash of the whole text in UTF-8.
        window: tokens that a model reads at once.
        windows: number of windows.
        bos: where BOS stands: at the head of `each` window, the `first` one or each `document`, or `none`.
        scored_tokens: in all windows.
        scored_bytes: UTF-8 bytes by which bits per byte are taken.
    """

    name: str
    text_sha256: str
    window: int
    windows: int
    bos: str | None = None
    scored_tokens: int
    scored_bytes: int | None = None


@dataclass(frozen=True)
class EvalReport(FiniteNumbers):
    """An evaluation.

    Attributes:
        schema: version of eval.json.
        checkpoint: the evaluated model, the student.
        teacher: its source, if there is one.
        parent: the folded checkpoint that it was distilled from, if there is one.
        protocol: the text; None where no suite reads one.
        suites: block of each suite by its name; None for a suite that does not apply. Blocks of unknown
            suites are kept as plain values.
        device: where it ran.
        versions: of kvfold, torch and transformers.
        cache_dtype: the number format that the student's cache was stored in; None: as it computes.
    """

    schema: int
    checkpoint: MeasuredCheckpoint
    teacher: MeasuredCheckpoint | None
    parent: MeasuredCheckpoint | None
    protocol: TextProtocol | None
    suites: dict[str, Any]
    device: str
    versions: dict[str, str]
    cache_dtype: str | None = None

    def block(self, name: str, kind: type[B]) -> B | None:
        """Return the block of a suite; None where it was not measured or does not apply."""
        found = self.suites.get(name)
        return found if isinstance(found, kind) else None

    @property
    def ppl(self) -> PerplexityBlock:
        """The block of the suite `ppl`, which must have been measured."""
        found = self.block("ppl", PerplexityBlock)
        assert found is not None
        return found

    @property
    def fidelity(self) -> FidelityBlock | None:
        """The block of the suite `fidelity`; None without a teacher."""
        return self.block("fidelity", FidelityBlock)

    @property
    def cache(self) -> CacheBlock:
        """The block of the suite `cache`, which must have been measured."""
        found = self.block("cache", CacheBlock)
        assert found is not None
        return found

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the models that were measured, in the order of `ROLES`."""
        measured = zip(ROLES, (self.checkpoint, self.teacher, self.parent), strict=True)
        return tuple(role for role, found in measured if found is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the content of eval.json as plain values, `schema` first."""
        return asdict(self)

    def to_text(self) -> str:
        """Return eval.json as it is written to a file."""
        return json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"


HEAD = tuple(each.name for each in fields(EvalReport))  # the keys of eval.json


def read_report(path: Path, directory: Path) -> EvalReport:
    """Read a report.

    Raises:
        InvalidInput: it is not a report of schema 2, is damaged, or belongs to another checkpoint.
    """
    remedy = f"move it away and measure again: kvfold eval {directory} --text stdlib --out {path}"
    content = read_json(path, remedy)
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise InvalidInput(f"{path} is not a report of schema {SCHEMA} (its schema is {schema}); {remedy}")
    report = parsed(EvalReport, content, path, remedy)
    blocks = dict(report.suites)
    for name, block in blocks.items():
        if name in BLOCKS and block is not None:
            blocks[name] = parsed(BLOCKS[name], block, path, remedy, ("suites", name))
    there = Path(report.checkpoint.path)
    # In a published report a name stands for the path.
    if there.is_absolute() and there.is_dir() and there.resolve() != directory.resolve():
        from .identity import hashes_of, identity  # which imports torch

        if report.checkpoint.identity != identity(hashes_of(directory)):  # a copy computes the same
            raise InvalidInput(f"{path} was measured on {there}, not on {directory}; {remedy}")
    return replace(report, suites=blocks)


def measured_by(directory: Path) -> EvalReport | None:
    """Read a checkpoint's own eval.json.

    Returns:
        The report; None where there is none, or no perplexity in it.

    Raises:
        InvalidInput: it is not a report, is damaged, or belongs to another checkpoint.
    """
    path = directory / FILE
    report = read_report(path, directory) if path.is_file() else None
    return report if report and report.protocol and report.suites.get("ppl") else None


def parsed(kind: type[T], content: Any, path: Path, remedy: str, place: tuple[str, ...] = ()) -> T:
    """Check plain values from a JSON file against a type.

    Keys that `kind` does not have are ignored. `remedy` is the advice in the message, and `place` the keys
    above `content` in the file.

    Raises:
        InvalidInput: a value is missing, of another type, or out of its range.
    """
    from pydantic import ValidationError

    try:
        found: T = type_adapter(cast(Any, kind)).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (*place, *first["loc"])))
        raise InvalidInput(f"{path} is not what kvfold writes ({where}: {first['msg']}); {remedy}") from None
    return found


def read_json(path: Path, remedy: str) -> Any:
    """Read a JSON file.

    Raises:
        InvalidInput: it is not valid JSON, is too large or nests too deeply.
    """
    try:
        content = untrusted.read_json(path, name="it", top=None)
        json.dumps(content, ensure_ascii=False).encode()  # a lone surrogate cannot be shown on a page
    except UnicodeEncodeError:
        raise InvalidInput(f"{path} is not valid JSON (it holds half a character); {remedy}") from None
    except InvalidInput as mistake:
        reason = str(mistake).partition(";")[0]
        raise InvalidInput(f"{path} is not valid JSON ({reason}); {remedy}") from None
    return content
