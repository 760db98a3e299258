"""Decoder layers of a transformers causal language model: where they are, and how the model calls them.

Nothing here knows the names of a family. The layers are the list whose length the configuration gives, and
attention modules are known by the names of their classes. The arguments of a layer other than the hidden
states (masks, positions, rotary tables, under whatever names) are taken from the model's own calls.

Shapes: B windows, S tokens of a window, D hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import InvalidInput

# A layer's number, the input of its attention (B, S, D) and the output of that (B, S, D).
See = Callable[[int, Tensor, Tensor], None]


def layer_list(model: Any) -> str:
    """Find the list of a model's decoder layers.

    Args:
        model: a transformers causal language model, also one with its weights on the meta device.

    Returns:
        The name of the `ModuleList` in the model.

    Raises:
        InvalidInput: no list in its decoder has as many modules as the configuration has layers.
    """
    count = model.config.get_text_config().num_hidden_layers
    decoder = {id(module) for module in model.get_decoder().modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and id(module) in decoder:
            return str(name)
    raise InvalidInput(
        f"{type(model).__name__} has no list of {count} decoder layers, so kvfold cannot work on its layers "
        "one by one"
    )


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return a model's decoder layers, in order.

    Raises:
        InvalidInput: none are found.
    """
    return list(model.get_submodule(layer_list(model)))


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is attention, by the class names that all families of transformers keep to."""
    return type(module).__name__.endswith("Attention")


def output_of(output: Any) -> Tensor:
    """Return the hidden states in a module's output: the output itself, or the first item of a tuple."""
    hidden = output[0] if isinstance(output, tuple) else output
    assert isinstance(hidden, Tensor)
    return hidden


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a module's call other than the hidden states."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]

    def run(self, layer: Any, hidden_BSD: Tensor) -> Tensor:
        """Call a decoder layer as the model does and return the hidden states after it (B, S, D)."""
        return output_of(layer(hidden_BSD, *self.arguments, **self.named))


