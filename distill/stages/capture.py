"""Decoder layers at work: what they and their attention read and give while a model runs, and an attention
module run alone.

A layer is found by the attention module in it, so that nothing here knows a family's names; what either is
called with beside the hidden states (masks, positions, rotary tables, under whatever names) is taken from the
model's own calls.

Shapes: B windows, S tokens of a window, D hidden size.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import InvalidInput
from ..data.batch import Batch
from ..losses.predictions import predict

See = Callable[
    [int, Tensor, Tensor], None
]  # a layer's number, what its attention read (B, S, D), what that gave (B, S, D)


@dataclass(frozen=True)
class Call:
    """What a module is called with beside the hidden states."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]


@dataclass(frozen=True)
class Captured:
    """What a model's layers gave while it ran, by layer.

    Attributes:
        hidden: hidden states after each layer (B, S, D).
        attention: queries, keys and values as they meet, after rotation: (B, heads, S, head dim) each.
    """

    hidden: list[Tensor] = field(default_factory=list)
    attention: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)


class Decoder:
    """The decoder layers of a causal language model, whole or with its weights elsewhere.

    Attributes:
        model: the whole.
        layers: names of its decoder layers, in order.
        attentions: names of their attention modules.

    Raises:
        InvalidInput: the model is not made of layers with one attention module each.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.attentions = _attentions(model)
        self.layers = [match[0] for name in self.attentions if (match := re.match(r".*?\.\d+(?=\.)", name))]
        if not self.layers or len(set(self.layers)) < len(self.attentions):
            raise InvalidInput(f"{type(model).__name__} is not made of layers with one attention module each")
        self._beside: tuple[None, ...] | None = (
            None  # layers may give a tuple, of which the first item goes on
        )
        self._is_known = False

    def __len__(self) -> int:
        return len(self.layers)

    def layer(self, number: int) -> Any:
        """A decoder layer."""
        return self.model.get_submodule(self.layers[number])

    def attention(self, number: int) -> Any:
        """A layer's attention module."""
        return self.model.get_submodule(self.attentions[number])

    @torch.no_grad()
    def calls(self, batch: Batch, *, embedded_BSD: Tensor | None = None) -> list[Call]:
        """How the model calls each of its layers on a batch; the layers do not run, but for the first, once.

        Args:
            batch: B windows of S tokens.
            embedded_BSD: stands for the embedded tokens, where those are not at hand: calls depend on
            positions alone.
        """
        calls: list[Call] = []
        with ExitStack() as stack:
            for number in range(len(self)):
                layer = self.layer(number)
                stack.enter_context(_replaced(layer, self._stand_in(layer.forward, calls)))
            with suppress(_Enough):
                if embedded_BSD is None:
                    predict(self.model, batch)
                else:
                    self.model.base_model(
                        inputs_embeds=embedded_BSD, position_ids=batch.position_ids_BS, use_cache=False
                    )
        assert len(calls) == len(self), "a model did not call its layers"
        return calls

    @torch.no_grad()
    def embedded(self, batch: Batch) -> Tensor:
        """What enters the first layer (B, S, D)."""
        entered: list[Tensor] = []

        def forward(hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
            entered.append(hidden_states)
            raise _Enough

        with _replaced(self.layer(0), forward), suppress(_Enough):
            predict(self.model, batch)
        return entered[0]

    def _stand_in(self, real: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
            calls.append(Call(arguments, named))
            if len(calls) == len(self):
                raise _Enough
            if not self._is_known:
                output = real(hidden_states, *arguments, **named)
                self._beside = (None,) * (len(output) - 1) if isinstance(output, tuple) else None
                self._is_known = True
            return hidden_states if self._beside is None else (hidden_states, *self._beside)

        return forward

    def attend(self, number: int, call: Call, hidden_BSD: Tensor) -> Tensor:
        """Run a layer's attention alone.

        Args:
            number: the layer.
            call: how the model calls that layer.
            hidden_BSD: what the attention reads: what the norm before it would give.

        Returns:
            What the attention gives after its output projection (B, S, D); differentiable.
        """
        inner = self._inner_call(number, call, hidden_BSD)
        if inner.arguments:
            return output_of(self.attention(number)(hidden_BSD, *inner.arguments[1:], **inner.named))
        return output_of(self.attention(number)(**{**inner.named, "hidden_states": hidden_BSD}))

    @torch.no_grad()
    def _inner_call(self, number: int, call: Call, hidden_BSD: Tensor) -> Call:
        """How a layer calls its attention, hidden states included."""

        def stop(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            raise _Called(Call(arguments, named))

        hook = self.attention(number).register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.layer(number).forward(hidden_BSD, *call.arguments, **call.named)
        except _Called as called:
            return called.call
        finally:
            hook.remove()
        raise AssertionError("a decoder layer did not call its attention")

    @contextmanager
    def seen_by(self, see: See) -> Iterator[None]:
        """For the duration, tell `see` what each attention module reads and gives, as soon as it has."""

        def hook(number: int) -> Callable[..., None]:
            return lambda _, arguments, named, output: see(
                number, arguments[0] if arguments else named["hidden_states"], output_of(output)
            )

        with ExitStack() as stack:
            for number in range(len(self)):
                handle = self.attention(number).register_forward_hook(hook(number), with_kwargs=True)
                stack.callback(handle.remove)
            yield


def output_of(output: Any) -> Tensor:
    """The hidden states that a module gives, alone or first in a tuple."""
    hidden = output[0] if isinstance(output, tuple) else output
    assert isinstance(hidden, Tensor)
    return hidden


class _Enough(Exception):
    """The model has called the layers that matter."""


class _Called(Exception):
    """A layer has called its attention."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


@contextmanager
def _replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    own = module.__dict__.get("forward")  # compiled and hooked modules have one of their own
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _attentions(model: Any) -> list[str]:
    """Names of the outermost attention modules, by the class names that all families of transformers keep
    to.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if type(module).__name__.endswith("Attention") and not inside:
            found.append(name)
    return found


@contextmanager
def capturing(model: Any, *, attention: bool = False) -> Iterator[Captured]:
    """For the duration, keep what the model's layers give; with gradients where there are any.

    Args:
        model: a causal language model.
        attention: also keep queries, keys and values.

    Raises:
        InvalidInput: queries, keys and values of this model cannot be seen.
    """
    decoder, captured = Decoder(model), Captured()
    with ExitStack() as stack:
        for number in range(len(decoder)):
            hook = decoder.layer(number).register_forward_hook(
                lambda *seen: captured.hidden.append(output_of(seen[-1]))
            )
            stack.callback(hook.remove)
        if attention:
            stack.enter_context(_functions_seen(decoder, captured))
        yield captured


@contextmanager
def _functions_seen(decoder: Decoder, captured: Captured) -> Iterator[None]:
    """Stand between the attention modules and transformers' attention function, where what differs by
    family is over.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own, find = (
        {id(decoder.attention(number)) for number in range(len(decoder))},
        ALL_ATTENTION_FUNCTIONS.get_interface,
    )

    def get_interface(*asked: Any) -> Callable[..., Any]:
        function = find(*asked)

        def see(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **named: Any
        ) -> Any:
            if id(module) in own:
                captured.attention.append((query, key, value))
            return function(module, query, key, value, *arguments, **named)

        return see

    ALL_ATTENTION_FUNCTIONS.get_interface = get_interface  # of this one object, for the duration
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.get_interface = find
    if len(captured.attention) < len(decoder):
        raise InvalidInput(
            f"attention_relation cannot be computed for {type(decoder.model).__name__}, which has an "
            f"attention function of its "
            "own; use hidden_mse, or attention_output in a stage of its own"
        )
