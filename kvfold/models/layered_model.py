"""A checkpoint as a transformers model that holds the weights of only those layers that are at work."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..checkpoints.directory import Checkpoint
from ..core.errors import InvalidInput
from ..core.system_calls import trim_memory
from .causal_lm import build_empty, device, untie
from .decoder import layer_list
from .load_failures import loading_failures, no_progress_bars


class LayeredModel:
    """A checkpoint as transformers builds it; the weights of a part are read when it is used, then dropped.

    Attributes:
        model: the model in eval mode; parameters are on the meta device, buffers (rotary tables) are real.
        blocks: its decoder layers, in order.
        device: where they run.

    Args:
        checkpoint: the source.
        attention: transformers' attention implementation; None: the one that transformers chooses.
        dtype: of the weights.
        place: where they run; None: on the GPU of this process, or the CPU where there is none.

    Raises:
        InvalidInput: transformers cannot build the model, or its decoder layers are not found.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        attention: str | None = "eager",
        dtype: torch.dtype = torch.float32,
        place: torch.device | None = None,
    ) -> None:
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            self.model = build_empty(checkpoint.directory, attention, dtype).eval()
        self._checkpoint = checkpoint
        self._dtype = dtype
        self.device = place or device()
        self._stack = layer_list(self.model)
        self.model.tie_weights()  # parameters became new ones on their way to the meta device
        self._keep_own_head()
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.device)
        self.model.requires_grad_(False)
        self.blocks: list[Any] = list(self.model.get_submodule(self._stack))

    def _keep_own_head(self) -> None:
        """Untie a head that the checkpoint stores with other numbers than its embeddings.

        transformers does so on loading, whatever the configuration says.
        """
        head = self.model.get_output_embeddings()
        embedding = self.model.get_input_embeddings()
        if head is None or head.weight is not embedding.weight:
            return
        names = {id(module): f"{name}.weight" for name, module in self.model.named_modules()}
        stored = names[id(embedding)]
        if stored not in self._checkpoint:
            stored = stored.removeprefix(f"{self.model.base_model_prefix}.")
        if stored not in self._checkpoint:
            return
        found = self._stored_head(names[id(head)], stored)
        if found is not None and not self._checkpoint.are_equal(found, stored):
            head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
            untie(self.model)

    def _stored_head(self, head: str, embedding: str) -> str | None:
        """Return the tensor that transformers reads as the head, under whatever name it is stored."""
        shape = self.model.get_output_embeddings().weight.shape
        for name in self._checkpoint:
            if name == embedding or self._block_of(name) is not None:
                continue
            if self._checkpoint.spec(name).shape == tuple(shape):
                found = self._convert({name: torch.empty(shape, device="meta")}, "meta")
                self.model.tie_weights()  # reading on the meta device leaves new parameters
                if head not in found.missing_keys:
                    return name
        return None

    @contextmanager
    def block(self, number: int) -> Iterator[Any]:
        """Give a decoder layer its weights for the duration.

        Raises:
            InvalidInput: a weight is missing, NaN or infinite.
        """
        try:
            self.load(number)
            yield self.blocks[number]
        finally:
            self.drop(number)

    @contextmanager
    def rest(self, *, without: str | None = None) -> Iterator[None]:
        """Give everything but the decoder layers its weights for the duration.

        Args:
            without: `head` or `embedding`: leave that one out, unless it is tied to the other; `ends`: leave
                both out.

        Raises:
            InvalidInput: a weight is missing, NaN or infinite.
        """
        ends = {"head": self.model.get_output_embeddings(), "embedding": self.model.get_input_embeddings()}
        tied = ends["head"].weight is ends["embedding"].weight
        skipped = []
        if without == "ends":
            skipped = list(ends.values())
        elif without is not None and not tied:
            skipped = [ends[without]]
        inside = {id(module) for block in self.blocks for module in block.modules()}
        modules = [
            module for module in self.model.modules() if id(module) not in inside and module not in skipped
        ]
        own = {name for name, module in self.model.named_modules() if module in skipped}
        try:
            names = [name for name in self._checkpoint if self._block_of(name) is None]
            self._load([name for name in names if not _under(name, own)])
            if tied:
                ends["head"].weight = ends["embedding"].weight
            self._check_loaded(modules)
            yield
        finally:
            _to_meta(modules)
            trim_memory()
            if tied:
                ends["head"].weight = ends["embedding"].weight

    def load(self, number: int) -> None:
        """Read the weights of a decoder layer."""
        self._load([name for name in self._checkpoint if self._block_of(name) == number])
        self._check_loaded(list(self.blocks[number].modules()))

    def drop(self, number: int) -> None:
        """Drop the weights of a decoder layer."""
        _to_meta(list(self.blocks[number].modules()))
        trim_memory()

    @contextmanager
    def streamed(self, kept: int) -> Iterator[Any]:
        """Make the model ready to run as a whole for the duration.

        Args:
            kept: so many layers at the start stay in memory; the others are read at every use.
        """

        def load(number: int) -> Any:
            def hook(*_: Any) -> None:
                if any(parameter.is_meta for parameter in self.blocks[number].parameters()):
                    self.load(number)

            return hook

        def drop(number: int) -> Any:
            def hook(*_: Any) -> None:
                if number >= kept:
                    self.drop(number)

            return hook

        with ExitStack() as stack:
            for number, block in enumerate(self.blocks):
                stack.callback(self.drop, number)
                stack.callback(block.register_forward_pre_hook(load(number)).remove)
                stack.callback(block.register_forward_hook(drop(number)).remove)
            stack.enter_context(self.rest())
            yield self.model

    def check_complete(self) -> None:
        """Check by names and shapes alone that the checkpoint holds every parameter.

        `check_weights` checks a source, of a class that transformers has, with a model of its own. This check
        covers outputs too, whose class may travel with them, and uses the model that will be loaded: names
        and tied weights of the two are the same by construction.

        Raises:
            InvalidInput: one is missing, or has another shape.
        """
        tied: dict[int, set[str]] = {}
        for name, weight in self.model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(weight), set()).add(name)
        shapes = {
            name: torch.empty(self._checkpoint.spec(name).shape, device="meta") for name in self._checkpoint
        }
        found = self._convert(shapes, "meta")
        absent = {min(names) for names in tied.values() if names <= found.missing_keys}
        absent |= {name for name, *_ in found.mismatched_keys} | set(found.conversion_errors)
        if absent:
            raise InvalidInput(f"{len(absent)} weights are missing or misshapen, e.g. {min(absent)}")
        self.model.tie_weights()

    def _block_of(self, name: str) -> int | None:
        """Return the number of the decoder layer that a tensor of the checkpoint belongs to.

        Checkpoints may leave the base model's name out.
        """
        for stack in (self._stack, self._stack.removeprefix(f"{self.model.base_model_prefix}.")):
            number, dot, _ = name.removeprefix(f"{stack}.").partition(".")
            if name.startswith(f"{stack}.") and dot and number.isdecimal():
                return int(number)
        return None

    def _load(self, names: list[str]) -> None:
        self._convert({name: self._checkpoint.read(name, self._dtype) for name in names}, self.device)

    def _convert(self, tensors: dict[str, torch.Tensor], place: torch.device | str) -> Any:
        """Put tensors where transformers would, renamed and joined as it does; return its report."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        settings = LoadStateDictConfig(
            device_map={"": place}, dtype=self._dtype, weight_mapping=get_model_conversion_mapping(self.model)
        )
        with loading_failures(self._checkpoint.directory, "model"), no_progress_bars():
            found, _ = convert_and_load_state_dict_in_model(self.model, tensors, settings, None)
        self.model.requires_grad_(False)
        return found

    def _check_loaded(self, modules: list[Any]) -> None:
        for module in modules:
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    where = next(path for path, other in self.model.named_modules() if other is module)
                    raise InvalidInput(
                        f"{self._checkpoint.directory} cannot be loaded: it has no {where}.{name}"
                    )


def _under(name: str, modules: set[str]) -> bool:
    """Return whether a tensor belongs to one of the modules.

    Checkpoints may leave the base model's name out.
    """
    path = name.rpartition(".")[0]
    return any(path == module or module.endswith(f".{path}") for module in modules)


def _to_meta(modules: list[Any]) -> None:
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(
                    torch.empty_like(parameter, device="meta"), requires_grad=False
                )
