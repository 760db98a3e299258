"""The reach of a source's predictions: the length that its files name, and the one that its own text shows.

A model can have more positions than it was trained on. Beyond those its text falls apart: it predicts a text
much worse behind another one than alone. Its uncertainty jumps there, too, but a sound model's also rises
where free text drifts away from what it knows, so that this counts only where there are too few texts.
Statistics of such positions are of inputs that no use of the model should have.

Legend: B sequences, T tokens, P pairs of sequences, L tokens of each sequence of a pair.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...core.untrusted import read_json
from ..families.source import Source

LENGTH = 512  # tokens of a calibration sequence where nothing says less
FIRST = 32  # positions that are never doubted
# How much the mean entropy rises between spans, each twice as long as the one before, where predictions break
# down: nats, a multiple of the largest rise before, and standard errors on top. SmolLM2-135M, trained on
# 2,048 tokens, rises by 0.27 behind position 128.
RISE, TIMES, ERRORS = 0.5, 2.0, 2.0
# Pairs of texts, their shortest length, and how much worse the second is predicted behind the first where
# predictions break down, in nats: 0.99 where a trained source broke down, 0.24 and less where four were
# sound.
PAIRS, FEWEST, SHORTEST, WORSE = 8, 3, 64, 0.5
_AT_ONCE = 2  # texts: logits of a large vocabulary take much memory, and weights may be read at every pass


def default_length(source: Source) -> int:
    """Return the tokens of a calibration sequence by default: `LENGTH`, or what a source was trained on.

    Args:
        source: the checkpoint. A scaled rotation names the positions of the first training; a tokenizer may
            name a length of its own.
    """
    scaled = source.config.get("rope_parameters") or source.config.get("rope_scaling") or {}
    stated: list[Any] = [
        source.positions,
        source.config.get("original_max_position_embeddings"),
        scaled.get("original_max_position_embeddings") if isinstance(scaled, dict) else None,
        _stated_by_tokenizer(source.checkpoint.directory),
    ]
    lengths = (int(value) for value in stated if isinstance(value, int | float) and value >= FIRST)
    return max(2, min(LENGTH, source.positions, *lengths))


def _stated_by_tokenizer(directory: Path) -> Any:
    file = directory / "tokenizer_config.json"
    return read_json(file).get("model_max_length") if file.is_file() else None


def reach_of(tokens_BT: Tensor, entropy_BT: Tensor, model: Any) -> tuple[int, str] | None:
    """Return the position from which on a source's predictions break down, and its sign in words; or None.

    Args:
        tokens_BT: ids of text that the source wrote, int64.
        entropy_BT: of the prediction before every token of it, nats.
        model: a transformers causal language model in eval mode.
    """
    if _pairs(tokens_BT):
        end, sign = breakdown(model, tokens_BT), "it predicts text much worse"
    else:
        end, sign = jump(entropy_BT), "its entropy jumps"
    return None if end is None else (end, sign)


def jump(entropy_BT: Tensor) -> int | None:
    """Return the first position from which on a source is suddenly unsure, or None.

    Positions are compared in spans [L, 2L) with L a power of two. What a text costs per token changes slowly
    from one to the next, and mostly at its beginning; a jump at a later one is no property of text.

    Args:
        entropy_BT: of the prediction before every token of text that the source wrote, nats.

    Example:
        >>> entropy_BT = torch.ones(16, 256) + torch.rand(16, 256)
        >>> entropy_BT[:, 64:] += 2
        >>> jump(entropy_BT)
        64
    """
    length, largest, start = entropy_BT.shape[1], 0.0, FIRST // 4
    while start * 3 // 2 <= length:
        before_B = entropy_BT[:, start // 2 : start].mean(1)
        after_B = entropy_BT[:, start : 2 * start].mean(1)
        rise_B = after_B - before_B
        error = float(rise_B.std() / len(rise_B) ** 0.5) if len(rise_B) > 1 else float("inf")
        rise = float(rise_B.mean())
        if start >= FIRST and rise > max(RISE, TIMES * largest) + ERRORS * error:
            return start
        largest, start = max(largest, rise), 2 * start
    return None


def breakdown(model: Any, tokens_BT: Tensor) -> int | None:
    """Return the first position from which on a source predicts a text much worse than at the beginning.

    Pairs of sequences are joined at lengths that double. The second half of the second one is predicted
    behind all that comes before, and behind its own first half only. Both losses are of the same tokens, so a
    few pairs show what entropies of many sequences do not: those differ more from text to text than by
    position.

    Args:
        model: a transformers causal language model in eval mode.
        tokens_BT: ids of text that the source wrote, int64.

    Returns:
        A length L, where the source reads L tokens well and 2·L badly. None where it reads all well, or there
        are fewer than `FEWEST` pairs.
    """
    pairs, length = _pairs(tokens_BT), SHORTEST
    while pairs and 2 * length <= tokens_BT.shape[1]:
        first_PL, second_PL = tokens_BT[: 2 * pairs, :length].split(pairs)
        joined_P = _second_half(model, torch.cat([first_PL, second_PL], 1), length // 2)
        worse_P = joined_P - _second_half(model, second_PL, length // 2)
        if float(worse_P.mean()) > WORSE + ERRORS * float(worse_P.std()) / pairs**0.5:
            return length
        length *= 2
    return None


def readings(sequences: int, length: int) -> int:
    """Return how often a source runs to read the pairs of a text of so many sequences, at most.

    Example:
        >>> readings(48, 256)
        16
    """
    tokens_BT = torch.empty(sequences, length, device="meta")
    doublings = (length // SHORTEST).bit_length() - 1
    return max(0, doublings) * 2 * -(-_pairs(tokens_BT) // _AT_ONCE)


def _pairs(tokens_BT: Tensor) -> int:
    """Return the number of pairs that are read; 0 where there are too few, or none is long enough."""
    pairs = min(PAIRS, len(tokens_BT) // 2)
    return pairs if pairs >= FEWEST and tokens_BT.shape[1] >= 2 * SHORTEST else 0


def _second_half(model: Any, ids_PT: Tensor, count: int) -> Tensor:
    """Return the mean loss of the last `count` tokens of every text (P,), nats."""
    losses = []
    for some_BT in ids_PT.to(model.device).split(_AT_ONCE):
        with torch.no_grad():
            output = model(input_ids=some_BT[:, :-1], use_cache=False, logits_to_keep=count)
        logits_BVT = output.logits[:, -count:].mT.float()
        losses.append(cross_entropy(logits_BVT, some_BT[:, -count:], reduction="none").mean(1))
    return torch.cat(losses).cpu()
