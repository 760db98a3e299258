"""Outputs of decoder layers, and their queries, keys and values, captured while a model runs.

Shapes: B windows, S tokens of a window, D hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ...core.errors import InvalidInput
from ...models.decoder import Decoder, output_of


@dataclass(frozen=True)
class Captured:
    """Outputs of a model's layers, one entry per layer.

    Attributes:
        hidden: hidden states after each layer (B, S, D).
        attention: queries, keys and values as they meet, after rotation: (B, heads, S, head dim) each.
    """

    hidden: list[Tensor] = field(default_factory=list)
    attention: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)


@contextmanager
def capturing(model: Any, *, attention: bool = False) -> Iterator[Captured]:
    """Keep the outputs of a model's layers for the duration; with gradients where there are any.

    Args:
        model: a causal language model.
        attention: also keep queries, keys and values.

    Raises:
        InvalidInput: this model does not show its queries, keys and values.
    """
    decoder = Decoder(model)
    captured = Captured()
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
    """Keep the arguments of transformers' attention function, which are alike in all families."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = {id(decoder.attention(number)) for number in range(len(decoder))}
    find = ALL_ATTENTION_FUNCTIONS.get_interface

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
            "attention function of its own; use hidden_mse, or attention_output in a stage of its own"
        )
