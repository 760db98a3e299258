"""The subject of an evaluation: checkpoints by role, loaded on demand, and the text as windows and scores."""

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from ..checkpoints.eval_json import MeasuredCheckpoint
from ..checkpoints.identity import check_signature, hashes_of, identity, signature
from ..checkpoints.record import changed_since, other_weights, read_record
from ..core.cache_dtypes import cache_dtype
from ..core.console import notice
from ..core.memory import free_bytes
from ..core.processes import from_every, from_first, together
from ..core.settings import Settings
from ..core.version import __version__
from ..core.work import WorkDir
from ..models.causal_lm import Described, Loaded, check_comparable, describe, load, place_of
from ..models.stored_cache import StoredCache
from ..models.teacher_cache import TeacherCache, identify
from ..texts.corpus import Text
from .options import Options
from .scores import UNQUANTISED, Live, LogitSource, Scores, gather, pending, score
from .stored_teacher import OPTION, StoredTeacher, fill
from .suites.catalogue import SUITES
from .windows import Limit, TextWindows, cut, limit_of, window_length

Made = TypeVar("Made")
S = TypeVar("S", bound=Settings)
_NO_NUMBERS = (
    "device_map",
    "offload_dir",
    "cpu_memory",
    "one_at_a_time",
    "teacher_cache",
    "trust_remote_code",
)

_TOLD = ("stage", "version", "target", "method", "cache")  # of kvfold.json


def measured_checkpoint(directory: Path, known: Mapping[str, str]) -> MeasuredCheckpoint:
    """Name a checkpoint whose files have known SHA-256, from `hashes_of`.

    Raises:
        InvalidInput: its kvfold.json is damaged.
    """
    record = read_record(directory)
    told = None if record is None else {key: record[key] for key in _TOLD if key in record}
    hub = directory.parent.parent.name if directory.parent.name == "snapshots" else ""
    name = hub.removeprefix("models--").replace("--", "/") or directory.name
    return MeasuredCheckpoint(str(directory), name, identity(known), told)


