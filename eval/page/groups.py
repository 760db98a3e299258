"""Groups of checkpoints that may be compared: one source, one text, the same windows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ...checkpoints.eval_json import MeasuredCheckpoint, TextProtocol
from ...checkpoints.quality_blocks import SuiteBlock
from ...core.errors import InvalidInput
from .records import Found, read_found

B = TypeVar("B", bound=SuiteBlock)


@dataclass(frozen=True)
class Group:
    """Checkpoints of one source under one protocol.

    Attributes:
        source: the checkpoint that they were folded from; None where it is unknown.
        protocol: the text that was read; None where none was.
        members: the checkpoints in the order in which they were given, without the source itself.
        itself: the source's own directory, if it was given.
    """

    source: MeasuredCheckpoint | None
    protocol: TextProtocol | None
    members: tuple[Found, ...]
    itself: Found | None = None

    @property
    def everyone(self) -> tuple[Found, ...]:
        """All checkpoints that were given, the source first."""
        return self.members if self.itself is None else (self.itself, *self.members)

    def measured(self, suite: str, kind: type[B]) -> list[tuple[int, Found, B]]:
        """Return the members for which a suite was measured: number, checkpoint and block of each."""
        found = []
        for number, one in enumerate(self.members):
            block = one.report.block(suite, kind)
            if block is not None:
                found.append((number, one, block))
        return found


def read_groups(directories: Sequence[Path]) -> tuple[Group, ...]:
    """Read all directories, each once, and group them.

    Raises:
        InvalidInput: no directory was given, or one cannot be read, see `read_found`.
    """
    if not directories:
        raise InvalidInput("name at least one directory of a checkpoint")
    unique = list({path.resolve(): path for path in reversed(directories)}.values())[::-1]
    found = [read_found(path, label) for path, label in zip(unique, labels(unique), strict=True)]
    sources = {}
    for one in found:
        if one.report.teacher is not None:
            sources[one.report.teacher.identity] = one.report.teacher
    groups: dict[tuple[str | None, TextProtocol | None], list[Found]] = {}
    for one in found:
        source = one.report.teacher or one.report.checkpoint
        identity = source.identity if source.identity in sources else None
        groups.setdefault((identity, one.report.protocol), []).append(one)
    # Measurements without a text may join any group of their source.
    for identity in {identity for identity, protocol in groups if protocol is None}:
        with_text = next((key for key in groups if key[0] == identity and key[1] is not None), None)
        if identity is not None and with_text is not None:
            groups[with_text] += groups.pop((identity, None))
    made = []
    for (identity, protocol), members in groups.items():
        itself = [one for one in members if one.report.checkpoint.identity == identity]
        others = tuple(one for one in members if one not in itself)
        made.append(Group(sources.get(identity or ""), protocol, others, next(iter(itself), None)))
    return tuple(made)


def labels(directories: Iterable[Path]) -> list[str]:
    """Return the shortest ends of the paths that are all different."""
    parts = [path.resolve().parts for path in directories]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names
