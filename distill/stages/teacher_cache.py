"""A teacher's last hidden states on disk, computed once: later runs on the same windows need no teacher in
memory.

DIR holds manifest.json, head.safetensors (the output embedding) and hidden-00000.safetensors, ...: hidden
states (N, S, D) of N windows, and a 16-byte key of each window's tokens and positions, by which it is found
again. So a cache serves any run that reads windows it knows, in whatever order. KL to it is exact but for the
rounding of the dtype that it was asked to have; a teacher that computes in bfloat16 loses nothing when it is
kept in bfloat16.

Shapes: B windows of a batch, S tokens of a window, T = B S, D hidden size, N windows of a file, V vocabulary.
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ...checkpoints.directory import check_output, finish
from ...checkpoints.record import describe
from ...core.errors import InvalidInput
from ...core.files import save_whole
from ..data.batch import Batch, Batches
from ..data.order import Windows
from ..losses import LOSSES
from ..losses.predictions import Predictions
from ..recipe.recipe import Recipe, Stage
from ..watch.display import progress_bar
from .capture import Captured
from .teacher import Online

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SCHEMA = 1
_MANIFEST, _PLAN, _LOCK = "manifest.json", "plan.json", "lock"
_FILE_BYTES = 2**28  # hidden states in one file
_BATCH = 8  # windows that the teacher reads at once
_KEY = 16


class Cached:
    """A teacher of which only the last hidden states are there.

    Args:
        directory: written by `write_cache`.
        device: where predictions are wanted.

    Raises:
        InvalidInput: the directory is no such cache.
    """

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._directory = directory
        self._manifest = _read(directory / _MANIFEST)
        self._device = device
        head = {name: tensor.to(device) for name, tensor in load_file(directory / "head.safetensors").items()}
        self._weight_VD, self._bias_V = head["weight"], head.get("bias")
        self._files: list[Any] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        for number, path in enumerate(sorted(directory.glob("hidden-*.safetensors"))):
            file = safe_open(path, framework="pt")
            self._files.append(file.get_slice("hidden"))  # type: ignore[no-untyped-call]
            for row, key in enumerate(file.get_tensor("keys")):  # type: ignore[no-untyped-call]
                self._places[bytes(key.tolist())] = (number, row)

    def predictions(self, batch: Batch) -> Predictions:
        """See `Teacher`.

        Raises:
            InvalidInput: a window is not in the cache.
        """
        names = keys(batch)
        self.check_holds(names)
        rows_SD = [self._files[number][row] for number, row in (self._places[name] for name in names)]
        hidden_TD = torch.cat(rows_SD).to(self._device, self._weight_VD.dtype)
        return Predictions(
            hidden_TD, self._weight_VD, self._bias_V, self._manifest["scale"], self._manifest["soft_cap"]
        )

    def captured(self, batch: Batch, *, attention: bool = False) -> tuple[Predictions, Captured]:
        """See `Teacher`.

        Raises:
            InvalidInput: it has no layers.
        """
        raise InvalidInput(
            f"teacher_cache {self._directory} holds last hidden states only; for losses on layers leave "
            f"it out"
        )

    def check_holds(self, names: Iterable[bytes]) -> None:
        """Refuse to serve windows that are not here, by their keys.

        Raises:
            InvalidInput: one is missing.
        """
        if any(name not in self._places for name in names):
            raise InvalidInput(
                f"teacher_cache {self._directory} lacks a window of this run, so it is for other data; "
                f"name another directory"
            )


def cache_for(stage: Stage, recipe: Recipe) -> Path | None:
    """The cache that a stage can learn from; None where there is none, or it compares layers."""
    if recipe.teacher_cache is None or any(LOSSES[name].reads != "logits" for name in stage.learnt):
        return None
    return Path(recipe.teacher_cache).expanduser()


def cached_teacher(
    directory: Path,
    online: Online | None,
    windows: Windows,
    recipe: Recipe,
    teacher: Path,
    accelerator: Accelerator,
) -> Cached:
    """The cache of a recipe, written first where it is not there.

    Args:
        directory: where it is.
        online: the teacher in memory; None where the cache is there.
        windows: the data.
        recipe: the run.
        teacher: the teacher's checkpoint.
        accelerator: device, processes, precision.

    Raises:
        InvalidInput: it is for something else, or cannot be written.
    """
    bf16 = accelerator.mixed_precision == "bf16"
    identity = identify(teacher, recipe.data.seq_len, recipe.teacher_cache_dtype, bf16)
    if online and not directory.exists():
        online.model.to(accelerator.device)  # where a student is sharded, its teacher is loaded elsewhere
        write_cache(directory, online, windows, recipe.windows, identity, accelerator)
    return open_cache(directory, windows, recipe.windows, identity, accelerator.device)


def open_cache(
    directory: Path, windows: Batches, count: int, identity: Mapping[str, Any], device: torch.device
) -> Cached:
    """A cache for the first `count` windows of a run.

    Raises:
        InvalidInput: it was made of or for something else; says what.
    """
    manifest = _read(directory / _MANIFEST)
    changed = [key for key in identity if manifest.get(key) != identity[key]]
    if changed:
        values = (
            "" if changed[0] == "teacher" else f" ({manifest.get(changed[0])}, not {identity[changed[0]]})"
        )
        raise InvalidInput(
            f"teacher_cache {directory} was made for another {changed[0]}{values}; name another directory"
        )
    cache = Cached(directory, device)
    cache.check_holds(key for cursor in range(count) for key in keys(windows.batch([cursor])))
    return cache


def identify(teacher: Path, seq_len: int, dtype: str, bf16: bool) -> dict[str, Any]:
    """What a cache is made of and for, beside the windows themselves.

    Reads the teacher's files for their hashes.
    """
    files = describe(teacher, None)["files"]
    weights = {
        name: digest
        for name, digest in files.items()
        if name.endswith(".safetensors") or name == "config.json"
    }
    computed = "bfloat16" if bf16 else "float32"
    return {
        "schema": _SCHEMA,
        "teacher": weights,
        "seq_len": seq_len,
        "dtype": computed if dtype == "auto" else dtype,
        "computed_in": computed,
    }


def write_cache(
    directory: Path,
    teacher: Online,
    windows: Batches,
    count: int,
    identity: Mapping[str, Any],
    accelerator: Accelerator,
) -> None:
    """Run the teacher over the first `count` windows of a run and keep what it gives, each window once.

    The processes share the work. What a run that was stopped has written is taken up again; the directory
    appears when it is whole.

    Raises:
        InvalidInput: the directory or its `.partial` is something else, or the disk is too small.
    """
    partial, is_main = directory.with_name(directory.name + ".partial"), accelerator.is_main_process
    cursors = {key: cursor for cursor in range(count) for key in keys(windows.batch([cursor]))}
    dtype, width = DTYPES[identity["dtype"]], teacher.model.config.get_text_config().hidden_size
    bytes_each = identity["seq_len"] * width * dtype.itemsize
    parts = list(_parts(list(cursors.values()), max(1, _FILE_BYTES // bytes_each)))
    mine = range(accelerator.process_index, len(parts), accelerator.num_processes)
    try:
        with _begun(directory, partial, _plan(identity, cursors)) if is_main else nullcontext():
            accelerator.wait_for_everyone()
            _check_room(partial, bytes_each * len(cursors))
            with progress_bar("teacher", len(mine)) as show:
                for done, number in enumerate(mine, 1):
                    file = partial / f"hidden-{number:05d}.safetensors"
                    if not file.exists():
                        save_whole(_hidden(teacher, windows, parts[number], dtype), file)
                    show(done, "")
            accelerator.wait_for_everyone()
            if is_main:
                _end(partial, directory, teacher, windows.batch([0]), {**identity, "windows": len(cursors)})
            accelerator.wait_for_everyone()
    except (OSError, SafetensorError) as error:
        raise InvalidInput(f"teacher_cache {directory} cannot be written: {error}") from None


def keys(batch: Batch) -> list[bytes]:
    """What tells each window from all others: a hash of its tokens and positions."""
    both_B2S = torch.stack([batch.input_ids_BS, batch.position_ids_BS], 1).cpu().contiguous().numpy()
    return [hashlib.blake2b(window_2S.tobytes(), digest_size=_KEY).digest() for window_2S in both_B2S]


def _plan(identity: Mapping[str, Any], windows: Iterable[bytes]) -> dict[str, Any]:
    """What an unfinished cache is to hold: one that was begun for other windows must not be taken up."""
    return {**identity, "windows": hashlib.sha256(b"".join(windows)).hexdigest()}


@contextmanager
def _begun(directory: Path, partial: Path, plan: Mapping[str, Any]) -> Iterator[None]:
    """Make the directory for what is not whole yet, or find there what an earlier run with the same plan has
    left; and keep other runs out of it."""
    check_output(directory)
    partial.mkdir(parents=True, exist_ok=True)
    file, unfinished = partial / _PLAN, partial / f"{_PLAN}.partial"
    is_empty = {path.name for path in partial.iterdir()} <= {
        _LOCK,
        unfinished.name,
    }  # killed before the plan was there
    if not is_empty and (not file.is_file() or _read(file) != plan):
        raise InvalidInput(
            f"{partial} is no unfinished teacher_cache of this run; remove it, or name another directory"
        )
    with (partial / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(
                f"another run is writing teacher_cache {directory}; wait for it, or name another"
            ) from None
        if is_empty:
            unfinished.write_text(json.dumps(plan) + "\n", encoding="utf-8")
            unfinished.rename(file)
        yield


def _end(partial: Path, directory: Path, teacher: Online, batch: Batch, manifest: dict[str, Any]) -> None:
    given = teacher.predictions(batch.to(teacher.model.device))
    head = {"weight": given.weight_VD, "bias": given.bias_V}
    save_whole(
        {name: tensor.cpu().contiguous() for name, tensor in head.items() if tensor is not None},
        partial / "head.safetensors",
    )
    form = {"scale": given.scale, "soft_cap": given.soft_cap}
    (partial / _MANIFEST).write_text(json.dumps(manifest | form, indent=2) + "\n", encoding="utf-8")
    (partial / _LOCK).unlink()
    finish(partial, directory)
    (directory / _PLAN).unlink()  # last: without its plan the unfinished directory would be nobody's


def _hidden(
    teacher: Online, windows: Batches, cursors: Sequence[int], dtype: torch.dtype
) -> dict[str, Tensor]:
    hidden, names = [], []
    for cursors_B in _parts(cursors, _BATCH):
        batch = windows.batch(cursors_B)
        names += keys(batch)
        hidden_TD = teacher.predictions(batch.to(teacher.model.device)).hidden_TD
        hidden.append(hidden_TD.unflatten(0, batch.input_ids_BS.shape).to("cpu", dtype))
    hidden_NSD = torch.cat(hidden)
    if not hidden_NSD.isfinite().all():
        raise InvalidInput(
            f"the teacher gives hidden states that are not finite in {dtype}; use teacher_cache_dtype: "
            f"bfloat16"
        )
    return {"hidden": hidden_NSD, "keys": torch.tensor([list(name) for name in names], dtype=torch.uint8)}


def _check_room(directory: Path, need: int) -> None:
    free = shutil.disk_usage(directory).free + sum(file.stat().st_size for file in directory.iterdir())
    if need > free:
        raise InvalidInput(
            f"teacher_cache takes {need:,} bytes and {directory.parent} has {free:,}; name a directory on "
            f"a larger disk, "
            "train on fewer tokens, or leave teacher_cache out"
        )


def _parts(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _read(file: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InvalidInput(
            f"teacher_cache {file.parent} is no cache written by kvfold; name another directory"
        ) from None
    return manifest
