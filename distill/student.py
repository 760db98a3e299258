"""The model that is trained: from a checkpoint to trainable float32 weights, and back to a checkpoint."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.checkpoint import Checkpoint, copy_side_files, save_state
from ..convert.containers import to_published, to_trainable
from ..convert.containers.remote import ship
from ..convert.errors import InvalidInput
from ..eval.head import check_head
from ..eval.models import Loaded, load
from ..eval.options import Options
from .head import Predictions, predict
from .losses import LOSSES
from .recipe import LossName, WeightSet

# From a model to the names of the weights in the set.
TRAINABLE: dict[WeightSet, Callable[[nn.Module], set[str]]] = {
    "all": lambda model: {name for name, _ in model.named_parameters()},
    "attention": lambda model: {
        f"{place}.{name}"
        for place, module in model.named_modules()
        if type(module).__name__.endswith("Attention")  # so are they named in every family of transformers
        for name, _ in module.named_parameters()
    },
}


class Objective(nn.Module):
    """What accelerate wraps: a module whose forward is the loss, so that the head is read inside the wrapped forward.

    Args:
        model: the student.
        losses: weight of each loss; those of weight 0 are not computed.
    """

    def __init__(self, model: Any, losses: Mapping[LossName, float]) -> None:
        super().__init__()
        self.model = model
        self._losses = {name: weight for name, weight in losses.items() if weight}

    def forward(self, input_ids_BS: Tensor, labels_BS: Tensor, teacher: Predictions) -> dict[str, Tensor]:
        """Sums over the B S tokens, in nats: `loss`, the weighted sum, differentiable; and every single loss by name."""
        student = predict(self.model, input_ids_BS)
        sums = {name: LOSSES[name](student, teacher, labels_BS.flatten())[0] for name in self._losses}
        loss = torch.stack([weight * sums[name] for name, weight in self._losses.items()]).sum()
        return {"loss": loss, **{name: value.detach() for name, value in sums.items()}}


def load_student(directory: Path, seq_len: int, device: torch.device) -> Loaded:
    """The student with float32 weights, in evaluation mode: no dropout, so that nothing in training draws random numbers.

    Raises:
        InvalidInput: it cannot be loaded whole, has fewer positions than a window, or its logits are no linear function of its
            last hidden states.
    """
    student = load(directory, Options(device="cuda" if device.type == "cuda" else "cpu", dtype="float32"))
    if student.positions is not None and seq_len > student.positions:
        raise InvalidInput(f"data.seq_len {seq_len} is more than the {student.positions} positions of the student {directory}")
    check_head(student, torch.arange(4)[None])
    student.model.to(device)
    to_trainable(student.model)
    return student


def set_trainable(model: nn.Module, name: WeightSet) -> list[nn.Parameter]:
    """Freeze everything but one of the sets of `TRAINABLE`; returns what is left to train.

    Raises:
        InvalidInput: the model has no such weights.
    """
    names = TRAINABLE[name](model)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_name in names)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise InvalidInput(f"train: {name} finds no weights in {type(model).__name__}; use train: all")
    return trainable


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
