"""Which checkpoints may be compared: those of one source, measured on the same text in the same windows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import InvalidInput
from .blocks import Checkpoint, Protocol
from .records import Found, read_found


@dataclass(frozen=True)
class Group:
    """Checkpoints of one source under one protocol.

    Attributes:
        source: what they were folded from; None where that is not known.
        protocol: on what was measured; None where no text was read.
        members: in the order in which they were given, the source itself left out if it is among them.
        itself: the source's own directory, if it was given.
    """

    source: Checkpoint | None
    protocol: Protocol | None
    members: tuple[Found, ...]
    itself: Found | None = None

    @property
    def everyone(self) -> tuple[Found, ...]:
        """All that were given, the source first."""
        return self.members if self.itself is None else (self.itself, *self.members)


def read_groups(directories: Sequence[Path]) -> tuple[Group, ...]:
    """Read all directories, each once.

    Raises:
        InvalidInput: see `read_found`; or none was given.
    """
    if not directories:
        raise InvalidInput("name at least one directory of a checkpoint")
    unique = list({path.resolve(): path for path in reversed(directories)}.values())[::-1]
    found = [read_found(path, label) for path, label in zip(unique, labels(unique), strict=True)]
    groups: dict[tuple[str | None, Protocol | None], list[Found]] = {}
    sources = {
        one.report.teacher.identity: one.report.teacher for one in found if one.report.teacher is not None
    }
    for one in found:
        own = one.report.checkpoint.identity
        identity = one.report.teacher.identity if one.report.teacher else own if own in sources else None
        groups.setdefault((identity, one.report.protocol), []).append(one)
    # Without a text, measurements of a source may stand beside any others of it.
    for identity in {identity for identity, protocol in groups if protocol is None}:
        beside = next((key for key in groups if key[0] == identity and key[1] is not None), None)
        if identity is not None and beside is not None:
            groups[beside] += groups.pop((identity, None))
    return tuple(
        _group(sources.get(identity or ""), protocol, members)
        for (identity, protocol), members in groups.items()
    )


def labels(directories: Iterable[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [path.resolve().parts for path in directories]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def _group(source: Checkpoint | None, protocol: Protocol | None, members: Sequence[Found]) -> Group:
    itself = [
        one for one in members if source is not None and one.report.checkpoint.identity == source.identity
    ]
    others = tuple(one for one in members if one not in itself)
    return Group(source, protocol, others, itself[0] if itself else None)
