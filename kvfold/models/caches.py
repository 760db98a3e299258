"""Caches of keys and values: their name in transformers, one filled in place, and positions behind one."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_OTHERS = {"linear_attention", "conv"}  # kinds of layers that do not attend
CACHE_NAMES = ("cache", "past_key_values")  # from transformers 5.24 on, and before


def cache_argument(module: Any) -> str:
    """Return the name of the cache among the arguments of a module's forward pass.

    It is asked of the module and not of the release, since code that travels with a checkpoint keeps the name
    that it was written with.
    """
    parameters = signature(module.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[-1])


def cache_of(output: Any) -> Any:
    """Return the cache in a model's output."""
    return next(getattr(output, name) for name in CACHE_NAMES if hasattr(output, name))


class GrowingLayer(DynamicLayer):
    """A layer's keys and values at the head of tensors that are as long as the text will be.

    transformers' own layer copies everything before at every token, T²/2 copies over T tokens: two thirds of
    the time in which a small model writes its calibration text on a CPU.

    Args:
        length: tokens of the text.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add the keys and values of more tokens (B, K, T, H); return those of all tokens so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._all_keys, self._all_values = (
                states.new_empty(*states.shape[:2], self._length, states.shape[3])
                for states in (key_states, value_states)
            )
        first = self.get_seq_length()
        end = first + key_states.shape[2]
        self._all_keys[:, :, first:end] = key_states
        self._all_values[:, :, first:end] = value_states
        self.keys, self.values = self._all_keys[:, :, :end], self._all_values[:, :, :end]
        return self.keys, self.values


def growing_cache(config: Any, length: int) -> DynamicCache | None:
    """Return an empty cache for `length` tokens; None where only some layers attend.

    The classes of such models make caches of their own. Layers of other kinds, such as those with a sliding
    window, keep transformers' own.
    """
    if has_other_layers(config):
        return None
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer(length) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def has_other_layers(config: Any) -> bool:
    """Return whether some layers of a model do not attend, by its configuration of transformers.

    None, of a model without one, has none.
    """
    if config is None:
        return False
    return not _OTHERS.isdisjoint(getattr(config.get_text_config(), "layer_types", None) or [])


def positions_behind(model: Any, cache: Any, ids_BT: Tensor) -> dict[str, Tensor]:
    """Return the argument that gives a model the positions of new tokens; empty where all layers attend.

    Where only some do, some classes count positions from a layer that has no keys (MiniMax), or not at all
    (Bamba), when they are called without positions.

    Args:
        model: a transformers causal language model.
        cache: of the tokens before, none of them padding; None at the start.
        ids_BT: the new tokens.
    """
    if cache is None or not has_other_layers(getattr(model, "config", None)):
        return {}
    keys = (getattr(layer, "keys", None) for layer in cache.layers)
    seen = next((key.shape[-2] for key in keys if key is not None), 0)
    place_T = torch.arange(seen, seen + ids_BT.shape[1], device=ids_BT.device)
    return {"position_ids": place_T.expand_as(ids_BT)}
