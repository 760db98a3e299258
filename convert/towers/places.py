"""The working directories of a fold of a text tower, and what a killed run leaves in them."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints.directory import check_output
from ...checkpoints.own_files import discard
from ...checkpoints.record import describe, read_record
from ...core.console import notice
from ...core.errors import InvalidInput
from ...core.files import locked, remove_left
from ...core.untrusted import printable
from ..request import FoldRequest
from .tower import Tower, TowerClaim, claim_of, is_copy, is_written, take_over, write_tower

_LOCK = "lock"  # in the tower as it was, of the run that folds it


@dataclass(frozen=True, kw_only=True)
class Places:
    """The directories of one fold of a tower that is put back in its place.

    Attributes:
        out: the whole output.
        part: the folded tower, `OUT.text`.
        alone: the tower as it was, `OUT.tower`.
        tower: the tower of the source.
        claim: of the fold; a directory `alone` with this claim was written by the same request.
    """

    out: Path
    part: Path
    alone: Path
    tower: Tower
    claim: TowerClaim

    @property
    def is_there(self) -> bool:
        """Return whether the tower as it is now is written already, by any run."""
        return self.is_ours or is_copy(self.tower, self.alone)

    @property
    def is_ours(self) -> bool:
        """Return whether an earlier run of the same request wrote the tower as it was."""
        found = claim_of(self.alone)
        return found is not None and found.digest == self.claim.digest and is_written(self.tower, self.alone)

    def finished_output(self, request: FoldRequest, held: ExitStack) -> dict[str, Any] | None:
        """Return the record of the output, where a killed run of the same request gave it its name.

        What that run did not remove any more is removed.

        Args:
            request: of the whole fold.
            held: keeps other runs out of the working directories from here on, where they are there.

        Raises:
            InvalidInput: another run uses the working directories.
        """
        for place in (self.out, self.part, self.alone):
            remove_left(place)
        if claim_of(self.alone) is not None:
            self._lock(held)
        record = read_record(self.out) if self.is_ours else None
        if record is None or record["request"] != json.loads(json.dumps(request.essentials())):
            return None
        if record["source"]["path"] != str(self.tower.directory.resolve()):
            return None
        notice(f"{self.out} was finished by an earlier run of this command; what that run left is removed")
        self.clear()
        return record

    def take(self, asked: FoldRequest, held: ExitStack) -> dict[str, Any] | None:
        """Write the tower as it was, or take it over from an earlier run.

        Args:
            asked: the request of the tower's fold.
            held: keeps other runs out of the working directories from here on.

        Returns:
            The record of the folded tower, where a killed run of the same request finished it.

        Raises:
            InvalidInput: a directory is in the way, cannot be written, or is another run's that is at work.
        """
        found = self._finished_part(asked)
        is_there = self.is_there
        left = claim_of(self.alone)
        if left and left.command == self.claim.command and not is_there and not self.part.exists():
            discard(self.alone)  # of a source that has changed since
        self._check(has_part=found is not None, is_there=is_there)
        if not is_there:
            write_tower(self.tower, self.alone, asked.shard_size, self.claim)
            self._lock(held)
        elif claim_of(self.alone) is not None and not self.is_ours:
            take_over(self.alone, self.claim)
        return found

    def _lock(self, held: ExitStack) -> None:
        """Keep other runs out of the working directories.

        The lock is in the tower as it was, and goes with it. A user's own tower gets none.
        """
        busy = f"another kvfold is writing {self.out}; wait for it, or name another --out"
        try:
            held.enter_context(locked(self.alone / _LOCK, busy))
        except FileNotFoundError:  # that run has just removed the directory
            raise InvalidInput(busy) from None

    def _finished_part(self, asked: FoldRequest) -> dict[str, Any] | None:
        """Return the record of the folded tower, where a killed run of the same request finished it.

        Args:
            asked: the request of the tower's fold.
        """
        record = read_record(self.part) if self.is_ours else None
        wanted = json.loads(json.dumps(asked.essentials()))
        # A record also has what was chosen where the request left it open.
        if record is None or any(record["request"].get(name) != value for name, value in wanted.items()):
            return None
        if record["source"] != describe(self.alone, asked.source_name):
            return None
        return record

    def _check(self, *, has_part: bool, is_there: bool) -> None:
        """Check that the directories may be written.

        Args:
            has_part: whether the folded tower is there and is used.
            is_there: of the tower as it was.

        Raises:
            InvalidInput: one is in the way; the sentence says what it is, and which command left it.
        """
        check_output(self.out, self.tower.directory)
        taken = [self.part] if not has_part and (self.part.exists() or self.part.is_symlink()) else []
        if not is_there and (self.alone.exists() or self.alone.is_symlink()):
            taken.append(self.alone)
        if not taken:
            return
        names = " and ".join(str(place) for place in taken)
        left = claim_of(self.alone)
        if left is None or left.digest == self.claim.digest:
            raise InvalidInput(
                f"{names} exists and nothing is overwritten: kvfold writes the text tower there until it is "
                f"in {self.out}; remove it, or name another output with --out"
            )
        stopped = printable(left.command)
        raise InvalidInput(
            f"{self.part} and {self.alone} are left by a stopped run of another command, and nothing is "
            f"overwritten: finish it with `{stopped} --out {self.out}`, remove both, or name another output "
            "with --out"
        )

    def clear(self) -> None:
        """Remove the working directories. A tower without a claim is the user's, and stays."""
        for place in (self.part, *([] if claim_of(self.alone) is None else [self.alone])):
            discard(place)
