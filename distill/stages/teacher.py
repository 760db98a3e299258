"""The model that the student learns from, in memory: whole, or sharing with the student what is equal.

Shapes: B windows, S tokens of a window, D hidden size.
"""

from collections import defaultdict
from collections.abc import Set
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ...core.console import notice
from ...core.errors import InvalidInput
from ...models.causal_lm import Loaded, check_comparable, load
from ...models.decoder import Decoder, See
from ...models.load_options import LoadOptions
from ..data.batch import Batch
from ..losses.predictions import Predictions, predict
from ..parallel.accelerator import first_place, shards_models
from ..parallel.layer_units import open_in_units
from ..parallel.sharding import reshard, shard_teacher
from ..recipe.recipe import SHARED, Recipe, Stage
from .capture import Captured, capturing
from .student import check_model
from .weights import TRAINABLE, places_of

_SAMPLED = 64  # entries by which a tensor differs from most others


class Teacher(Protocol):
    """A source of predictions for a stage: constants, without a graph."""

    def predictions(self, batch: Batch) -> Predictions:
        """Return predictions for all B S tokens."""


class Online:
    """A model in memory, frozen, in evaluation mode; with `autocast` it computes in that dtype."""

    def __init__(self, model: Any, autocast: torch.dtype | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self._autocast = autocast

    @torch.no_grad()
    def predictions(self, batch: Batch) -> Predictions:
        """Return predictions for all tokens; see `Teacher`."""
        with self._precision():
            return predict(self.model, batch)

    @torch.no_grad()
    def captured(self, batch: Batch, *, attention: bool = False) -> tuple[Predictions, Captured]:
        """Return predictions and the outputs of layers, with `attention` also queries, keys and values."""
        with self._precision(), capturing(self.model, attention=attention) as captured:
            return predict(self.model, batch), captured

    @torch.no_grad()
    def show_layers(self, batch: Batch, see: See) -> None:
        """Run the layers in order and pass each attention's input and output to `see` at once."""
        with self._precision(), self.decoder().seen_by(see):
            predict(self.model, batch)

    def decoder(self) -> Decoder:
        """Return its decoder layers."""
        return Decoder(self.model)

    def _precision(self) -> torch.autocast:
        return torch.autocast(
            self.model.device.type, dtype=self._autocast, enabled=self._autocast is not None
        )


def load_teacher(
    directory: Path, recipe: Recipe, bf16: bool, device: torch.device, student: Loaded
) -> Online:
    """Load a teacher with weights of its own, in bfloat16 or float32.

    Raises:
        InvalidInput: it cannot be loaded whole, it has another tokenizer than the student, or as of
            `check_model`.
    """
    options = LoadOptions(
        device="cuda" if device.type == "cuda" else "cpu", dtype="bfloat16" if bf16 else "float32"
    )
    teacher = load(directory, options)
    check_comparable(student, teacher, "")
    teacher.model.to(device)
    check_model(teacher, recipe)
    return Online(teacher.model)


def open_teacher(
    directory: Path,
    stage: Stage,
    recipe: Recipe,
    accelerator: Accelerator,
    student: Loaded,
    *,
    alone: bool = False,
) -> Online:
    """Load the teacher that a recipe asks for.

    `student` has the weights that the stage starts from, which `shared` reads. With `alone` each process runs
    the teacher by itself, as when it writes; then it cannot be in shards.

    Raises:
        InvalidInput: as in `load_teacher` and `load_shared`.
    """
    bf16 = accelerator.mixed_precision == "bf16"
    if shards_models(stage) and alone:
        notice(f"every process loads {directory} whole, since each writes by itself what the run learns from")
    elif shards_models(stage) and (
        found := open_in_units(directory, torch.bfloat16 if bf16 else torch.float32)
    ):
        check_comparable(student, found.loaded, "")
        teacher = Online(found.model)
        shard_teacher(teacher, found)
        check_model(found.loaded, recipe)
        reshard(found.model)
        return teacher  # of which every process has a part; all must run it together
    if recipe.teacher != SHARED:
        return load_teacher(directory, recipe, bf16, first_place(accelerator, stage), student)
    trained = TRAINABLE[stage.train](student.model)
    return load_shared(directory, recipe, bf16, accelerator.device, student, trained)


def load_shared(
    directory: Path, recipe: Recipe, bf16: bool, device: torch.device, student: Loaded, trained: Set[str]
) -> Online:
    """Load a teacher that shares the memory of every weight that is equal in the student and stays so.

    Usually only its attention takes memory. It computes the same numbers, bit for bit, as a teacher with
    weights of its own; with `bf16` by autocast, as the student does. `student` has the weights that the stage
    starts from and is on `device`; `trained` names those that the stage trains in place.

    Raises:
        InvalidInput: as in `load_teacher`, or nothing can be shared.
    """
    model = load_teacher(directory, recipe, False, torch.device("cpu"), student).model
    constant = [weight for name, weight in student.model.named_parameters() if name not in trained]
    shared = _share(model, constant)
    if not shared:
        raise InvalidInput(
            f"teacher: shared keeps one copy of what {directory} and the student have in common, and "
            "nothing of that stays as it is in this stage; use train: attention, or leave teacher out"
        )
    own = {id(weight): weight for weight in model.parameters()}
    notice(
        f"student and teacher share {shared:,} weights; the teacher has {_count(own.values()) - shared:,} "
        f"of its own"
    )
    return Online(model.to(device), torch.bfloat16 if bf16 else None)


@torch.no_grad()
def _share(model: nn.Module, constant: list[nn.Parameter]) -> int:
    """Replace parameters by equal ones of `constant`; return how many weights are shared."""
    known: dict[tuple[Any, ...], list[nn.Parameter]] = defaultdict(list)
    for weight in constant:
        known[_sample(weight)].append(weight)
    replaced: dict[int, nn.Parameter] = {}
    for module, name, weight in places_of(model):
        if id(weight) not in replaced:
            equal = (other for other in known[_sample(weight)] if torch.equal(weight.to(other.device), other))
            twin = next(equal, None)
            # A parameter of its own over the same memory: the one must not need a gradient where the other
            # does.
            replaced[id(weight)] = (
                weight if twin is None else nn.Parameter(twin.detach(), requires_grad=False)
            )
        module._parameters[name] = replaced[id(weight)]
    storages = {weight.data_ptr() for weight in constant}
    return _count(weight for weight in replaced.values() if weight.data_ptr() in storages)


def _sample(weight: Tensor) -> tuple[Any, ...]:
    flat = weight.detach().flatten()
    return tuple(weight.shape), *flat[:: max(1, len(flat) // _SAMPLED)].tolist()


def _count(weights: Any) -> int:
    return sum(weight.numel() for weight in weights)
