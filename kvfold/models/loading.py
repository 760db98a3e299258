"""The source as a transformers model.

Whole in memory, or with the weights of only those layers that are at work.
"""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from ..checkpoints.directory import Checkpoint
from ..convert.families.recognition import FAMILIES
from ..convert.families.source import has_own_head
from ..core.errors import InvalidInput


def device() -> torch.device:
    """Where models run: this process's GPU, or the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def load_model(directory: Path) -> Any:
    """A local checkpoint as statistics need it: float32, eager attention, eval mode, on the GPU where there
    is one.

    Raises:
        InvalidInput: it cannot be loaded whole.
    """
    from transformers import AutoModelForCausalLM

    with _failures(directory, "model"), _quiet():
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    if info["missing_keys"]:  # transformers fills them with random numbers
        raise InvalidInput(
            f"{directory} cannot be loaded: weights are missing, e.g. {min(info['missing_keys'])}"
        )
    return model.to(device()).eval()


def load_tokenizer(directory: Path) -> Any:
    """A local checkpoint's tokenizer.

    Raises:
        InvalidInput: it has none that transformers can load.
    """
    from transformers import AutoTokenizer

    with _failures(directory, "tokenizer"):
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def untie(model: Any) -> None:
    """Have a model's configuration say that its head is not its embeddings, so that nothing ties them
    later.
    """
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    model.all_tied_weights_keys.pop(f"{head}.weight", None)


class LayeredModel:
    """A checkpoint as transformers builds it, whose weights are read when a part is used and then dropped.

    Attributes:
        model: the model in eval mode; parameters are on the meta device, buffers (rotary tables) are real.
        blocks: its decoder layers, in order.
        device: where they run.

    Args:
        checkpoint: the source.
        query: name of something in layer 0, such as its query projection, under which the decoder layers are
            found; None: the first list of as many modules as there are layers.
        attention: transformers' implementation; None: the one it would choose.
        dtype: of the weights.

    Raises:
        InvalidInput: transformers cannot build the model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        query: str | None,
        attention: str | None = "eager",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        from accelerate import init_empty_weights

        with _failures(checkpoint.directory, "model"), init_empty_weights(include_buffers=False):
            self.model = _build(checkpoint.directory, attention, dtype).eval()
        self.model.tie_weights()  # parameters became new ones on their way to the meta device
        self._keep_own_head(checkpoint)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device())
        self.model.requires_grad_(False)
        self.device = device()
        self._checkpoint, self._dtype = checkpoint, dtype
        self._stack = _stack_of(self.model, query)
        self.blocks: list[Any] = list(self.model.get_submodule(self._stack))

    def _keep_own_head(self, checkpoint: Checkpoint) -> None:
        """Untie a head that the checkpoint stores with other numbers than its embeddings, as transformers
        does on loading.
        """
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if head is None or head.weight is not embedding.weight:
            return
        names = {id(module): f"{name}.weight" for name, module in self.model.named_modules()}
        stored = names[id(embedding)]
        if stored not in checkpoint:
            stored = stored.removeprefix(f"{self.model.base_model_prefix}.")
        family = FAMILIES.get(
            str(checkpoint.config.get("model_type"))
        )  # transformers may rename what is stored
        if has_own_head(checkpoint, names[id(head)] if family is None else family.head, stored):
            head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
            untie(self.model)

    @contextmanager
    def block(self, number: int) -> Iterator[Any]:
        """A decoder layer with its weights, for the duration.

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
        """Everything but the decoder layers with its weights, for the duration.

        Args:
            without: `head` or `embedding`, when it is not tied to the other and not needed; `ends`: neither.

        Raises:
            InvalidInput: a weight is missing, NaN or infinite.
        """
        ends = {"head": self.model.get_output_embeddings(), "embedding": self.model.get_input_embeddings()}
        tied = ends["head"].weight is ends["embedding"].weight
        skipped = (
            list(ends.values()) if without == "ends" else [] if tied or without is None else [ends[without]]
        )
        inside = {id(module) for block in self.blocks for module in block.modules()}
        modules = [
            module for module in self.model.modules() if id(module) not in inside and module not in skipped
        ]
        own = {name for name, module in self.model.named_modules() if module in skipped}
        try:
            self._load(
                [name for name in self._checkpoint if self._block_of(name) is None and not _under(name, own)]
            )
            if tied:
                ends["head"].weight = ends["embedding"].weight
            self._check_loaded(modules)
            yield
        finally:
            _to_meta(modules)
            _give_back()
            if tied:
                ends["head"].weight = ends["embedding"].weight

    def load(self, number: int) -> None:
        """Read a decoder layer's weights."""
        self._load([name for name in self._checkpoint if self._block_of(name) == number])
        self._check_loaded(list(self.blocks[number].modules()))

    def drop(self, number: int) -> None:
        """Forget a decoder layer's weights."""
        _to_meta(list(self.blocks[number].modules()))
        _give_back()

    @contextmanager
    def streamed(self, kept: int) -> Iterator[Any]:
        """The model ready to run as a whole.

        The first `kept` layers stay in memory, the others are read at every use.
        """

        def load(number: int) -> Any:
            return lambda *_: None if _is_loaded(self.blocks[number]) else self.load(number)

        def drop(number: int) -> Any:
            return lambda *_: None if number < kept else self.drop(number)

        with ExitStack() as stack:
            for number, block in enumerate(self.blocks):
                stack.callback(self.drop, number)
                stack.callback(block.register_forward_pre_hook(load(number)).remove)
                stack.callback(block.register_forward_hook(drop(number)).remove)
            stack.enter_context(self.rest())
            yield self.model

    def check_complete(self) -> None:
        """See, without reading a number, that every parameter would come out of the checkpoint.

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
        """The decoder layer that a tensor of the checkpoint belongs to.

        Checkpoints may leave the base model's name out.
        """
        for stack in (self._stack, self._stack.removeprefix(f"{self.model.base_model_prefix}.")):
            number, dot, _ = name.removeprefix(f"{stack}.").partition(".")
            if name.startswith(f"{stack}.") and dot and number.isdecimal():
                return int(number)
        return None

    def _load(self, names: list[str]) -> None:
        """Put tensors of the checkpoint where they belong."""
        with _failures(self._checkpoint.directory, "model"):
            self._convert({name: self._checkpoint[name] for name in names}, device())

    def _convert(self, tensors: dict[str, torch.Tensor], place: torch.device | str) -> Any:
        """Put tensors where transformers would, renamed and joined as it does; returns what it says of it."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        how = LoadStateDictConfig(
            device_map={"": place}, dtype=self._dtype, weight_mapping=get_model_conversion_mapping(self.model)
        )
        with _failures(self._checkpoint.directory, "model"), _quiet():
            found, _ = convert_and_load_state_dict_in_model(self.model, tensors, how, None)
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
    """Whether a tensor is one of a module's own; checkpoints may leave the base model's name out."""
    path = name.rpartition(".")[0]
    return any(path == module or module.endswith(f".{path}") for module in modules)


