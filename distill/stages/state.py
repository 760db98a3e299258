"""Training state on disk: written whole or not at all, checked when read, without pickle.

`step-00000500/` holds weights.safetensors (each trainable or frozen tensor once, float32, adapters next to
the weights that they adapt), optimizer.safetensors (AdamW's moments, `<key>.<weight>`), progress.json, and
manifest.json with the SHA-256 of the other three. Nothing in training draws random numbers, and the order of
the data is a function of the cursor, so this is the whole state. At the end of a stage adapters are merged
into the weights and there is no optimizer, since the next stage has its own.

Tensors are stored whole, however the processes divide them, so that a run can resume with another number of
processes.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ...checkpoints.directory import finish
from ...checkpoints.record import sha256
from ...checkpoints.shards import ShardWriter, TensorSpec
from ...core.console import notice
from ...core.disk import DiskError, disk_sentence, naming
from ...core.errors import InvalidInput
from ...core.files import write_json
from ...core.system_calls import sync_path
from ...core.untrusted import read_json
from ..parallel.tensors import full_tensor, local_part, named_weights
from .weights import adapted, is_adapter, merged

_MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
_MOMENTS = "optimizer.safetensors"
_PROGRESS = "progress.json"
_FILES = {WEIGHTS, _MOMENTS, _PROGRESS}


@dataclass(frozen=True)
class Progress:
    """The point that a run has reached.

    Attributes:
        stage: index of the stage.
        step: optimizer steps taken in it.
        total_steps: optimizer steps taken in the run.
        cursor: windows read in the run.
        tokens: tokens trained on in the run.
        recipe: the resolved recipe.
        models: fingerprints of student and teacher.
    """

    stage: int = 0
    step: int = 0
    total_steps: int = 0
    cursor: int = 0
    tokens: int = 0
    recipe: dict[str, Any] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)


class Gathered:
    """The whole tensors of a model that may be sharded, one by one: a file, a name in it, the tensor.

    No process holds them all, and all must iterate over them together. The student may have adapters; without
    an optimizer, which means a stage's end, they are merged.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self._layers = adapted(model) if model and optimizer is None else {}
        named = list(named_weights(model)) if model else []
        self._weights = {name: weight for name, weight in named if optimizer or not is_adapter(name)}
        # Sorted, since a fresh optimizer and a restored one have their moments in different orders.
        self._states = {
            name: dict(sorted(optimizer.state[weight].items()))
            for name, weight in named
            if optimizer and weight in optimizer.state
        }

    def specs(self) -> dict[str, dict[str, TensorSpec]]:
        """Return the names, dtypes and shapes of the tensors of each file."""
        moments = {
            f"{key}.{name}": value for name, found in self._states.items() for key, value in found.items()
        }
        files: dict[str, Mapping[str, Tensor]] = {WEIGHTS: self._weights, _MOMENTS: moments}
        return {
            file: {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
            for file, tensors in files.items()
        }

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, weight in self._weights.items():
            layer = self._layers.get(name.rpartition(".")[0])
            is_merged = layer is not None and name.endswith(".weight")
            yield WEIGHTS, name, merged(layer) if is_merged else full_tensor(weight.detach())
            for key, value in self._states.get(name, {}).items():
                yield _MOMENTS, f"{key}.{name}", full_tensor(value)


def save(directory: Path, progress: Progress, gathered: Gathered, keep: int, *, writes: bool = True) -> None:
    """Write the state of a step, then remove all but the newest `keep`.

    All processes call it together, and one of them `writes`.

    Raises:
        InvalidInput: the disk is full or cannot be written; earlier states are untouched.
    """
    if not writes:
        for _ in gathered:
            pass
        return
    final = directory / f"step-{progress.total_steps:08d}"
    partial = directory / (final.name + ".partial")
    for leftover in (partial, final):  # `final` exists if it was damaged and its steps were done again
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        with naming(directory):
            partial.mkdir(parents=True)
            _write(partial, progress, gathered)
            # A run that resumes from this state does not log its steps again.
            for log in [*directory.parent.glob("*.jsonl"), directory.parent]:
                sync_path(log)
            finish(partial, final)
    except DiskError as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = "earlier training states are kept" if saved(directory) else ""
        raise InvalidInput(disk_sentence(error, kept=kept)) from None
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise InvalidInput(f"the training state cannot be saved in {directory}: {error}") from None
    for old in saved(directory)[keep:]:
        shutil.rmtree(old)


def _write(directory: Path, progress: Progress, gathered: Gathered) -> None:
    with ExitStack() as stack:
        writers = {}
        for file, specs in gathered.specs().items():
            place = (directory / file).with_suffix("")
            place.mkdir()
            writers[file] = stack.enter_context(ShardWriter(place, specs, sys.maxsize))
        for file, name, tensor in gathered:
            writers[file].write(name, tensor)
    for file in writers:
        place = (directory / file).with_suffix("")
        (place / "model.safetensors").rename(directory / file)
        place.rmdir()
    write_json(directory / _PROGRESS, asdict(progress))
    hashes = {file.name: sha256(file) for file in sorted(directory.iterdir())}
    write_json(directory / _MANIFEST, hashes)


def newest(directory: Path) -> Path | None:
    """Return the newest whole state; None if none was ever saved.

    Raises:
        InvalidInput: there are states, but none is whole.
    """
    states = saved(directory)
    for state in states:
        if is_whole(state):
            return state
        notice(f"{state} is damaged; using the state before it")
    if states:
        raise InvalidInput(
            f"no training state in {directory} is whole; remove {directory.parent} to start over"
        )
    return None


def read_progress(state: Path) -> Progress:
    """Return the point that the run had reached.

    Raises:
        InvalidInput: another version wrote the file.
    """
    content = read_json(state / _PROGRESS)
    if content.keys() != asdict(Progress()).keys():
        raise InvalidInput(f"{state} is no training state of this kvfold; remove it")
    return Progress(**content)


@torch.no_grad()
def restore_weights(state: Path, model: nn.Module) -> None:
    """Copy the saved weights into a model that is not sharded yet.

    Adapters keep their weights if the state was saved before they existed.
    """
    with safe_open(state / WEIGHTS, framework="pt") as file:
        saved_names = set(file.keys())
        for name, parameter in named_weights(model):
            if name in saved_names or not is_adapter(name):
                parameter.copy_(file.get_tensor(name))


def restore_optimizer(state: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give a fresh optimizer over the same weights its saved moments."""
    parameters = dict(named_weights(model))
    with safe_open(state / _MOMENTS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open gives no iterator
            key, _, parameter_name = name.partition(".")
            parameter, value = parameters[parameter_name], file.get_tensor(name)
            # AdamW counts its steps on the CPU.
            optimizer.state[parameter][key] = value if key == "step" else local_part(value, parameter)


def saved(directory: Path) -> list[Path]:
    """Return the saved states, newest first, whole or damaged since."""
    return sorted((path for path in directory.glob("step-*") if path.suffix != ".partial"), reverse=True)


def is_whole(state: Path) -> bool:
    """Return whether all files of a saved state are as they were written."""
    try:
        hashes: dict[str, str] = read_json(state / _MANIFEST)
        files = {state / name: expected for name, expected in hashes.items()}
        # A pipe has no end, and a link leads to what this run did not write.
        if hashes.keys() != _FILES or any(file.is_symlink() or not file.is_file() for file in files):
            return False
        return all(sha256(file) == expected for file, expected in files.items())
    except (OSError, ValueError):
        return False
