"""The text tower of a multimodal checkpoint, read in its place as a causal language model.

Plans read it so, and statistics are taken on it so: no weight is copied.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ...checkpoints.directory import Checkpoint, read_config
from ...checkpoints.quantised.packed_checkpoint import QuantisedCheckpoint, as_stored, is_quantised
from ...core.errors import InvalidInput
from ..families.source import Source, open_source
from .tower import Tower, write_side_files

_NAMES = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")


class TowerView(Checkpoint):
    """Tensors of another checkpoint under other names; each is read from the files of the other.

    The directory has the config.json and the side files that go with these names.
    """

    def __init__(self, directory: Path, whole: Checkpoint, names: Mapping[str, str]) -> None:
        self.directory = directory
        self.config = read_config(directory)
        self._entries = {name: whole._entries[stored] for stored, name in names.items()}
        self.opened, self.origin, self.left_out = whole.opened, whole, {}

    def identity(self) -> list[tuple[str, int, int]]:
        """Return what changes when the other checkpoint does."""
        return self.origin.identity()


@contextmanager
def tower_source(tower: Tower) -> Iterator[Source]:
    """Open a text tower as the source of a plan; it can be read until the block ends.

    Yields:
        The source, whose directory is a temporary one without weights. Errors in the block name the whole
        checkpoint.
    """
    with tempfile.TemporaryDirectory(prefix="kvfold-tower-") as work:
        directory = Path(work) / tower.directory.resolve().name
        with named_as_whole(tower, directory):
            directory.mkdir()
            write_side_files(tower, directory)
            stored = TowerView(directory, as_stored(tower.whole), tower.stored)
            yield open_source(QuantisedCheckpoint(directory, stored) if is_quantised(directory) else stored)


@contextmanager
def named_as_whole(tower: Tower, place: Path) -> Iterator[None]:
    """Let errors about a tower that is read from a directory of kvfold's own name the user's checkpoint."""
    stored = {name: whole for names in (tower.stored, tower.names) for whole, name in names.items()}
    try:
        yield
    except InvalidInput as refusal:
        sentence = str(refusal)
        for ours in (str(place.resolve()), str(place)):
            sentence = sentence.replace(ours, f"the text tower of {tower.directory}")
        raise InvalidInput(_NAMES.sub(lambda found: stored.get(found[0], found[0]), sentence)) from None