def _build(directory: Path, attention: str | None, dtype: torch.dtype) -> Any:
    """The class that a checkpoint is loaded with, without weights.

    What this kvfold wrote is built by its own code.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from .fused_attention import level
    from .remote_code import carries_own_code
    from .shipped.modeling_kvfold import KvfoldForCausalLM

    how = {"dtype": dtype, **({} if attention is None else {"attn_implementation": attention})}
    if carries_own_code(directory):
        return KvfoldForCausalLM._from_config(
            KvfoldForCausalLM.config_class.from_pretrained(directory), **how
        )
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return level(AutoModelForCausalLM.from_config(config, trust_remote_code=False, **how))


def _stack_of(model: Any, query: str | None) -> str:
    """The name of the list of decoder layers, or of the one that a projection is in."""
    if query is None:
        count = model.config.get_text_config().num_hidden_layers
        lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
        found = next((str(name) for name, module in lists.items() if len(module) == count), None)
        if found is None:
            raise InvalidInput(
                f"{type(model).__name__} has no list of {count} layers, so it cannot be read layer by layer"
            )
        return found
    parts = query.split(".")
    prefixes = [".".join(parts[:end]) for end in range(1, len(parts))]
    return next(prefix for prefix in prefixes if isinstance(model.get_submodule(prefix), nn.ModuleList))


def _is_loaded(block: Any) -> bool:
    return not any(parameter.is_meta for parameter in block.parameters())


def _to_meta(modules: list[Any]) -> None:
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(
                    torch.empty_like(parameter, device="meta"), requires_grad=False
                )


def _give_back() -> None:
    """Have the C library return freed memory.

    Glibc keeps blocks of a few MB, and layer after layer they add up.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def _failures(directory: Path, what: str) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except InvalidInput:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = shorten(str(error), 200, placeholder=" ...")
        raise InvalidInput(
            f"the {what} of {directory} cannot be loaded ({type(error).__name__}): {reason}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers, for the duration."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
