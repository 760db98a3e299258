"""Token-by-token forward passes of a model with its own cache in transformers.

Legend: B sequences, P tokens of a prompt, T tokens read at once, K of the last of them whose logits are
formed, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ...models.caches import cache_argument, cache_of, positions_behind
from ...models.causal_lm import Loaded
from ...models.finite import refuse


def read(loaded: Loaded, ids_BT: Tensor, cache: Any = None, last: int | None = None) -> tuple[Tensor, Any]:
    """Read more tokens of B sequences.

    Args:
        loaded: the model.
        ids_BT: token ids.
        cache: the cache from the tokens before, which is changed in place; None at the start.
        last: form logits for this many tokens at the end, at least 1; None: for all.

    Returns:
        Logits (B, K, V) in the model's dtype, and the cache after these tokens.
    """
    can_keep_fewer = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters
    fewer = {} if last is None or not can_keep_fewer else {"logits_to_keep": last}
    place = {**positions_behind(loaded.model, cache, ids_BT), cache_argument(loaded.model): cache}
    output = loaded.model(input_ids=ids_BT, use_cache=True, **place, **fewer)
    logits_BKV: Tensor = output.logits if last is None else output.logits[:, -last:]
    return logits_BKV, cache_of(output)


def read_prompts(loaded: Loaded, ids_BP: Tensor, role: str) -> tuple[Tensor, Any]:
    """Read prompts of one length, and return the logits (B, 1, V) after them and the cache.

    Raises:
        InvalidInput: the logits are not finite.
    """
    logits_BKV, cache = read(loaded, ids_BP, last=1)
    for row, finite in enumerate(logits_BKV.isfinite().all(-1).all(-1).tolist()):
        if not finite:
            raise refuse(role, loaded, ids_BP[row : row + 1], row)
    return logits_BKV, cache


def greedy(logits_BKV: Tensor) -> Tensor:
    """Return the likeliest token (B, 1) after the last one read."""
    return logits_BKV[:, -1:].argmax(-1)


@torch.inference_mode()
def write(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    steps: Sequence[int],
    batch_size: int,
    role: str,
    *,
    chance_NT: Tensor | None = None,
    is_over: Callable[[list[int]], bool] = lambda tokens: False,
) -> list[list[int]]:
    """Return the tokens that a model writes behind each prompt.

    Prompts of one length are read together, so that none is padded.

    Args:
        loaded: the model.
        prompts: token ids, BOS included.
        steps: tokens at most, for each prompt.
        batch_size: prompts read at once.
        role: the model's, for errors.
        chance_NT: numbers from 0 to 1 by which tokens are drawn at temperature 1, float64; two models that
            find the same tokens likely draw the same ones by the same numbers. None: the likeliest tokens.
        is_over: whether a text has ended with its last token, which is kept.

    Raises:
        InvalidInput: the logits are not finite.
    """
    found: list[list[int]] = [[] for _ in prompts]
    for batch in batches(prompts, batch_size):
        chance_BT = None if chance_NT is None else chance_NT[batch]
        ids_BP = torch.tensor([prompts[number] for number in batch], device=loaded.device)
        limits = [steps[number] for number in batch]
        written = _continued(loaded, ids_BP, limits, role, chance_BT, is_over)
        for number, tokens in zip(batch, written, strict=True):
            found[number] = tokens
    return found


def batches(prompts: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Yield the numbers of at most `size` prompts of one length at a time."""
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for _, same in groupby(order, key=lambda number: len(prompts[number])):
        numbers = list(same)
        yield from (numbers[start : start + size] for start in range(0, len(numbers), size))


def _continued(
    loaded: Loaded,
    ids_BP: Tensor,
    limits: Sequence[int],
    role: str,
    chance_BT: Tensor | None,
    is_over: Callable[[list[int]], bool],
) -> list[list[int]]:
    """Continue prompts of one length; their cache is freed."""
    found: list[list[int]] = [[] for _ in limits]
    logits_BKV, cache = read_prompts(loaded, ids_BP, role)
    going, step = set(range(len(limits))), 0
    while True:
        next_B1 = greedy(logits_BKV) if chance_BT is None else drawn(logits_BKV, chance_BT[:, step])
        for row, token in enumerate(next_B1.flatten().tolist()):
            if row in going:
                found[row].append(token)
                if len(found[row]) == limits[row] or is_over(found[row]):
                    going.discard(row)
        if not going:
            return found
        logits_BKV, cache = read(loaded, next_B1.to(loaded.device), cache, last=1)
        step += 1


def drawn(logits_BKV: Tensor, chance_B: Tensor) -> Tensor:
    """Return the token (B, 1) that a number from 0 to 1 draws at temperature 1."""
    sums_BV = logits_BKV[:, -1].double().softmax(-1).cumsum(-1)
    wanted_B1 = chance_B.to(sums_BV)[:, None] * sums_BV[:, -1:]
    return torch.searchsorted(sums_BV, wanted_B1, right=True).clamp_max(sums_BV.shape[-1] - 1)
