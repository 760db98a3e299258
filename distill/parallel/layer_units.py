"""Models that no process ever holds whole: built without weights, which each unit gets while it is sharded.

A unit is a decoder layer, or everything around the layers. Every process reads every unit, since transformers
may rename, fuse or split tensors on the way, and keeps its shard. So a process needs room for its part of a
model and one unit, which it needs for a forward pass as well.

Shapes: any.
"""

from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ...checkpoints.directory import Checkpoint
from ...checkpoints.quantised.packed_checkpoint import open_checkpoint
from ...convert.formats import to_trainable
from ...core.console import notice
from ...core.errors import InvalidInput
from ...models.causal_lm import Loaded, describe
from ...models.decoder import layer_list
from ...models.layered_model import LayeredModel
from ...models.load_options import LoadOptions
from .tensors import named_weights

# Norms that `to_trainable` may take out of a model, depending on their weights.
_LATENT_NORMS = ("kv_a_layernorm.weight", "q_a_layernorm.weight")


class LayerUnits:
    """The weights of a model that was built without any.

    Attributes:
        model: the model; its parameters are on the meta device until they are given, its buffers real.
        loaded: the same with its tokenizer.
        saved_weights: a file of a training state whose weights replace the checkpoint's, by the names of
            `tensors.named_weights`; None for no such file.

    Raises:
        InvalidInput: transformers cannot build the model, or the checkpoint has no safetensors or lacks a
            weight.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, *, opened: bool = False) -> None:
        checkpoint = open_checkpoint(directory)
        self.model = skeleton(checkpoint, dtype, opened=opened)
        tokenizer = describe(directory, LoadOptions()).tokenizer
        self.loaded = Loaded(directory, tokenizer, self.model.config, self.model)
        self.saved_weights: Path | None = None
        self._source = LayeredModel(checkpoint, attention=None, dtype=dtype)
        self._opened = opened
        self._source.check_complete()
        self._layers = layer_list(self.model)

    def __len__(self) -> int:
        return len(self._source.blocks)

    @contextmanager
    def layer(self, number: int) -> Iterator[nn.Module]:
        """Give a decoder layer its weights for the duration; those that are sharded meanwhile stay.

        Raises:
            InvalidInput: a weight is missing, NaN or infinite.
        """
        with self._source.block(number) as block:
            if self._opened:
                to_trainable(block)
            layer = self.model.get_submodule(f"{self._layers}.{number}")
            self._give(layer, block)
            yield layer

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Give everything around the decoder layers its weights; as `layer`."""
        layers = {id(module) for module in self.model.get_submodule(self._layers).modules()}
        with self._source.rest():
            self._give(self.model, self._source.model, without=layers)
            yield

    @torch.no_grad()
    def _give(self, taker: nn.Module, giver: nn.Module, without: Set[int] = frozenset()) -> None:
        """Put weights where there are none.

        Tied weights stay tied. Existing weights stay unless a training state has them.
        """
        names = {id(weight): name for name, weight in named_weights(self.model)}
        given: dict[int, nn.Parameter] = {}
        with ExitStack() as stack:
            saved = None
            if self.saved_weights:
                saved = stack.enter_context(safe_open(self.saved_weights, framework="pt"))
            known = set(saved.keys()) if saved else set()
            for path, module in taker.named_modules():
                if id(module) in without:
                    continue
                there = path.replace(".base_layer", "")
                present = {name: weight for name, weight in module._parameters.items() if weight is not None}
                for name, weight in present.items():
                    if id(weight) not in given:
                        value = weight
                        if weight.is_meta:
                            value = giver.get_parameter(f"{there}.{name}".removeprefix("."))
                        if saved and names[id(weight)] in known:
                            value = saved.get_tensor(names[id(weight)]).to(value.device)
                        given[id(weight)] = nn.Parameter(value.detach(), requires_grad=weight.requires_grad)
                    module._parameters[name] = given[id(weight)]
                for name in module._buffers.keys() - module._non_persistent_buffers_set:
                    module._buffers[name] = giver.get_submodule(there)._buffers[name]


def skeleton(checkpoint: Checkpoint, dtype: torch.dtype, *, opened: bool) -> Any:
    """Return a checkpoint's model in evaluation mode, with its parameters on the meta device.

    With `opened`, linearised norms are opened for training, see `to_trainable`. Errors as of `LayerUnits`.
    """
    model = LayeredModel(checkpoint, attention=None, dtype=dtype).model
    for module in model.modules():
        if module._non_persistent_buffers_set:  # tables that no checkpoint has, as transformers makes them
            model._init_weights(module)  # float32, whatever the model was built in
    if opened:
        _read_norms(model, checkpoint)
        to_trainable(model)
    return model


def open_in_units(directory: Path, dtype: torch.dtype, *, opened: bool = False) -> LayerUnits | None:
    """Open a checkpoint by the unit; arguments as of `LayerUnits`.

    Returns:
        None, with a notice, if that is impossible: then every process must load the whole model.
    """
    try:
        return LayerUnits(directory, dtype, opened=opened)
    except InvalidInput as reason:
        notice(f"every process loads the whole of {directory} before it keeps its shards: {reason}")
        return None


@torch.no_grad()
def _read_norms(model: Any, checkpoint: Checkpoint) -> None:
    """Give a model the latent norms whose weights show whether they are linearised."""
    prefix = f"{model.base_model_prefix}."
    for name, _ in list(model.named_parameters()):
        if name.endswith(_LATENT_NORMS):
            stored = next((known for known in (name, name.removeprefix(prefix)) if known in checkpoint), None)
            if stored is None:
                raise InvalidInput(f"{name} has another name in the checkpoint")
            place, _, own = name.rpartition(".")
            model.get_submodule(place)._parameters[own] = nn.Parameter(
                checkpoint[stored].float(), requires_grad=False
            )