class Subject:
    """A student, and its teacher and folded parent where they are known.

    Attributes:
        paths: the checkpoints' directories by role.
        roles: `student`, then `teacher` and `parent` where there are any.
        options: options for loading models and cutting the text.
        text: the text to read; None where no suite reads one.
        one_at_a_time: only one model may be in memory; call `load` for each use and keep no reference.
        stored: the loaded student's cache in `options.cache_dtype`; None where that is None or nothing is
            loaded.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        options: Options,
        text: Text | None,
        settings: Settings | None = None,
        journal: WorkDir | None = None,
    ) -> None:
        """Check that the models can be compared; weights are read only to hash them.

        Raises:
            InvalidInput: a directory holds no model, there is no such device, two models cannot be compared,
                or the journal belongs to another evaluation.
        """
        self.paths, self.options, self.text, self._settings = paths, options, text, settings
        self.roles = tuple(paths)
        self.device, self._dtype = place_of(options)
        self._loaded: dict[str, Loaded] = {}
        self._made: dict[Callable[[Subject], Any], Any] = {}
        self.stored: StoredCache | None = None
        self._journal = journal or WorkDir()
        with together():
            self._described = {role: describe(path, options, multimodal=True) for role, path in paths.items()}
            for role in self.roles[1:]:
                check_comparable(
                    self._described["student"], self._described[role], text.joined if text else ""
                )
        self._read = {role: signature(path) for role, path in paths.items()}
        hashes = {role: hashes_of(path) for role, path in paths.items()}
        self.checkpoints: dict[str, MeasuredCheckpoint] = {
            role: measured_checkpoint(path, hashes[role]) for role, path in paths.items()
        }
        for role, path in paths.items():
            if role != "teacher" and (sentence := other_weights(path, hashes[role])):
                notice(sentence)
        self._teacher_hashes = hashes.get("teacher", {})
        if "teacher" in paths:
            self._look_for_changes(self._teacher_hashes)
        self.one_at_a_time = self._do_not_fit() if options.one_at_a_time is None else options.one_at_a_time
        with together():
            self._journal.begin(self._asked())
        self._journal.units = from_first(self._journal.units)

    def _look_for_changes(self, hashes: Mapping[str, str]) -> None:
        """Report a teacher in the place of the student's source that has other files than the source had."""
        record, teacher = read_record(self.paths["student"]), self.paths["teacher"]
        if (
            record
            and record["source"]["path"] == str(teacher.resolve())
            and (name := changed_since(record, teacher, hashes))
        ):
            notice(f"{teacher} has changed since {self.paths['student']} was made from it: {name} differs")

    def asked(self, kind: type[S]) -> S:
        """Return the options of a suite, which has their class in its row of `SUITES`."""
        return asked_of(self._settings, kind)

    def load(self, role: str) -> Loaded:
        """Return the model, loaded once and kept; with `one_at_a_time` the others are released first.

        The student's cache is in `options.cache_dtype` wherever the model runs, except in `unquantised`.

        Raises:
            InvalidInput: it cannot be loaded whole, or its cache cannot be stored in that format.
        """
        if role not in self._loaded:
            if self.one_at_a_time:
                self._loaded.clear()
                self.stored = None
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            loaded = self._loaded[role] = load(self.paths[role], self.options, multimodal=True)
            self.check_unchanged(role)
            if role == "student" and self.options.cache_dtype is not None:
                self.stored = StoredCache(loaded.model, cache_dtype(self.options.cache_dtype))
        return self._loaded[role]

    def check_unchanged(self, *roles: str) -> None:
        """Check that models have the files whose hashes are recorded; by default all of them.

        Raises:
            InvalidInput: a file was written, replaced or removed meanwhile.
        """
        for role in roles or self.roles:
            check_signature(self.paths[role], self._read[role])

    @contextmanager
    def unquantised(self) -> Iterator[Loaded]:
        """Load the student and let it keep its cache as it computes it, for the duration."""
        loaded = self.load("student")
        assert self.stored is not None, "there is no other cache than this one"
        with self.stored.off():
            yield loaded

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the value of a part of the evaluation, from the journal or else from `measure`."""
        return self._journal.unit(name, measure)

    def once(self, make: Callable[["Subject"], Made]) -> Made:
        """Return what a function makes of this subject; further calls return the same."""
        if make not in self._made:
            self._made[make] = make(self)
        made: Made = self._made[make]
        return made

    def described(self, role: str) -> Described:
        """Return the model's tokenizer and configuration without its weights."""
        return self._described[role]

    @property
    def limit(self) -> Limit:
        """Return the positions that every model has."""
        return limit_of(self._described.values())

    def stored_dtype(self, role: str) -> str:
        """Return the dtype of the weights in the checkpoint."""
        dtype = self._described[role].config.dtype
        return str(torch.float32 if dtype is None else dtype).removeprefix("torch.")

    def dtype(self, role: str) -> str:
        """Return the dtype in which the weights are loaded."""
        return self.stored_dtype(role) if self._dtype == "auto" else self._dtype

    @cached_property
    def windows(self) -> TextWindows:
        """The text in windows by the student's tokenizer.

        Raises:
            InvalidInput: the text does not suit the windows, or a model has fewer positions.
        """
        assert self.text is not None, "a suite that reads text says so in its row"
        with together():
            length = window_length(self.options.window, list(self._described.values()), self.text)
            return cut(self.text, self._described["student"], length, self.options)

    @cached_property
    def scores(self) -> Scores:
        """Every model's loss at every scored token, from one pass that resumes from the journal.

        Raises:
            InvalidInput: a model's logits are not finite, or kvfold cannot form them.
        """
        roles = self.roles if self.options.cache_dtype is None else (*self.roles, UNQUANTISED)
        groups = [roles]
        if self.one_at_a_time:
            groups = [("parent",)] if "parent" in roles else []
            groups.append(tuple(role for role in roles if role != "parent"))
        measures: dict[str, torch.Tensor] = {}
        with tempfile.TemporaryDirectory(prefix="kvfold-teacher-") as spare:
            for group in groups:
                measures |= self._score(group, Path(spare))
        return gather(self.windows, measures)

    def _score(self, roles: tuple[str, ...], spare: Path) -> dict[str, torch.Tensor]:
        size, windows = self.options.batch_size, self.windows
        own = pending(windows, size, roles, self._journal)
        sources: dict[str, LogitSource] = {}
        directory = self.options.teacher_cache or (spare / "states" if self.one_at_a_time else None)
        if directory is not None and "teacher" in roles:
            with together():
                sources["teacher"] = self._stored_teacher(directory, own)
        with together():
            for role in roles if own else ():
                if role == UNQUANTISED:
                    sources[role] = Live(self.load("student"), windows, self.unquantised)
                elif role not in sources:
                    sources[role] = Live(self.load(role), windows)
        return score(sources, windows, size, roles=roles, journal=self._journal)

    def _stored_teacher(self, directory: Path, own: list[int]) -> StoredTeacher:
        """Return the teacher by its hidden states on disk, after those that are missing were computed."""
        identity = identify(self._teacher_hashes, self.dtype("teacher"))
        cache = TeacherCache(directory, OPTION, {**identity, "device": self.device})

        def load_checked() -> Loaded:
            return Live(self.load("teacher"), self.windows).loaded

        fill(cache, self.windows.ids_NW, own, self.options.batch_size, load_checked)
        return StoredTeacher(cache, self._described["teacher"], self.device)

    def _do_not_fit(self) -> bool:
        if len(self.paths) < 2 or self.options.device_map == "auto":
            return False
        needed = 0
        for role, path in self.paths.items():
            sizes = (getattr(torch, name).itemsize for name in (self.dtype(role), self.stored_dtype(role)))
            loaded, stored = sizes
            needed += sum(file.stat().st_size for file in path.glob("*.safetensors")) * loaded // stored
        if not any(from_every(needed > free_bytes())):  # each would wait for suites that the others leave out
            return False
        notice(
            f"the models take {needed / 1e9:.1f} GB together, more than is free; they are loaded one "
            f"at a time"
        )
        return True

    def _asked(self) -> dict[str, Any]:
        given = self.options.model_dump(exclude=set(_NO_NUMBERS))
        for suite in SUITES.values():
            given |= self.asked(suite.settings).model_dump()
        options = {
            f"--{name.replace('_', '-')}": ",".join(map(str, value)) if isinstance(value, tuple) else value
            for name, value in given.items()
        }
        models = {role: checkpoint.identity for role, checkpoint in self.checkpoints.items()}
        text = {} if self.text is None else {"text": [self.text.name, self.text.sha256]}
        return {**models, **text, **options, "versions": versions()}


def asked_of(settings: Settings | None, kind: type[S]) -> S:
    """Return the part of some settings that a class describes, or its defaults where they have none of it."""
    if settings is None or not kind.model_fields.keys() <= type(settings).model_fields.keys():
        return kind()
    return settings.part(kind)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that the numbers depend on."""
    return {"kvfold": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