class CallRecorder:
    """Learns how a model calls its decoder layers, without running them.

    Each layer is replaced by a stand-in that passes its input on. Some families return a tuple from a layer.
    Only a real output shows it, so the first layer runs once, in the first recording.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._rest: tuple[None, ...] | None = None  # stands for the items of a tuple after the first

    def record(self, layers: Sequence[Any], forward: Callable[[], Any]) -> tuple[Tensor, list[LayerCall]]:
        """Run a model up to its last layer.

        Args:
            layers: its decoder layers, in order; in the first recording the first one needs its weights.
            forward: runs the model.

        Returns:
            The hidden states that enter the first layer, and the call of each layer.
        """
        entered: list[Tensor] = []
        calls: list[LayerCall] = []

        def stand_in(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
                entered.append(hidden_states)
                calls.append(LayerCall(arguments, named))
                if not self._is_known:
                    output = real(hidden_states, *arguments, **named)
                    self._is_known = True
                    self._rest = (None,) * (len(output) - 1) if isinstance(output, tuple) else None
                if len(calls) == len(layers):
                    raise _Stopped
                return self._as_output(hidden_states)

            return call

        with _replaced(layers, [stand_in(layer.forward) for layer in layers]), suppress(_Stopped):
            forward()
        assert len(calls) == len(layers), "a model did not call its layers"
        return entered[0], calls

    @contextmanager
    def giving(self, layers: Sequence[Any], hidden_BSD: Tensor) -> Iterator[None]:
        """Have all layers return these hidden states for the duration; something was recorded before."""
        assert self._is_known

        def call(*_: Any, **__: Any) -> Any:
            return self._as_output(hidden_BSD)

        with _replaced(layers, [call] * len(layers)):
            yield

    def _as_output(self, hidden_BSD: Tensor) -> Any:
        return hidden_BSD if self._rest is None else (hidden_BSD, *self._rest)


class Decoder:
    """The decoder layers of a causal language model and the attention module in each.

    Attributes:
        model: the whole model, in memory or with weights on the meta device.
        layers: names of its decoder layers, in order.
        attentions: names of their attention modules.

    Raises:
        InvalidInput: the model is not made of layers with one attention module each.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        stack = layer_list(model)
        self.layers: list[str] = []
        self.attentions: list[str] = []
        for number, layer in enumerate(model.get_submodule(stack)):
            found: list[str] = []  # attention modules that are in no other one
            for name, module in layer.named_modules():
                if is_attention(module) and not any(name.startswith(f"{outer}.") for outer in found):
                    found.append(name)
            if len(found) != 1:
                raise InvalidInput(
                    f"{type(model).__name__} is not made of layers with one attention module each"
                )
            self.layers.append(f"{stack}.{number}")
            self.attentions.append(f"{stack}.{number}.{found[0]}")
        self._recorder = CallRecorder()

    def __len__(self) -> int:
        return len(self.layers)

    def layer(self, number: int) -> Any:
        """Return a decoder layer."""
        return self.model.get_submodule(self.layers[number])

    def attention(self, number: int) -> Any:
        """Return a layer's attention module."""
        return self.model.get_submodule(self.attentions[number])

    @torch.no_grad()
    def calls(self, **inputs: Tensor) -> list[LayerCall]:
        """Record how the model calls each of its layers; see `CallRecorder`.

        Args:
            **inputs: of the model without its head. `inputs_embeds` (B, S, D) of any value stand for token
                ids where the embedding has no weights, since the calls depend on positions alone.

        Raises:
            InvalidInput: a layer of the model needs more than the call and its input.
        """
        config = self.model.config.get_text_config()
        name = type(self.model).__name__
        if getattr(config, "num_kv_shared_layers", None):
            raise InvalidInput(
                f"the last layers of {name} read keys and values of earlier ones, so kvfold cannot run its "
                "layers one by one"
            )
        if "inputs_embeds" in inputs and getattr(config, "hidden_size_per_layer_input", None):
            raise InvalidInput(
                f"every layer of {name} reads embeddings of the tokens, so kvfold cannot run its layers one "
                "by one without them in memory"
            )
        layers = [self.layer(number) for number in range(len(self))]
        _, calls = self._recorder.record(layers, lambda: self.model.base_model(**inputs, use_cache=False))
        return calls

    @torch.no_grad()
    def embedded(self, **inputs: Tensor) -> Tensor:
        """Return the hidden states that enter the first layer (B, S, D), which does not run."""
        entered: list[Tensor] = []

        def stop(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
            entered.append(hidden_states)
            raise _Stopped

        with _replaced([self.layer(0)], [stop]), suppress(_Stopped):
            self.model.base_model(**inputs, use_cache=False)
        return entered[0]

    def attend(self, number: int, call: LayerCall, hidden_BSD: Tensor) -> Tensor:
        """Run a layer's attention alone.

        Returns:
            The output of the attention after its output projection (B, S, D); differentiable.
        """
        inner = self._inner_call(number, call, hidden_BSD)
        if inner.arguments:
            return output_of(self.attention(number)(hidden_BSD, *inner.arguments[1:], **inner.named))
        return output_of(self.attention(number)(**{**inner.named, "hidden_states": hidden_BSD}))

    @torch.no_grad()
    def _inner_call(self, number: int, call: LayerCall, hidden_BSD: Tensor) -> LayerCall:
        """Record how a layer calls its attention, hidden states included."""
        seen: list[LayerCall] = []

        def stop(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen.append(LayerCall(arguments, named))
            raise _Stopped

        hook = self.attention(number).register_forward_pre_hook(stop, with_kwargs=True)
        with ExitStack() as stack, suppress(_Stopped):
            stack.callback(hook.remove)
            self.layer(number).forward(hidden_BSD, *call.arguments, **call.named)
        assert seen, "a decoder layer did not call its attention"
        return seen[0]

    @contextmanager
    def seen_by(self, see: See) -> Iterator[None]:
        """Pass the input and output of each attention module to `see` as soon as it has run."""

        def hook(number: int) -> Callable[..., None]:
            return lambda _, arguments, named, output: see(
                number, arguments[0] if arguments else named["hidden_states"], output_of(output)
            )

        with ExitStack() as stack:
            for number in range(len(self)):
                handle = self.attention(number).register_forward_hook(hook(number), with_kwargs=True)
                stack.callback(handle.remove)
            yield


class _Stopped(Exception):
    """The model has called the layers that matter."""


@contextmanager
def _replaced(modules: Sequence[Any], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    own = [module.__dict__.get("forward") for module in modules]  # of compiled and hooked modules
    for module, forward in zip(modules, forwards, strict=True):
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward
