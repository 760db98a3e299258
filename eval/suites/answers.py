"""A model's answers to prompts that ask for a key: the generated digits, and the rank of each candidate.

Legend: B prompts of a batch, P tokens of a prompt, T tokens of a key, C candidates, K positions with logits,
V vocabulary.
"""

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...models.causal_lm import Loaded
from .decoding import greedy, read, read_prompts
from .haystack import STEPS, NeedlePrompt


@torch.inference_mode()
def answer(loaded: Loaded, batch: Sequence[NeedlePrompt], role: str = "model") -> tuple[list[str], Tensor]:
    """Return a model's answers to prompts of one length.

    Args:
        loaded: the model.
        batch: B prompts, read at once without padding.
        role: name of the model in messages.

    Returns:
        The first digits that it generates greedily after each prompt, and the gain (B, C) in the log
        likelihood of each candidate by the text, nats, float64.

    Raises:
        InvalidInput: the logits are not finite.
    """
    device = loaded.device
    ids_BP = torch.tensor([sample.ids for sample in batch], device=device)
    logits_BKV, cache = read_prompts(loaded, ids_BP, role)
    columns = zip(*(sample.candidates for sample in batch), strict=True)
    # Each candidate in turn reads a copy of the cache, so that at most two caches are in memory.
    score_BC = torch.stack([_score(loaded, cache, logits_BKV, column) for column in columns], 1)
    score_BC -= torch.stack([_without_text(loaded, sample) for sample in batch])
    generated = []
    for _ in range(STEPS):
        generated.append(greedy(logits_BKV))
        logits_BKV, cache = read(loaded, generated[-1].to(device), cache, last=1)
    texts = loaded.tokenizer.batch_decode(torch.cat(generated, 1))
    return [match[0] if (match := re.search(r"\d+", text)) else "" for text in texts], score_BC


def _without_text(loaded: Loaded, sample: NeedlePrompt) -> Tensor:
    """Return the log likelihood (C,) of each candidate after the question alone, float64."""
    count = len(sample.candidates[0])
    ids_CP = torch.tensor(
        [[*sample.question, *candidate] for candidate in sample.candidates], device=loaded.device
    )
    logits_CKV = read(loaded, ids_CP[:, :-1], last=count)[0].double()
    keys_CT = ids_CP[:, -count:].to(logits_CKV.device)
    return logits_CKV.log_softmax(-1).gather(-1, keys_CT[..., None])[..., 0].sum(1).cpu()


def rank(score_BC: Tensor) -> Tensor:
    """Return the rank (B,) of each row's first entry, 1 for the greatest; a tie counts one half."""
    right_B1, others_BC = score_BC[:, :1], score_BC[:, 1:]
    return 1 + (others_BC > right_B1).sum(1) + 0.5 * (others_BC == right_B1).sum(1)


def _score(loaded: Loaded, cache: Any, last_BKV: Tensor, keys: Sequence[tuple[int, ...]]) -> Tensor:
    """Return the log likelihood (B,) of a key after each prompt, float64.

    The keys of a batch may differ in length.
    """
    longest = max(map(len, keys))
    ids_BT = torch.tensor([[*key, *[0] * (longest - len(key))] for key in keys], device=last_BKV.device)
    counts_BT = torch.tensor(
        [[number < len(key) for number in range(longest)] for key in keys], device=last_BKV.device
    )
    logits_BTV = last_BKV
    if longest > 1:
        more_BKV, _ = read(loaded, ids_BT[:, :-1].to(loaded.device), copy.deepcopy(cache))
        logits_BTV = torch.cat([last_BKV, more_BKV], 1)
    scores_BT = logits_BTV.double().log_softmax(-1).gather(-1, ids_BT[..., None])[..., 0]
    return (scores_BT * counts_BT).sum(1).cpu()
