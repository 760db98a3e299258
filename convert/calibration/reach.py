"""The reach of a source's predictions: the length that its files name, and the one that its own text shows.

A model can have more positions than it was trained on. Beyond those its text falls apart: it predicts a text
much worse behind another one than alone. Its uncertainty jumps there, too, but a sound model's also rises
where free text drifts away from what it knows, so that this counts only where there are too few texts.
Statistics of such positions are of inputs that no use of the model should have.

Legend: B sequences, T tokens, P pairs of sequences, L tokens of each sequence of a pair.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...core.untrusted import read_json
from ...texts.calibration_name import parts
from ..algebra.rotary import stated_rope
from ..families.layers.layer_kinds import ATTENTION
from ..families.source import Source

# Tokens of a calibration sequence where nothing says less: of a text that is read, and of one that the source
# writes. After 256 tokens of its own SmolLM2-135M loses 3 % more in short windows than after 512, and 12 %
# more in windows of 2,048, for less than half of the time (docs/notes/calibration.md).
READ, WRITTEN = 512, 256
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


def default_length(source: Source, calibration: str | None) -> int:
    """Return the tokens of a calibration sequence by default: `READ`, `WRITTEN`, or what a source takes.

    Args:
        source: the checkpoint. A scaled rotation names the positions of the first training; a tokenizer may
            name a length of its own.
        calibration: as for `study.study`; None: `self`.
    """
    usual = WRITTEN if calibration is None or parts(calibration)[0] else READ
    scaled = stated_rope(source.config)
    scaled = scaled.get(ATTENTION, scaled)
    tokenizer = source.checkpoint.directory / "tokenizer_config.json"
    stated: list[Any] = [
        source.positions,
        source.config.get("original_max_position_embeddings"),
        scaled.get("original_max_position_embeddings"),
        read_json(tokenizer).get("model_max_length") if tokenizer.is_file() else None,
    ]
    lengths = (int(value) for value in stated if isinstance(value, int | float) and value >= FIRST)
    return max(2, min(usual, source.positions, *lengths))


def reach_of(tokens_BT: Tensor, entropy_BT: Tensor, model: Any, positions: int) -> tuple[int, str] | None:
    """Return the position from which on a source's predictions break down, and its sign in words; or None.

    `entropy_BT` is in nats; the other arguments are those of `breakdown`.
    """
    if _pairs(len(tokens_BT), tokens_BT.shape[1]):
        end, sign = breakdown(model, tokens_BT, positions), "it predicts text much worse"
    else:
        end, sign = jump(entropy_BT), "its entropy jumps"
    return None if end is None else (end, sign)


def jump(entropy_BT: Tensor) -> int | None:
    """Return the first position where a source suddenly becomes unsure, or None.

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


def breakdown(model: Any, tokens_BT: Tensor, positions: int) -> int | None:
    """Return the first position where a source begins to predict a text much worse than at its start.

    Pairs of sequences are joined at lengths that double. The second half of the second one is predicted
    behind all that comes before, and behind its own first half only. Both losses are of the same tokens, so a
    few pairs show what entropies of many sequences do not: those differ more from text to text than by
    position.

    Args:
        model: a transformers causal language model in eval mode.
        tokens_BT: ids of text that the source wrote, int64.
        positions: of the source.

    Returns:
        A length L, where the source reads L tokens well and 2·L badly. None where it reads all well, or there
        are fewer than `FEWEST` pairs.
    """
    sequences, written = tokens_BT.shape
    pairs = _pairs(sequences, written)
    for length in joined_lengths(sequences, written, positions):
        first_PL, second_PL = tokens_BT[: 2 * pairs, :length].split(pairs)
        joined_P = _second_half(model, torch.cat([first_PL, second_PL], 1), length // 2)
        worse_P = joined_P - _second_half(model, second_PL, length // 2)
        if float(worse_P.mean()) > WORSE + ERRORS * float(worse_P.std()) / pairs**0.5:
            return length
    return None


def joined_lengths(sequences: int, length: int, positions: int) -> list[int]:
    """Return the lengths at which pairs of sequences are joined, at most; none where there are too few.

    Two of `length` tokens are no longer together than `READ`, unless one is, since maps of attention take
    memory, and no longer than the source's positions.

    Example:
        >>> joined_lengths(48, 256, 2048), joined_lengths(48, 256, 256), joined_lengths(4, 256, 2048)
        ([64, 128, 256], [64, 128], [])
    """
    if not _pairs(sequences, length):
        return []
    longest = min(length, min(positions, max(length, READ)) // 2)
    return [SHORTEST << doubling for doubling in range((longest // SHORTEST).bit_length())]


def readings(sequences: int, length: int, positions: int) -> int:
    """Return how often a source runs to read the pairs of a text, at most.

    Arguments are those of `joined_lengths`.

    Example:
        >>> readings(48, 256, 256)
        16
    """
    batches = -(-_pairs(sequences, length) // _AT_ONCE)
    return 2 * batches * len(joined_lengths(sequences, length, positions))


def _pairs(sequences: int, length: int) -> int:
    """Return the number of pairs that are read; 0 where there are too few, or none is long enough."""
    pairs = min(PAIRS, sequences // 2)
    return pairs if pairs >= FEWEST and length >= 2 * SHORTEST else 0


def _second_half(model: Any, ids_PT: Tensor, count: int) -> Tensor:
    """Return the mean loss of the last `count` tokens of every text (P,), nats."""
    losses = []
    for some_BT in ids_PT.to(model.device).split(_AT_ONCE):
        with torch.no_grad():
            output = model(input_ids=some_BT[:, :-1], use_cache=False, logits_to_keep=count)
        logits_BVT = output.logits[:, -count:].mT.float()
        losses.append(cross_entropy(logits_BVT, some_BT[:, -count:], reduction="none").mean(1))
    return torch.cat(losses).cpu()
