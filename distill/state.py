"""Training state on disk: written whole or not at all, checked when read, without pickle.

`step-00000500/` holds weights.safetensors (each trainable or frozen tensor once, float32), optimizer.safetensors (AdamW's
moments, `<key>.<weight>`), progress.json, and manifest.json with the SHA-256 of the other three. Nothing in training draws
random numbers and the order of the data is a function of the cursor, so this is all there is.
"""

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ..convert.checkpoint import finish
from ..convert.console import notice
from ..convert.errors import InvalidInput

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        stage: index of the stage.
        step: optimizer steps taken in it.
        total_steps: optimizer steps taken in the run.
        cursor: windows read in the run.
        tokens: tokens trained on in the run.
        recipe: the resolved recipe.
    """

    stage: int = 0
    step: int = 0
    total_steps: int = 0
    cursor: int = 0
    tokens: int = 0
    recipe: dict[str, Any] = field(default_factory=dict)


def save(directory: Path, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int) -> None:
    """Write the state of a step, then remove all but the newest `keep`.

    Raises:
        InvalidInput: the disk is full or cannot be written; the states before are untouched.
    """
    final = directory / f"step-{progress.total_steps:08d}"
    partial = directory / (final.name + ".partial")
    for leftover in (partial, final):  # `final` exists when it was found damaged and its steps were done again
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write(partial, progress, model, optimizer)
        finish(partial, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise InvalidInput(f"the training state cannot be saved in {directory}: {error}") from None
    for old in saved(directory)[keep:]:
        shutil.rmtree(old)


def _write(directory: Path, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    save_file({name: parameter.detach() for parameter, name in names.items()}, directory / "weights.safetensors")
    moments = {f"{key}.{names[p]}": value for p, row in optimizer.state.items() for key, value in row.items()}
    save_file(moments, directory / "optimizer.safetensors")
    (directory / "progress.json").write_text(json.dumps(asdict(progress), indent=2) + "\n", encoding="utf-8")
    hashes = {file.name: _sha256(file) for file in sorted(directory.iterdir())}
    (directory / _MANIFEST).write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")


def newest(directory: Path) -> Path | None:
    """The newest whole state; None when none was ever saved.

    Raises:
        InvalidInput: there are states, but none is whole.
    """
    states = saved(directory)
    for state in states:
        if _is_whole(state):
            return state
        notice(f"{state} is damaged; going back to the state before it")
    if states:
        raise InvalidInput(f"no training state in {directory} is whole; remove {directory.parent} to start over")
    return None


def read_progress(state: Path) -> Progress:
    """How far the run had come."""
    return Progress(**json.loads((state / "progress.json").read_text(encoding="utf-8")))


@torch.no_grad()
def restore_weights(state: Path, model: nn.Module) -> None:
    """Copy the saved weights into the model."""
    weights = load_file(state / "weights.safetensors")
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def restore_optimizer(state: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give a fresh optimizer over the same weights its saved moments."""
    parameters = dict(model.named_parameters())
    for name, value in load_file(state / "optimizer.safetensors").items():
        key, _, parameter_name = name.partition(".")
        parameter = parameters[parameter_name]
        # AdamW counts its steps on the CPU.
        optimizer.state[parameter][key] = value if key == "step" else value.to(parameter.device)


def saved(directory: Path) -> list[Path]:
    """The states that were saved, newest first, whole or damaged since."""
    return sorted((path for path in directory.glob("step-*") if path.suffix != ".partial"), reverse=True)


def _is_whole(state: Path) -> bool:
    try:
        hashes: dict[str, str] = json.loads((state / _MANIFEST).read_text(encoding="utf-8"))
        return all(_sha256(state / name) == expected for name, expected in hashes.items())
    except (OSError, ValueError):
        return False


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
