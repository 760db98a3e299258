"""A model that reads its cache as an engine stores it: rounded to a number format when it is written.

Attention modules of transformers write new keys and values with `update` of a cache object and attend to what
it returns. Here each module is given a stand-in for that object, whether the caller keeps a cache or not. So
every token, also the one that is just written, is read in the format, by a forward pass over a whole window
exactly as by decoding token by token.

Legend: B sequences, K key/value heads, T new tokens, S tokens of the cache, H head dim, C latent rank,
R rotary width.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.cache_dtypes import CacheDtype
from ..core.errors import InvalidInput
from .caches import CACHE_NAMES
from .decoder import Decoder

_NAMES = (*CACHE_NAMES, "layer_past", "past_key_value")  # of the cache among the arguments of attention


class StoredCache:
    """The cache of a loaded model in a number format, from its construction on.

    What a format's group or scale spans is what one token writes at once: the key and the value of each head,
    or the latent and the rotary key as one row, as vLLM stores them. The digits of positions that kvfold's
    intact form keeps next to its latent are not rounded. Where a gradient is formed, it is that of
    `CacheDtype.passed`.

    Args:
        model: a transformers causal language model; its attention modules get hooks.
        kind: the number format.
        scales: by number of a layer, the scale of its keys (of its latent) and of its values; 1.0 elsewhere.
        option: the user's name for the format, for errors.

    Attributes:
        kind: the number format.
        bytes_per_token: bytes that a token takes in each layer, with its scales; None before the layer ran.

    Raises:
        InvalidInput: the model is not made of layers with one attention module each.

    Example:
        >>> from kvfold.core.cache_dtypes import cache_dtype
        >>> stored = StoredCache(model, cache_dtype("fp8_e4m3"))  # doctest: +SKIP
        >>> with stored.off():  # doctest: +SKIP
        ...     exact = model(ids).logits
    """

    def __init__(
        self,
        model: Any,
        kind: CacheDtype,
        scales: Mapping[int, tuple[float, float]] | None = None,
        option: str = "--cache-dtype",
    ) -> None:
        decoder = Decoder(model)
        self.kind = kind
        self._option = option
        self.bytes_per_token: list[float | None] = [None] * len(decoder)
        self._scales = dict(scales or {})
        self._is_on = True
        self._given: dict[int, _Reading] = {}
        self._handles: list[Any] = []
        for number in range(len(decoder)):
            self._watch(number, decoder.attention(number))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the model read its cache unrounded for the duration."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    def _watch(self, number: int, module: Any) -> None:
        parameters = list(inspect.signature(module.forward).parameters)
        names = [name for name in _NAMES if name in parameters]
        if not names:
            raise self._refusal(number, module)

        def give(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._is_on:
                return None
            given = {**dict(zip(parameters, args, strict=False)), **kwargs}
            name = next((name for name in names if given.get(name) is not None), names[0])
            inner, place = given.get(name), parameters.index(name)
            if isinstance(inner, _Reading):  # arguments of another call, of which this one is made
                inner = inner.inner
            reading = self._given[number] = _Reading(inner, self, number, module)
            if place < len(args):
                return (*args[:place], reading, *args[place + 1 :]), kwargs
            return args, {**kwargs, name: reading}

        def check(_: nn.Module, args: Any, output: Any) -> None:
            if self._is_on and not self._given.pop(number).is_written:
                raise self._refusal(number, module)

        self._handles += [
            module.register_forward_pre_hook(give, with_kwargs=True),
            module.register_forward_hook(check),
        ]

    def _refusal(self, number: int, module: Any) -> InvalidInput:
        return InvalidInput(
            f"layer {number} of this model ({type(module).__name__}) does not write its keys and values to a "
            f"cache of transformers, so the loss of {self.kind.name} cannot be measured; leave out "
            f"{self._option}"
        )

    def write(self, number: int, module: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a layer writes as it will be read.

        Args:
            number: of the layer.
            module: its attention.
            first: keys (B, K, T, H), or latents (B, 1, T, C).
            second: values (B, K, T, H), rotary keys (B, 1, T, R), or digits of positions.
        """
        first_scale, second_scale = self._scales.get(number, (1.0, 1.0))
        # kvfold's intact form caches a latent and rebuilds keys from it.
        if any(kind.__name__ == "KvfoldIntactAttention" for kind in type(module).__mro__):
            rows = [first]
            read = self._rounded(first, first_scale), second
        elif getattr(module, "kv_lora_rank", None):
            rows = [torch.cat([first, second], dim=-1)]
            widths = [first.shape[-1], second.shape[-1]]
            latent, rotary = self._rounded(rows[0], first_scale).split(widths, dim=-1)
            read = latent, rotary
        else:
            rows = [first, second]
            read = self._rounded(first, first_scale), self._rounded(second, second_scale)
        self.bytes_per_token[number] = sum(row.shape[1] * self.kind.bytes(row.shape[-1]) for row in rows)
        return read

    def _rounded(self, rows: Tensor, scale: float) -> Tensor:
        return (self.kind.passed if rows.requires_grad else self.kind.stored)(rows, scale)


class _Reading:
    """The stand-in for the cache in one call of one attention module.

    Everything other than `update` is the caller's cache's.

    Attributes:
        inner: the caller's cache; None where it keeps none.
        is_written: true once the attention has written to it.
    """

    def __init__(self, inner: Any, stored: StoredCache, number: int, module: Any) -> None:
        self.is_written, self.inner = False, inner
        self._stored, self._number, self._module = stored, number, module

    def update(self, first: Tensor, second: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new tokens and return all that attention reads."""
        self.is_written = True
        first, second = self._stored.write(self._number, self._module, first, second)
        if self.inner is None:
            return first, second
        found: tuple[Tensor, Tensor] = self.inner.update(first, second, *args, **kwargs)
        return found

    def get_seq_length(self, *args: Any) -> int:
        """Return the tokens that the cache holds, 0 where none is kept. Llama 4's attention asks for it."""
        return 0 if self.inner is None else int(self.inner.get_seq_length(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
