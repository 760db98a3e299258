"""The model that is trained: from a checkpoint to trainable float32 weights, and back to a checkpoint."""

from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

from ..convert.checkpoint import Checkpoint, copy_side_files, save_state
from ..convert.containers import to_published, to_trainable
from ..convert.containers.remote import ship
from ..convert.errors import InvalidInput
from ..eval.head import check_head
from ..eval.models import Described, Loaded, load
from ..eval.options import Options


def load_student(directory: Path, seq_len: int, device: torch.device) -> Loaded:
    """The student with float32 weights, in evaluation mode: no dropout, so that nothing in training draws random numbers.

    Raises:
        InvalidInput: it cannot be loaded whole, has fewer positions than a window, or its logits are no linear function of its
            last hidden states.
    """
    student = load(directory, Options(device="cuda" if device.type == "cuda" else "cpu", dtype="float32"))
    check_positions(student, seq_len)
    check_head(student, torch.arange(4)[None])
    student.model.to(device)
    to_trainable(student.model)
    return student


def check_positions(student: Loaded | Described, seq_len: int) -> None:
    """Refuse windows that are longer than a student takes.

    Raises:
        InvalidInput: says so.
    """
    if student.positions is not None and seq_len > student.positions:
        raise InvalidInput(
            f"data.seq_len {seq_len} is more than the {student.positions} positions of the student {student.path}"
        )


def publish(model: nn.Module, student: Path, directory: Path) -> None:
    """Write the trained model as a checkpoint with the names, dtypes, config and side files of the student it came from."""
    stored = Checkpoint(student)
    dtypes = {name: stored.spec(name).dtype for name in stored}
    usual = Counter(dtypes.values()).most_common(1)[0][0]
    state = to_published(model, _without_ties(model))
    save_state({name: tensor.to("cpu", dtypes.get(name, usual)) for name, tensor in state.items()}, directory)
    (directory / "config.json").write_bytes((student / "config.json").read_bytes())
    copy_side_files(student, directory)
    ship(student, directory)


def _without_ties(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with each tensor once, under the first of its names."""
    twice = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        name for name, _ in model.named_parameters()
    }
    return {name: tensor for name, tensor in model.state_dict().items() if name not in twice}
